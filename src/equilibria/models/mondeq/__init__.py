"""monDEQ (Winston and Kolter, NeurIPS 2020)."""

from equilibria.models.mondeq.model import mondeq
from equilibria.models.registry import register_presets

register_presets(__name__, mondeq)
