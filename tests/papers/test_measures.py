"""What is measured besides accuracy, and how it is printed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import equilibria as eq
from equilibria.inputs import find_latents, get_engine
from equilibria.papers.measures import (
    MEASURES,
    UNROLLED_STEP,
    collect,
    unrolled_search,
)
from equilibria.papers.memory import peak_bytes
from equilibria.papers.pictures import ENGINES
from equilibria.papers.plots import Printed, printed
from tests.inputs.small_generator import HIDDEN, LATENTS, SIDE, decoder

CPU = torch.device("cpu")
KILO = 1000 * torch.finfo(torch.float32).bits // 8


def test_the_peak_counts_what_is_alive_at_one_time() -> None:
    def one_after_the_other() -> None:
        for _ in range(5):
            torch.zeros(1000)

    def together() -> None:
        kept = [torch.zeros(1000) for _ in range(5)]
        kept[0].view(10, 100).add_(1)

    assert peak_bytes(one_after_the_other, CPU) == KILO
    assert peak_bytes(together, CPU) == 5 * KILO


def test_the_peak_counts_what_autograd_saves() -> None:
    x = torch.rand(1000, requires_grad=True)

    def chain(length: int) -> int:
        def run() -> None:
            y = x
            for _ in range(length):
                y = y.sin()
            y.sum().backward()

        return peak_bytes(run, CPU)

    # Backwards the saved tensors go as gradients come, so that only some vectors are added.
    assert 20 * KILO <= chain(20) <= 25 * KILO
    assert chain(5) <= 10 * KILO


def test_unrolling_takes_more_memory_than_the_implicit_gradient() -> None:
    x = torch.randn(4, 3, 8, 8)

    def memory(gradient: eq.Unrolled | str) -> int:
        model = eq.create_model("deep-opteq-small", channels=8, widths=(8, 8), gradient=gradient)
        return peak_bytes(lambda: model(x).sum().backward(), CPU)

    few, many = memory(eq.Unrolled(steps=5)), memory(eq.Unrolled(steps=40))
    assert many > 4 * few
    assert memory("implicit") < many / 2


def test_a_search_that_keeps_its_graph_is_plain_descent_and_pays_for_every_step() -> None:
    model, images = decoder(), torch.rand(2, 1, SIDE, SIDE, dtype=torch.float64)
    latents = torch.zeros(2, LATENTS, dtype=torch.float64)
    for _ in range(3):
        leaf = latents.requires_grad_()
        loss = (model(leaf) - images).square().sum()
        latents = (leaf - UNROLLED_STEP * torch.autograd.grad(loss, leaf)[0]).detach()
    found = unrolled_search(model, images, iterations=3)
    torch.testing.assert_close(found.detach(), latents)
    assert found.requires_grad  # a loss of the latents reaches the weights
    few, many = (peak_bytes(partial(unrolled_search, model, images, n), CPU) for n in (4, 32))
    assert many > 4 * few


def test_the_search_of_the_paper_holds_its_history() -> None:
    model, images = decoder(), torch.rand(2, 1, SIDE, SIDE, dtype=torch.float64)

    def memory(length: int) -> int:
        engine = get_engine("official", memory=length)
        return peak_bytes(lambda: find_latents(model, images, engine=engine, iterations=40), CPU)

    # Of z, μ and x, the differences of the iterates and of what the map makes of them.
    row = 2 * (2 * HIDDEN + LATENTS) * images.element_size() * len(images)
    assert memory(32) - memory(2) >= 30 * row


def test_figures_as_printed() -> None:
    assert printed("92.9 ± 0.2%") == Printed(92.9, 0.2, "%")
    assert printed("81.3 ± 0,2%") == Printed(81.3, 0.2, "%")
    assert printed("1.22e-02") == Printed(0.0122)
    assert printed("> 5") == Printed(5, is_bound=True)
    assert printed("3.9 s") == Printed(3.9, unit="s")
    assert printed("8GB") == Printed(8, unit="GB")
    assert printed("162 k") == Printed(162_000)
    assert printed("2.53M") == Printed(2_530_000)
    assert printed("–") is None
    results: list[dict[str, float | None]] = [{"accuracy": 0.5}, {"accuracy": 0.7}, {}]
    values = collect(results, "accuracy")
    assert MEASURES["accuracy"].show(values) == "60.00 ± 14.14"
    assert MEASURES["accuracy"].show(values[:1]) == "50.00"


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_every_measure_has_a_title(name: str) -> None:
    assert MEASURES[name].title


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_of_the_figures_searches_for_latents(name: str) -> None:
    model, images = decoder(), torch.rand(2, 1, SIDE, SIDE, dtype=torch.float64)
    found = find_latents(model, images, engine=ENGINES[name], iterations=4)
    assert bool((found.loss <= found.initial_loss).all())


def test_a_way_to_mix_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="acceleration must be one of type-1, type-2, broyden"):
        get_engine("official", acceleration="type-3")
