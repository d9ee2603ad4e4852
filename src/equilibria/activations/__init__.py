"""Activations as proximal operators: value, derivative, primitive, penalty and subgradient."""

from equilibria.activations.base import (
    Activation,
    get_activation,
    list_activations,
    register_activation,
)
from equilibria.activations.piecewise import IdentityActivation, LeakyReLU, ReLU, SoftThreshold
from equilibria.activations.smooth import Sigmoid, SmoothActivation, Softplus, Tanh

__all__ = [
    "Activation",
    "IdentityActivation",
    "LeakyReLU",
    "ReLU",
    "Sigmoid",
    "SmoothActivation",
    "SoftThreshold",
    "Softplus",
    "Tanh",
    "get_activation",
    "list_activations",
    "register_activation",
]
