"""Data fidelity: how well an image explains its measurement."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import Layout, sum_per_sample
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.terms import one_tensor
from equilibria.operators import Identity, LinearOperator
from equilibria.registry import check_not_negative, check_positive


class DataFidelity(Energy):
    """Data fidelity (w/2)·‖Ay − x‖² of an image y to its measurement x, or to a box around x.

    Args:
        A: Linear operator, such as a mask, a blur or a lower resolution, or any differentiable map
            of images; None is the identity. The state has the input shape of A.
        noise: Standard deviation ν of the noise in x; None sets w = 1. With a number, the last
            input of the layer is the noise level σ of the prior, and w = (σ/ν)².
        box: Quantization step of x: a number, or a tensor that broadcasts with x, such as one step
            per frequency for JPEG. The energy is then w/2 times the squared distance of Ay to the
            box |Ay − x| ≤ box/2.
        image_shape: Shape (C, H, W) of one image, if A is a function that changes the shape.

    Examples:
        >>> mask = eq.operators.Mask(torch.tensor([[[[1.0, 0.0]]]]))
        >>> layer = eq.EquilibriumLayer(eq.energies.DataFidelity(mask), activation="identity")
        >>> layer(torch.ones(1, 1, 1, 2)).round(decimals=2)  # ½‖y‖² halves the visible pixel
        tensor([[[[0.5000, 0.0000]]]])
    """

    def __init__(
        self,
        A: LinearOperator | Callable[[Tensor], Tensor] | None = None,
        noise: float | None = None,
        *,
        box: float | Tensor = 0.0,
        image_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        if noise is not None:
            check_positive(noise=noise)
        check_not_negative(box=float(box.min()) if isinstance(box, Tensor) else box)
        self.A = Identity() if A is None else A
        self.noise = noise
        self.image_shape = image_shape
        self.box = box
        self.has_box = bool((box > 0).any()) if isinstance(box, Tensor) else box > 0

    @property
    def formula(self) -> str:
        weight = "½" if self.noise is None else f"(σ²/2·{self.noise:g}²)"
        return f"{weight}dist²(Ay, x ± box/2)" if self.has_box else f"{weight}‖Ay − x‖²"

    @property
    def is_linear(self) -> bool:
        """Whether the measurement A is a linear operator."""
        return isinstance(self.A, LinearOperator)

    def inject(self, *inputs: Tensor) -> Context:
        x = inputs[0]
        if self.noise is None:
            weight = x.new_ones(len(x))
        elif len(inputs) < 2:
            raise ValueError(
                f"DataFidelity(noise={self.noise:g}) also needs the noise level of the prior: call "
                "the layer with (image, noise)"
            )
        else:
            weight = (inputs[-1].reshape(-1).to(x) / self.noise).square().expand(len(x))
        return Context(sample={"x": x, "weight": weight})

    def initial_state(self, context: Context) -> State:
        x = context["x"]
        if isinstance(self.A, LinearOperator):
            return x.new_zeros(len(x), *self.A.input_shape(tuple(x.shape[1:])))
        return x.new_zeros(len(x), *(self.image_shape or x.shape[1:]))

    def value(self, state: State, context: Context) -> Tensor:
        y = one_tensor(state, self)
        return 0.5 * context["weight"] * sum_per_sample(self._excess(y, context).square())

    def descent(self, state: State, context: Context) -> State:
        if not isinstance(self.A, LinearOperator):
            return super().descent(state, context)
        excess = self._excess(one_tensor(state, self), context)
        weight = context["weight"].reshape(-1, *(1,) * (excess.dim() - 1))
        return -self.A.adjoint(weight * excess)

    @property
    def limits(self) -> Bounds[float]:
        return Bounds(concavity=0.0) if self.is_linear else Bounds()

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        """Return bounds on the derivatives of the term.

        If A is the identity and there is no box, the concavity is −w, w the weight of the term.
        """
        A, weight = self.A, context["weight"]
        if not isinstance(A, LinearOperator):
            return Bounds()
        is_identity = isinstance(A, Identity) and not self.has_box
        concavity = -weight if is_identity else torch.zeros_like(weight)
        return Bounds(lambda: weight * A.norm_bound(layout[0]).square(), concavity)

    def _excess(self, y: Tensor, context: Context) -> Tensor:
        """Difference between Ay and its projection onto the box."""
        residual: Tensor = self.A(y) - context["x"]
        if not self.has_box:
            return residual
        half = torch.as_tensor(self.box, dtype=residual.dtype, device=residual.device) / 2
        return residual - residual.clamp(-half, half)
