"""What an attack is asked to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from equilibria.inputs.attacks.budget import Budget, Norm
from equilibria.inputs.attacks.losses import AttackLoss, check_loss

Method = Literal["pgd", "jiio", "fgsm"]
DEFAULT_STEPS: dict[Method, int] = {"pgd": 20, "jiio": 40, "fgsm": 1}


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """The options of `attack`, checked."""

    eps: float
    norm: Norm = "l2"
    method: Method = "pgd"
    steps: int | None = None
    restarts: int = 1
    step_size: float | None = None
    random_start: bool = False
    warm_start: bool = False
    clip: tuple[float, float] | None = (0.0, 1.0)
    loss: AttackLoss = "cross_entropy"
    tolerance: float | None = None
    joint_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Budget(self.norm, self.eps, self.clip)
        check_loss(self.loss)
        if self.method not in get_args(Method):
            raise ValueError(
                f"method must be one of {', '.join(get_args(Method))}, not {self.method!r}"
            )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if self.method == "fgsm" and self.steps not in (None, 1):
            raise ValueError(f"fgsm is one step, not {self.steps}: use method='pgd' for more")
        if self.method == "fgsm" and self.step_size is not None:
            raise ValueError("the step of fgsm is as long as eps: leave out step_size")
        if self.restarts < 1:
            raise ValueError(f"restarts must be at least 1, not {self.restarts}")
        for name in ("step_size", "tolerance"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, not {value}")
        if self.warm_start and self.method != "pgd":
            raise ValueError(f"warm_start is for method='pgd', not {self.method!r}")
        if self.joint_options and self.method != "jiio":
            raise ValueError(f"joint_options are for method='jiio', not {self.method!r}")

    def as_options(self) -> dict[str, Any]:
        """The keywords that `attack` takes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def budget(self) -> Budget:
        return Budget(self.norm, self.eps, self.clip)

    @property
    def chosen_steps(self) -> int:
        return DEFAULT_STEPS[self.method] if self.steps is None else self.steps
