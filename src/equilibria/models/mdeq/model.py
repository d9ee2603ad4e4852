"""MDEQ as an image classifier: its stem, the head that joins the branches, the named models.

Bai, Koltun, Kolter, "Multiscale Deep Equilibrium Models", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.equilibrium import EquilibriumLayer, Solving
from equilibria.models.base import EquilibriumClassifier
from equilibria.models.blocks import ImageLayers, Norm, channels_of, conv_norm, conv_norm_relu
from equilibria.models.mdeq.cell import MDEQCell, unpack_branches
from equilibria.models.registry import with_options_of
from equilibria.registry import check_at_least_one

BOTTLENECK_EXPANSION = 4


class MDEQStem(ImageLayers):
    """The injection: two 3×3 convolutions and a 1×1 one, each with norm and ReLU.

    `downsample` 2 strides the first convolution, 4 the first two. The initial kernels preserve the
    variance, so that a fresh model in evaluation mode, whose batch norms have seen nothing yet,
    injects at the same scale as in training.
    """

    def __init__(
        self, in_channels: int, channels: int, *, downsample: int, norm: Norm, groups: int
    ) -> None:
        if downsample not in (1, 2, 4):
            raise ValueError(f"downsample must be 1, 2 or 4, not {downsample}")
        first, second = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[downsample]
        sizes = ((in_channels, 3, first), (channels, 3, second), (channels, 1, 1))
        layers: list[nn.Module] = []
        for width, size, stride in sizes:
            layers += conv_norm_relu(width, channels, size, stride=stride, norm=norm, groups=groups)
        super().__init__(in_channels, layers)
        for i, layer in enumerate(self):
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if i == 0 else "relu")


class Bottleneck(nn.Module):
    """ReLU(conv1×1 ∘ conv3×3 ∘ conv1×1 + projection), all with norms, to 4 times `width`."""

    def __init__(self, in_channels: int, width: int, *, norm: Norm, groups: int) -> None:
        super().__init__()
        out_channels = BOTTLENECK_EXPANSION * width
        conv = partial(conv_norm, norm=norm, groups=groups)
        inner = partial(conv_norm_relu, norm=norm, groups=groups, affine=False)
        self.residual = nn.Sequential(
            *inner(in_channels, width, 1),
            *inner(width, width, 3),
            *conv(width, out_channels, 1, affine=False),
        )
        self.projection = (
            nn.Identity() if in_channels == out_channels else conv(in_channels, out_channels, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return F.relu(self.residual(z) + self.projection(z))


class MDEQHead(nn.Module):
    """A bottleneck a branch; strided convolutions down to the coarsest, summed; then the classes.

    It takes all branches in one tensor, as `pack_branches` makes it. The bottlenecks have width
    `head_channels` in the first branch and twice that of the branch before in every other.
    """

    def __init__(
        self,
        channels: Sequence[int],
        head_channels: int,
        final_channels: int,
        num_classes: int,
        *,
        norm: Norm,
        groups: int,
    ) -> None:
        super().__init__()
        check_at_least_one(head_channels=head_channels, final_channels=final_channels)
        self.channels = tuple(channels)
        widths = [head_channels * 2**branch for branch in range(len(channels))]
        sizes = [BOTTLENECK_EXPANSION * width for width in widths]
        self.bottlenecks = nn.ModuleList(
            Bottleneck(c, width, norm=norm, groups=groups)
            for c, width in zip(channels, widths, strict=True)
        )
        conv = partial(conv_norm_relu, norm=norm, groups=groups, bias=True)
        self.downs = nn.ModuleList(
            conv(size, larger, 3, stride=2) for size, larger in pairwise(sizes)
        )
        self.final = conv(sizes[-1], final_channels, 1)
        self.classifier = nn.Linear(final_channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        branches = unpack_branches(features, self.channels)
        joined = self.bottlenecks[0](branches[0])
        for branch, bottleneck, down in zip(
            branches[1:], self.bottlenecks[1:], self.downs, strict=True
        ):
            joined = bottleneck(branch) + down(joined)
        logits: Tensor = self.classifier(self.final(joined).mean(dim=(2, 3)))
        return logits


@with_options_of(MDEQCell)
def mdeq(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    channels: int | Sequence[int] = (16, 32),
    head_channels: int = 4,
    final_channels: int = 64,
    downsample: int = 1,
    outer_norm: Norm = "group",
    groups: int = 8,
    solving: Solving | None = None,
    **cell: Any,
) -> EquilibriumClassifier:
    """An MDEQ classifier; `channels` has one number a branch, the finest first.

    `norm` is the norm in the equilibrium, `outer_norm` that in the stem and the head ("batch" in
    the paper; with "group" no sample sees another, and training and evaluation are the same map).
    `groups` are reduced to what fits the channels. `downsample` (1, 2 or 4) is by strides in the
    stem. The other options are those of `MDEQCell`.

    Examples:
        >>> from equilibria.models.mdeq.model import mdeq
        >>> model = mdeq(channels=(4, 8), groups=2, in_channels=1).eval()
        >>> with eq.solving(model, tolerance=0.1):
        ...     print(model(torch.rand(1, 1, 8, 8)).shape)
        torch.Size([1, 10])
    """
    widths = channels_of(channels, "branch")
    outer: dict[str, Any] = {"norm": outer_norm, "groups": groups}
    layer = EquilibriumLayer(MDEQCell(widths, groups=groups, **cell), solving=solving)
    return EquilibriumClassifier(
        MDEQStem(in_channels, widths[0], downsample=downsample, **outer),
        layer,
        MDEQHead(widths, head_channels, final_channels, num_classes, **outer),
    )
