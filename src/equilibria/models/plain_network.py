"""The plain feed-forward network that OptEq starts from, and is compared with.

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022, Eq. 1 and Table 3 ("Acc-DNN").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from equilibria.activations import Activation, get_activation
from equilibria.models.blocks import ImageStem, PooledLinearHead


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
    """y = W_{L+1} z_L with z_0 = 0, x = g(image); g and the last layer are those of Deep OptEq."""

    def __init__(self, stem: nn.Module, layers: Sequence[PlainLayer], head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.layers = nn.ModuleList(layers)
        self.head = head

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


def plain_network(
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
) -> PlainNetwork:
    """The weight-untied network of Eq. 1, with the options of `deep_opteq` that apply to it.

    `channels` is the width of x. With the widths 16, 32, 64, 128, 128 the kernels W_k of
    n_k × n_{k−1} alone have 244 224 entries, more than the 199 k that Table 3 states for network
    and Deep OptEq alike: the same widths and the same size exclude each other.
    """
    if not widths:
        raise ValueError("a plain network needs at least one layer")
    if kernel_size % 2 == 0 or input_kernel_size % 2 == 0:
        raise ValueError(f"kernel sizes must be odd, not {kernel_size}, {input_kernel_size}")
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
    return PlainNetwork(
        stem=ImageStem(
            in_channels, channels, depth=stem_depth, downsample=downsample, strides=stem_strides
        ),
        layers=layers,
        head=PooledLinearHead(widths[-1], num_classes, pool=pool),
    )
