"""Saliency maps: Grad-CAM of the input of a model's head, and gradients in the image.

Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based
Localization", ICCV 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibria.models import EquilibriumClassifier


def grad_cam(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """Compute Grad-CAM maps of the feature at the equilibrium.

    The map is ReLU(Σ_k α_k z_k), where z_k is a channel of the feature and α_k the mean over the
    map of ∂(logit of a class)/∂z_k. Only the head is differentiated, not the equilibrium.

    Args:
        model: Classifier with an equilibrium layer.
        images: Batch of images, shape (B, C, H, W).
        classes: Class of each sample, shape (B,); by default the one with the largest logit.

    Returns:
        One map per image, shape (B, H', W'), in the resolution of the feature.

    Raises:
        TypeError: If the model is not an equilibrium classifier.
        ValueError: If its feature is not a map (B, K, H', W').

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> eq.analysis.grad_cam(model, images).shape
        torch.Size([2, 8, 8])
    """
    if not isinstance(model, EquilibriumClassifier):
        raise TypeError(
            f"{type(model).__name__} has no equilibrium layer; Grad-CAM needs a classifier made by "
            "`eq.create_model`"
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
            score = logits.gather(1, chosen[:, None]).sum()
            (gradient,) = torch.autograd.grad(score, feature)
    finally:
        model.train(was_training)
    if feature.dim() != 4:
        raise ValueError(
            "Grad-CAM needs a feature of shape (batch, channels, height, width), "
            f"got {tuple(feature.shape)}"
        )
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    return (weights * feature).sum(dim=1).relu().detach()


def input_gradient(model: nn.Module, images: Tensor, classes: Tensor, rivals: Tensor) -> Tensor:
    """Compute the gradient of the margin in the image, by the gradient rule of the model.

    The margin is the logit of class k minus that of class j at the equilibrium.

    Args:
        model: Classifier.
        images: Batch of images, shape (B, C, H, W).
        classes: Class k of each sample, shape (B,).
        rivals: Class j of each sample, shape (B,).
    """
    with torch.enable_grad():
        leaf = images.detach().clone().requires_grad_()
        logits = model(leaf)
        first, second = (logits.gather(1, k[:, None]).sum() for k in (classes, rivals))
        (gradient,) = torch.autograd.grad(first - second, leaf)
    return gradient
