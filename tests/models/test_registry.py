"""The registry of models."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import equilibria as eq
from equilibria.models import registry


@pytest.fixture
def _clean_registry() -> Any:
    yield
    for name in ("tiny", "loose"):
        registry._models._factories.pop(name, None)
        registry._cards.pop(name, None)


def test_models_are_listed_in_order() -> None:
    expected = {"opteq-small", "deep-opteq-small"}
    expected |= {"deep-opteq-162k", "deep-opteq-199k", "deep-opteq-1m"}
    assert expected <= set(eq.list_models())
    assert eq.list_models() == sorted(eq.list_models())


def test_unknown_name_raises_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'opteq-smal'; did you mean 'opteq-small'"):
        eq.create_model("opteq-smal")
    # An ambiguous prefix raises too.
    with pytest.raises(ValueError, match=r"Available: .*deep-opteq-162k"):
        eq.create_model("deep-opteq")


def test_options_have_the_values_of_the_preset() -> None:
    options = eq.models.model_options("deep-opteq-199k")
    assert options["channels"] == 48
    assert options["alpha"] == 0.8
    assert {"num_classes", "in_channels", "tolerance", "max_iterations"} <= set(options)


@pytest.mark.usefixtures("_clean_registry")
def test_users_can_register_models() -> None:
    def tiny(*, num_classes: int = 10, in_channels: int = 3, width: int = 2) -> nn.Module:
        return nn.Linear(in_channels * width, num_classes)

    eq.register_model("tiny", tiny, width=5)
    assert eq.create_model("tiny", num_classes=4).in_features == 15  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="exists already"):
        eq.register_model("tiny", tiny)
    eq.register_model("tiny", tiny, replace=True, width=6)
    assert eq.create_model("tiny").in_features == 18  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="no option 'widht'; did you mean 'width'"):
        eq.create_model("tiny", widht=3)

    def loose(**anything: Any) -> nn.Module:
        return nn.Identity(**anything)

    eq.register_model("loose", loose)
    eq.create_model("loose", whatever=1)


@pytest.mark.parametrize("name", ["opteq-small", "mdeq-small", "resnet-small", "conv4"])
@pytest.mark.parametrize("option", ["num_classes", "in_channels"])
@pytest.mark.parametrize("bad", [0, -1, 2.5, "3", None, True])
def test_invalid_counts_raise(name: str, option: str, bad: object) -> None:
    with pytest.raises(ValueError, match=f"{option} must be an integer of at least 1, got "):
        eq.create_model(name, **{option: bad})
