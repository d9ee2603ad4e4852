"""Refactoring must not change loss trajectories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.trajectories import DIGITS, REAL, RECORDED, difference, trajectory

RECORDINGS = json.loads(RECORDED.read_text())
TOLERANCE = 1e-6


@pytest.mark.parametrize("case", DIGITS)
def test_training_follows_the_recorded_trajectory(case: str) -> None:
    assert difference(trajectory(case), RECORDINGS[case]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL)
def test_training_on_real_data_follows_the_recorded_trajectory(real_data: Path, case: str) -> None:
    assert difference(trajectory(case), RECORDINGS[case]) <= TOLERANCE
