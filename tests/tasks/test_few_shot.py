"""Few-shot learning by task vectors: episodes, their evaluation, and the outer gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.few_shot import FewShotClassifier, few_shot_opteq
from equilibria.tasks import FewShot
from equilibria.tasks.few_shot import EpisodeBatch, EpisodicTask
from tests.models.small import with_solving

TIGHT: dict[str, Any] = {
    "ridge": 0.1,
    "engine": {"name": "gradient-warm", "inner_tolerance": 1e-11},
    "iterations": 400,
    "tolerance": 1e-9,
    "check_tolerance": 1e-11,
    "outer_iterations": 400,
}


def model_of(**overrides: Any) -> FewShotClassifier:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "num_classes": 2,
        "in_channels": 1,
        "channels": 3,
        "task_size": 4,
        "stem_depth": 1,
        "activation": "softplus",
        "tolerance": 1e-12,
        "max_iterations": 1000,
        "gradient": eq.Implicit(tolerance=1e-12),
    }
    return few_shot_opteq(**with_solving({**options, **overrides})).double()


def episodes_of(count: int, *, ways: int = 2, shots: int = 1, queries: int = 2) -> Any:
    """Return noisy images of one pattern per class, and their labels."""
    generator = torch.Generator().manual_seed(3)
    names = torch.arange(ways)
    labels = torch.cat([names.repeat_interleave(n) for n in (shots, queries)])
    patterns = torch.rand(count, ways, 1, 6, 6, generator=generator, dtype=torch.float64)
    noise = torch.rand(count, len(labels), 1, 6, 6, generator=generator, dtype=torch.float64)
    return patterns[:, labels] + 0.2 * noise, labels.repeat(count, 1)


def test_labels_define_support_and_queries() -> None:
    images, labels = episodes_of(3, ways=4, shots=2, queries=3)
    batch = EpisodeBatch.of(images, labels)
    assert (batch.ways, batch.shots, len(batch)) == (4, 2, 3)
    torch.testing.assert_close(batch.support, images[:, :8])
    assert batch.support_labels[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(batch.query, images[:, 8:])
    assert batch.query_labels.shape == (3, 12)
    assert batch.groups(batch.support).tolist() == [0] * 8 + [1] * 8 + [2] * 8


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 0, 0, 1], r"begin with \[1, 0"),
        ([0, 1, 2, 0], r"begin with \[0, 1, 2, 0\]"),
        ([0, 1, 0, 2], r"begin with \[0, 1, 0, 2\]"),
        ([0, 0, 0, 0], "once per shot"),
        ([0, 0, 1, 1], "once per shot"),
    ],
)
def test_labels_in_another_order_are_rejected(labels: list[int], message: str) -> None:
    if labels == [0, 1, 2, 0]:
        # A second episode whose support has the classes in another order.
        targets = torch.tensor([labels, [0, 2, 1, 0]])
    else:
        targets = torch.tensor([labels])
    with pytest.raises(ValueError, match=message):
        EpisodeBatch.of(torch.zeros(len(targets), 4, 1, 6, 6), targets)


def test_ordinary_batches_and_models_are_rejected() -> None:
    images, labels = episodes_of(1)
    with pytest.raises(ValueError, match="use a data set of episodes"):
        FewShot().training_step(model_of(), images[0], labels[0])
    with pytest.raises(TypeError, match="has no task vector"):
        FewShot().training_step(nn.Linear(2, 2), images, labels)
    with pytest.raises(ValueError, match="the model has 3 classes, but the episodes have 2 ways"):
        FewShot().training_step(model_of(num_classes=3), images, labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ridge": -1.0}, "ridge must not be negative"),
        ({"outer": "unrolled"}, "outer must be one of"),
        ({"outer": "implicit", "ridge": 0.0}, "needs a positive ridge"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"engine": "andersen"}, "did you mean 'anderson'"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FewShot(**options)


def query_loss_at(model: FewShotClassifier, episodes: EpisodeBatch, tasks: Tensor) -> Tensor:
    logits = model(episodes.query, tasks[episodes.groups(episodes.query)])
    return F.cross_entropy(logits, episodes.query_labels.flatten())


def test_detached_loss_is_the_query_loss_at_the_optimal_task_vectors() -> None:
    model, (images, labels) = model_of(), episodes_of(3)
    task = FewShot(**TIGHT)
    step = task.training_step(model, images, labels)
    episodes = EpisodeBatch.of(images, labels)
    adapted = task.adapt(model, episodes)
    assert adapted.converged.all()
    assert bool((adapted.loss < adapted.initial_loss).all())
    expected = query_loss_at(model, episodes, adapted.x)
    torch.testing.assert_close(step.loss, expected)
    assert int(step.samples) == 12
    assert step.correct is not None
    assert 0 <= int(step.correct) <= 12
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(step.loss, parameters)
    references = torch.autograd.grad(expected, parameters)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference)
        assert bool((gradient != 0).any()), "every weight is trained"


def test_implicit_gradient_includes_that_of_the_optimum() -> None:
    """The reference are finite differences, with the inner problem solved at other weights."""
    model, (images, labels) = model_of(), episodes_of(2)
    episodes = EpisodeBatch.of(images, labels)
    task = FewShot(**TIGHT, outer="implicit")
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(task.training_step(model, images, labels).loss, parameters)
    detached = torch.autograd.grad(
        FewShot(**TIGHT).training_step(model, images, labels).loss, parameters
    )
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def along(gradients: tuple[Tensor, ...]) -> float:
        return float(sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)))

    losses = []
    with torch.no_grad():
        for step in (1e-4, -2e-4):
            for parameter, change in zip(parameters, direction, strict=True):
                parameter.add_(step * change)
            losses.append(float(query_loss_at(model, episodes, task.adapt(model, episodes).x)))
    assert along(gradients) == pytest.approx((losses[0] - losses[1]) / 2e-4, rel=1e-3)
    assert abs(along(gradients) - along(detached)) > 1e-2 * abs(along(gradients))


def test_unconverged_optimum_is_treated_as_constant() -> None:
    model, (images, labels) = model_of(), episodes_of(2)
    short: dict[str, Any] = {"ridge": 0.1, "iterations": 1, "tolerance": 1e-9}
    parameters = list(model.parameters())
    implicit, detached = (
        torch.autograd.grad(
            FewShot(**short, outer=outer).training_step(model, images, labels).loss, parameters
        )
        for outer in ("implicit", "detached")
    )
    for gradient, reference in zip(implicit, detached, strict=True):
        torch.testing.assert_close(gradient, reference)


def test_episodes_are_independent() -> None:
    model, (images, labels) = model_of(), episodes_of(4)
    task = FewShot(ridge=0.1, iterations=10)
    episodes = EpisodeBatch.of(images, labels)
    together = task.adapt(model, episodes).x
    for index in range(4):
        single = EpisodeBatch.of(images[index : index + 1], labels[index : index + 1])
        torch.testing.assert_close(task.adapt(model, single).x[0], together[index])
    batches = [(images[i : i + 1], labels[i : i + 1]) for i in range(4)]
    in_batch, singly = task.evaluate(model, [(images, labels)]), task.evaluate(model, batches)
    assert in_batch.figures == singly.figures
    assert in_batch.loss == pytest.approx(singly.loss)


def test_training_lowers_the_loss() -> None:
    """Episodes without training have other patterns, so only the task itself can be learned."""
    model = model_of(tolerance=1e-6, gradient=eq.Implicit())
    images, labels = episodes_of(16, queries=3)
    task = FewShot(ridge=1e-2, iterations=8)
    before = task.evaluate(model, [(images, labels)])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(8):
        optimizer.zero_grad()
        task.training_step(model, images[:8], labels[:8]).loss.backward()
        optimizer.step()
    after = task.evaluate(model, [(images, labels)])
    assert after.loss < 0.9 * before.loss
    assert after.solves.share_converged == 1


class KnownAccuracy(EpisodicTask):
    """Task that predicts a given number of queries of each episode correctly."""

    def __init__(self, right: list[int]) -> None:
        self.right = right

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
        raise NotImplementedError

    def predict(self, model: nn.Module, episodes: EpisodeBatch) -> Tensor:
        answers = episodes.query_labels.clone()
        for row, count in zip(answers, self.right, strict=True):
            row[count:] = 1 - row[count:]
        return 20.0 * F.one_hot(answers, 2).double()


def test_interval_is_that_of_the_mean_over_episodes() -> None:
    images, labels = episodes_of(4, queries=5)
    evaluation = KnownAccuracy([10, 10, 8, 4]).evaluate(nn.Identity(), [(images, labels)])
    shares = torch.tensor([1.0, 1.0, 0.8, 0.4]).double()
    assert evaluation.score == evaluation.accuracy == pytest.approx(0.8)
    assert set(evaluation.figures) == {"accuracy", "interval", "episodes"}
    interval = 1.96 * float(shares.std()) / 2
    assert evaluation.figures["interval"] == pytest.approx(interval, rel=1e-4)
    assert (evaluation.figures["episodes"], evaluation.samples) == (4.0, 40)
    assert evaluation.loss == pytest.approx(0.2 * 20, rel=1e-3)
    single = KnownAccuracy([7]).evaluate(nn.Identity(), [(images[:1], labels[:1])])
    assert single.figures["interval"] is None
    with pytest.raises(ValueError, match="at least one episode, got none"):
        KnownAccuracy([]).evaluate(nn.Identity(), [])


def test_outcomes_of_processes_are_joined() -> None:
    images, labels = episodes_of(3, queries=5)
    whole = KnownAccuracy([5, 7, 9]).evaluate(nn.Identity(), [(images, labels)])
    other = KnownAccuracy([9]).evaluate(nn.Identity(), [(images[2:], labels[2:])])
    others = iter([*other.values.values(), *[torch.zeros(0)] * 3])
    both = KnownAccuracy([5, 7]).evaluate(
        nn.Identity(),
        [(images[:2], labels[:2])],
        lambda local: torch.cat([local, next(others).to(local)]),
    )
    assert (both.loss, both.samples) == (pytest.approx(whole.loss), 30)
    assert both.accuracy == pytest.approx(0.7)
    assert both.figures == whole.figures
