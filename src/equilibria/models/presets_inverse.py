"""The named models of inverse problems."""

from __future__ import annotations

from equilibria.models.registry import register_model
from equilibria.models.restorers import deq_restorer

register_model(
    "deq-restorer",
    deq_restorer,
    summary="Restores images: minimises a data term and a learned convex prior",
    paper="after Gilton et al., 2021",
)
