"""The named models of few-shot learning."""

from __future__ import annotations

from equilibria.models.conv4 import conv4
from equilibria.models.few_shot import few_shot_mdeq, few_shot_opteq
from equilibria.models.registry import register_model

register_model(
    "few-shot-mdeq",
    few_shot_mdeq,
    summary="MDEQ of two branches with a task vector of 400 numbers (Omniglot)",
    paper="JIIO T6",
)
register_model(
    "few-shot-opteq",
    few_shot_opteq,
    summary="OptEq of 64 channels a class with a task vector of 320 numbers (Omniglot)",
    paper="JIIO T6",
)
register_model(
    "conv4",
    conv4,
    summary="four strided convolutions, the network of MAML (Omniglot)",
    paper="JIIO T6",
)
