"""Bounds on the part before the equilibrium layer: its Lipschitz constant, and its rounding.

`StemBounds` bounds the stem S, from the pixels to the input of the layer. `ImagePath` adds the
injection U and maps rows back to the image. `ImageNorm` is the norm in which the image moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from equilibria.certificates.states import flat_rows
from equilibria.context import State
from equilibria.context.state import Packing, map_state
from equilibria.energies import Energy
from equilibria.energies.capabilities import first_descent
from equilibria.equilibrium.layer import as_inputs
from equilibria.models.affine import NORMS
from equilibria.models.base import EquilibriumModel
from equilibria.models.blocks import ImageLayers, Normalize
from equilibria.operators import Conv2d
from equilibria.operators.base import Shape
from equilibria.operators.rounding import NORM_SLACK, accumulated, upper_norm


class UnboundedError(ValueError):
    """Raised if no bound is known for a part; the message names it."""


@dataclass(frozen=True)
class ImageNorm:
    """The norm ‖·‖_p in which an image moves, 2 ≤ p ≤ ∞."""

    p: float

    def l2_size(self, numbers: int) -> float:
        """Return the largest L2 norm of a vector of this length whose norm is 1."""
        return float(numbers ** (0.5 - 1 / self.p))

    def dual(self, rows: Tensor) -> Tensor:
        """Return the dual norm of each row, max ⟨row, d⟩ over ‖d‖ ≤ 1."""
        order = 1.0 if math.isinf(self.p) else self.p / (self.p - 1)
        lengths: Tensor = torch.linalg.vector_norm(rows, ord=order, dim=-1)
        return lengths


L2 = ImageNorm(2)
LINF = ImageNorm(math.inf)


@dataclass(frozen=True)
class Step:
    """Bounds on consecutive layers of a stem: h ↦ Ah + b, a ReLU or max pooling."""

    layers: tuple[nn.Module, ...]
    lipschitz: float
    """Factor in the Lipschitz constant of the stem in the pixels: ‖A‖ with the deferred scale."""
    gain: float
    """‖A‖ of these layers alone, for the propagation of errors."""
    rounding: float = 0.0
    """Rounding error of the layers, per unit of ‖h‖."""
    offset: float = 0.0
    """Norm of b and of the subtracted means, over all pixels."""
    is_affine: bool = True


@dataclass(frozen=True)
class Features:
    """Output of a stem for a batch of images."""

    values: Tensor
    size: Tensor
    """Upper bound on ‖S(x)‖, per sample."""
    error: Tensor
    """Upper bound on ‖fl(S(x)) − S(x)‖, per sample."""


@dataclass(frozen=True, eq=False)
class StemBounds:
    """Bounds on a stem, the map from pixels to the input of an equilibrium layer, in evaluation.

    The scale 1/std of a normalization is deferred (`Signal.scale`): it multiplies the kernel of the
    next convolution, whose norm is then that of both. A scale that remains at the end is the last
    step. A BatchNorm after a convolution multiplies its kernel, too.
    The Lipschitz constant of a ReLU is 1, that of average pooling 1/s, and that of max pooling the
    square root of the largest number of windows that contain one pixel. An error e becomes
    (‖A‖ + ε)e + ε‖h‖ + 12u‖b‖ in a step of rounding ε.
    """

    steps: tuple[Step, ...]
    numbers: int
    """Number of pixels of an image, times its channels."""
    unit: float
    """Unit roundoff of the type that the stem computes in."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        stem: nn.Module,
        exact: nn.Module,
        normalize: Normalize | None,
        shape: Shape,
        unit: float,
    ) -> StemBounds:
        """Bound a stem.

        Args:
            stem: Stem that computes in the type whose unit roundoff is `unit`.
            exact: The stem in float64.
            normalize: Normalization before the stem, if any.
            shape: Shape of one image.
            unit: Unit roundoff.

        Returns:
            The bounds.

        Raises:
            UnboundedError: If a layer of the stem has no known bound.
        """
        steps: list[Step] = []
        signal = Signal(tuple(shape))
        if normalize is not None:
            step, signal = _normalization(normalize, signal, unit)
            steps.append(step)
        used, meant = list(_flat(stem)), list(_flat(exact))
        place = 0
        while place < len(meant):
            follows = meant[place + 1] if place + 1 < len(meant) else None
            has_norm = isinstance(meant[place], Convolution) and isinstance(follows, nn.BatchNorm2d)
            count = 2 if has_norm else 1
            layers = slice(place, place + count)
            bounded = _bounded(tuple(used[layers]), meant[layers], signal, unit)
            if bounded is not None:
                step, signal = bounded
                steps.append(step)
            place += count
        steps.append(Step((), signal.largest_scale, 1.0))
        return cls(tuple(steps), math.prod(shape), unit)

    def lipschitz(self, norm: ImageNorm = L2) -> float:
        """Return the Lipschitz constant of the stem, from this norm of the pixels to L2."""
        return math.prod(step.lipschitz for step in self.steps) * norm.l2_size(self.numbers)

    @property
    def is_affine(self) -> bool:
        """Whether the stem has neither a ReLU nor max pooling."""
        return all(step.is_affine for step in self.steps)

    def run(self, images: Tensor) -> Features:
        """Compute the features with bounds on their size and rounding error."""
        values = images
        size = self._measured(values)
        error = torch.zeros_like(size)
        for step in self.steps:
            error = (step.gain + step.rounding) * error + step.rounding * size
            error = error + 12 * self.unit * step.offset
            for layer in step.layers:
                values = layer(values)
            size = self._measured(values) + error
        return Features(values, size, error)

    def _measured(self, values: Tensor) -> Tensor:
        flat = values.flatten(1)
        sizes: Tensor = torch.linalg.vector_norm(flat, dim=1).double()
        return sizes * (1 + accumulated(2 * flat.shape[1] + 8, self.unit))


