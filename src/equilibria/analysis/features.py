"""Statistics of features at equilibria, and relations between the branches of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.energies import HSIC, Decorrelation
from equilibria.energies.branch_coupling import diversity, heritage, resampling

RELATIVE_ZERO = 1e-3
"""Values count as zero up to this share of the largest absolute value of a sample."""


@dataclass(frozen=True)
class Relations:
    """Similarity of neighboring branches (MOptEqs, Figure 2)."""

    heritage: Tensor
    """Heritage: Σ H(zᵢ, zⱼ) / LC over the L pairs of neighbors with C channels, shape (B,)."""
    diversity: Tensor
    """Diversity: Σ D(zᵢ, zⱼ) / L(C² − C) over neighboring branches, shape (B,)."""
    correlation: Tensor
    """|⟨z₂ₖ, z₁ₗ⟩| between channels of the first two branches, first image, scaled to [0, 1]."""


def relations(features: Sequence[Tensor]) -> Relations:
    """Return heritage and diversity of neighboring branches.

    Branches of different resolutions are resampled. Both scale with the features of a model, so
    only their ratio can be compared between models.

    Args:
        features: Feature zᵢ of each branch (`branch_features`), shape (B, C, …).
    """
    count, channels = len(features), features[0].shape[1]
    finest = max(z.shape[-1] for z in features)
    scales = [finest // z.shape[-1] for z in features]

    def resampled_pair(i: int, j: int) -> tuple[Tensor, Tensor]:
        other: Tensor = resampling(scales[i], scales[j], features[j].dim() - 2)(features[j])
        return features[i], other

    pairs = [resampled_pair(i, j) for i in range(count) for j in {(i - 1) % count, (i + 1) % count}]
    similar = torch.stack([heritage(*pair) for pair in pairs]).sum(0) / (count * channels)
    diverse = torch.stack([diversity(*pair) for pair in pairs]).sum(0)
    first, second = resampled_pair(0, 1 % count)
    products = (second[0].flatten(1) @ first[0].flatten(1).T).abs()
    return Relations(
        heritage=similar,
        diversity=diverse / (count * (channels**2 - channels)),
        correlation=products / products.max().clamp_min(torch.finfo(products.dtype).tiny),
    )


def channel_correlation(feature: Tensor) -> Tensor:
    """Return |cos| of every pair of channels over all images and pixels, shape (C, C)."""
    rows = feature.flatten(2).transpose(0, 1).flatten(1)
    unit = torch.nn.functional.normalize(rows, dim=1)
    return (unit @ unit.T).abs()


def feature_statistics(feature: Tensor) -> dict[str, float]:
    """Return the statistics that the regularizers in Table 2 of OptEq penalize, by label."""
    z = feature.double()
    sizes = z.flatten(1)
    largest = sizes.abs().amax(dim=1, keepdim=True)
    statistics = {
        "Mean |z| (L1)": float(sizes.abs().mean()),
        "Mean z² (L2)": float(sizes.square().mean()),
        "Share of numbers next to zero": float(
            (sizes.abs() <= RELATIVE_ZERO * largest).double().mean()
        ),
        "Length ‖z‖, mean (incay)": float(sizes.norm(dim=1).mean()),
    }
    if len(z) > 1 and z.shape[1] > 1:
        pairs = z.shape[1] * (z.shape[1] - 1)
        cosines = Decorrelation(scale="batch", epsilon=0.0).value(z) * 2 / pairs
        dependence = HSIC(scale="batch", epsilon=0.0).value(z) * 2 / pairs
        statistics["cos² between channels, mean (decorrelation)"] = float(cosines)
        statistics["HSIC of two channels, mean"] = float(dependence)
    return statistics
