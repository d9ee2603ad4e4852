"""Linear maps with an exact transpose, a rigorous bound of their norm, and control over it."""

from equilibria.operators.base import LinearOperator, Shape, Weights
from equilibria.operators.compose import Adjoint, Compose, OperatorLike, as_operator
from equilibria.operators.conv import Conv1d, Conv2d
from equilibria.operators.dense import Dense
from equilibria.operators.graph import Adjacency, GraphConv, Incidence
from equilibria.operators.measurements import (
    AveragePool,
    Blur,
    Identity,
    ImageMeasurement,
    Mask,
    about,
)
from equilibria.operators.separable import SeparableConv2d
from equilibria.operators.sparse import Sparse

__all__ = [
    "Adjacency",
    "Adjoint",
    "AveragePool",
    "Blur",
    "Compose",
    "Conv1d",
    "Conv2d",
    "Dense",
    "GraphConv",
    "Identity",
    "ImageMeasurement",
    "Incidence",
    "LinearOperator",
    "Mask",
    "OperatorLike",
    "SeparableConv2d",
    "Shape",
    "Sparse",
    "Weights",
    "about",
    "as_operator",
]