@dataclass(frozen=True)
class Signal:
    """Shape and scale of the input of the next layer of a stem."""

    shape: Shape
    scale: Tensor | None = None
    """Scale of each channel that is not yet part of the bound of a layer."""

    @property
    def largest_scale(self) -> float:
        """Lipschitz constant of the scale."""
        return 1.0 if self.scale is None else float(self.scale.abs().max())


Convolution: TypeAlias = nn.Conv2d | nn.ConvTranspose2d

Bounded: TypeAlias = tuple[Step, Signal]
"""Bounds on a layer, and the input of the next one."""


def _normalization(layer: Normalize, signal: Signal, unit: float) -> Bounded:
    mean, std = layer.mean.double(), layer.std.double()
    scale = 1 / std
    largest = float(scale.max())
    offset = float((mean / std).norm()) * math.sqrt(math.prod(signal.shape[1:]))
    return Step((layer,), 1.0, largest, 8 * unit * largest, offset), Signal(signal.shape, scale)


def _bounded(
    used: tuple[nn.Module, ...], meant: Sequence[nn.Module], signal: Signal, unit: float
) -> Bounded | None:
    """Bound a layer with the BatchNorm after it, if any; None for a layer without effect."""
    layer, *norms = meant
    if isinstance(layer, Convolution):
        return _convolution(used, layer, norms, signal, unit)
    if isinstance(layer, nn.AvgPool2d):
        return _average_pooling(used, layer, signal, unit)
    if isinstance(layer, nn.MaxPool2d):
        return _max_pooling(used, layer, signal)
    if isinstance(layer, nn.BatchNorm2d):
        scale, offset = batch_affine(layer)
        largest = float(scale.abs().max())
        lipschitz = signal.largest_scale * largest
        size = offset * math.sqrt(math.prod(signal.shape[1:]))
        step = Step(used, lipschitz, largest, 12 * unit * largest, size)
        return step, Signal(signal.shape)
    if isinstance(layer, nn.ReLU):
        step = Step(used, signal.largest_scale, 1.0, is_affine=False)
        return step, Signal(signal.shape)
    if isinstance(layer, nn.Flatten):
        return Step(used, signal.largest_scale, 1.0), Signal((math.prod(signal.shape),))
    if isinstance(layer, nn.Dropout | nn.Dropout2d):
        return None
    why = "scale depends on the input" if isinstance(layer, NORMS) else "norm has no known bound"
    raise UnboundedError(f"the stem has a {type(layer).__name__}, whose {why}")


