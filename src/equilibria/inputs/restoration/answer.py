"""Restoring with a network that was trained to do so."""

from __future__ import annotations

from torch import Tensor, nn

from equilibria.inputs.restoration.corruptions import Corrupted
from equilibria.inputs.restoration.measurements import picture_of


def answer(model: nn.Module, seen: Corrupted) -> Tensor:
    """What a model that was trained to restore makes of measurements (G of Eq. 23)."""
    if getattr(model, "takes_measurement", False):
        restored: Tensor = model(seen.measured, seen.measurement)
        return restored
    picture = picture_of(seen.measurement, seen.measured, seen.measured.shape[2:])
    if picture is None:
        raise ValueError(
            f"{type(model).__name__} restores pictures, but the measurement makes none: give it "
            "a measurement with a `picture` method, or use a generator"
        )
    restored = model(picture)
    return restored
