"""The parts around an equilibrium: from an image to its input, from its feature to the logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equilibria.context.twin import twin
from equilibria.operators import LinearOperator
from equilibria.registry import check_at_least_one, check_not_negative

Operator = TypeVar("Operator", bound=LinearOperator)
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
    first_layer(model).register_forward_pre_hook(normalize.before)
    model.normalize = normalize


def first_layer(model: nn.Module) -> nn.Module:
    """Return the module of a model that sees the images first; the model itself if none is known.

    Args:
        model: A model of images.
    """
    candidates = (getattr(model, name, None) for name in FIRST_LAYERS)
    return next((module for module in candidates if isinstance(module, nn.Module)), model)


class ImageLayers(nn.Sequential):
    """Layers one after the other on images, which are checked first."""

    def __init__(self, in_channels: int, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__(*layers)
        self.in_channels = in_channels

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        features = images
        for layer in self:
            features = layer(features)
        return features


class ImageStem(ImageLayers):
    """g(x): `depth` 3×3 convolutions with BatchNorm, ReLU between them, and optional pooling.

    The first `strides` convolutions halve the resolution; an average pooling by `downsample` may
    follow. The norms have no trainable `affine` part by default, as the papers' parameter counts
    require; in evaluation they fold into their convolutions. `recompute`: a training step keeps
    nothing of what is in between, and computes it again in its backward pass.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        depth: int = 1,
        downsample: int = 1,
        strides: int = 0,
        affine: bool = False,
        recompute: bool = False,
    ) -> None:
        check_at_least_one(channels=channels, depth=depth, downsample=downsample)
        if not 0 <= strides <= depth:
            raise ValueError(
                f"strides counts the convolutions that halve the resolution: 0 to {depth}, "
                f"not {strides}"
            )
        layers: list[nn.Module] = []
        for level in range(depth):
            if level > 0:
                layers.append(nn.ReLU())
            width = in_channels if level == 0 else channels
            stride = 2 if level < strides else 1
            layers.append(nn.Conv2d(width, channels, 3, stride, padding=1, bias=False))
            layers.append(nn.BatchNorm2d(channels, affine=affine))
        if downsample > 1:
            layers.append(nn.AvgPool2d(downsample))
        super().__init__(in_channels, layers)
        self.recompute = recompute

    def forward(self, images: Tensor) -> Tensor:
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return super().forward(images)
        calls = count()
        forward = super().forward

        def run(images: Tensor) -> Tensor:
            if next(calls) == 0:
                return forward(images)
            # The norms have counted this batch: again, they do so in copies that are thrown away.
            return ImageLayers.forward(twin(self, _copied), images)

        features: Tensor = checkpoint(run, images, use_reentrant=False)
        return features


def _copied(held: Tensor) -> Tensor:
    return held if isinstance(held, nn.Parameter) else held.clone()


Norm = Literal["group", "batch"]


def conv_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    stride: int = 1,
    bias: bool = False,
    norm: Norm = "batch",
    groups: int = 1,
    affine: bool = True,
) -> nn.Sequential:
    """A "same" convolution and its norm; `groups` are reduced to what fits the channels."""
    check_at_least_one(channels=out_channels, kernel_size=kernel_size)
    padding = kernel_size // 2
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=padding, bias=bias)
    if norm == "batch":
        return nn.Sequential(conv, nn.BatchNorm2d(out_channels, affine=affine))
    count = fitting_groups(out_channels, groups)
    return nn.Sequential(conv, nn.GroupNorm(count, out_channels, affine=affine))


def conv_norm_relu(*channels_and_size: int, **options: Any) -> nn.Sequential:
    """The same with ReLU."""
    return conv_norm(*channels_and_size, **options).append(nn.ReLU(inplace=True))


class PooledLinearHead(nn.Module):
    """Average pooling to `pool` × `pool`, then a linear classifier."""

    def __init__(self, channels: int, num_classes: int, *, pool: int = 1) -> None:
        super().__init__()
        check_at_least_one(channels=channels, num_classes=num_classes, pool=pool)
        self.pool = nn.AdaptiveAvgPool2d(pool)
        self.classifier = nn.Linear(channels * pool * pool, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(features).flatten(1))
        return logits


@torch.no_grad()
def small(operator: Operator, scale: float) -> Operator:
    """The operator, its initial weights shrunk: small norms make first solves short (OptEq 7.4)."""
    check_not_negative(init_scale=scale)
    for parameter in operator.parameters():
        parameter.mul_(scale)
    return operator


def check_images(images: Tensor, in_channels: int) -> None:
    """A clear error where a tensor is not a batch of images for this model."""
    if images.dim() != 4 or images.shape[1] != in_channels:
        raise ValueError(
            f"expected images of shape (batch, {in_channels}, height, width), "
            f"not {tuple(images.shape)}"
            + ("; add a batch dimension with images[None]" if images.dim() == 3 else "")
        )
    if not images.is_floating_point():
        raise ValueError(
            f"expected floating-point images, not {images.dtype}; "
            f"convert them, e.g. images.to({torch.get_default_dtype()}) / 255"
        )


def check_odd(**sizes: int) -> None:
    """Refuse kernels without a middle."""
    for name, size in sizes.items():
        if size < 1 or size % 2 == 0:
            raise ValueError(f"{name} must be odd, not {size}")


def channels_of(channels: int | Sequence[int], level: str) -> tuple[int, ...]:
    """The channels of each branch or tier; a number alone is one."""
    widths = (channels,) if isinstance(channels, int) else tuple(channels)
    if not widths or min(widths) < 1:
        raise ValueError(f"channels must be positive, one number a {level}, not {channels}")
    return widths


def check_halvings(features: Tensor, channels: int, levels: int, level: str) -> None:
    """A clear error where maps do not fit `levels` resolutions, each half as fine as the last."""
    if features.dim() != 4 or features.shape[1] != channels:
        raise ValueError(
            f"expected an input of shape (batch, {channels}, height, width), "
            f"not {tuple(features.shape)}"
        )
    divisor = 2 ** (levels - 1)
    height, width = features.shape[2:]
    if height % divisor or width % divisor or not (height and width):
        raise ValueError(
            f"{levels} resolutions, each half as fine as the one before, need maps whose sides are "
            f"divisible by {divisor}, not {height}×{width}: give fewer channels (one number a "
            f"{level}), or resize or pad the images"
        )


def fitting_groups(channels: int, groups: int) -> int:
    """The largest divisor of `groups` that splits the channels into groups of at least four.

    Four is what 8 groups of the smallest published branch (32 channels) have; a group of one
    channel on a small map is normalized by a handful of numbers.
    """
    check_at_least_one(groups=groups)
    fitting = (g for g in range(groups, 1, -1) if groups % g == 0 and channels % g == 0)
    return next((g for g in fitting if channels // g >= 4), 1)
