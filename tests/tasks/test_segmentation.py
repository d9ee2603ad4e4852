"""The segmentation task against counting by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.models.segmentation import deep_opteq_segmentation
from equilibria.tasks.segmentation import (
    Segmentation,
    SegmentationEvaluation,
    evaluate_segmentation,
)

IGNORE = 255


class Echo(nn.Module):
    """Takes its input for the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def saying(classes: Tensor, count: int) -> Tensor:
    """Logits that predict these classes: 5 for them, 0 for the others."""
    return 5 * F.one_hot(classes, count).movedim(-1, 1).float()


TRUTH = torch.tensor([[[0, 0, 1], [1, 2, IGNORE]]])
FOUND = torch.tensor([[[0, 1, 1], [1, 0, 2]]])
LOGITS = saying(FOUND, 4)
"""Class 2 is there and never found, class 3 neither there nor found."""


def test_evaluation_counts_as_one_does_by_hand() -> None:
    evaluation = evaluate_segmentation(Echo(), [(LOGITS, TRUTH)])
    assert evaluation.confusion.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0] * 4]
    assert (evaluation.correct, evaluation.samples, evaluation.accuracy) == (3, 5, 0.6)
    assert evaluation.class_accuracy[:3].tolist() == [0.5, 1.0, 0.0]
    assert evaluation.class_iou[:3].tolist() == pytest.approx([1 / 3, 2 / 3, 0.0])
    assert bool(evaluation.class_accuracy[3].isnan())
    assert bool(evaluation.class_iou[3].isnan())
    assert evaluation.mean_accuracy == pytest.approx(0.5)
    assert evaluation.mean_iou == pytest.approx(1 / 3)
    right, wrong = math.log1p(3 * math.exp(-5)), math.log(math.exp(5) + 3)
    assert evaluation.loss == pytest.approx((3 * right + 2 * wrong) / 5, rel=1e-6)


def test_a_class_that_is_only_predicted_has_an_iou_of_zero_and_no_accuracy() -> None:
    evaluation = evaluate_segmentation(
        Echo(), [(saying(torch.tensor([[[0, 1]]]), 2), torch.tensor([[[0, 0]]]))]
    )
    assert evaluation.class_iou.tolist() == [0.5, 0.0]
    assert evaluation.mean_iou == 0.25
    assert evaluation.mean_accuracy == 0.5


def test_uneven_batches_of_uneven_images_give_the_numbers_of_all_pixels() -> None:
    logits, labels = torch.randn(7, 4, 6, 5), torch.randint(0, 4, (7, 6, 5))
    labels[:, 0] = IGNORE
    labels[4] = IGNORE
    whole = evaluate_segmentation(Echo(), [(logits, labels)])
    pieces = [(logits[:4], labels[:4]), (logits[4:5], labels[4:5])]
    pieces += [(logits[5:, :, :2], labels[5:, :2]), (logits[5:, :, 2:], labels[5:, 2:])]
    parts = evaluate_segmentation(Echo(), pieces)
    assert torch.equal(whole.confusion, parts.confusion)
    assert whole.mean_iou == parts.mean_iou
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_a_perfect_prediction() -> None:
    labels = torch.randint(0, 3, (2, 5, 5))
    evaluation = evaluate_segmentation(Echo(), [(saying(labels, 3), labels)])
    assert evaluation.mean_iou == evaluation.mean_accuracy == evaluation.accuracy == 1


def test_training_step_is_the_mean_over_labelled_pixels() -> None:
    logits = torch.randn(3, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 4, (3, 5, 6))
    labels[0, :2] = IGNORE
    step = Segmentation().training_step(Echo(), logits, labels.to(torch.uint8))
    kept = labels != IGNORE
    chosen = logits.movedim(1, 3)[kept]
    assert step.samples == len(chosen) == 78
    assert step.correct == int((chosen.argmax(dim=1) == labels[kept]).sum())
    torch.testing.assert_close(step.loss, F.cross_entropy(chosen, labels[kept]))
    step.loss.backward()
    assert bool((logits.grad.abs().sum(dim=1) > 0).eq(kept).all())


def test_ignore_index_is_an_option() -> None:
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    labels[0] = -100
    step = Segmentation(ignore_index=-100).training_step(Echo(), logits, labels)
    assert step.samples == 16
    evaluation = evaluate_segmentation(Echo(), [(logits, labels)], ignore_index=-100)
    assert evaluation.samples == 16


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
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
    solves = evaluate_segmentation(
        model, [(images[:3], labels[:3]), (images[3:], labels[3:])]
    ).solves
    assert solves.mean_iterations == pytest.approx(float(solution.iterations.double().mean()))
    assert solves.share_converged == 1
    assert evaluate_segmentation(Echo(), [(LOGITS, TRUTH)]).solves.mean_iterations is None


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_mode_as_it_was(training: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4)).train(training)
    evaluate_segmentation(model, [(LOGITS, TRUTH)])
    assert model.training is training
    assert int(model[0].num_batches_tracked) == 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no labelled pixel"):
        evaluate_segmentation(Echo(), [])
    with pytest.raises(ValueError, match="no labelled pixel"):
        evaluate_segmentation(Echo(), [(LOGITS, torch.full_like(TRUTH, IGNORE))])
    with pytest.raises(ValueError, match="same size"):
        Segmentation().training_step(Echo(), LOGITS, TRUTH[:, :, :2])
    with pytest.raises(ValueError, match="label 4 is neither"):
        Segmentation().training_step(Echo(), LOGITS, torch.full_like(TRUTH, 4))
    with pytest.raises(ValueError, match="one of the 4 classes"):
        Segmentation(ignore_index=3).training_step(Echo(), LOGITS, TRUTH)


def test_evaluation_is_made_of_counts_alone() -> None:
    evaluation = evaluate_segmentation(Echo(), [(LOGITS, TRUTH)])
    doubled = SegmentationEvaluation(evaluation.loss, 2 * evaluation.confusion, evaluation.solves)
    assert doubled.mean_iou == evaluation.mean_iou
    assert doubled.samples == 2 * evaluation.samples
