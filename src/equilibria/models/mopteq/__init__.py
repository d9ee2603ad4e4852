"""POptEqs and MOptEqs (Li et al.): branches, cells, networks, named models."""

from equilibria.models.mopteq.models import mopteq, popteq
from equilibria.models.registry import register_presets

register_presets(__name__, popteq, mopteq)
