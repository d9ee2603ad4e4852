"""Adapting weights to an episode, and handing over a gradient that was computed by other means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from equilibria.tasks.episodes import EpisodeBatch

Weights = dict[str, Tensor]


def weights_of(model: nn.Module) -> Weights:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def logits_at(model: nn.Module, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """What the model says of images with other weights in place of its own."""
    logits: Tensor = functional_call(model, dict(weights), (images,))
    return logits


def support_loss(
    model: nn.Module, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor
) -> Tensor:
    """The mean cross-entropy of labelled images."""
    return F.cross_entropy(logits_at(model, weights, images), labels)


def each_episode(episodes: EpisodeBatch) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Support images and labels, query images and labels, one episode after the other."""
    yield from zip(
        episodes.support,
        episodes.support_labels,
        episodes.query,
        episodes.query_labels,
        strict=True,
    )


def loss_with_gradient(
    value: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Tensor:
    """A loss of the given value whose gradient with respect to the weights is the given one.

    So a method that has its update from elsewhere (Reptile's θ − θ′, iMAML's linear solve) trains
    by the same loop and optimizers as a loss that is differentiated.
    """
    total = value.detach()
    for weight, gradient in zip(weights, gradients, strict=True):
        total = total + ((weight - weight.detach()) * gradient.detach()).sum()
    return total


def mean_of(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The mean over episodes of gradients, weight by weight."""
    return [torch.stack(tensors).mean(dim=0) for tensors in zip(*gradients, strict=True)]
