"""MDEQ as an image classifier: its stem and the head that joins the branches.

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
    """MDEQ's stem: two 3×3 convolutions and a 1×1 one, each with a norm and ReLU.

    The initial kernels preserve the variance, so that an untrained model has injections of the same
    scale in evaluation mode (with initial running statistics) as in training mode.

    Args:
        in_channels: Channels of the images.
        channels: Channels of the output.
        downsample: 2 gives the first convolution stride 2; 4 the first two.
        norm: "group" or "batch".
        groups: Largest number of groups of a group norm.
    """

    def __init__(
        self, in_channels: int, channels: int, *, downsample: int, norm: Norm, groups: int
    ) -> None:
        if downsample not in (1, 2, 4):
            raise ValueError(f"downsample must be 1, 2 or 4, got {downsample}")
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
    """Bottleneck block ReLU(conv1×1 ∘ conv3×3 ∘ conv1×1 + projection) with norms.

    Args:
        in_channels: Channels of the input.
        width: Inner channels; the output has 4 · width.
        norm: "group" or "batch".
        groups: Largest number of groups of a group norm.
    """

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
    """MDEQ's head: one bottleneck per branch, summed from fine to coarse, then a classifier.

    The input is all branches in one tensor (see `pack_branches`).

    Args:
        channels: Channels of each branch, the finest first.
        head_channels: Width of the first bottleneck; it doubles from branch to branch.
        final_channels: Channels of the pooled feature.
        num_classes: Number of classes.
        norm: "group" or "batch".
        groups: Largest number of groups of a group norm.
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
    """Build an MDEQ classifier.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        channels: Channels of each branch, the finest first.
        head_channels: Width of the head's first bottleneck.
        final_channels: Channels of the pooled feature.
        downsample: Factor by which the stem reduces the resolution: 1, 2 or 4.
        outer_norm: Norm of the stem and the head: "batch" as in the paper, or "group", which makes
            samples independent, and training and evaluation the same map.
        groups: Largest number of groups of a group norm.
        solving: How the layer solves.
        cell: Options of `MDEQCell`, such as `norm`.

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
