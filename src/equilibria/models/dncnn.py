"""DnCNN: a plain network that predicts the noise of an image, to compare restorers with.

Zhang, Zuo, Chen, Meng, Zhang, "Beyond a Gaussian Denoiser: Residual Learning of Deep CNN for Image
Denoising", IEEE Transactions on Image Processing 26(7), 2017.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from equilibria.models.blocks import check_images

DnCNNNorm = Literal["batch", "none"]


class DnCNN(nn.Module):
    """x̂ = ŷ − f(ŷ), with f a chain of `depth` convolutions and ReLUs between them."""

    def __init__(
        self, in_channels: int, channels: int, depth: int, kernel_size: int, norm: DnCNNNorm
    ) -> None:
        super().__init__()
        if depth < 2:
            raise ValueError(f"depth must be at least 2, not {depth}")
        if norm not in ("batch", "none"):
            raise ValueError(f"norm must be 'batch' or 'none', not {norm!r}")
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, not {kernel_size}")
        self.in_channels = in_channels
        padding = kernel_size // 2
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, channels, kernel_size, padding=padding),
            nn.ReLU(),
        ]
        for _ in range(depth - 2):
            plain = norm == "none"
            layers.append(nn.Conv2d(channels, channels, kernel_size, padding=padding, bias=plain))
            layers += [nn.ReLU()] if plain else [nn.BatchNorm2d(channels), nn.ReLU()]
        last = nn.Conv2d(channels, in_channels, kernel_size, padding=padding)
        self.noise = nn.Sequential(*layers, last)

    def forward(self, measured: Tensor) -> Tensor:
        check_images(measured, self.in_channels)
        restored: Tensor = measured - self.noise(measured)
        return restored


def dncnn(
    *,
    in_channels: int = 1,
    channels: int = 64,
    depth: int = 17,
    kernel_size: int = 3,
    norm: DnCNNNorm = "batch",
) -> DnCNN:
    """The network of the paper for noise of a known strength."""
    return DnCNN(in_channels, channels, depth, kernel_size, norm)
