"""Memory, searches for latents, and the format of numbers."""

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


def test_peak_counts_simultaneously_live_tensors() -> None:
    def sequentially() -> None:
        for _ in range(5):
            torch.zeros(1000)

    def simultaneously() -> None:
        tensors = [torch.zeros(1000) for _ in range(5)]
        tensors[0].view(10, 100).add_(1)

    assert peak_bytes(sequentially, CPU) == KILO
    assert peak_bytes(simultaneously, CPU) == 5 * KILO


def test_peak_includes_tensors_saved_by_autograd() -> None:
    x = torch.rand(1000, requires_grad=True)

    def chain(length: int) -> int:
        def run() -> None:
            y = x
            for _ in range(length):
                y = y.sin()
            y.sum().backward()

        return peak_bytes(run, CPU)

    # The backward pass frees saved tensors as it goes, so gradients add only a few vectors.
    assert 20 * KILO <= chain(20) <= 25 * KILO
    assert chain(5) <= 10 * KILO


def test_unrolling_needs_more_memory_than_the_implicit_gradient() -> None:
    x = torch.randn(4, 3, 8, 8)

    def memory(gradient: eq.Unrolled | str) -> int:
        model = eq.create_model("deep-opteq-small", channels=8, widths=(8, 8), gradient=gradient)
        return peak_bytes(lambda: model(x).sum().backward(), CPU)

    few, many = memory(eq.Unrolled(steps=5)), memory(eq.Unrolled(steps=40))
    assert many > 4 * few
    assert memory("implicit") < many / 2


def test_unrolled_search_is_gradient_descent_whose_memory_grows_with_its_steps() -> None:
    model, images = decoder(), torch.rand(2, 1, SIDE, SIDE, dtype=torch.float64)
    latents = torch.zeros(2, LATENTS, dtype=torch.float64)
    for _ in range(3):
        leaf = latents.requires_grad_()
        loss = (model(leaf) - images).square().sum()
        latents = (leaf - UNROLLED_STEP * torch.autograd.grad(loss, leaf)[0]).detach()
    result = unrolled_search(model, images, iterations=3)
    torch.testing.assert_close(result.detach(), latents)
    assert result.requires_grad  # a loss of the latents has gradients for the weights
    few, many = (peak_bytes(partial(unrolled_search, model, images, n), CPU) for n in (4, 32))
    assert many > 4 * few


def test_memory_of_the_paper_search_grows_with_its_history() -> None:
    model, images = decoder(), torch.rand(2, 1, SIDE, SIDE, dtype=torch.float64)

    def memory(length: int) -> int:
        engine = get_engine("official", memory=length)
        return peak_bytes(lambda: find_latents(model, images, engine=engine, iterations=40), CPU)

    # Differences of the iterates and of their images, for z, μ and x.
    row = 2 * (2 * HIDDEN + LATENTS) * images.element_size() * len(images)
    assert memory(32) - memory(2) >= 30 * row


def test_printed_numbers_are_parsed_and_formatted() -> None:
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
def test_every_engine_of_the_figures_reduces_the_loss(name: str) -> None:
    model, images = decoder(), torch.rand(2, 1, SIDE, SIDE, dtype=torch.float64)
    result = find_latents(model, images, engine=ENGINES[name], iterations=4)
    assert bool((result.loss <= result.initial_loss).all())


def test_unknown_acceleration_raises() -> None:
    with pytest.raises(ValueError, match="acceleration must be one of type-1, type-2, broyden"):
        get_engine("official", acceleration="type-3")
