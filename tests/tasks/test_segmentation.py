"""The segmentation task agrees with figures computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.models.opteq.models import deep_opteq_segmentation
from equilibria.tasks import Segmentation
from equilibria.tasks.classification import class_accuracy, class_iou

IGNORE = 255


class Echo(nn.Module):
    """Model that returns its input as logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def logits_for(classes: Tensor, count: int) -> Tensor:
    """Return logits that predict these classes: 5 for them, 0 for the others."""
    return 5 * F.one_hot(classes, count).movedim(-1, 1).float()


TRUTH = torch.tensor([[[0, 0, 1], [1, 2, IGNORE]]])
PREDICTED = torch.tensor([[[0, 1, 1], [1, 0, 2]]])
LOGITS = logits_for(PREDICTED, 4)
"""Class 2 occurs and is never predicted; class 3 neither occurs nor is predicted."""


def test_pixels_without_valid_prediction_count_as_wrong() -> None:
    """They are in no column of the confusion matrix, but count against their class."""
    logits = LOGITS.clone()
    logits[0, 1, 1, 0] = torch.nan
    evaluation = Segmentation().evaluate(Echo(), [(logits, TRUTH)])
    assert evaluation.counts["confusion"].tolist() == [
        [1, 1, 0, 0],
        [0, 1, 0, 0],
        [1, 0, 0, 0],
        [0] * 4,
    ]
    assert (evaluation.correct, evaluation.samples, evaluation.figures["unanswered"]) == (2, 5, 1)
    assert evaluation.figures["mean_accuracy"] == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    assert evaluation.figures["mean_iou"] == pytest.approx((1 / 3 + 1 / 3 + 0) / 3)
    nothing = Segmentation().evaluate(Echo(), [(torch.full_like(LOGITS, torch.nan), TRUTH)])
    assert (nothing.accuracy, nothing.score) == (0, 0)


def test_evaluation_agrees_with_figures_by_hand() -> None:
    evaluation = Segmentation().evaluate(Echo(), [(LOGITS, TRUTH)])
    confusion = evaluation.counts["confusion"]
    assert confusion.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0] * 4]
    assert (evaluation.correct, evaluation.samples, evaluation.accuracy) == (3, 5, 0.6)
    assert class_accuracy(confusion)[:3].tolist() == [0.5, 1.0, 0.0]
    assert class_iou(confusion)[:3].tolist() == pytest.approx([1 / 3, 2 / 3, 0.0])
    assert bool(class_accuracy(confusion)[3].isnan())
    assert bool(class_iou(confusion)[3].isnan())
    assert evaluation.figures["mean_accuracy"] == pytest.approx(0.5)
    assert evaluation.figures["mean_iou"] == pytest.approx(1 / 3)
    right, wrong = math.log1p(3 * math.exp(-5)), math.log(math.exp(5) + 3)
    assert evaluation.loss == pytest.approx((3 * right + 2 * wrong) / 5, rel=1e-6)


def test_class_that_is_only_predicted_has_iou_zero_and_no_accuracy() -> None:
    evaluation = Segmentation().evaluate(
        Echo(), [(logits_for(torch.tensor([[[0, 1]]]), 2), torch.tensor([[[0, 0]]]))]
    )
    assert class_iou(evaluation.counts["confusion"]).tolist() == [0.5, 0.0]
    assert evaluation.figures["mean_iou"] == 0.25
    assert evaluation.figures["mean_accuracy"] == 0.5


def test_figures_do_not_depend_on_the_batches() -> None:
    logits, labels = torch.randn(7, 4, 6, 5), torch.randint(0, 4, (7, 6, 5))
    labels[:, 0] = IGNORE
    labels[4] = IGNORE
    whole = Segmentation().evaluate(Echo(), [(logits, labels)])
    pieces = [(logits[:4], labels[:4]), (logits[4:5], labels[4:5])]
    pieces += [(logits[5:, :, :2], labels[5:, :2]), (logits[5:, :, 2:], labels[5:, 2:])]
    parts = Segmentation().evaluate(Echo(), pieces)
    assert torch.equal(whole.counts["confusion"], parts.counts["confusion"])
    assert whole.figures["mean_iou"] == parts.figures["mean_iou"]
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_perfect_prediction_scores_one() -> None:
    labels = torch.randint(0, 3, (2, 5, 5))
    evaluation = Segmentation().evaluate(Echo(), [(logits_for(labels, 3), labels)])
    assert set(evaluation.figures.values()) == {1.0}


