"""What pulled a decision: derivatives against differences of solved models, and what adds up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.context.state import map_state
from equilibria.energies import Branches, HeritageDiversity, Input
from equilibria.models import (
    EquilibriumClassifier,
    EquilibriumModel,
    NoContributionsError,
    contributions,
)
from equilibria.models.reflection.model import reflection_network
from tests.models.small import images, small_model

STEP = 1e-5
Change = Callable[[EquilibriumModel, float], None]


@eq.energy_term
def smoothness(y: Tensor, x: Tensor) -> Tensor:
    return (1 + (y[:, 1:] - y[:, :-1]).square()).log().sum(dim=1)


def with_own_term(activation: str = "relu") -> EquilibriumModel:
    """A hidden objective as a user writes it, with a term of no degree."""
    torch.manual_seed(0)
    energy = eq.Input(eq.Dense(6, 9)) + eq.Quadratic(eq.Dense(5, 9, norm="bound", zeta=0.7))
    layer = eq.EquilibriumLayer(
        energy + 0.3 * smoothness, activation=activation, tolerance=1e-12, max_iterations=2000
    )
    model = EquilibriumModel(nn.Identity(), layer, nn.Linear(9, 3)).double().eval()
    nn.init.normal_(energy["input"].bias)  # type: ignore[arg-type]
    return model


def prepared(name: str, **options: Any) -> EquilibriumClassifier:
    """Biases are drawn, so that none of them says nothing."""
    model = small_model(name, solver="auto", **options)
    model.train()(images())
    for term in model.modules():
        if isinstance(term, Input) and term.bias is not None:
            nn.init.normal_(term.bias, std=0.3)
    nn.init.normal_(model.head.classifier.bias)  # type: ignore[union-attr, arg-type]
    return model.eval()


def reflection() -> EquilibriumModel:
    """The input also passes by the equilibrium: its feature is 2z − u."""
    torch.manual_seed(0)
    side = images().shape[-1]
    model = reflection_network(
        image_size=side, units=(7,), in_channels=images().shape[1], num_classes=3, zeta=2.0
    )
    nn.init.normal_(model.layer.cell.energy["convex_potential"].bias)  # type: ignore
    nn.init.normal_(model.head.bias)  # type: ignore
    return model.double().eval()


def scaled(term: str, place: str | None = None) -> Change:
    """Multiplies a term of the sum, or of a branch, by 1 + h."""

    def change(model: EquilibriumModel, h: float) -> None:
        energy: Any = model.layer.cell.energy
        terms = energy.terms if place is None else energy.terms[place].terms
        terms[term] = (1 + h) * terms[term]

    return change


def kernel_of_branch(place: int) -> Change:
    def change(model: EquilibriumModel, h: float) -> None:
        energy: Any = model.layer.cell.energy
        assert isinstance(energy, Branches)
        energy.terms[str(place)] = (1 + h) * energy.terms[str(place)]

    return change


def inputs_of(model: EquilibriumModel) -> list[Input]:
    return [term for term in model.modules() if isinstance(term, Input)]


def input_of(place: int) -> Change:
    def change(model: EquilibriumModel, h: float) -> None:
        for parameter in inputs_of(model)[place].U.parameters():
            parameter.data *= 1 + h

    return change


def bias_of(place: int) -> Change:
    def change(model: EquilibriumModel, h: float) -> None:
        bias = inputs_of(model)[place].bias
        assert bias is not None
        bias.data *= 1 + h

    return change


def diversity(model: EquilibriumModel, h: float) -> None:
    for term in model.modules():
        if isinstance(term, HeritageDiversity):
            term.coupling.diversity *= 1 + h


def all_of_the_coupling(model: EquilibriumModel, h: float) -> None:
    (term,) = (t for t in model.modules() if isinstance(t, HeritageDiversity))
    plain = term.descent
    term.descent = lambda y, c: map_state(lambda d: (1 + h) * d, plain(y, c))  # type: ignore[method-assign]


MOPTEQ = {"space": "y", "widths": (3, 4), "scales": (1, 2)}
CASES: dict[str, tuple[Callable[[], EquilibriumModel], dict[str, list[Change]]]] = {
    "OptEq": (
        lambda: prepared("opteq-small", space="y"),
        {
            "input": [input_of(0)],
            "input+bias": [scaled("input")],
            "bias": [bias_of(0)],
            "quadratic": [scaled("quadratic")],
        },
    ),
    "OptEq in z": (
        lambda: prepared("opteq-small", space="z"),
        {"input": [input_of(0)], "bias": [bias_of(0)]},
    ),
    "Deep OptEq": (
        lambda: prepared("deep-opteq-small", widths=(3, 4, 3), alpha=0.7),
        {
            **{f"input of layer {i + 1}": [input_of(i)] for i in range(3)},
            **{f"bias of layer {i + 1}": [bias_of(i)] for i in range(3)},
        },
    ),
    "POptEqs": (
        lambda: prepared("popteq-small", widths=(3, 4), scales=(1, 2)),
        {
            "input of branch 2": [input_of(1)],
            "quadratic of branch 1": [scaled("quadratic", "0")],
            "quadratic of branch 2": [scaled("quadratic", "1")],
        },
    ),
    "MOptEqs": (
        lambda: prepared("mopteq-small", diversity=0.0, **MOPTEQ),
        {"bias of branch 1": [bias_of(0)], "heritage": [all_of_the_coupling]},
    ),
    "MOptEqs, diverse": (
        lambda: prepared("mopteq-small", diversity=0.2, **MOPTEQ),
        {"diversity": [diversity], "heritage+diversity": [all_of_the_coupling]},
    ),
    "GEQ": (
        lambda: prepared("geq-small", widths=(4, 4), scales=(1, 2), zeta=1.2),
        {f"gaussian kernel of branch {i + 1}": [kernel_of_branch(i)] for i in range(2)},
    ),
    "sigmoid kernel": (
        lambda: prepared(
            "geq-small",
            kernel="sigmoid",
            widths=(4, 4),
            scales=(1, 2),
            hidden=64,
            channel_split=8,
        ),
        {"sigmoid kernel of branch 1": [scaled("sigmoid_kernel", "0")]},
    ),
    "leaky": (
        lambda: prepared("opteq-small", space="y", activation="leaky_relu"),
        {"quadratic": [scaled("quadratic")]},
    ),
    "reflection": (
        reflection,
        {"convex potential": [scaled("convex_potential")]},
    ),
    "own term": (with_own_term, {"smoothness": [scaled("smoothness")], "input": [input_of(0)]}),
    "own term, tanh": (
        lambda: with_own_term("tanh"),
        {"smoothness": [scaled("smoothness")], "quadratic": [scaled("quadratic")]},
    ),
}


def asked(model: EquilibriumModel) -> tuple[Tensor, Tensor, Tensor]:
    """Images, the class of each, and the second best."""
    pictures = (
        torch.rand(3, 6, dtype=torch.float64)
        if isinstance(model.stem, nn.Identity)
        else images().double()
    )
    with torch.no_grad():
        best = model(pictures).topk(2, dim=1).indices
    return pictures, best[:, 0], best[:, 1]


@torch.no_grad()
def margins(model: EquilibriumModel, pictures: Tensor, classes: Tensor, rivals: Tensor) -> Tensor:
    with eq.solving(model, tolerance=1e-13, max_iterations=5000):
        logits: Tensor = model(pictures)
    return (logits.gather(1, classes[:, None]) - logits.gather(1, rivals[:, None]))[:, 0]


@pytest.mark.parametrize("case", CASES)
def test_pulls_are_derivatives_of_the_margin(case: str) -> None:
    make, changes = CASES[case]
    model = make()
    question = asked(model)
    found = contributions(model, *question)
    torch.testing.assert_close(found.margin, margins(model, *question), rtol=1e-7, atol=1e-9)
    pulls = dict(zip(found.terms, found.pull.unbind(dim=1), strict=True))
    for name, ways in changes.items():
        expected = sum(pulls[part] for part in name.split("+"))
        assert isinstance(expected, Tensor)
        for change in ways:
            ends = []
            for h in (STEP, -STEP):
                other = copy.deepcopy(model)
                change(other, h)
                ends.append(margins(other, *question))
            difference = (ends[0] - ends[1]) / (2 * STEP)
            scale = float(difference.abs().max())
            assert scale > 1e-6, f"{name} has no influence: nothing was tested"
            torch.testing.assert_close(expected, difference, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("case", CASES)
def test_sources_add_up_to_the_margin_where_that_is_said(case: str) -> None:
    model = CASES[case][0]()
    found = contributions(model, *asked(model))
    assert bool(found.why_not_sum) == ("tanh" in case)
    left = float((found.remainder.abs() / found.margin.abs().clamp_min(1e-3)).max())
    assert left > 1e-3 if found.why_not_sum else left < 1e-6


@pytest.mark.parametrize("case", ["OptEq", "OptEq in z", "POptEqs", "MOptEqs", "Deep OptEq"])
def test_pulls_of_linear_terms_are_the_margin_and_quadratic_ones_bring_nothing(case: str) -> None:
    model = CASES[case][0]()
    found = contributions(model, *asked(model))
    linear = torch.tensor([name.startswith(("input", "bias")) for name in found.terms])
    torch.testing.assert_close(found.source[:, linear], found.pull[:, linear])
    assert float(found.source[:, ~linear].abs().sum()) < 1e-9
    total = found.head + found.pull[:, linear].sum(dim=1)
    torch.testing.assert_close(total, found.margin, rtol=1e-6, atol=1e-9)


def test_models_of_which_no_terms_are_known_are_refused() -> None:
    model = small_model("mdeq-small")
    classes = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(NoContributionsError, match="no hidden objective"):
        contributions(model, images(size=8), classes, classes + 1)
    coupled = small_model("deep-opteq-small", regularizer="decorrelation", gamma=0.01)
    with pytest.raises(NoContributionsError, match="coupled"):
        contributions(coupled, images(), classes, classes + 1)