def _convolution(
    used: tuple[nn.Module, ...],
    layer: Convolution,
    norms: Sequence[nn.Module],
    signal: Signal,
    unit: float,
) -> Bounded:
    if (
        layer.groups != 1
        or layer.padding_mode != "zeros"
        or layer.dilation != (1, 1)
        or not isinstance(layer.padding, tuple)
    ):
        raise UnboundedError(f"the stem has {layer}, whose norm has no known bound")
    is_transposed = isinstance(layer, nn.ConvTranspose2d)
    kernel = layer.weight.detach().double()
    kernel = kernel.transpose(0, 1) if is_transposed else kernel  # (out, in, k, k)
    bias = torch.zeros_like(kernel[:, 0, 0, 0]) if layer.bias is None else layer.bias.double()
    size = float(bias.norm())
    for norm in norms:
        assert isinstance(norm, nn.BatchNorm2d)
        scale, moved = batch_affine(norm)
        kernel = kernel * scale[:, None, None, None]
        size = float((bias * scale).norm()) + moved
    padding: Shape = layer.padding
    sides = _convolved_sides(layer, signal.shape[1:], padding)
    # The transpose has the norm of the convolution that leads from its output to its input.
    widest = sides if is_transposed else signal.shape[1:]

    def norm_of(weight: Tensor) -> float:
        weight = weight.transpose(0, 1) if is_transposed else weight
        return _norm_of_convolution(weight, layer.stride, padding, widest)

    gain = norm_of(kernel)
    lipschitz = gain if signal.scale is None else norm_of(kernel * signal.scale[:, None, None])
    window = math.prod(layer.kernel_size)
    spread = math.sqrt(window) * float(torch.linalg.vector_norm(kernel))
    rounding = accumulated(layer.in_channels * window + 4, unit) * spread
    offset = size * math.sqrt(math.prod(sides))
    rounding = rounding + 12 * unit * (gain + rounding)
    return Step(used, lipschitz, gain, rounding, offset), Signal((layer.out_channels, *sides))


