"""How steep the parts around an equilibrium are, and what rounding does in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.models.blocks import ImageLayers, Normalize, PooledLinearHead
from equilibria.models.mopteq.branches import ConvolutionFusionHead
from equilibria.operators import Conv2d, Shape
from equilibria.operators.rounding import accumulated, upper_norm

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)
"""Layers whose scale depends on the input: nothing bounds their steepness."""
AFFINE = (
    *(nn.Identity, nn.Flatten, nn.Linear, nn.Dropout, nn.Dropout2d, nn.BatchNorm2d, nn.Conv2d),
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Sequential, ImageLayers),
    *(PooledLinearHead, ConvolutionFusionHead),
)
"""Affine in evaluation."""


class UnboundedError(ValueError):
    """Nothing is known of a part; the message says of which."""


def why_not_affine(head: nn.Module) -> str:
    """Why logits are not an affine function of the feature; empty if they are."""
    for part in head.modules():
        if isinstance(part, NORMS):
            return f"the head has a {type(part).__name__}, whose scale depends on the input"
        if type(part) not in AFFINE and not getattr(part, "is_affine", False):
            return f"the head has a {type(part).__name__}, and is not known to be linear"
    return ""


@dataclass(frozen=True)
class Step:
    """Some layers of a stem, h ↦ Ah + b, or a ReLU."""

    layers: tuple[nn.Module, ...]
    lipschitz: float
    """What the layers add to the steepness of the whole, in the pixels."""
    gain: float
    """‖A‖."""
    own: float = 0.0
    """The rounding of the step, in shares of ‖h‖."""
    offset: float = 0.0
    """The sizes of b and of what is subtracted on the way, in all pixels."""
    is_affine: bool = True


@dataclass(frozen=True)
class Features:
    """What a stem makes of images."""

    values: Tensor
    size: Tensor
    """‖g(x)‖ of each sample, from above."""
    error: Tensor
    """‖fl(g(x)) − g(x)‖ of each sample, from above."""


class StemBounds:
    """The map from pixels to the input of an equilibrium layer, in evaluation mode.

    stem: computes in the type whose unit roundoff is `unit`; normalize: comes before it.
    exact: the stem in float64.

    Convolutions take over the scale of a normalization before them and of a BatchNorm after them;
    ReLU and pooling are not steeper than 1 and 1/s. An error e becomes
    (‖A‖ + ε)e + ε‖h‖ + 12u‖b‖ in a step of rounding ε.
    """

    @torch.no_grad()
    def __init__(
        self,
        stem: nn.Module,
        exact: nn.Module,
        normalize: Normalize | None,
        shape: Shape,
        unit: float,
    ) -> None:
        self.unit = unit
        self.shape = tuple(shape)
        self.scale: Tensor | None = None
        """Of each channel, not yet part of the steepness."""
        self.steps: list[Step] = []
        if normalize is not None:
            self._normalize(normalize)
        used, meant = list(_flat(stem)), list(_flat(exact))
        place = 0
        while place < len(meant):
            follows = meant[place + 1] if place + 1 < len(meant) else None
            has_norm = isinstance(meant[place], nn.Conv2d) and isinstance(follows, nn.BatchNorm2d)
            count = 2 if has_norm else 1
            self._add(used[place : place + count], meant[place : place + count])
            place += count
        self.steps.append(Step((), self._settled(), 1.0))

    @property
    def lipschitz(self) -> float:
        """Of the whole, in the pixels."""
        return math.prod(step.lipschitz for step in self.steps)

    @property
    def is_affine(self) -> bool:
        return all(step.is_affine for step in self.steps)

    def run(self, images: Tensor) -> Features:
        """The features, with sizes that are measured on the way."""
        values = images
        size = self._measured(values)
        error = torch.zeros_like(size)
        for step in self.steps:
            error = (step.gain + step.own) * error + step.own * size
            error = error + 12 * self.unit * step.offset
            for layer in step.layers:
                values = layer(values)
            size = self._measured(values) + error
        return Features(values, size, error)

    def _measured(self, values: Tensor) -> Tensor:
        flat = values.flatten(1)
        sizes: Tensor = torch.linalg.vector_norm(flat, dim=1).double()
        return sizes * (1 + accumulated(2 * flat.shape[1] + 8, self.unit))

    def _settled(self) -> float:
        """The scale that is left, counted at last."""
        if self.scale is None:
            return 1.0
        largest = float(self.scale.abs().max())
        self.scale = None
        return largest

    def _normalize(self, layer: Normalize) -> None:
        mean, std = layer.mean.double(), layer.std.double()
        self.scale = 1 / std
        largest = float(self.scale.max())
        offset = float((mean / std).norm()) * math.sqrt(math.prod(self.shape[1:]))
        self.steps.append(Step((layer,), 1.0, largest, 8 * self.unit * largest, offset))

    def _add(self, used: Sequence[nn.Module], meant: Sequence[nn.Module]) -> None:
        layer, *norms = meant
        if isinstance(layer, nn.Conv2d):
            self.steps.append(self._convolution(tuple(used), layer, norms))
        elif isinstance(layer, nn.BatchNorm2d):
            scale, offset = batch_affine(layer)
            largest = float(scale.abs().max())
            lipschitz = self._settled() * largest
            size = offset * math.sqrt(math.prod(self.shape[1:]))
            self.steps.append(Step(tuple(used), lipschitz, largest, 12 * self.unit * largest, size))
        elif isinstance(layer, nn.ReLU):
            self.steps.append(Step(tuple(used), self._settled(), 1.0, is_affine=False))
        elif isinstance(layer, nn.AvgPool2d):
            self.steps.append(self._pooling(tuple(used), layer))
        elif isinstance(layer, nn.Flatten):
            self.steps.append(Step(tuple(used), self._settled(), 1.0))
            self.shape = (math.prod(self.shape),)
        elif not isinstance(layer, nn.Dropout | nn.Dropout2d):
            why = "whose scale depends on the input" if isinstance(layer, NORMS) else "not bounded"
            raise UnboundedError(f"the stem has a {type(layer).__name__}, {why}")

    def _convolution(
        self, used: tuple[nn.Module, ...], layer: nn.Conv2d, norms: Sequence[nn.Module]
    ) -> Step:
        if (
            layer.groups != 1
            or layer.padding_mode != "zeros"
            or layer.dilation != (1, 1)
            or not isinstance(layer.padding, tuple)
        ):
            raise UnboundedError(f"the stem has {layer}, whose norm is not bounded")
        kernel = layer.weight.detach().double()
        bias = torch.zeros_like(kernel[:, 0, 0, 0]) if layer.bias is None else layer.bias.double()
        size = float(bias.norm())
        for norm in norms:
            assert isinstance(norm, nn.BatchNorm2d)
            scale, moved = batch_affine(norm)
            kernel = kernel * scale[:, None, None, None]
            size = float((bias * scale).norm()) + moved
        stride = layer.stride[0] if layer.stride[0] == layer.stride[1] else 1
        if any(side % stride for side in self.shape[1:]):
            stride = 1  # all outputs, of which the layer has some

        def norm_of(weight: Tensor) -> float:
            operator = Conv2d.from_tensor(weight, stride=stride, padding=layer.padding)  # type: ignore[arg-type]
            return upper_norm(operator, self.shape)

        gain = norm_of(kernel)
        scaled = kernel if self.scale is None else kernel * self.scale[:, None, None]
        lipschitz = gain if self.scale is None else norm_of(scaled)
        self.scale = None
        window = math.prod(layer.kernel_size)
        spread = math.sqrt(window) * float(torch.linalg.vector_norm(kernel))
        own = accumulated(layer.in_channels * window + 4, self.unit) * spread
        sides = zip(self.shape[1:], layer.kernel_size, layer.padding, layer.stride, strict=True)
        sizes = ((n + 2 * p - k) // s + 1 for n, k, p, s in sides)
        self.shape = (layer.out_channels, *sizes)
        offset = size * math.sqrt(math.prod(self.shape[1:]))
        return Step(used, lipschitz, gain, own + 12 * self.unit * (gain + own), offset)

    def _pooling(self, used: tuple[nn.Module, ...], layer: nn.AvgPool2d) -> Step:
        size = layer.kernel_size
        if not isinstance(size, int) or layer.stride != size or layer.padding:
            raise UnboundedError(f"the stem has {layer}, whose norm is not bounded")
        channels, *sides = self.shape
        self.shape = (channels, *(side // size for side in sides))
        own = accumulated(size**2 + 2, self.unit) / size
        return Step(used, self._settled() / size, 1 / size, own)


def batch_affine(layer: nn.BatchNorm2d) -> tuple[Tensor, float]:
    """What BatchNorm multiplies each channel by in evaluation, and the sizes of what it adds."""
    if layer.training or layer.running_mean is None or layer.running_var is None:
        raise UnboundedError("the stem has a BatchNorm2d that couples the samples of a batch")
    scale = (layer.running_var.double() + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight.double()
    added = 0.0 if layer.bias is None else float(layer.bias.double().norm())
    return scale, float((layer.running_mean.double() * scale).norm()) + added


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) in (nn.Sequential, nn.Identity) or isinstance(module, ImageLayers):
        for child in module.children():
            yield from _flat(child)
    else:
        yield module
