"""Linear operators with an exact transpose, a rigorous bound on their norm, and norm control."""

from equilibria.operators.base import LinearOperator
from equilibria.operators.compose import Compose, as_operator
from equilibria.operators.conv import Conv1d, Conv2d
from equilibria.operators.dense import Dense
from equilibria.operators.graph import Adjacency, GraphConv, Incidence
from equilibria.operators.measurements import AveragePool, Blur, Identity, ImageMeasurement, Mask
from equilibria.operators.separable import SeparableConv2d
from equilibria.operators.sparse import Sparse

__all__ = [
    "Adjacency",
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
    "SeparableConv2d",
    "Sparse",
    "as_operator",
]
