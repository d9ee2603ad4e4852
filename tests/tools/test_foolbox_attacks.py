"""The attacks of `tools.foolbox_attacks` succeed where they must, and not within a radius."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("foolbox", reason="NO FOOLBOX: pip install foolbox", exc_type=ImportError)

from tools.foolbox_attacks import (
    BEYOND,
    WITHIN,
    Settings,
    attack_all,
    certified_target,
    linear_target,
    smallest,
)

QUICK = Settings(
    images=8, slow_images=8, pgd_steps=8, ddn_steps=40, carlini_wagner_steps=3, boundary_steps=20
)
GRADIENTS = ("PGD", "PGD, targeted", f"PGD, targeted, {BEYOND} r", "DDN")


def test_attacks_reach_the_exact_radius_of_a_linear_model_and_not_less() -> None:
    target = linear_target(40)
    results = attack_all(target, Settings(images=40, ddn_steps=60), GRADIENTS)
    best = smallest(results)
    assert bool((best > 1 - 1e-6).all())
    assert bool((best <= BEYOND).all())
    assert results["PGD"].count(WITHIN) == 0


def test_no_attack_succeeds_within_a_certified_radius() -> None:
    """All attacks run. Those that minimize the distance find other classes farther away."""
    target = certified_target("digits-certified", 8)
    assert len(target.images) > 6
    results = attack_all(target, QUICK)
    assert bool((smallest(results) > WITHIN).all())
    assert bool(results["boundary"].distance.isfinite().all())


def test_a_radius_that_is_too_large_is_disproved() -> None:
    target = linear_target(10)
    too_large = type(target)(
        target.model, target.images, target.labels, target.nearest, 1.02 * target.radius
    )
    results = attack_all(too_large, Settings(images=10, pgd_steps=30), ("PGD, targeted",))
    assert bool((smallest(results) <= WITHIN).all())
    assert torch.equal(target.nearest != target.labels, torch.ones(10, dtype=torch.bool))
