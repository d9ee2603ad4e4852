"""Registry of activations, and its error messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from equilibria.activations import (
    Activation,
    LeakyReLU,
    ReLU,
    base,
    get_activation,
    list_activations,
    register_activation,
)


class Nameless(Activation):
    """σ(a) = ½a, S = ¼a², f = ½y²; without a name."""

    @property
    def lipschitz(self) -> float:
        return 0.5

    def __call__(self, a: Tensor) -> Tensor:
        return a / 2

    def derivative(self, a: Tensor) -> Tensor:
        return torch.full_like(a, 0.5)

    def primitive(self, a: Tensor) -> Tensor:
        return a.square() / 4

    def penalty(self, y: Tensor) -> Tensor:
        return y.square() / 2

    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        return gradient + y


@pytest.fixture(autouse=True)
def _restore_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base._ACTIVATIONS, "_factories", dict(base._ACTIVATIONS._factories))


def test_built_in_names() -> None:
    built_in = {"identity", "leaky_relu", "relu", "sigmoid", "soft_threshold", "softplus", "tanh"}
    assert built_in <= set(list_activations())
    assert list_activations() == sorted(list_activations())


def test_name_options_and_instances() -> None:
    assert get_activation("relu") == ReLU()
    assert get_activation("leaky_relu", slope=0.1) == LeakyReLU(slope=0.1)
    activation = LeakyReLU(slope=0.3)
    assert get_activation(activation) is activation


def test_the_error_for_an_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'rleu'.*'relu'.*identity, "):
        get_activation("rleu")


def test_the_error_for_an_unknown_option_names_it() -> None:
    with pytest.raises(TypeError, match=r"'leaky_relu'.*'slop'"):
        get_activation("leaky_relu", slop=0.1)
    with pytest.raises(TypeError, match="'relu'"):
        get_activation("relu", slope=0.1)


def test_options_cannot_be_combined_with_an_instance() -> None:
    with pytest.raises(TypeError, match="set them on that object"):
        get_activation(LeakyReLU(), slope=0.1)


def test_a_class_is_not_an_activation() -> None:
    with pytest.raises(TypeError, match="name or an instance of Activation"):
        get_activation(ReLU)  # type: ignore[arg-type]


def test_a_custom_activation_can_be_registered() -> None:
    @register_activation
    @dataclass(frozen=True)
    class Gain(LeakyReLU):
        name: ClassVar[str] = "gain"

    assert get_activation("gain", slope=0.5) == Gain(slope=0.5)


def test_register_activation_sets_a_missing_name() -> None:
    @register_activation("half")
    class Half(Nameless):
        pass

    assert Half.name == "half"
    assert get_activation("half") == Half()


def test_registration_needs_a_name() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        register_activation(Nameless)


def test_a_class_cannot_have_two_names() -> None:
    with pytest.raises(ValueError, match="has the name 'leaky_relu'"):
        register_activation("other")(LeakyReLU)
    assert "other" not in list_activations()


def test_a_taken_name_is_an_error_unless_replaced() -> None:
    class MyReLU(ReLU):
        pass

    with pytest.raises(ValueError, match="'relu'"):
        register_activation(MyReLU)
    register_activation(MyReLU, replace=True)
    assert type(get_activation("relu")) is MyReLU
    register_activation(replace=True)(ReLU)
    assert type(get_activation("relu")) is ReLU
