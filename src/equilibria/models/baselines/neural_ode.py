"""Neural ODEs for images, plain and augmented: z(1) of dz/dt = f(t, z), z(0) = image.

Chen et al., "Neural Ordinary Differential Equations", NeurIPS 2018; Dupont et al., "Augmented
Neural ODEs", NeurIPS 2019. The solver is torchdiffeq's, an optional dependency.
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
    """f(t, z): 1×1, 3×3 and 1×1 convolutions with an activation between them.

    With `time_dependent`, t is one more input channel of each convolution, constant over the image.
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
        # The solver computes in one type, also where autocast chose another.
        velocity: Tensor = self.reduce(self._with_time(t, y)).to(z.dtype)
        return velocity

    def _with_time(self, t: Tensor, y: Tensor) -> Tensor:
        if not self.time_dependent:
            return y
        plane = t.to(y.dtype).expand(y.shape[0], 1, *y.shape[2:])
        return torch.cat([y, plane], dim=1)


class NeuralODE(nn.Module):
    """logits = head(z(1)), z(0) = the image with `augment` more channels of zeros.

    Plain on the pixels, with augment > 0 an augmented one. The head averages z(1) to `pool` ×
    `pool` pixels; for images of that size it is the linear layer on all of z(1) that Dupont et al.
    use. `adjoint` solves a second ODE for the gradient, whose error the tolerances control, with
    memory that does not grow with the steps; without it, autograd goes through the steps. At most
    `max_steps` steps are taken, forward and backward. The ODE of the adjoint jumps wherever ReLU
    has a kink, so tight tolerances make its steps many: activation="softplus" has none.

    dopri5 chooses **one step size for the whole batch**, from an error norm over all samples: the
    answer for a sample depends on what else is in the batch, by as much as the tolerances allow,
    and a sample that is hard to integrate makes all of them slow.
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
        """How often the last forward solve evaluated f."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """z(1), in the type of the images."""
        check_images(images, self.in_channels)
        # Steps shrink towards the resolution of t: half precision would end them early.
        start = images.to(torch.promote_types(images.dtype, torch.float32))
        if self.augment:
            start = F.pad(start, (0, 0, 0, 0, 0, self.augment))
        if start.numel() == 0:
            self.last_evaluations = 0
            return start.to(images.dtype)
        finite = finite_samples(start)
        if bool(finite.all()):
            return self._flow(start).to(images.dtype)
        # The step size is that of the whole batch: a sample that is not finite would end it.
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

        def counted(t: Tensor, z: Tensor) -> Tensor:
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
            path = solve(counted, start, times, **options)
        except AssertionError as error:
            reason = str(error).split(":")[0]
            raise RuntimeError(
                f"the ODE could not be solved ({reason}): raise rtol and atol, or raise max_steps"
            ) from error
        self.last_evaluations = calls
        final: Tensor = path[-1]
        return final
