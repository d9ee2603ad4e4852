"""Plain convolutional networks as baselines.

- `PlainNetwork`, the weight-untied counterpart of Deep OptEq: Xie et al., "Optimization Induced
  Equilibrium Networks", TPAMI 2022, Eq. 1 and Table 3 ("Acc-DNN").
- `Conv4`, a standard network of few-shot learning: Vinyals et al. 2016, with strides and mean
  pooling as for Omniglot in Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation
  of Deep Networks", ICML 2017.
- `DnCNN`, which predicts the noise of an image: Zhang, Zuo, Chen, Meng, Zhang, "Beyond a Gaussian
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
    """Layer z_{k+1} = σ(W_k z_k + U_k x + b_k) of a plain network (OptEq Eq. 1).

    The first layer has no W.

    Args:
        previous: Channels of z_k; None for the first layer.
        width: Channels of z_{k+1}.
        inputs: Channels of x.
        kernel_size: Side of W's kernel.
        input_kernel_size: Side of U's kernel.
        bias: Whether there is a bias b.
        activation: σ.
    """

    def __init__(
        self,
        previous: int | None,
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
            nn.Conv2d(previous, width, kernel_size, padding=padding, bias=False)
            if previous
            else None
        )
        self.U = nn.Conv2d(
            inputs, width, input_kernel_size, padding=input_kernel_size // 2, bias=bias
        )
        self.activation = activation
        # He initialization with the total fan-in of W and U.
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
    """Weight-untied network (OptEq Eq. 1) with the stem and the head of `deep_opteq`.

    Its layers are z_{k+1} = σ(W_k z_k + U_k x + b_k), where x is the output of the stem.

    Notes:
        Table 3 states 199 k parameters for this network and for Deep OptEq with widths 16, 32, 64,
        128, 128. With these widths, the kernels W_k alone have 244,224 entries, so either the
        widths or the size must differ.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        channels: Channels of x.
        widths: Channels of each layer.
        kernel_size: Side of the kernels W_k.
        input_kernel_size: Side of the kernels U_k.
        stem_depth: Number of 3×3 convolutions of the stem.
        stem_strides: How many of the first convolutions have stride 2.
        downsample: Side of the average pooling after the stem.
        pool: Side of the map that the head pools the feature to.
        activation: σ.
        bias: Whether layers have a bias.
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
            raise ValueError("widths is empty; a plain network needs at least one layer")
        check_at_least_one(channels=channels)
        check_odd(kernel_size=kernel_size, input_kernel_size=input_kernel_size)
        layers = [
            PlainLayer(
                previous,
                width,
                channels,
                kernel_size=kernel_size,
                input_kernel_size=input_kernel_size,
                bias=bias,
                activation=get_activation(activation),
            )
            for previous, width in zip([None, *widths], widths, strict=False)
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
        """Return the output of the last layer."""
        x: Tensor = self.stem(images)
        z: Tensor | None = None
        for layer in self.layers:
            z = layer(z, x)
        assert z is not None
        return z


def norm_of_images(norm: Conv4Norm, channels: int, groups: int) -> nn.Module:
    """Build a norm: "batch" uses batch statistics in evaluation too (as MAML), "group" none."""
    check_choice(get_args(Conv4Norm), norm=norm)
    if norm == "batch":
        return nn.BatchNorm2d(channels, track_running_stats=False)
    return nn.GroupNorm(fitting_groups(channels, groups), channels)


class StridedBlocks(ImageLayers):
    """Blocks of a 3×3 convolution of stride 2, a norm and a ReLU.

    Args:
        in_channels: Channels of the images.
        channels: Channels of each block.
        depth: Number of blocks.
        norm: "batch" or "group".
        groups: Largest number of groups of a group norm.
    """

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
    """Few-shot classifier of MAML, Reptile and iMAML: four strided blocks, mean pooling, linear.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        channels: Channels of each block.
        norm: "batch", or "group", which makes samples independent.
        groups: Largest number of groups of a group norm.
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
        """Return the logits of images (B, C, H, W) or of episodes (B, samples, C, H, W).

        Episodes count as B · samples images.
        """
        features = self.features(images.flatten(0, -4))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


class DnCNN(nn.Module):
    """DnCNN restorer x̂ = ŷ − f(ŷ) with a plain convolutional network f.

    The defaults are the paper's network for noise of a known level.

    Args:
        in_channels: Channels of the images.
        channels: Channels of the inner layers.
        depth: Number of convolutions.
        kernel_size: Side of the kernels.
        norm: Norm of the inner layers, "batch" or "none".
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
        """Return the radius of the receptive field, in pixels.

        Args:
            accuracy: Not used: pixels outside the radius have no effect.
        """
        return self.depth * (self.kernel_size // 2)
