"""Few-shot classifiers: the task vector, independence of samples, gradients and optimization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.inputs import SearchSettings, optimal_value, optimize_input
from equilibria.models import MDEQCell
from equilibria.models.baselines.plain import Conv4
from equilibria.models.few_shot import (
    BranchesFiLM,
    FewShotClassifier,
    FiLMCell,
    few_shot_mdeq,
    few_shot_opteq,
    modulate,
)
from equilibria.models.registry import model_outline, parameter_count
from tests.models.small import with_solving

SMALL: dict[str, dict[str, Any]] = {
    "opteq": {"channels": 4, "task_size": 6, "stem_depth": 1},
    "opteq-shared": {"channels": 4, "task_size": 6, "stem_depth": 1, "shared": True},
    "mdeq": {
        "channels": (4, 4),
        "task_size": 6,
        "expansion": 2,
        "head_channels": 2,
        "final_channels": 8,
        "init_gain": 0.5,
    },
}
KINDS = list(SMALL)


def small(kind: str, **overrides: Any) -> FewShotClassifier:
    torch.manual_seed(0)
    make = few_shot_mdeq if kind == "mdeq" else few_shot_opteq
    options = {
        "num_classes": 3,
        "in_channels": 1,
        "tolerance": 1e-12,
        "max_iterations": 2000,
        **SMALL[kind],
    }
    gradient = eq.Implicit(tolerance=1e-12)
    model = make(**with_solving({**options, "gradient": gradient, **overrides})).double()
    with torch.no_grad():
        # The shift of OptEq's FiLM is initially zero.
        for parameter in model.conditioning.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def drawings(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 8, 8, generator=generator, dtype=torch.float64)


def vectors(count: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_depend_on_an_image_and_its_task_only(kind: str) -> None:
    model, images, tasks = small(kind), drawings(4), vectors(4)
    together = model(images, tasks)
    assert together.shape == (4, 3)
    alone = torch.cat([model(images[i : i + 1], tasks[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(together, model(images, tasks.flip(0)), rtol=1e-3)
    torch.testing.assert_close(model(images), model(images, torch.zeros_like(tasks)))
    episodes = images.unflatten(0, (2, 2))
    torch.testing.assert_close(model(episodes, tasks), together)
    torch.testing.assert_close(model.for_images(images)(tasks), together)
    assert model(images[:0]).shape == (0, 3)


def test_shared_weights_make_logits_equivariant_to_the_order_of_classes() -> None:
    """Permuting the parts of the task vector permutes the logits."""
    model, images, tasks = small("opteq-shared"), drawings(4), vectors(4)
    order = torch.tensor([2, 0, 1])
    permuted = tasks.unflatten(1, (3, 2))[:, order].flatten(1)
    torch.testing.assert_close(model(images, permuted), model(images, tasks)[:, order])
    assert float(model(images).detach().std(dim=1).max()) < 1e-12
    with pytest.raises(ValueError, match="task_size must be a multiple of the 3 classes"):
        small("opteq-shared", task_size=7)


def test_batch_statistics_are_those_of_an_episode() -> None:
    model, images, tasks = small("opteq", norm="batch"), drawings(6), vectors(6)
    together = model(images.unflatten(0, (2, 3)), tasks)
    alone = torch.cat([model(images[i : i + 3], tasks[i : i + 3]) for i in (0, 3)])
    torch.testing.assert_close(together, alone, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(together, model(images, tasks), rtol=1e-3)
    assert model(images[:0].reshape(0, 3, *images.shape[1:])).shape == (0, 3)
    with pytest.raises(ValueError, match="one of batch, group"):
        small("opteq", norm="layer")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_weights_and_tasks_against_finite_differences(kind: str) -> None:
    model, images, tasks = small(kind, activation="softplus"), drawings(3), vectors(3)
    labels = torch.tensor([0, 2, 1])
    variables = [*model.parameters(), tasks.requires_grad_()]
    gradients = torch.autograd.grad(F.cross_entropy(model(images, tasks), labels), variables)
    assert all(bool((gradient != 0).any()) for gradient in gradients)
    direction = [torch.randn_like(variable) for variable in variables]
    exact = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
    losses = []
    with torch.no_grad():
        # Short steps, because kinks of the ReLUs of the stem and the head are near.
        for step in (1e-7, -2e-7):
            for variable, change in zip(variables, direction, strict=True):
                variable.add_(step * change)
            losses.append(F.cross_entropy(model(images, tasks), labels))
    torch.testing.assert_close(exact, (losses[0] - losses[1]) / 2e-7, rtol=1e-4, atol=1e-8)


GROUPS, LABELS = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 2, 1, 0])
"""Two tasks with three images each."""


def support_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, LABELS, reduction="none")


def ridge(x: Tensor) -> Tensor:
    return 0.05 * x.square().sum(dim=1)


def test_optimized_task_vectors_are_stationary() -> None:
    model, images = small("opteq", activation="softplus"), drawings(6)
    result = optimize_input(
        model.for_images(images),
        support_loss,
        model.no_tasks(2, images),
        groups=GROUPS,
        penalty=ridge,
        engine={"name": "gradient-warm", "inner_tolerance": 1e-10},
        iterations=400,
        settings=SearchSettings(tolerance=1e-8),
    )
    assert result.converged.all(), result.summary()
    x = result.x.clone().requires_grad_()
    total = support_loss(model(images, x[GROUPS])).sum() + ridge(x).sum()
    torch.testing.assert_close(total.detach(), result.loss.sum())
    (gradient,) = torch.autograd.grad(total, x)
    assert float(gradient.norm()) < 1e-6
    assert float(result.x.norm()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_has_a_gradient_of_the_optimal_value(kind: str) -> None:
    model, images = small(kind), drawings(6)
    result = optimize_input(
        model.for_images(images),
        support_loss,
        model.no_tasks(2, images),
        groups=GROUPS,
        penalty=ridge,
        iterations=5,
    )
    assert bool((result.loss < result.initial_loss).all())
    value = optimal_value(result)
    torch.testing.assert_close(value.detach(), result.loss)
    gradients = torch.autograd.grad(value.sum(), list(model.parameters()), allow_unused=True)
    assert all(gradient is not None for gradient in gradients)


def test_modulation_by_known_values() -> None:
    features = torch.tensor([[1.0, 2.0]])[..., None, None]
    film = torch.tensor([[0.5, -1.0, 10.0, 20.0]])
    assert modulate(features, film).flatten().tolist() == [11.5, 20.0]


def test_film_cell_without_modulation_is_mdeqs_cell() -> None:
    torch.manual_seed(0)
    plain = MDEQCell((4, 4), expansion=2, init_gain=0.5).double()
    torch.manual_seed(0)
    filmed = FiLMCell((4, 4), expansion=2, init_gain=0.5).double()
    assert filmed.sizes == [2 * 2 * 4] * 2
    features = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    condition = BranchesFiLM(3, filmed.sizes).double()
    nn.init.zeros_(condition.film.bias)
    zeros, ones = torch.zeros(2, 3).double(), torch.ones(2, 3).double()
    states = (torch.randn(2, 4, 6, 6).double(), torch.randn(2, 4, 3, 3).double())
    expected = plain.step(states, plain.inject(features))
    for tasks, same in ((zeros, True), (ones, False)):
        context = filmed.inject(*condition(features, tasks))
        for actual, reference in zip(filmed.step(states, context), expected, strict=True):
            assert torch.allclose(actual, reference) is same
    with pytest.raises(ValueError, match="compute them with BranchesFiLM"):
        filmed.inject(features)


def test_opteq_converges_for_large_weights_and_task_vectors() -> None:
    model = small("opteq", tolerance=1e-6)
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter.mul_(20)
    model.eval()(drawings(4), 100 * vectors(4))
    assert model.last_solution is not None
    assert model.last_solution.converged.all()


def test_tasks_and_images_of_the_wrong_size_raise() -> None:
    with pytest.raises(ValueError, match="one task vector of 6 numbers for each of the 4 images"):
        small("opteq")(drawings(4), vectors(3))
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 1, height, width\)"):
        small("opteq")(drawings(4).repeat(1, 3, 1, 1))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_conv4_normalizes_batches_or_images(norm: Any) -> None:
    model = Conv4(channels=8, norm=norm, num_classes=3, in_channels=1)
    images = torch.rand(4, 1, 28, 28)
    logits = model(images)
    assert logits.shape == (4, 3)
    assert model(images[:0]).shape == (0, 3)
    torch.testing.assert_close(logits, model.eval()(images))
    torch.testing.assert_close(logits, model(images.unflatten(0, (2, 2))))
    independent = torch.allclose(logits[:2], model(images[:2]), rtol=1e-4, atol=1e-6)
    assert independent is (norm == "group")
    with pytest.raises(ValueError, match="norm must be one of batch, group"):
        Conv4(norm="layer")  # type: ignore[arg-type]


def test_sizes_of_the_paper() -> None:
    model = model_outline("few-shot-mdeq")
    assert isinstance(model, FewShotClassifier)
    assert isinstance(model.layer.cell, FiLMCell)
    assert model.layer.cell.channels == (64, 128)
    assert model.task_size == 400
    assert parameter_count(model_outline("conv4", in_channels=1)) == 112_261
