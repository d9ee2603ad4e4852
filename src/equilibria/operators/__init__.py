"""Linear maps with an exact transpose, a rigorous bound of their norm, and control over it."""

from equilibria.operators.base import LinearOperator, Shape, Weights
from equilibria.operators.compose import Adjoint, Compose, as_operator
from equilibria.operators.conv import Conv2d
from equilibria.operators.dense import Dense
from equilibria.operators.measurements import AveragePool, Blur, Identity, Mask
from equilibria.operators.separable import SeparableConv2d

__all__ = [
    "Adjoint",
    "AveragePool",
    "Blur",
    "Compose",
    "Conv2d",
    "Dense",
    "Identity",
    "LinearOperator",
    "Mask",
    "SeparableConv2d",
    "Shape",
    "Weights",
    "as_operator",
]
