"""GEQ: equilibria whose input acts through a Gaussian kernel."""

from equilibria.models.geq.model import geq
from equilibria.models.registry import register_presets

register_presets(__name__, geq)
