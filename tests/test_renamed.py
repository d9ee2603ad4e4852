"""Spellings of before version 0.2 keep working until 0.3, and say what they are called now."""

from __future__ import annotations

import inspect

import pytest
import torch

import equilibria as eq
from equilibria.registry import RENAMED, accepts_old_names, current_names


def test_an_old_option_is_the_new_one_and_warns() -> None:
    energy = eq.Input(torch.eye(3))
    with pytest.warns(DeprecationWarning, match="'adjoint' is now 'gradient'"):
        layer = eq.EquilibriumLayer(energy, adjoint="one_step")  # type: ignore[call-arg]
    assert layer.gradient == eq.OneStep()


def test_an_option_of_another_meaning_is_left_alone() -> None:
    """A Neural ODE has an option `adjoint` of its own, which is about ODEs."""
    assert current_names({"adjoint": False}, ["adjoint", "gradient"]) == {"adjoint": False}
    assert current_names({"adjoint": False}, ["steps"]) == {"adjoint": False}
    assert set(RENAMED).isdisjoint(RENAMED.values())


def test_the_signature_stays() -> None:
    @accepts_old_names
    def draw(*, center: float, size: int = 1) -> float:
        return center * size

    with pytest.warns(DeprecationWarning, match="until version 0.3"):
        assert draw(centre=2.0) == 2.0  # type: ignore[call-arg]
    assert list(inspect.signature(draw).parameters) == ["center", "size"]
    with pytest.raises(TypeError, match="colour"):
        draw(center=1.0, colour=2)  # type: ignore[call-arg]


def test_names_that_left_the_window_are_found_in_their_rooms() -> None:
    with pytest.warns(DeprecationWarning, match=r"equilibria\.energies\.L1"):
        assert eq.L1 is eq.energies.L1  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"equilibria\.gradients\.get_gradient"):
        assert eq.get_adjoint is eq.gradients.get_gradient  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"equilibria\.FeatureRegularizer"):
        assert eq.FeatureRegulariser is eq.FeatureRegularizer  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_this_name'"):
        eq.nothing_of_this_name  # type: ignore[attr-defined]  # noqa: B018


def test_the_window_is_small() -> None:
    assert len(eq.__all__) <= 49
