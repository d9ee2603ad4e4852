"""The named models of inverse problems."""

from __future__ import annotations

from equilibria.models.dncnn import dncnn
from equilibria.models.registry import register_model
from equilibria.models.restorers import deq_restorer

register_model(
    "deq-restorer",
    deq_restorer,
    summary="Restores images: minimizes a data term and a learned convex prior",
    paper="after Gilton et al., 2021",
)
register_model(
    "dncnn",
    dncnn,
    summary="Restores images: a plain network that predicts the noise",
    paper="Zhang et al., 2017",
)
