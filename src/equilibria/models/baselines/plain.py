"""Plain convolutional networks that equilibrium models are compared with.

- The weight-untied network that OptEq starts from: Xie et al., "Optimization Induced Equilibrium
  Networks", TPAMI 2022, Eq. 1 and Table 3 ("Acc-DNN").
- The four convolutions that few-shot learners adapt: Vinyals et al. 2016; with strides and a mean
  at the end, as for Omniglot in Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast
  Adaptation of Deep Networks", ICML 2017.
- DnCNN, which predicts the noise of an image: Zhang, Zuo, Chen, Meng, Zhang, "Beyond a Gaussian
  Denoiser: Residual Learning of Deep CNN for Image Denoising", IEEE TIP 26(7), 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from equilibria.activations import Activation, get_activation
from equilibria.models.blocks import (
    ImageLayers,
    ImageStem,
    PooledLinearHead,
    check_odd,
    fitting_groups,
)
from equilibria.registry import check_at_least, check_at_least_one, check_choice

Conv4Norm = Literal["batch", "group"]
DnCNNNorm = Literal["batch", "none"]


class PlainLayer(nn.Module):
    """z_{k+1} = σ(W_k z_k + U_k x + b_k) (Eq. 1); the first layer, without z, has no W."""

    def __init__(
        self,
        before: int | None,
        width: int,
        inputs: int,
        *,
        kernel_size: int,
        input_kernel_size: int,
        bias: bool,
        activation: Activation,
    ) -> None:
        super().__init__()
        padding = kernel_size // 2
        self.W = (
            nn.Conv2d(before, width, kernel_size, padding=padding, bias=False) if before else None
        )
        self.U = nn.Conv2d(
            inputs, width, input_kernel_size, padding=input_kernel_size // 2, bias=bias
        )
        self.activation = activation
        # [W U] acts on z and x together: He's variance 2 ÷ fan-in, with the fan-in of both.
        kernels = [self.U.weight] if self.W is None else [self.W.weight, self.U.weight]
        fan_in = sum(kernel[0].numel() for kernel in kernels)
        for kernel in kernels:
            nn.init.normal_(kernel, std=math.sqrt(2 / fan_in))
        if self.U.bias is not None:
            nn.init.zeros_(self.U.bias)

    def forward(self, z: Tensor | None, x: Tensor) -> Tensor:
        injected: Tensor = self.U(x)
        if self.W is None:
            return self.activation(injected)
        return self.activation(self.W(z) + injected)


class PlainNetwork(nn.Module):
    """y = W_{L+1} z_L with z_0 = 0, x = g(image); g and the last layer are those of Deep OptEq.

    The weight-untied network of Eq. 1, with the options of `deep_opteq` that apply to it.
    `channels` is the width of x. With the widths 16, 32, 64, 128, 128 the kernels W_k of
    n_k × n_{k−1} alone have 244 224 entries, more than the 199 k that Table 3 states for network
    and Deep OptEq alike: the same widths and the same size exclude each other.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        channels: int = 32,
        widths: Sequence[int] = (16, 32),
        kernel_size: int = 3,
        input_kernel_size: int = 1,
        stem_depth: int = 1,
        stem_strides: int = 0,
        downsample: int = 1,
        pool: int = 2,
        activation: str | Activation = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if not widths:
            raise ValueError("a plain network needs at least one layer")
        check_at_least_one(channels=channels)
        check_odd(kernel_size=kernel_size, input_kernel_size=input_kernel_size)
        layers = [
            PlainLayer(
                before,
                width,
                channels,
                kernel_size=kernel_size,
                input_kernel_size=input_kernel_size,
                bias=bias,
                activation=get_activation(activation),
            )
            for before, width in zip([None, *widths], widths, strict=False)
        ]
        self.stem = ImageStem(
            in_channels, channels, depth=stem_depth, downsample=downsample, strides=stem_strides
        )
        self.layers = nn.ModuleList(layers)
        self.head = PooledLinearHead(widths[-1], num_classes, pool=pool)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """z_L."""
        x: Tensor = self.stem(images)
        z: Tensor | None = None
        for layer in self.layers:
            z = layer(z, x)
        assert z is not None
        return z


def norm_of_images(norm: Conv4Norm, channels: int, groups: int) -> nn.Module:
    """By the batch at hand, also in evaluation, as MAML does; or by each image alone."""
    check_choice(get_args(Conv4Norm), norm=norm)
    if norm == "batch":
        return nn.BatchNorm2d(channels, track_running_stats=False)
    return nn.GroupNorm(fitting_groups(channels, groups), channels)


class StridedBlocks(ImageLayers):
    """`depth` times a convolution that halves the resolution, a norm, ReLU."""

    def __init__(
        self, in_channels: int, channels: int, depth: int, *, norm: Conv4Norm, groups: int
    ) -> None:
        layers: list[nn.Module] = []
        for level in range(depth):
            width = channels if level else in_channels
            layers += [
                nn.Conv2d(width, channels, 3, stride=2, padding=1),
                norm_of_images(norm, channels, groups),
                nn.ReLU(),
            ]
        super().__init__(in_channels, layers)


class Conv4(nn.Module):
    """Four times convolution (stride 2), norm, ReLU; the mean over pixels; a linear classifier.

    The explicit network of MAML, Reptile and iMAML; norm="group" keeps samples apart.
    """

    def __init__(
        self,
        *,
        num_classes: int = 5,
        in_channels: int = 3,
        channels: int = 64,
        norm: Conv4Norm = "batch",
        groups: int = 8,
    ) -> None:
        super().__init__()
        check_at_least_one(channels=channels, groups=groups)
        self.features = StridedBlocks(in_channels, channels, 4, norm=norm, groups=groups)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits; episodes, shape `(B, samples, C, H, W)`, are taken as B · samples images."""
        features = self.features(images.flatten(0, -4))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


class DnCNN(nn.Module):
    """x̂ = ŷ − f(ŷ), with f a chain of `depth` convolutions and ReLUs between them.

    The defaults are the paper's network for noise of a known strength.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        channels: int = 64,
        depth: int = 17,
        kernel_size: int = 3,
        norm: DnCNNNorm = "batch",
    ) -> None:
        super().__init__()
        check_at_least(2, depth=depth)
        check_at_least_one(channels=channels)
        check_choice(get_args(DnCNNNorm), norm=norm)
        check_odd(kernel_size=kernel_size)
        self.depth, self.kernel_size = depth, kernel_size
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
        self.noise = ImageLayers(in_channels, [*layers, last])

    def forward(self, measured: Tensor) -> Tensor:
        restored: Tensor = measured - self.noise(measured)
        return restored

    def reach(self, accuracy: float) -> int:
        """How far a restored pixel looks, in pixels; exactly, whatever the accuracy."""
        return self.depth * (self.kernel_size // 2)
