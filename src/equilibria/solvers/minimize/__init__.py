"""Minimizing the hidden objective itself, which converges where the fixed-point map does not."""

from equilibria.solvers.minimize.base import Minimizer
from equilibria.solvers.minimize.descent import Descent

__all__ = ["Descent", "Minimizer"]
