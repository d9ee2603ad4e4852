"""Segmenters: any image size, exact sizes, true gradients, and that they learn."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.baselines.fcn import FCNHead, SegmentationStem, fcn
from equilibria.models.mopteq.models import mopteq
from equilibria.models.opteq.models import (
    EquilibriumSegmenter,
    deep_opteq_segmentation,
    equilibrium_segmenter,
)
from equilibria.models.registry import parameter_count
from equilibria.tasks import Segmentation
from tests.models.small import with_solving

Factory = Callable[..., nn.Module]


def small_deep_opteq(**options: Any) -> EquilibriumSegmenter:
    sizes: dict[str, Any] = {"channels": 4, "widths": (3, 4, 5), "head_width": 4, "num_classes": 3}
    return deep_opteq_segmentation(**with_solving({**sizes, **options}))


def small_fcn(**options: Any) -> nn.Module:
    sizes: dict[str, Any] = {"channels": 4, "widths": (3, 4, 5), "head_width": 4, "num_classes": 3}
    return fcn(**{**sizes, **options})


def small_mopteq(**options: Any) -> EquilibriumSegmenter:
    cell = mopteq(channels=4, widths=(3, 4), scales=(1, 2)).layer.cell
    return equilibrium_segmenter(
        cell, num_classes=3, channels=4, head_width=4, multiple=2, **with_solving(options)
    )


EQUILIBRIA: list[Factory] = [small_deep_opteq, small_mopteq]
FACTORIES: list[Factory] = [*EQUILIBRIA, small_fcn]


def settled(model: nn.Module) -> nn.Module:
    """In float64 and evaluation mode, with the running statistics of some images."""
    model.double().train()
    with torch.no_grad():
        for _ in range(30):
            model(torch.rand(8, 3, 16, 16, dtype=torch.float64))
    return model.eval()


@pytest.mark.parametrize("make", FACTORIES)
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [(16, 16), (13, 18), (9, 7), (1, 3)])
def test_every_pixel_gets_logits_whatever_the_size(
    make: Factory, stride: int, size: tuple[int, int]
) -> None:
    model = make(stride=stride).eval()
    with torch.no_grad():
        assert model(torch.rand(2, 3, *size)).shape == (2, 3, *size)
        assert model(torch.rand(0, 3, *size)).shape == (0, 3, *size)


@pytest.mark.parametrize("make", FACTORIES)
def test_images_are_extended_to_the_right_and_below_by_their_edge(make: Factory) -> None:
    model = settled(make(stride=4))
    images = torch.rand(2, 3, 13, 22, dtype=torch.float64)
    extended = F.pad(images, (0, 2, 0, 3), mode="replicate")
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(extended)[:, :, :13, :22])


def test_logits_move_with_the_image() -> None:
    """A stem that strides and a head that upsamples must agree on where a pixel is."""
    model = settled(small_fcn(stride=4))
    images = torch.rand(1, 3, 96, 96, dtype=torch.float64)
    with torch.no_grad():
        here, moved = model(images), model(images.roll((4, 8), dims=(2, 3)))
    inner = slice(40, 56)
    torch.testing.assert_close(here[:, :, inner, inner], moved[:, :, 44:60, 48:64])


def test_the_head_upsamples_between_pixel_centres() -> None:
    head = FCNHead(1, 1, 1, stride=4, dropout=0.0).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.convolution[0].weight[0, 0, 1, 1] = 1
        head.convolution[1].weight.fill_(1)
        head.convolution[1].running_var.fill_(1 - head.convolution[1].eps)
        head.classifier.weight.fill_(1)
    centers = (torch.arange(8, dtype=torch.float64) + 0.5) * 4
    logits = head(centers.expand(1, 1, 8, 8))[0, 0, 10, 2:-2]
    torch.testing.assert_close(logits, torch.arange(32, dtype=torch.float64)[2:-2] + 0.5)


@pytest.mark.parametrize("make", FACTORIES)
def test_images_do_not_influence_one_another(make: Factory) -> None:
    model = settled(make())
    images = torch.rand(3, 3, 14, 17, dtype=torch.float64)
    with torch.no_grad():
        together = model(images)
        for index in range(3):
            torch.testing.assert_close(model(images[index : index + 1])[0], together[index])


@pytest.mark.parametrize("make", EQUILIBRIA)
def test_the_gradient_is_that_of_the_equilibrium(make: Factory) -> None:
    model = settled(
        make(tolerance=1e-13, max_iterations=2000, gradient=eq.Implicit(tolerance=1e-13))
    )
    images = torch.rand(2, 3, 7, 10, dtype=torch.float64)
    weights = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def loss() -> Tensor:
        return (model(images) * weights).sum()

    loss().backward()
    slope = sum(float((p.grad * direction[name]).sum()) for name, p in model.named_parameters())
    ends = []
    for sign in (1, -2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(direction[name], alpha=sign * 1e-6)
            ends.append(float(loss()))
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("make", EQUILIBRIA)
def test_what_equilibrium_models_offer_works_at_any_size(make: Factory) -> None:
    model = settled(make(tolerance=1e-10, max_iterations=500))
    images = torch.rand(2, 3, 9, 14, dtype=torch.float64)
    with torch.no_grad():
        solution = model.solve(images)
        assert bool(solution.converged.all())
        assert float(model.objective(images).residual(solution.state).max()) < 1e-6
        bound = model.contraction_bound(images)
        assert bound is not None if make is small_deep_opteq else bound is None
        assert bound is None or (bound < 1).all()
        model(images)
    assert bool(model.last_solution.converged.all())


def test_sizes_are_those_of_the_formula() -> None:
    m, widths, head, classes = 8, (4, 6, 6), 5, 7
    stem = 9 * 3 * m + 9 * m * m
    layers = sum(9 * m * n + m * n + n for n in widths)
    tail = 9 * m * head + 2 * head + head * classes + classes
    model = deep_opteq_segmentation(
        num_classes=classes, channels=m, widths=widths, head_width=head, stride=4
    )
    assert parameter_count(model) == stem + layers + tail
    baseline = fcn(num_classes=classes, channels=m, widths=widths, head_width=head, stride=4)
    pairs = [(8, 4), (4, 6), (6, 6)]
    plain = sum(9 * a * b + 2 * b for a, b in pairs)
    tail = 9 * 6 * head + 2 * head + head * classes + classes
    assert parameter_count(baseline) == stem + plain + tail


@pytest.mark.parametrize("parameters", [30_000, 45_403, 200_000])
def test_the_baseline_meets_a_given_size(parameters: int) -> None:
    with torch.device("meta"):
        count = parameter_count(fcn(num_classes=11, parameters=parameters))
    assert abs(count - parameters) < 0.03 * parameters


def test_the_size_of_the_paper_can_be_built() -> None:
    with torch.device("meta"):
        model = deep_opteq_segmentation(
            num_classes=19,
            channels=512,
            widths=(256, 512, 512),
            stride=8,
            head_width=128,
            norm="estimate",
        )
    assert [unit.W.out_channels for unit in model.layer.cell.units()] == [256, 512, 512]
    assert parameter_count(model) == 11_879_827


@pytest.mark.parametrize("make", FACTORIES)
def test_copies_are_the_same_model(make: Factory) -> None:
    model = settled(make())
    images = torch.rand(2, 3, 9, 14, dtype=torch.float64)
    other = settled(make())
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = model(images)
        for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
            assert torch.equal(same(images), logits)


@pytest.mark.parametrize("make", FACTORIES)
def test_training_under_autocast(make: Factory, device: torch.device) -> None:
    model = make().to(device)
    images = torch.rand(4, 3, 12, 15, device=device)
    labels = torch.randint(0, 3, (4, 12, 15), device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        step = Segmentation().training_step(model, images, labels)
    step.loss.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_dropout_and_options_are_heard() -> None:
    images = torch.rand(2, 3, 16, 16)
    for make in FACTORIES:
        model = make(dropout=0.5).train()
        assert not torch.equal(model(images), model(images))
    assert small_deep_opteq(stride=2).features(images).shape[2:] == (8, 8)
    assert small_deep_opteq(stride=8).features(images).shape[2:] == (2, 2)
    assert len([m for m in small_fcn(stem_depth=4).stem if isinstance(m, nn.Conv2d)]) == 4


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="power of 2"):
        SegmentationStem(3, 4, stride=3)
    with pytest.raises(ValueError, match="multiple"):
        SegmentationStem(3, 4, multiple=0)
    with pytest.raises(ValueError, match="at least one layer"):
        fcn(widths=())
    with pytest.raises(ValueError, match="odd"):
        fcn(kernel_size=2)
    with pytest.raises(ValueError, match="smallest network"):
        fcn(parameters=100)
    with pytest.raises(ValueError, match="batch dimension"):
        small_deep_opteq()(torch.rand(3, 8, 8))


def rectangles(samples: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise with a red, a green and a blue rectangle, each over the last; the labels say which."""
    height, width = 32, 40
    images = 0.5 * torch.rand(samples, 3, height, width, generator=chance)
    labels = torch.zeros(samples, height, width, dtype=torch.long)
    for color in range(3):
        sides = torch.randint(10, 18, (samples, 2), generator=chance)
        corner = torch.rand(samples, 2, generator=chance)
        for index in range(samples):
            tall, wide = sides[index].tolist()
            top = int(corner[index, 0] * (height - tall))
            left = int(corner[index, 1] * (width - wide))
            inside = (index, slice(top, top + tall), slice(left, left + wide))
            labels[inside] = color + 1
            images[index, :, inside[1], inside[2]] *= 0.6
            images[index, color, inside[1], inside[2]] += 0.6
    return images, labels


@pytest.mark.parametrize(
    "make",
    [
        lambda: fcn(num_classes=4, channels=16, widths=(8, 16, 16), head_width=16, stride=2),
        lambda: deep_opteq_segmentation(
            num_classes=4, channels=16, widths=(8, 16, 16), head_width=16, stride=2
        ),
    ],
    ids=["fcn", "deep-opteq"],
)
def test_sixty_steps_teach_to_tell_rectangles(make: Factory) -> None:
    chance = torch.Generator().manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    held_out = [rectangles(16, chance), rectangles(5, chance)]
    for _ in range(60):
        step = Segmentation().training_step(model, *rectangles(8, chance))
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
    evaluation = Segmentation().evaluate(model, held_out)
    assert evaluation.score > 0.85
    assert evaluation.accuracy > 0.93
    assert evaluation.solves.share_converged in (1, None)
