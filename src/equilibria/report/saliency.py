"""Where an image speaks for a class: Grad-CAM, of the feature that the head of a model sees.

Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based
Localization", ICCV 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.models import EquilibriumClassifier

SHADE = 0.55
"""The share of the map in an overlaid image."""


def grad_cam(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """ReLU(Σ_k α_k z_k), α_k the mean over the map of ∂(logit of a class)/∂z_k; (samples, h, w).

    z is the feature at the equilibrium, z_k a channel of it. The equilibrium is not differentiated:
    the head alone is between the feature and the logits.

    classes: one a sample; by default the one with the largest logit.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> eq.report.grad_cam(model, images).shape
        torch.Size([2, 8, 8])
    """
    if not isinstance(model, EquilibriumClassifier):
        raise TypeError(
            f"{type(model).__name__} has no feature at an equilibrium: Grad-CAM here takes an "
            "equilibrium classifier, as `eq.create_model` makes them"
        )
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            feature = model.features(images)
        with torch.enable_grad():
            feature = feature.detach().requires_grad_()
            logits = model.head(feature)
            chosen = logits.argmax(dim=1) if classes is None else classes.to(logits.device)
            said = logits.gather(1, chosen[:, None]).sum()
            (gradient,) = torch.autograd.grad(said, feature)
    finally:
        model.train(was_training)
    if feature.dim() != 4:
        raise ValueError("Grad-CAM needs a feature that is a map (batch, channels, height, width)")
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    return (weights * feature).sum(dim=1).relu().detach()


def input_gradient(model: nn.Module, images: Tensor, classes: Tensor, rivals: Tensor) -> Tensor:
    """∂(w_k − w_j)/∂image, through the equilibrium; k of `classes` and j of `rivals`, a sample.

    As exact as the model's gradient rule is.
    """
    with torch.enable_grad():
        leaf = images.detach().clone().requires_grad_()
        logits = model(leaf)
        of, over = (logits.gather(1, one[:, None]).sum() for one in (classes, rivals))
        (gradient,) = torch.autograd.grad(of - over, leaf)
    return gradient


def signed(values: Tensor) -> Tensor:
    """Maps (…, h, w) as colored ones (…, 3, h, w): blue below zero, white at it, red above."""
    most = values.abs().amax(dim=(-2, -1), keepdim=True)
    even = values / most.where(most > 0, 1)
    ends = torch.tensor([[0.02, 0.44, 0.69], [0.82, 0.26, 0.12]], dtype=values.dtype)
    red = even.clamp_min(0)[..., None, :, :] * (1 - ends[1])[:, None, None]
    blue = (-even).clamp_min(0)[..., None, :, :] * (1 - ends[0])[:, None, None]
    return 1 - red - blue


def overlaid(images: Tensor, maps: Tensor) -> Tensor:
    """Images, in color, under their maps: each map from its own zero (blue) to its most (red)."""
    from matplotlib import colormaps

    most = maps.amax(dim=(1, 2), keepdim=True)
    even = torch.where(most > 0, maps / most.where(most > 0, 1), 0)
    size = images.shape[2:]
    even = F.interpolate(even[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    shades = torch.from_numpy(colormaps["turbo"](even.cpu().numpy())[..., :3]).permute(0, 3, 1, 2)
    return (1 - SHADE) * images.expand(-1, 3, -1, -1) + SHADE * shades.to(images)
