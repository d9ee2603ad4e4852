"""Adversarial attacks: the worst input near a given one."""

from equilibria.inputs.attacks.attack import adversarial_images, attack
from equilibria.inputs.attacks.budget import Budget, Norm
from equilibria.inputs.attacks.losses import AttackLoss
from equilibria.inputs.attacks.measure import AttackFigures, measure, wilson_interval
from equilibria.inputs.attacks.result import AttackResult, joined
from equilibria.inputs.attacks.settings import AttackSettings, Method

__all__ = [
    "AttackFigures",
    "AttackLoss",
    "AttackResult",
    "AttackSettings",
    "Budget",
    "Method",
    "Norm",
    "adversarial_images",
    "attack",
    "joined",
    "measure",
    "wilson_interval",
]
