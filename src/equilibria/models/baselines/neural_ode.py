"""Neural ODEs for images, plain and augmented: z(1) for dz/dt = f(t, z), z(0) = image.

Chen et al., "Neural Ordinary Differential Equations", NeurIPS 2018; Dupont et al., "Augmented
Neural ODEs", NeurIPS 2019. The solver is from torchdiffeq, an optional dependency.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.activations import Activation, get_activation
from equilibria.context.context import run_eagerly
from equilibria.models.blocks import PooledLinearHead, check_images
from equilibria.models.non_finite import finite_samples
from equilibria.registry import check_at_least_one, check_not_negative, check_positive


class VectorField(nn.Module):
    """Vector field f(t, z): 1×1, 3×3 and 1×1 convolutions with an activation between them.

    Args:
        channels: Channels of z.
        filters: Channels of the inner maps.
        time_dependent: Add t as an input channel of each convolution.
        activation: Activation.
    """

    def __init__(
        self,
        channels: int,
        filters: int,
        *,
        time_dependent: bool = True,
        activation: str | Activation = "relu",
    ) -> None:
        super().__init__()
        extra = int(time_dependent)
        self.time_dependent = time_dependent
        self.activation = get_activation(activation)
        self.expand = nn.Conv2d(channels + extra, filters, 1)
        self.mix = nn.Conv2d(filters + extra, filters, 3, padding=1)
        self.reduce = nn.Conv2d(filters + extra, channels, 1)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        y = z.to(self.expand.weight.dtype)
        y = self.activation(self.expand(self._with_time(t, y)))
        y = self.activation(self.mix(self._with_time(t, y)))
        # The solver needs the dtype of z, and autocast may have changed it.
        velocity: Tensor = self.reduce(self._with_time(t, y)).to(z.dtype)
        return velocity

    def _with_time(self, t: Tensor, y: Tensor) -> Tensor:
        if not self.time_dependent:
            return y
        plane = t.to(y.dtype).expand(y.shape[0], 1, *y.shape[2:])
        return torch.cat([y, plane], dim=1)


class NeuralODE(nn.Module):
    """Neural ODE classifier logits = head(z(1)), z(0) = the image with added channels of zeros.

    The solver, dopri5, uses **one step size for the whole batch**, from an error norm over all
    samples. Outputs therefore depend on the rest of the batch, within the tolerances, and one stiff
    sample slows down all others.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        filters: Channels of the inner maps of f.
        augment: Number of channels of zeros; more than 0 makes an augmented Neural ODE.
        time_dependent: Whether f depends on t.
        activation: Activation of f. The derivative of ReLU is discontinuous, so the adjoint ODE
            needs many steps for small tolerances; "softplus" is smooth.
        pool: Side of the map that the head pools z(1) to. For images of this side the head is the
            linear layer on z(1) of Dupont et al.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        adjoint: Solve a second ODE for the gradient, with memory independent of the number of
            steps. Otherwise autograd differentiates the steps.
        max_steps: Largest number of steps of a forward or backward solve.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        filters: int = 32,
        augment: int = 0,
        time_dependent: bool = True,
        activation: str | Activation = "relu",
        pool: int = 8,
        rtol: float = 1e-3,
        atol: float = 1e-3,
        adjoint: bool = True,
        max_steps: int = 1000,
    ) -> None:
        super().__init__()
        check_not_negative(augment=augment)
        check_positive(rtol=rtol, atol=atol)
        check_at_least_one(filters=filters, max_steps=max_steps)
        channels = in_channels + augment
        self.field = VectorField(
            channels, filters, time_dependent=time_dependent, activation=activation
        )
        self.head = PooledLinearHead(channels, num_classes, pool=pool)
        self.in_channels = in_channels
        self.augment = augment
        self.rtol = rtol
        self.atol = atol
        self.adjoint = adjoint
        self.max_steps = max_steps
        self.last_evaluations: int | None = None
        """Number of evaluations of f in the last forward solve; None before the first."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Return the solution z(1) of the ODE in the dtype of the images."""
        check_images(images, self.in_channels)
        # In half precision t has too few digits for small steps.
        start = images.to(torch.promote_types(images.dtype, torch.float32))
        if self.augment:
            start = F.pad(start, (0, 0, 0, 0, 0, self.augment))
        if start.numel() == 0:
            self.last_evaluations = 0
            return start.to(images.dtype)
        finite = finite_samples(start)
        if bool(finite.all()):
            return self._flow(start).to(images.dtype)
        # A sample that is not finite would stop the solve of the whole batch.
        features = torch.full_like(start, torch.nan)
        if bool(finite.any()):
            features = features.index_put((finite,), self._flow(start[finite]))
        return features.to(images.dtype)

    @run_eagerly
    def _flow(self, start: Tensor) -> Tensor:
        try:
            import torchdiffeq
        except ImportError as error:
            raise ImportError(
                "Neural ODEs need torchdiffeq: pip install 'equilibria[ode]'", name="torchdiffeq"
            ) from error
        calls = 0

        def counted_field(t: Tensor, z: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            velocity: Tensor = self.field(t, z)
            return velocity

        times = torch.tensor([0.0, 1.0], dtype=start.dtype, device=start.device)
        options: dict[str, Any] = {
            "rtol": self.rtol,
            "atol": self.atol,
            "method": "dopri5",
            "options": {"max_num_steps": self.max_steps},
        }
        solve = torchdiffeq.odeint
        if self.adjoint:
            solve = torchdiffeq.odeint_adjoint
            options["adjoint_params"] = tuple(self.field.parameters())
        try:
            path = solve(counted_field, start, times, **options)
        except AssertionError as error:
            reason = str(error).split(":")[0]
            raise RuntimeError(
                f"the ODE could not be solved ({reason}); raise rtol and atol, or max_steps"
            ) from error
        self.last_evaluations = calls
        final: Tensor = path[-1]
        return final
