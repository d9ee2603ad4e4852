"""What features are like at equilibria: statistics of the regularizers, relations of branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.energies import HSIC, Decorrelation
from equilibria.energies.branch_coupling import diversity, heritage, resampling

NEXT_TO_NOTHING = 1e-3
"""Shares of the largest number of a feature below this count as zero."""


@dataclass(frozen=True)
class Relations:
    """How alike neighboring branches are (MOptEqs, Figure 2)."""

    heritage: Tensor
    """Σ H(zᵢ, zⱼ) / LC of each image, over the pairs of neighbors."""
    diversity: Tensor
    """Σ D(zᵢ, zⱼ) / L(C² − C)."""
    correlation: Tensor
    """|⟨z₂ₖ, z₁ₗ⟩| of the channels of the first two branches for the first image, at most 1."""


def relations(features: Sequence[Tensor]) -> Relations:
    """Of zᵢ of every branch (`branch_features`), each brought to the resolution of the other.

    A model that scales its features scales H and D, so their ratio is what can be compared.
    """
    count, channels = len(features), features[0].shape[1]
    finest = max(z.shape[-1] for z in features)
    scales = [finest // z.shape[-1] for z in features]

    def beside(i: int, j: int) -> tuple[Tensor, Tensor]:
        other: Tensor = resampling(scales[i], scales[j], features[j].dim() - 2)(features[j])
        return features[i], other

    pairs = [beside(i, j) for i in range(count) for j in {(i - 1) % count, (i + 1) % count}]
    similar = torch.stack([heritage(*pair) for pair in pairs]).sum(0) / (count * channels)
    diverse = torch.stack([diversity(*pair) for pair in pairs]).sum(0)
    one, other = beside(0, 1 % count)
    products = (other[0].flatten(1) @ one[0].flatten(1).T).abs()
    return Relations(
        heritage=similar,
        diversity=diverse / (count * (channels**2 - channels)),
        correlation=products / products.max().clamp_min(torch.finfo(products.dtype).tiny),
    )


def channel_correlation(feature: Tensor) -> Tensor:
    """|cos| of every pair of channels, over all images and pixels."""
    rows = feature.flatten(2).transpose(0, 1).flatten(1)
    unit = torch.nn.functional.normalize(rows, dim=1)
    return (unit @ unit.T).abs()


def feature_statistics(feature: Tensor) -> dict[str, float]:
    """What the regularizers of OptEq's Table 2 weigh, of a batch of features."""
    z = feature.double()
    sizes = z.flatten(1)
    largest = sizes.abs().amax(dim=1, keepdim=True)
    found = {
        "Mean |z| (L1)": float(sizes.abs().mean()),
        "Mean z² (L2)": float(sizes.square().mean()),
        "Share of numbers next to zero": float(
            (sizes.abs() <= NEXT_TO_NOTHING * largest).double().mean()
        ),
        "Length ‖z‖, mean (incay)": float(sizes.norm(dim=1).mean()),
    }
    if len(z) > 1 and z.shape[1] > 1:
        pairs = z.shape[1] * (z.shape[1] - 1)
        cosines = Decorrelation(scale="batch", epsilon=0.0).value(z) * 2 / pairs
        dependence = HSIC(scale="batch", epsilon=0.0).value(z) * 2 / pairs
        found["cos² between channels, mean (decorrelation)"] = float(cosines)
        found["HSIC of two channels, mean"] = float(dependence)
    return found
