"""The Jacobian penalty of searches over inputs is taken at an iterate (x, z) (JIIO Eq. 27)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.context.state import state_tensors
from equilibria.data import Split
from equilibria.equilibrium import jacobian_penalty
from equilibria.inputs import Engine, SearchSettings, optimize_input
from equilibria.tasks import (
    AdversarialClassification,
    FewShot,
    ImageRestoration,
    Reconstruction,
    Task,
)
from equilibria.training import TrainingSettings, fit
from tests.inputs.small_problem import inputs, ridge, smooth_model, squared_distance


def test_visited_pair_is_a_uniformly_drawn_iterate() -> None:
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    options: dict[str, Any] = {
        "penalty": ridge,
        "engine": Engine(decay="none"),
    }
    settings = SearchSettings(tolerance=1e-300, verify=False, step_size=0.1)
    options["settings"] = settings
    iterates = [x0]
    for iterations in (1, 2, 3):
        iterates.append(optimize_input(model, loss, x0, iterations=iterations, **options).x)
    drawn = []
    torch.manual_seed(0)
    for _ in range(60):
        visiting = {**options, "settings": replace(settings, visit=True)}
        result = optimize_input(model, loss, x0, iterations=4, **visiting)
        assert result.visited is not None
        x, state = result.visited
        distances = [float((x - other).abs().max()) for other in iterates]
        drawn.append(distances.index(min(distances)))
        assert min(distances) <= 1e-12
        if drawn[-1]:
            # z lags behind x, so it is not the equilibrium of x.
            (image,) = state_tensors(
                model.layer.cell.step(state, model.layer.cell.inject(model.stem(x)))
            )
            assert float((image - state_tensors(state)[0]).detach().norm()) > 1e-6
    assert all(6 <= drawn.count(k) <= 26 for k in range(4)), "the draws must be uniform"
    assert optimize_input(model, loss, x0, iterations=4, **options).visited is None


IMAGES = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 0, 1, 0, 1])


def decoder() -> nn.Module:
    return eq.create_model(
        "opteq-decoder", in_channels=1, image_size=8, latent_dim=4, channels=8, width=8
    )


def classifier() -> nn.Module:
    return eq.create_model("opteq-small", num_classes=2, in_channels=1, channels=8, width=8, pool=4)


def few_shot() -> nn.Module:
    return eq.create_model("few-shot-opteq", num_classes=2, in_channels=1, channels=8, task_size=6)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Task], Tensor, Tensor]] = {
    "generator": (decoder, lambda: Reconstruction(iterations=4), IMAGES, LABELS),
    "restoration": (decoder, lambda: ImageRestoration(iterations=4), IMAGES, LABELS),
    "adversarial": (
        classifier,
        lambda: AdversarialClassification(eps=0.5, method="jiio", steps=4),
        IMAGES,
        LABELS,
    ),
    "few-shot": (
        few_shot,
        lambda: FewShot(iterations=4),
        IMAGES[None, :4],
        torch.tensor([[0, 1, 0, 1]]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_steps_report_an_iterate_of_their_search(case: str) -> None:
    make, task, images, labels = CASES[case]
    torch.manual_seed(0)
    model = make().train()
    with eq.solving(model, record="equilibria") as record:
        task().training_step(model, images, labels)
    (visited,) = record.visited
    assert visited.layer is model.layer
    penalty = jacobian_penalty(visited.layer.cell, visited.state, visited.context)
    assert bool(torch.isfinite(penalty).all())
    weights = list(model.layer.parameters())
    gradients = torch.autograd.grad(penalty.sum(), weights, allow_unused=True, retain_graph=True)
    assert any(g is not None and bool((g != 0).any()) for g in gradients)
    # With ReLU the Jacobian depends on the stem only by signs, so check the inputs instead: this
    # raises an error if they are in no graph.
    total = torch.stack([tensor.square().sum() for tensor in visited.inputs]).sum()
    torch.autograd.grad(total, list(model.stem.parameters()))


def test_training_penalty_uses_the_visited_iterate(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, task = decoder(), Reconstruction(iterations=3)
    settings = TrainingSettings(epochs=1, batch_size=6, jacobian_weight=1.0, jacobian_at="iterate")

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the loop must use the iterate of the search")

    monkeypatch.setattr("equilibria.training.loop.random_iterate", fail)
    (plain,) = fit(
        copy.deepcopy(model), task, Split(IMAGES, LABELS), replace(settings, jacobian_weight=0.0)
    )
    (metrics,) = fit(model, task, Split(IMAGES, LABELS), settings)
    assert metrics.gradient_norm != plain.gradient_norm
