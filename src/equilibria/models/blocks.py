"""Layers before and after an equilibrium layer: stems, heads, norms, and checks of sizes."""

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
"""Attribute names of the module that processes the images first."""


class Normalize(nn.Module):
    """Standardize each channel: (image − mean) / std.

    Args:
        mean: Mean of each channel; saved with the weights.
        std: Standard deviation of each channel, positive; saved with the weights.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ValueError(
                f"mean and std need one value per channel each, got {len(mean)} and {len(std)}"
            )
        if not all(value > 0 for value in std):
            raise ValueError(f"std must be positive, got {tuple(std)}")
        dtype = torch.get_default_dtype()
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype))
        self.register_buffer("std", torch.tensor(std, dtype=dtype))

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() < 3 or images.shape[-3] != len(self.mean):
            raise ValueError(
                f"expected images of {len(self.mean)} channels (one per value of mean and std), "
                f"got a tensor of shape {tuple(images.shape)}"
            )
        return (images - self.mean[:, None, None]) / self.std[:, None, None]

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Forward pre-hook that normalizes the first input of another module."""
        images, *others = inputs
        return self(images), *others


def normalize_first(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Normalize the images of a model in its first layer, in place.

    `model.stem(images)` includes the normalization, and the names of all other weights stay.

    Args:
        model: Model of images; afterwards it takes pixels in [0, 1].
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """
    normalize = Normalize(mean, std)
    first_layer(model).register_forward_pre_hook(normalize.before)
    model.normalize = normalize


def first_layer(model: nn.Module) -> nn.Module:
    """Return the module that processes the images first.

    Args:
        model: Model of images.

    Returns:
        The first of the attributes `FIRST_LAYERS` that is a module, or `model` itself.
    """
    candidates = (getattr(model, name, None) for name in FIRST_LAYERS)
    return next((module for module in candidates if isinstance(module, nn.Module)), model)


class ImageLayers(nn.Sequential):
    """Sequential layers that check the shape and type of their images.

    Args:
        in_channels: Channels of the images.
        layers: The layers, in order.
    """

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
    """The stem g(x): 3×3 convolutions with BatchNorm, ReLU between them, and optional pooling.

    Args:
        in_channels: Channels of the images.
        channels: Channels of the output.
        depth: Number of convolutions.
        downsample: Side of the average pooling at the end; 1 for none.
        strides: How many of the first convolutions have stride 2.
        affine: Whether the norms have trainable gains and offsets. The parameter counts of the
            papers require False.
        recompute: Do not store activations in training; compute them again in the backward pass.
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
                f"strides (the number of convolutions of stride 2) must be in [0, {depth}], "
                f"got {strides}"
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
            # The running statistics already include this batch, so the second pass updates copies.
            return ImageLayers.forward(twin(self, _copy_buffer), images)

        features: Tensor = checkpoint(run, images, use_reentrant=False)
        return features


def _copy_buffer(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


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
    """Build a convolution with "same" padding, followed by a norm.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Side of the kernel.
        stride: Stride of the convolution.
        bias: Whether the convolution has a bias.
        norm: "batch" or "group".
        groups: Largest number of groups of a group norm (see `fitting_groups`).
        affine: Whether the norm has a trainable gain and offset.
    """
    check_at_least_one(channels=out_channels, kernel_size=kernel_size)
    padding = kernel_size // 2
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=padding, bias=bias)
    if norm == "batch":
        return nn.Sequential(conv, nn.BatchNorm2d(out_channels, affine=affine))
    count = fitting_groups(out_channels, groups)
    return nn.Sequential(conv, nn.GroupNorm(count, out_channels, affine=affine))


def conv_norm_relu(*channels_and_size: int, **options: Any) -> nn.Sequential:
    """Build a convolution, a norm and a ReLU; the arguments are those of `conv_norm`."""
    return conv_norm(*channels_and_size, **options).append(nn.ReLU(inplace=True))


class PooledLinearHead(nn.Module):
    """Average pooling to `pool` × `pool`, then a linear classifier.

    Args:
        channels: Channels of the feature.
        num_classes: Number of classes.
        pool: Side of the pooled map.
    """

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
    """Scale the parameters of an operator in place; small norms make the first solves short.

    Args:
        operator: Operator whose parameters are multiplied.
        scale: Factor, not negative.

    Returns:
        The operator.
    """
    check_not_negative(init_scale=scale)
    for parameter in operator.parameters():
        parameter.mul_(scale)
    return operator


def check_images(images: Tensor, in_channels: int) -> None:
    """Check that a tensor is a batch of floating-point images.

    Args:
        images: Images, expected shape (B, in_channels, H, W).
        in_channels: Expected number of channels.

    Raises:
        ValueError: If the shape or the dtype is wrong.
    """
    if images.dim() != 4 or images.shape[1] != in_channels:
        raise ValueError(
            f"expected images of shape (batch, {in_channels}, height, width), "
            f"got {tuple(images.shape)}"
            + ("; add a batch dimension with images[None]" if images.dim() == 3 else "")
        )
    if not images.is_floating_point():
        raise ValueError(
            f"expected floating-point images, got {images.dtype}; "
            f"convert them, e.g. images.to({torch.get_default_dtype()}) / 255"
        )


def check_odd(**sizes: int) -> None:
    """Raise a ValueError unless all sizes, passed by name, are odd and positive."""
    for name, size in sizes.items():
        if size < 1 or size % 2 == 0:
            raise ValueError(f"{name} must be odd, got {size}")


def channels_of(channels: int | Sequence[int], level: str) -> tuple[int, ...]:
    """Return the channels of each branch or tier as a tuple.

    Args:
        channels: One number per branch or tier; an int stands for a single one.
        level: What a number belongs to ("branch" or "tier"), for the error.
    """
    widths = (channels,) if isinstance(channels, int) else tuple(channels)
    if not widths or min(widths) < 1:
        raise ValueError(f"channels needs one positive number per {level}, got {channels}")
    return widths


def check_halvings(features: Tensor, channels: int, levels: int, level: str) -> None:
    """Raise a ValueError if maps cannot be halved for each of several resolutions.

    Args:
        features: Maps, expected shape (B, channels, H, W).
        channels: Expected number of channels.
        levels: Number of resolutions; each has half the sides of the previous one.
        level: What a resolution is called ("branch" or "tier"), for the error.
    """
    if features.dim() != 4 or features.shape[1] != channels:
        raise ValueError(
            f"expected an input of shape (batch, {channels}, height, width), "
            f"got {tuple(features.shape)}"
        )
    divisor = 2 ** (levels - 1)
    height, width = features.shape[2:]
    if height % divisor or width % divisor or not (height and width):
        raise ValueError(
            f"{levels} resolutions need maps whose sides are divisible by {divisor}, got "
            f"{height}×{width}; resize or pad the images, or shorten channels, which has one "
            f"number per {level}"
        )


def fitting_groups(channels: int, groups: int) -> int:
    """Return the largest divisor of `groups` with at least four channels per group, or 1.

    Four channels per group is what 8 groups of the smallest published branch (32 channels) have.
    A group of one channel on a small map would be normalized by a handful of numbers.

    Args:
        channels: Number of channels.
        groups: Largest number of groups.
    """
    check_at_least_one(groups=groups)
    fitting = (g for g in range(groups, 1, -1) if groups % g == 0 and channels % g == 0)
    return next((g for g in fitting if channels // g >= 4), 1)
