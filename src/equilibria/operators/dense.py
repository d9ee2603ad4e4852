"""Dense matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.context.state import at_least_float32
from equilibria.operators import spectral
from equilibria.operators.base import Shape, Weights, shape_error
from equilibria.operators.norm_control import NORMS, KernelOperator, as_kernel, random_kernel
from equilibria.operators.orthonormal import orthonormal_rows


class Dense(KernelOperator):
    """Dense matrix W of shape (out, in), applied along the last axis: z ↦ W z, without bias.

    A sample is a vector, or has more axes before the last, such as time steps or nodes. The norm
    bound is the spectral norm, which is exact.

    Args:
        in_features, out_features: Length of the last axis of inputs and outputs.
        norm: Norm control: "bound" guarantees ‖W‖ ≤ ζ, "estimate" approximates it by power
            iteration, "orthonormal" makes W/ζ a matrix with orthonormal rows
            (`orthonormal_rows`; needs `out_features <= in_features`), None disables it.
        zeta: Limit ζ on the norm.

    Examples:
        >>> W = eq.Dense(4, 3, norm="bound", zeta=0.5)
        >>> W(torch.ones(2, 4)).shape, W.adjoint(torch.ones(2, 3)).shape
        (torch.Size([2, 3]), torch.Size([2, 4]))
        >>> bool(W.norm_bound((4,)) <= 0.5001)
        True
    """

    kernel: nn.Parameter
    norms = (*NORMS, "orthonormal")

    def __init__(
        self, in_features: int, out_features: int, *, norm: str | None = None, zeta: float = 0.95
    ) -> None:
        if min(in_features, out_features) < 1:
            raise ValueError(
                "in_features and out_features must be positive, got "
                f"{in_features} and {out_features}"
            )
        super().__init__(random_kernel(out_features, in_features), norm=norm, zeta=zeta)
        self._check_rows()

    @classmethod
    def from_tensor(cls, matrix: Tensor, norm: str | None = None, zeta: float = 0.95) -> Dense:
        """Create the operator of a matrix.

        Args:
            matrix: W, shape (out, in). An nn.Parameter is shared and remains trainable; any other
                tensor is a constant.
            norm: Norm control, see the class.
            zeta: Limit ζ on the norm.
        """
        operator = cls.__new__(cls)
        KernelOperator.__init__(operator, as_kernel(matrix, 2), norm=norm, zeta=zeta)
        operator._check_rows()
        return operator

    def _check_rows(self) -> None:
        if self.norm == "orthonormal" and self.out_features > self.in_features:
            raise ValueError(
                f"{self.out_features} rows of length {self.in_features} cannot be orthonormal; "
                f"out_features must be at most {self.in_features}"
            )

    @property
    def in_features(self) -> int:
        """Number of input features."""
        return self.kernel.shape[1]

    @property
    def out_features(self) -> int:
        """Number of output features."""
        return self.kernel.shape[0]

    @property
    def bias_shape(self) -> Shape:
        return (self.out_features,)

    @property
    def weight(self) -> Tensor:
        """Effective matrix W of the operator, after norm control."""
        return self.weights()[0]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}{self._control_repr()}"

    def output_shape(self, input_shape: Shape) -> Shape:
        *before, features = input_shape or (None,)
        if features != self.in_features:
            raise shape_error(self, "input", f"(B, …, {self.in_features})", input_shape)
        return (*before, self.out_features)

    def input_shape(self, output_shape: Shape) -> Shape:
        *before, features = output_shape or (None,)
        if features != self.out_features:
            raise shape_error(self, "output", f"(B, …, {self.out_features})", output_shape)
        return (*before, self.in_features)

    def row_norms(self, input_shape: Shape) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.weight, dim=1)
        return norms

    @property
    def norm_limit(self) -> float | None:
        return self.zeta if self.norm == "orthonormal" else super().norm_limit

    def norm_bound(self, input_shape: Shape) -> Tensor:
        if self.norm != "orthonormal":
            return super().norm_bound(input_shape)
        self.output_shape(input_shape)
        return self._constant(self.zeta) + (self.kernel * 0).sum()  # NaN if K is not finite

    def _effective(self, shape: Shape) -> Tensor:
        if self.norm != "orthonormal":
            return super()._effective(shape)
        # Stored weights are computed in float64, so that all types agree to their precision.
        kernel = at_least_float32(self.kernel) if torch.is_grad_enabled() else self.kernel.double()
        with spectral.full_precision(kernel):
            return (self.zeta * orthonormal_rows(kernel)).to(self.kernel.dtype)

    def _control_shape(self, input_shape: Shape | None) -> Shape:
        return (self.in_features,)

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return F.linear(z, weights[0])

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return F.linear(y, weights[0].transpose(0, 1))

    def _search(self, kernels: Weights, input_shape: Shape) -> spectral.TopSingular:
        return spectral.top_singular(kernels[0])

    def _bound_at(self, kernels: Weights, input_shape: Shape, data: Any) -> Tensor:
        (kernel,) = kernels
        return spectral.singular_value(lambda v: kernel @ v, lambda u: kernel.mT @ u, data)
