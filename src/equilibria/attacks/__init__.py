"""Adversarial attacks: the worst input near a given one."""

from equilibria.attacks.attack import adversarial_images, attack
from equilibria.attacks.budget import Budget, Norm
from equilibria.attacks.figure import attack_png
from equilibria.attacks.losses import AttackLoss
from equilibria.attacks.measure import AttackFigures, measure, wilson_interval
from equilibria.attacks.pixels import InPixels
from equilibria.attacks.result import AttackResult, joined
from equilibria.attacks.settings import AttackSettings, Method

__all__ = [
    "AttackFigures",
    "AttackLoss",
    "AttackResult",
    "AttackSettings",
    "Budget",
    "InPixels",
    "Method",
    "Norm",
    "adversarial_images",
    "attack",
    "attack_png",
    "joined",
    "measure",
    "wilson_interval",
]