def test_training_loss_is_the_mean_over_labelled_pixels() -> None:
    logits = torch.randn(3, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 4, (3, 5, 6))
    labels[0, :2] = IGNORE
    step = Segmentation().training_step(Echo(), logits, labels.to(torch.uint8))
    labelled = labels != IGNORE
    rows = logits.movedim(1, 3)[labelled]
    assert step.samples == len(rows) == 78
    assert step.correct == int((rows.argmax(dim=1) == labels[labelled]).sum())
    torch.testing.assert_close(step.loss, F.cross_entropy(rows, labels[labelled]))
    step.loss.backward()
    assert bool((logits.grad.abs().sum(dim=1) > 0).eq(labelled).all())


def test_ignore_index_is_an_option() -> None:
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    labels[0] = -100
    step = Segmentation(ignore_index=-100).training_step(Echo(), logits, labels)
    assert step.samples == 16
    evaluation = Segmentation(ignore_index=-100).evaluate(Echo(), [(logits, labels)])
    assert evaluation.samples == 16


def test_batch_without_labels_has_zero_loss_and_gradient() -> None:
    logits = torch.randn(1, 3, 2, 2, requires_grad=True)
    step = Segmentation().training_step(Echo(), logits, torch.full((1, 2, 2), IGNORE))
    step.loss.backward()
    assert (float(step.loss.detach()), step.samples, step.correct) == (0.0, 0, 0)
    assert not logits.grad.any()


def test_solve_statistics_are_those_of_the_solutions() -> None:
    model = deep_opteq_segmentation(
        num_classes=3, channels=4, widths=(3, 4, 4), head_width=4
    ).eval()
    images, labels = torch.rand(5, 3, 9, 14), torch.randint(0, 3, (5, 9, 14))
    solution = model.solve(images)
    solves = (
        Segmentation().evaluate(model, [(images[:3], labels[:3]), (images[3:], labels[3:])]).solves
    )
    assert solves.mean_iterations == pytest.approx(float(solution.iterations.double().mean()))
    assert solves.share_converged == 1
    assert Segmentation().evaluate(Echo(), [(LOGITS, TRUTH)]).solves.mean_iterations is None


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_keeps_the_training_mode(training: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4)).train(training)
    Segmentation().evaluate(model, [(LOGITS, TRUTH)])
    assert model.training is training
    assert int(model[0].num_batches_tracked) == 0


def test_invalid_labels_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one labelled pixel, got none"):
        Segmentation().evaluate(Echo(), [])
    with pytest.raises(ValueError, match="at least one labelled pixel, got none"):
        Segmentation().evaluate(Echo(), [(LOGITS, torch.full_like(TRUTH, IGNORE))])
    with pytest.raises(ValueError, match="label maps of shape"):
        Segmentation().training_step(Echo(), LOGITS, TRUTH[:, :, :2])
    with pytest.raises(ValueError, match=r"labels must be below 4.*got 4"):
        Segmentation().training_step(Echo(), LOGITS, torch.full_like(TRUTH, 4))
    with pytest.raises(ValueError, match="must not be one of the 4 classes, got 3"):
        Segmentation(ignore_index=3).training_step(Echo(), LOGITS, TRUTH)


def test_outcomes_of_processes_are_joined() -> None:
    """Two processes with the same data have the figures of one."""

    def twice(local: Tensor) -> Tensor:
        return torch.cat([local, local])

    single = Segmentation().evaluate(Echo(), [(LOGITS, TRUTH)])
    both = Segmentation().evaluate(Echo(), [(LOGITS, TRUTH)], twice)
    assert both.figures == single.figures
    assert both.loss == pytest.approx(single.loss)
    assert (both.samples, both.correct) == (2 * single.samples, 2 * (single.correct or 0))
