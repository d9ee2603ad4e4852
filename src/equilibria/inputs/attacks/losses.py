"""What an attack makes as large as it can, sample by sample."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

AttackLoss = Literal["cross_entropy", "margin"]


def attack_losses(name: AttackLoss, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample.

    "cross_entropy" is what training minimizes. "margin" is the best wrong logit less the right one:
    above zero where the prediction is wrong, and steep where cross-entropy has become flat.
    """
    if name == "cross_entropy":
        # Where a model is certain, 1 − p is lost in single precision, and the gradient with it.
        precise = logits if logits.device.type == "mps" else logits.double()
        return F.cross_entropy(precise, labels, reduction="none").to(logits.dtype)
    right = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(dim=1) - right


def check_loss(name: str) -> None:
    if name not in get_args(AttackLoss):
        raise ValueError(f"loss must be one of {', '.join(get_args(AttackLoss))}, not {name!r}")
