"""The first layer of a model that was trained on images of mean 0 and variance 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FIRST_LAYERS = ("stem", "trunk", "encoder", "features")
"""What models call the module that sees the images first."""


class Normalize(nn.Module):
    """(image − mean) / std, channel by channel; both are saved with the weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ValueError(
                f"give a mean and a std for each channel, not {len(mean)} and {len(std)}"
            )
        if not all(value > 0 for value in std):
            raise ValueError(f"std must be positive, not {tuple(std)}")
        dtype = torch.get_default_dtype()
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype))
        self.register_buffer("std", torch.tensor(std, dtype=dtype))

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() < 3 or images.shape[-3] != len(self.mean):
            raise ValueError(
                f"expected images of {len(self.mean)} channels, as mean and std have, not a tensor "
                f"of shape {tuple(images.shape)}"
            )
        return (images - self.mean[:, None, None]) / self.std[:, None, None]

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As a hook before another module: the images are its first input."""
        images, *others = inputs
        return self(images), *others


def normalize_first(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Make `Normalize` the first layer of a model of images, which then takes pixels in [0, 1].

    It stands before the stem, so that `model.stem(images)` includes it, and all other weights keep
    their names.
    """
    normalize = Normalize(mean, std)
    found = (getattr(model, name, None) for name in FIRST_LAYERS)
    first = next((module for module in found if isinstance(module, nn.Module)), model)
    first.register_forward_pre_hook(normalize.before)
    model.normalize = normalize
