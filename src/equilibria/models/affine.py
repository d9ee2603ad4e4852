"""Whether a head computes an affine function; only then can logits be attributed and certified."""

from __future__ import annotations

from torch import nn

from equilibria.models.blocks import ImageLayers, PooledLinearHead
from equilibria.models.mopteq.branches import ConvolutionFusionHead

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)
"""Layers whose scale depends on the input; they have no known Lipschitz constant."""
AFFINE = (
    *(nn.Identity, nn.Flatten, nn.Linear, nn.Dropout, nn.Dropout2d, nn.BatchNorm2d, nn.Conv2d),
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Sequential, ImageLayers),
    *(PooledLinearHead, ConvolutionFusionHead),
)
"""Layers that are affine in evaluation mode."""


def why_not_affine(head: nn.Module) -> str:
    """Return the reason why logits are not an affine function of the feature.

    Args:
        head: Head of a classifier, in evaluation mode.

    Returns:
        A clause for a message, or an empty string if the head is affine.
    """
    for part in head.modules():
        if isinstance(part, NORMS):
            return f"the head has a {type(part).__name__}, whose scale depends on the input"
        if type(part) not in AFFINE and not getattr(part, "is_affine", False):
            return f"the head has a {type(part).__name__}, which is not known to be affine"
    return ""