def _convolved_sides(layer: Convolution, sides: Shape, padding: Shape) -> Shape:
    """Return the height and width of the output of a convolution."""
    each = zip(sides, layer.kernel_size, layer.stride, padding, layer.output_padding, strict=True)
    if isinstance(layer, nn.ConvTranspose2d):
        return tuple((n - 1) * s + k - 2 * p + extra for n, k, s, p, extra in each)
    return tuple((n + 2 * p - k) // s + 1 for n, k, s, p, _ in each)


def _norm_of_convolution(weight: Tensor, strides: Shape, padding: Shape, sides: Shape) -> float:
    """Bound the norm of the convolution of maps of this size.

    The symbol needs one stride, and sides that are its multiples. The outputs for two different
    strides are a subset of those for stride 1. Further rows and columns of zeros do not change an
    output.
    """
    stride = strides[0] if strides[0] == strides[1] else 1
    operator = Conv2d.from_tensor(weight, stride=stride, padding=padding)
    return upper_norm(operator, (weight.shape[1], *(-(-n // stride) * stride for n in sides)))


def _average_pooling(
    used: tuple[nn.Module, ...], layer: nn.AvgPool2d, signal: Signal, unit: float
) -> Bounded:
    size = layer.kernel_size
    if not isinstance(size, int) or layer.stride != size or layer.padding:
        raise UnboundedError(f"the stem has {layer}, whose norm has no known bound")
    channels, *sides = signal.shape
    rounding = accumulated(size**2 + 2, unit) / size
    step = Step(used, signal.largest_scale / size, 1 / size, rounding)
    return step, Signal((channels, *(side // size for side in sides)))


def _max_pooling(used: tuple[nn.Module, ...], layer: nn.MaxPool2d, signal: Signal) -> Bounded:
    """Bound max pooling by √N, N the largest number of windows that contain one pixel.

    |max_W h − max_W h′| is at most the largest |h_i − h′_i| in the window W. The sum of the squares
    of all windows therefore has the square of each |h_i − h′_i| at most N times. The bound is
    attained, by a pixel that is the largest of all its windows. Max pooling does not round.
    """
    if layer.return_indices:
        raise UnboundedError(f"the stem has {layer}, which also returns indices")
    channels, *sides = signal.shape
    sizes = tuple(layer(torch.zeros(1, 1, *sides)).shape[2:])
    pairs = (
        _both(getattr(layer, name)) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    covered = 1
    for n, count, k, s, p, d in zip(sides, sizes, *pairs, strict=True):
        starts, taps = s * torch.arange(count)[:, None] - p, d * torch.arange(k)
        places = starts + taps
        places = places[(places >= 0) & (places < n)]
        covered *= int(torch.bincount(places).max())
    factor = math.sqrt(covered) * (1 + NORM_SLACK)
    step = Step(used, signal.largest_scale * factor, factor, is_affine=False)
    return step, Signal((channels, *sizes))


def _both(size: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the size in each direction."""
    return (size, size) if isinstance(size, int) else tuple(size)


def batch_affine(layer: nn.BatchNorm2d) -> tuple[Tensor, float]:
    """Return the factor of each channel of a BatchNorm, and the norm of its offset."""
    if layer.training or layer.running_mean is None or layer.running_var is None:
        raise UnboundedError("the stem has a BatchNorm2d that couples the samples of a batch")
    scale = (layer.running_var.double() + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight.double()
    added = 0.0 if layer.bias is None else float(layer.bias.double().norm())
    return scale, float((layer.running_mean.double() * scale).norm()) + added


@dataclass(frozen=True, eq=False)
class ImagePath:
    """The map from the image to the pre-activations: the stem S, then the injection U.

    If the stem is not affine, the map starts at its output, and the Lipschitz constant of S enters
    as a factor.
    """

    model: EquilibriumModel
    """The model in float64."""
    energy: Energy
    """The energy E. Its descent −∇E(y; x) is affine in x, with the linear part U."""
    like: State
    """A state of the objective; only its shape counts."""
    image_shape: Shape
    feature_shape: Shape
    stem: StemBounds | None
    norm: ImageNorm = L2

    @property
    def lipschitz(self) -> float:
        """Λ, the Lipschitz constant of the stem from `norm` to L2."""
        assert self.stem is not None
        return self.stem.lipschitz(self.norm)

    @property
    def is_whole(self) -> bool:
        """Whether the path begins at the image, because the stem is affine."""
        return self.stem is not None and self.stem.is_affine

    def in_norm(self, norm: ImageNorm) -> ImagePath:
        """Return the same path for another norm of the image."""
        return replace(self, norm=norm)

    def pull_back(self, rows: Tensor) -> Tensor:
        """Map rows u to (US)ᵀu, one number per pixel, or to Uᵀu where S is not affine."""
        return self._pulled(rows, self.is_whole)

    def pull_back_to_feature(self, rows: Tensor) -> Tensor:
        """Map rows u to Uᵀu, one number per element of the feature."""
        return self._pulled(rows, False)

    def length(self, pulled: Tensor) -> Tensor:
        """Bound how fast ⟨u, U S(x)⟩ can change with x, for rows that were pulled back."""
        if self.is_whole:
            return self.norm.dual(pulled)
        return L2.dual(pulled) * self.lipschitz

    def _pulled(self, rows: Tensor, is_whole: bool) -> Tensor:
        with torch.enable_grad():
            at = rows.new_zeros(len(rows), *(self.image_shape if is_whole else self.feature_shape))
            at.requires_grad_()
            inputs = as_inputs(self.model.injected(at) if is_whole else at)
            context = self.energy.inject(*inputs)
            descent = first_descent(self.energy, context)
            if descent is None:
                zero = map_state(lambda t: t.new_zeros(len(rows), *t.shape[1:]), self.like)
                layout = Packing.of(self.like).layout
                descent = self.energy.descent(zero, self.energy.complete(context, layout))
            (pulled,) = torch.autograd.grad(flat_rows(descent), at, rows)
        return pulled.flatten(1)


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) in (nn.Sequential, nn.Identity) or isinstance(module, ImageLayers):
        for child in module.children():
            yield from _flat(child)
    else:
        yield module
