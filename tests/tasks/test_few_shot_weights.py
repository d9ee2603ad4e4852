"""MAML, Reptile and iMAML agree with their definitions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.baselines.plain import Conv4
from equilibria.tasks import IMAML, MAML, Reptile
from equilibria.tasks.few_shot import EpisodeBatch
from tests.tasks.test_few_shot import episodes_of


def network() -> nn.Module:
    """Return a smooth network, for finite differences."""
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 2))
    return nn.Sequential(_Flat(), *layers).double()


class _Flat(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(0, -4)


def along(gradients: Any, direction: list[Tensor]) -> float:
    return float(sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)))


@pytest.mark.parametrize("steps", [1, 3])
def test_maml_differentiates_the_adapted_loss(steps: int) -> None:
    model, (images, labels) = network(), episodes_of(3)
    task = MAML(inner_steps=steps, inner_rate=0.5)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(task.training_step(model, images, labels).loss, parameters)
    first_order = MAML(inner_steps=steps, inner_rate=0.5, first_order=True)
    cheap = torch.autograd.grad(first_order.training_step(model, images, labels).loss, parameters)
    direction = [torch.randn_like(parameter) for parameter in parameters]
    losses = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, change in zip(parameters, direction, strict=True):
                parameter.add_(step * change)
        losses.append(float(task.training_step(model, images, labels).loss.detach()))
    difference = (losses[0] - losses[1]) / 2e-5
    assert along(gradients, direction) == pytest.approx(difference, rel=1e-6)
    assert abs(along(cheap, direction) - difference) > 1e-3 * abs(difference)


def test_first_order_maml_uses_the_gradient_at_the_adapted_weights() -> None:
    model, (images, labels) = network(), episodes_of(1)
    task = MAML(inner_steps=2, inner_rate=0.5, first_order=True)
    gradients = torch.autograd.grad(
        task.training_step(model, images, labels).loss, list(model.parameters())
    )
    episodes = EpisodeBatch.of(images, labels)
    adapted = copy.deepcopy(model)
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(adapted(episodes.support), episodes.support_labels[0]).backward()
        optimizer.step()
    loss = F.cross_entropy(adapted(episodes.query), episodes.query_labels[0])
    for one, other in zip(
        gradients, torch.autograd.grad(loss, list(adapted.parameters())), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_reptile_step_agrees_with_its_definition(optimizer: Any) -> None:
    """With SGD as the outer optimizer the step is θ + ε mean(θ′ − θ)."""
    model, (images, labels) = network(), episodes_of(3)
    task = Reptile(inner_steps=4, inner_rate=0.02, inner_batch=100, optimizer=optimizer)
    rate = 0.3
    before = [parameter.detach().clone() for parameter in model.parameters()]
    moved = []
    for index in range(3):
        copied = copy.deepcopy(model)
        kinds: dict[str, Any] = {
            "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.0, 0.999)),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
        }
        inner = kinds[optimizer](copied.parameters())
        for _ in range(4):
            inner.zero_grad()
            F.cross_entropy(copied(images[index]), labels[index]).backward()
            inner.step()
        moved.append([parameter.detach() for parameter in copied.parameters()])
    outer = torch.optim.SGD(model.parameters(), lr=rate)
    task.training_step(model, images, labels).loss.backward()
    outer.step()
    for index, (parameter, start) in enumerate(zip(model.parameters(), before, strict=True)):
        mean = torch.stack([weights[index] for weights in moved]).mean(dim=0)
        torch.testing.assert_close(parameter.detach(), start + rate * (mean - start))


def test_reptile_iterates_over_the_images_of_an_episode() -> None:
    model, (images, labels) = network(), episodes_of(1)
    batch_sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, given: batch_sizes.append(len(given[0])))
    Reptile(inner_steps=3, inner_batch=2).training_step(model, images, labels)
    assert batch_sizes == [2, 2, 2, 4]
    batch_sizes.clear()
    Reptile(inner_batch=2, evaluation_steps=3).evaluate(model, [(images, labels)])
    assert batch_sizes == [2, 2, 2, 4], "two images of the support, then the four queries"


def test_imaml_gradient_is_the_implicit_one() -> None:
    model, (images, labels) = network(), episodes_of(2)
    task = IMAML(inner_steps=400, inner_rate=0.05, proximal=2.0, solve_steps=200)
    step = task.training_step(model, images, labels)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(step.loss, list(parameters.values()))
    episodes = EpisodeBatch.of(images, labels)
    sizes = [parameter.numel() for parameter in parameters.values()]
    expected = []
    for index in range(2):
        adapted = task.adapt(
            model, episodes.support[index], episodes.support_labels[index], steps=400
        )
        flat = torch.cat([weight.detach().flatten() for weight in adapted.parameters()])

        def loss(vector: Tensor, images: Tensor, labels: Tensor) -> Tensor:
            pieces = torch.split(vector, sizes)
            weights = {
                name: piece.view_as(parameter)
                for (name, parameter), piece in zip(parameters.items(), pieces, strict=True)
            }
            return F.cross_entropy(functional_call(model, weights, (images,)), labels)

        support = (episodes.support[index], episodes.support_labels[index])
        hessian = torch.autograd.functional.hessian(lambda v, s=support: loss(v, *s), flat)
        outer = torch.func.grad(loss)(flat, episodes.query[index], episodes.query_labels[index])
        start = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        inner = torch.func.grad(loss)(flat, *support) + 2.0 * (flat - start)
        assert float(inner.norm()) < 1e-8, "the inner problem is solved"
        identity = torch.eye(len(flat), dtype=flat.dtype)
        expected.append(torch.linalg.solve(identity + hessian / 2.0, outer))
    torch.testing.assert_close(
        torch.cat([gradient.flatten() for gradient in gradients]),
        torch.stack(expected).mean(dim=0),
        rtol=1e-5,
        atol=1e-9,
    )


def test_imaml_gradient_is_finite_if_the_system_is_indefinite() -> None:
    """A small λ makes the linear system indefinite."""
    model, (images, labels) = network(), episodes_of(2)
    task = IMAML(inner_steps=1, inner_rate=1e-3, proximal=1e-4, solve_steps=20)
    gradients = torch.autograd.grad(
        task.training_step(model, images, labels).loss, list(model.parameters())
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", ["maml", "reptile", "imaml"])
def test_solving_blocks_apply_to_adapted_models(name: str) -> None:
    """Copies of a layer use the settings of `solving` blocks, which also record their solves."""
    torch.manual_seed(0)
    model = eq.create_model("few-shot-opteq", in_channels=1, num_classes=2, channels=4).double()
    images, labels = episodes_of(1)
    with eq.solving(model, tolerance=1e-2, record=True) as coarse:
        TASKS[name].training_step(model, images, labels).loss.backward()
    with eq.solving(model, tolerance=1e-9, record=True) as fine:
        TASKS[name].training_step(model, images, labels).loss.backward()
    assert len(coarse.solutions) == len(fine.solutions) > 1
    assert coarse.evaluations < fine.evaluations
    assert all(solution.tolerance == 1e-9 for solution in fine.solutions)


TASKS: dict[str, Any] = {
    "maml": MAML(inner_steps=2, inner_rate=0.1),
    "first-order": MAML(inner_rate=0.1, first_order=True),
    "reptile": Reptile(evaluation_steps=3, inner_batch=5),
    "imaml": IMAML(inner_steps=3),
}


@pytest.mark.parametrize("name", list(TASKS))
def test_episodes_are_independent(name: str) -> None:
    torch.manual_seed(0)
    model = Conv4(in_channels=1, channels=4, num_classes=2).double()
    original = copy.deepcopy(model.state_dict())
    images, labels = episodes_of(3)
    together = TASKS[name].evaluate(model, [(images, labels)])
    alone = TASKS[name].evaluate(model, [(images[i : i + 1], labels[i : i + 1]) for i in (2, 0, 1)])
    assert together.accuracy == pytest.approx(alone.accuracy)
    assert together.loss == pytest.approx(alone.loss, rel=1e-6)
    assert together.figures["episodes"] == 3
    for name_, tensor in model.state_dict().items():
        assert torch.equal(tensor, original[name_]), "evaluation must not change the weights"


@pytest.mark.parametrize("name", list(TASKS))
def test_training_step_has_gradients_for_all_weights(name: str) -> None:
    model = Conv4(in_channels=1, channels=4, num_classes=2, norm="group").double()
    images, labels = episodes_of(2)
    step = TASKS[name].training_step(model, images, labels)
    step.loss.backward()
    assert int(step.samples) == 8
    assert float(step.loss.detach()) > 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert bool((parameter.grad != 0).any())
    with pytest.raises(ValueError, match="the model has 3 classes, but the episodes have 2 ways"):
        TASKS[name].training_step(
            Conv4(in_channels=1, channels=4, num_classes=3).double(), images, labels
        )


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (MAML, {"inner_rate": 0.0}, "inner_rate must be positive"),
        (MAML, {"inner_steps": 0}, "inner_steps must be at least 1"),
        (Reptile, {"inner_batch": 0}, "inner_batch must be at least 1"),
        (Reptile, {"optimizer": "lbfgs"}, "optimizer must be one of adam, sgd"),
        (IMAML, {"proximal": 0.0}, "proximal must be positive"),
        (IMAML, {"solve_steps": 0}, "solve_steps must be at least 1"),
    ],
)
def test_invalid_options_are_rejected(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
