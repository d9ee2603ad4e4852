"""How well an image explains what was measured of it."""

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
    """(w/2)·‖Ay − x‖², or w/2 times the squared distance of Ay to the box |Ay − x| ≤ box/2.

    A: a linear operator, such as a mask, a blur or a lower resolution, or any differentiable map of
        images. The state has the shape that A takes: that of x unless A says otherwise.
    noise: the standard deviation ν of x. With σ the noise level that the layer is given as its last
        input, w = (σ/ν)²: the weight that a prior for noise σ leaves to the data. None: w = 1.
    box: the step of a quantization that x went through, or a tensor of steps that meets the shape
        of x, as JPEG has one for each frequency; of Ay nothing more is known than that it was
        rounded to x.
    image_shape: of one picture (C, H, W), where A is a function that changes it.

    Examples:
        >>> mask = eq.operators.Mask(torch.tensor([[[[1.0, 0.0]]]]))
        >>> layer = eq.EquilibriumLayer(eq.energies.DataFidelity(mask), activation="identity")
        >>> layer(torch.ones(1, 1, 1, 2)).round(decimals=2)  # ½‖y‖² halves what is seen
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
            raise ValueError("DataFidelity with a noise needs that of the prior: (image, noise)")
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
        return 0.5 * context["weight"] * sum_per_sample(self._outside(y, context).square())

    def descent(self, state: State, context: Context) -> State:
        if not isinstance(self.A, LinearOperator):
            return super().descent(state, context)
        left = self._outside(one_tensor(state, self), context)
        weight = context["weight"].reshape(-1, *(1,) * (left.dim() - 1))
        return -self.A.adjoint(weight * left)

    @property
    def limits(self) -> Bounds[float]:
        return Bounds(concavity=0.0) if self.is_linear else Bounds()

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        """The concavity is −w where A is the identity and there is no box: E is convex."""
        A, weight = self.A, context["weight"]
        if not isinstance(A, LinearOperator):
            return Bounds()
        is_identity = isinstance(A, Identity) and not self.has_box
        concavity = -weight if is_identity else torch.zeros_like(weight)
        return Bounds(lambda: weight * A.norm_bound(layout[0]).square(), concavity)

    def _outside(self, y: Tensor, context: Context) -> Tensor:
        """Ay − x, less what the box forgives."""
        left: Tensor = self.A(y) - context["x"]
        if not self.has_box:
            return left
        half = torch.as_tensor(self.box, dtype=left.dtype, device=left.device) / 2
        return left - left.clamp(-half, half)
