"""Average pooling: the map between the resolutions of a multi-scale model."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from equilibria.operators.base import LinearOperator, Shape, Weights, shape_error


class AveragePool(LinearOperator):
    """P: the mean over s×s blocks; Pᵀ: nearest-neighbor upsampling divided by s².

    P Pᵀ = I/s², so that ‖P‖ = 1/s exactly. (The papers' upsampling is this Pᵀ: only then are the
    couplings between two resolutions the gradient of one energy.)
    """

    def __init__(self, scale: int) -> None:
        super().__init__()
        if scale < 1:
            raise ValueError(f"scale must be a positive integer, got {scale}")
        self.scale = scale

    def extra_repr(self) -> str:
        return f"{self.scale}"

    def output_shape(self, input_shape: Shape) -> Shape:
        s = self.scale
        if len(input_shape) != 3 or any(size < 1 or size % s for size in input_shape[1:]):
            expected = f"(B, C, H, W) with H and W divisible by {s}"
            raise shape_error(self, "input", expected, input_shape)
        channels, height, width = input_shape
        return (channels, height // s, width // s)

    def input_shape(self, output_shape: Shape) -> Shape:
        if len(output_shape) != 3 or min(output_shape[1:]) < 1:
            raise shape_error(self, "output", "(B, C, H, W)", output_shape)
        channels, height, width = output_shape
        return (channels, height * self.scale, width * self.scale)

    @property
    def norm_limit(self) -> float:
        return 1.0 / self.scale

    def norm_bound(self, input_shape: Shape) -> Tensor:
        self.output_shape(input_shape)
        return self._constant(1.0 / self.scale)

    def _map(self, z: Tensor, weights: Weights) -> Tensor:
        return F.avg_pool2d(z, self.scale)

    def _map_adjoint(self, y: Tensor, weights: Weights) -> Tensor:
        return F.interpolate(y / self.scale**2, scale_factor=self.scale, mode="nearest")
