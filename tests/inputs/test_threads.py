"""Searches on a model that other threads use do not affect them."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import equilibria as eq
from equilibria.inputs import attack, find_latents, optimize_input
from equilibria.restoration import restore
from tests.inputs.small_generator import SmallDecoder, latents
from tests.inputs.small_problem import inputs, ridge, smooth_model, squared_distance

THREADS, ROUNDS = 5, 2
Job = Callable[[], list[Tensor]]


class Doubled(nn.Module):
    """Doubles its input in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def classifier() -> nn.Module:
    """Return a model in training mode, with a gradient rule that attacks replace."""
    model = smooth_model()
    model.layer = eq.EquilibriumLayer(
        model.layer.cell, solver=eq.Anderson(tolerance=1e-12), gradient="one_step"
    )
    model.head = nn.Sequential(Doubled(), model.head)
    return model.train()


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss(), list(model.parameters())))


def classifier_jobs(model: Any) -> dict[str, Job]:
    x, labels = inputs(), torch.tensor([0, 2, 1])
    options: dict[str, Any] = {"eps": 0.4, "steps": 6, "clip": None}
    return {
        "pgd": lambda: [attack(model, x, labels, **options).images],
        "jiio": lambda: [attack(model, x, labels, method="jiio", **options).images],
        "optimize_input": lambda: [
            optimize_input(model, squared_distance(), x, penalty=ridge, iterations=8).x
        ],
        "solve": lambda: [model.solve(x).state],
        "training": lambda: gradients(model, lambda: F.cross_entropy(model(x), labels)),
    }


def decoder_jobs(model: Any) -> dict[str, Job]:
    with torch.no_grad():
        images = SmallDecoder().double().eval()(latents())
    return {
        "restore": lambda: [restore(model, images[..., ::2], halved, iterations=6).latents],
        "latents": lambda: [find_latents(model, images, iterations=6).x],
        "solve": lambda: [model.layer.solve(model.stem(latents())).state],
        "training": lambda: gradients(model, lambda: (model(latents()) - 1).square().sum()),
    }


def halved(images: Tensor) -> Tensor:
    return images[..., ::2]


def snapshot(model: nn.Module) -> list[object]:
    """Return everything that a search might change in a model."""
    layers = [m for m in model.modules() if isinstance(m, eq.EquilibriumLayer)]
    return [
        [module.training for module in model.modules()],
        [(id(p), p.requires_grad, p.grad) for p in model.parameters()],
        [(layer.solver, layer.gradient, layer.strict) for layer in layers],
        [value.tolist() for value in model.state_dict().values()],
    ]


@pytest.mark.parametrize(
    ("make", "jobs_of"),
    [(classifier, classifier_jobs), (lambda: SmallDecoder().double().train(), decoder_jobs)],
    ids=["classifier", "decoder"],
)
def test_concurrent_searches_give_the_sequential_results(
    make: Callable[[], nn.Module], jobs_of: Callable[[Any], dict[str, Job]]
) -> None:
    """Attacks must not change modes and gradients of the shared model, not even temporarily."""
    model = make()
    jobs = jobs_of(model)
    expected = {name: job() for name, job in jobs.items()}
    original = snapshot(model)
    barrier = threading.Barrier(THREADS)
    names = list(jobs)

    def work(thread: int) -> list[tuple[str, list[Tensor]]]:
        outputs = []
        try:
            for turn in range(ROUNDS * len(names)):
                if turn % len(names) == 0:
                    barrier.wait()
                name = names[(thread + turn) % len(names)]
                outputs.append((name, jobs[name]()))
        except BaseException:
            barrier.abort()  # The other threads must not wait for this one.
            raise
        return outputs

    with ThreadPoolExecutor(THREADS) as pool:
        results = [result for outputs in pool.map(work, range(THREADS)) for result in outputs]
    assert len(results) == THREADS * ROUNDS * len(names)
    for name, tensors in results:
        for tensor, reference in zip(tensors, expected[name], strict=True):
            torch.testing.assert_close(tensor, reference, rtol=1e-9, atol=1e-11, msg=name)
    assert snapshot(model) == original


def test_attacks_do_not_affect_concurrent_training() -> None:
    """Every step has gradients, and the final weights are those without attacks."""
    x, labels = inputs(), torch.tensor([0, 2, 1])

    def trained(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(15):
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    expected, model, finished = trained(classifier()), classifier(), threading.Event()

    def attacks() -> int:
        count = 0
        while not finished.is_set() or not count:
            result = attack(model, x, labels, eps=0.4, steps=3, clip=None)
            assert bool(result.images.isfinite().all())
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(attacks) for _ in range(3)]
        try:
            weights = trained(model)
        finally:
            finished.set()
        assert all(future.result() for future in futures)
    for weight, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["pgd", "jiio"])
def test_attack_keeps_the_last_solutions_of_the_model(method: Any) -> None:
    model, x, labels = classifier(), inputs(), torch.tensor([0, 2, 1])
    layer: Any = model.layer
    with eq.solving(model, gradient="implicit"):
        F.cross_entropy(model(x), labels).backward()
    forward, backward = layer.last_solution, layer.last_backward
    attack(model, 2 * x, labels, eps=0.4, method=method, clip=None)
    assert layer.last_solution is forward
    assert layer.last_backward is backward


def test_convergence_warning_is_issued_once() -> None:
    """Attacks work on copies of the model, which must not warn again."""
    model, x, labels = classifier().eval(), inputs(), torch.tensor([0, 2, 1])
    options: dict[str, Any] = {"eps": 0.4, "steps": 3, "clip": None}
    with warnings.catch_warnings(record=True) as caught, eq.solving(model, max_iterations=2):
        warnings.simplefilter("always")
        for _ in range(3):
            attack(model, x, labels, **options)
            model(x)
    forward = [w for w in caught if "did not converge; sample" in str(w.message)]
    assert len(forward) == 1


def test_solving_blocks_apply_to_attacks() -> None:
    model, x, labels = classifier(), inputs(), torch.tensor([0, 2, 1])
    with eq.solving(model, solver="picard", tolerance=1e-3):
        coarse = attack(model, x, labels, eps=0.4, steps=3, clip=None)
    fine = attack(model, x, labels, eps=0.4, steps=3, clip=None)
    assert coarse.evaluations != fine.evaluations
    assert not torch.equal(coarse.logits, fine.logits)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["compiled", "traced by fx", "scripted", "parametrized"])
def test_transformed_models_can_be_attacked(kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    plain.eval()
    make: dict[str, Callable[[nn.Module], Any]] = {
        "compiled": lambda model: torch.compile(model, backend="eager"),
        "traced by fx": torch.fx.symbolic_trace,
        "scripted": lambda model: torch.jit.trace(model, inputs()),
        "parametrized": weight_normed,
    }
    model = make[kind](copy.deepcopy(plain))
    options: dict[str, Any] = {"eps": 0.4, "steps": 3, "clip": None}
    labels = torch.tensor([0, 2, 1])
    expected = attack(plain, inputs(), labels, **options)
    model.train()
    original = [p.requires_grad for p in model.parameters()]
    result = attack(model, inputs(), labels, **options)
    torch.testing.assert_close(result.images, expected.images)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == original


def weight_normed(model: nn.Module) -> nn.Module:
    weight_norm(model[0])  # type: ignore[index]
    return model
