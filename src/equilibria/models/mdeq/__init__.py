"""MDEQ (Bai et al., NeurIPS 2020): the cell and its layers, the network, named models."""

from equilibria.models.mdeq.model import mdeq
from equilibria.models.registry import register_presets

register_presets(__name__, mdeq)
