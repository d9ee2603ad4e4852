"""The classification task agrees with figures computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.models import heritage_diversity_loss
from equilibria.models.base import predicted_classes
from equilibria.models.mopteq.models import branch_features
from equilibria.tasks import Classification, create_task
from equilibria.tasks.classification import confusion_matrix

evaluate = Classification().evaluate


class Echo(nn.Module):
    """Model that returns its input as logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


LOGITS = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 5.0]])
LABELS = torch.tensor([0, 1, 2, 2])


def test_evaluation_agrees_with_figures_by_hand() -> None:
    evaluation = evaluate(Echo(), [(LOGITS[:3], LABELS[:3]), (LOGITS[3:], LABELS[3:])])
    assert (evaluation.correct, evaluation.samples, evaluation.accuracy) == (3, 4, 0.75)
    assert evaluation.counts["confusion"].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert evaluation.values["prediction"].tolist() == [0, 1, 1, 2]
    right, wrong = math.log1p(2 * math.exp(-5)), math.log(math.exp(5) + 2)
    assert evaluation.loss == pytest.approx((3 * right + wrong) / 4, rel=1e-6)
    assert evaluation.values["confidence"].tolist() == pytest.approx([math.exp(-right)] * 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_count_as_wrong(bad: float) -> None:
    """The argmax of NaN logits is class 0, which is right for some samples."""
    logits = LOGITS.clone()
    logits[[0, 3], [0, 2]] = bad
    evaluation = evaluate(Echo(), [(logits, LABELS)])
    assert evaluation.values["prediction"].tolist() == [-1, 1, 1, -1]
    assert evaluation.correct == 1
    assert evaluation.figures["unanswered"] == 2
    assert evaluation.counts["confusion"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert "unanswered" not in evaluate(Echo(), [(LOGITS, LABELS)]).figures
    everything = evaluate(Echo(), [(torch.full((4, 6), bad), LABELS)])
    assert (everything.accuracy, everything.figures["top5_accuracy"]) == (0, 0)
    step = Classification().training_step(Echo(), torch.full((4, 3), bad), LABELS)
    assert int(step.correct or 0) == 0


def test_single_logit_of_minus_infinity_is_valid() -> None:
    logits = torch.tensor([[-math.inf, 2.0, 1.0], [-math.inf] * 3])
    assert predicted_classes(logits).tolist() == [1, -1]


def test_model_without_equilibrium_has_no_solve_statistics() -> None:
    solves = evaluate(Echo(), [(LOGITS, LABELS)]).solves
    assert solves.mean_iterations is None
    assert solves.max_iterations is None
    assert solves.share_converged is None
    assert solves.max_residual is None


def test_solve_statistics_are_those_of_the_solutions() -> None:
    model = eq.create_model("opteq-small", in_channels=1, channels=8, width=8).eval()
    images, labels = torch.rand(7, 1, 8, 8), torch.arange(7)
    solution = model.solve(images)
    solves = evaluate(model, [(images[:4], labels[:4]), (images[4:], labels[4:])]).solves
    assert solves.mean_iterations == pytest.approx(float(solution.iterations.double().mean()))
    assert solves.max_iterations == int(solution.iterations.max())
    assert solves.max_residual == pytest.approx(float(solution.residual.max()), rel=1e-3)
    assert solves.share_converged == 1


def test_share_converged_counts_unconverged_samples() -> None:
    model = eq.create_model("opteq-small", in_channels=1, channels=8, width=8, max_iterations=1)
    with pytest.warns(eq.ConvergenceWarning):
        solves = evaluate(model, [(torch.rand(3, 1, 8, 8), torch.arange(3))]).solves
    assert solves.share_converged == 0


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_keeps_the_training_mode(training: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).train(training)
    evaluate(model, [(LOGITS, LABELS)])
    assert model.training is training
    assert int(model[0].num_batches_tracked) == 0


def test_evaluate_rejects_an_empty_data_set() -> None:
    with pytest.raises(ValueError, match="at least one sample, got none"):
        evaluate(Echo(), [])


def test_confusion_matrix_includes_classes_that_do_not_occur() -> None:
    counts = confusion_matrix(torch.tensor([0, 0]), torch.tensor([0, 1]), classes=4)
    assert counts.shape == (4, 4)
    assert counts[0].tolist() == [1, 1, 0, 0]


def test_label_smoothing_changes_the_loss() -> None:
    plain = Classification().training_step(Echo(), LOGITS, LABELS)
    smooth = Classification(label_smoothing=0.1).training_step(Echo(), LOGITS, LABELS)
    assert not torch.equal(plain.loss, smooth.loss)
    assert (plain.correct, plain.samples) == (3, 4)
    with pytest.raises(ValueError, match="label_smoothing"):
        Classification(label_smoothing=1.0)


def test_top_five_accuracy() -> None:
    logits = torch.arange(7.0).repeat(4, 1)
    labels = torch.tensor([6, 2, 1, 0])
    assert evaluate(Echo(), [(logits, labels)]).figures["top5_accuracy"] == 0.5
    assert evaluate(Echo(), [(LOGITS, LABELS)]).figures["top5_accuracy"] is None


def test_labels_beyond_the_number_of_classes_are_rejected() -> None:
    model, task = eq.create_model("opteq-small", num_classes=3, in_channels=1), Classification()
    images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 9])
    with pytest.raises(ValueError, match="below num_classes=3, got 9"):
        task.training_step(model, images, labels)
    with pytest.raises(ValueError, match="below num_classes=3, got 9"):
        task.evaluation_step(model, images, labels, torch.Generator())


def test_branch_loss_is_added_to_cross_entropy() -> None:
    torch.manual_seed(0)
    model = eq.create_model("popteq-small", channels=4, widths=(3, 4, 4), tolerance=1e-6)
    images, labels = torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 2])
    solution = model.eval().solve(images)
    branches = branch_features(model.layer.cell, solution.state, solution.context)
    related = heritage_diversity_loss(branches, 0.1)
    losses = [
        create_task("branches", gamma=gamma, diversity=0.1)
        .training_step(model, images, labels)
        .values["loss"]
        for gamma in (0.0, 0.5)
    ]
    torch.testing.assert_close(losses[1] - losses[0], 0.5 * related, rtol=1e-3, atol=1e-5)
    weights = list(model.layer.parameters())
    grads = [torch.autograd.grad(loss.sum(), weights)[0].norm() for loss in losses]
    assert grads[0] != grads[1]
    with pytest.raises(ValueError, match="gamma"):
        create_task("branches", gamma=-1.0)
    explicit = eq.create_model("resnet-small", channels=(4, 4, 4))
    with pytest.raises(TypeError, match="POptEqs or MOptEqs"):
        create_task("branches").training_step(explicit, torch.rand(2, 3, 32, 32), labels[:2])
