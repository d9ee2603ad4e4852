"""Ridge prior whose scales a network chooses for each pixel, from the noisy image."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.energies.ridge import RidgePrior
from equilibria.registry import check_at_least_one

REDUCTION = 2
"""Factor by which the network reduces the resolution."""
STRONGEST = 3.0
"""Largest absolute value of the logarithm of the factor of a scale."""


class AdaptiveRidgePrior(RidgePrior):
    """Learned image prior R(y; x, σ) = Σ_c Σ_pixels α⁻² ψ(α (W y)_c), α = α_c(σ)·exp(s_c(x, σ)).

    A network reads the noisy image x and its noise level σ, and chooses s for each filter and
    pixel, with |s| ≤ 3. It does not read y. So for given x, R is an explicit function of y, and as
    the slopes of α⁻¹ψ′(αt) do not depend on α, −ρ ≤ ∇²R ≤ S as for a `RidgePrior`. Networks return
    zero at first, and loading the weights of a `RidgePrior` leaves the network as it is.

    Args:
        width: Channels of the network.
        depth: Convolutions of the network, at half the resolution.
        **options: Options of `RidgePrior`.
    """

    def __init__(self, *, width: int = 48, depth: int = 5, **options: Any) -> None:
        super().__init__(**options)
        check_at_least_one(width=width, depth=depth)
        self.width = width
        outputs = len(self.log_scales) * REDUCTION**2
        # The image in units of its noise, without its mean, and the logarithm of the noise.
        counts = [REDUCTION**2 + 1, *[width] * (depth - 1), outputs]
        layers: list[nn.Module] = []
        for inputs, channels in pairwise(counts):
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
        self.network = nn.Sequential(*layers[:-1])
        last = cast(nn.Conv2d, self.network[-1])
        nn.init.zeros_(last.weight)
        nn.init.zeros_(cast(Tensor, last.bias))

    @property
    def formula(self) -> str:
        return "Σ α(x)⁻²ψ(α(x)Wy)"

    def scales(self, noise: Tensor, image: Tensor | None, unit: float = 1.0) -> Tensor:
        """Return the scale α of each response, shape (B, filters, rows, columns).

        Args:
            noise: Noise level σ of each sample, shape (B,).
            image: Noisy image x with one channel. Without it, the scales are those of a
                `RidgePrior`.
            unit: See `RidgePrior`.
        """
        scales = super().scales(noise, image, unit)
        if image is None:
            return scales
        if image.shape[1] != 1:
            raise ValueError(
                f"AdaptiveRidgePrior adapts to images with one channel, got {image.shape[1]}; use "
                "OpponentPrior for color images"
            )
        height, width = image.shape[2:]
        even = (0, -width % REDUCTION, 0, -height % REDUCTION)
        blocks = F.pixel_unshuffle(F.pad(unit * image, even, mode="replicate"), REDUCTION)
        level = (unit * noise)[:, None, None, None].to(image)
        contrast = (blocks - blocks.mean(dim=(1, 2, 3), keepdim=True)) / level.sqrt()
        known = level.log().expand(-1, 1, *blocks.shape[2:])
        read = torch.cat([contrast, known], dim=1).contiguous(memory_format=torch.channels_last)
        logarithms = F.pixel_shuffle(self.network(read), REDUCTION)
        # A response belongs to the pixel in the middle of its filter.
        first = (self.size - 1) // 2
        rows, columns = (slice(first, first + size - self.size + 1) for size in (height, width))
        factors = (STRONGEST * torch.tanh(logarithms[..., rows, columns] / STRONGEST)).exp()
        return scales[:, :, None, None] * factors

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}network."
        if not any(name.startswith(start) for name in state_dict):
            state_dict |= {start + name: value for name, value in self.network.state_dict().items()}
        super()._load_from_state_dict(state_dict, prefix, *args)
