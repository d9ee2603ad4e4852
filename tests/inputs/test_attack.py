"""Attacks stay within their budget, use the true gradient, and do not change the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.inputs import AttackResult, AttackSettings, attack
from equilibria.inputs.attacks import adversarial_images, wilson_interval
from tests.inputs.digit_models import digit_classifier, digits

METHODS = ("fgsm", "pgd", "jiio")


def losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(images), labels, reduction="none")


def dense_model(gradient: str, seed: int = 0) -> eq.models.EquilibriumClassifier:
    """Return a small smooth model in float64, whose map contracts slowly."""
    torch.manual_seed(seed)
    W = 0.9 * torch.linalg.qr(torch.randn(6, 6))[0]
    layer = eq.EquilibriumLayer(
        eq.Input(eq.Dense(5, 6)) + eq.Quadratic(W),
        activation="softplus",
        solver=eq.Anderson(tolerance=1e-12, max_iterations=500),
        gradient=gradient,
    )
    return eq.models.EquilibriumClassifier(nn.Linear(4, 5), layer, nn.Linear(6, 3)).double()


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("method", METHODS)
def test_attack_stays_within_its_budget(method: Any, norm: Any) -> None:
    model = digit_classifier("opteq")
    images, labels = digits(30)
    original = images.clone()
    eps = 0.7 if norm == "l2" else 0.07
    result = attack(model, images, labels, norm=norm, eps=eps, method=method, steps=None)
    assert torch.equal(images, original)
    order = 2 if norm == "l2" else torch.inf
    limit = torch.tensor(eps)
    for change in (result.images - images, result.images.double() - images.double()):
        assert bool((change.flatten(1).norm(p=order, dim=1) <= limit).all())
    assert bool(((result.images >= 0) & (result.images <= 1)).all())
    assert float(result.distance.mean()) > 0.8 * eps
    assert torch.allclose(result.loss, losses(model, result.images, labels), rtol=1e-3, atol=1e-4)
    assert float(result.loss.mean()) > 2 * float(result.initial_loss.mean())
    assert result.robust_accuracy < result.accuracy
    assert result.evaluations > 1
    assert result.vjps >= 1
    assert (result.status is not None) == (method == "jiio")
    assert f"{result.robust_accuracy:.1%}" in result.summary()


@pytest.mark.parametrize("gradient", ["one_step", "phantom", "implicit"])
def test_attack_uses_the_true_gradient_for_every_gradient_rule(gradient: str) -> None:
    """One short step of PGD has the direction of the gradient by finite differences."""
    model = dense_model(gradient)
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(1)).double()
    label = losses(model, x.expand(3, 4), torch.arange(3)).argmin()[None]
    result = attack(
        model, x, label, eps=1e-3, step_size=1e-3, steps=1, clip=None, loss="cross_entropy"
    )
    h = 1e-5
    shifts = h * torch.eye(4).double()
    ahead, behind = (losses(model, x + s * shifts, label.expand(4)) for s in (1, -1))
    expected = (ahead - behind) / (2 * h)
    step = (result.images - x)[0]
    assert torch.allclose(step / step.norm(), expected / expected.norm(), atol=1e-6)
    leaf = x.clone().requires_grad_()
    (by_rule,) = torch.autograd.grad(F.cross_entropy(model(leaf), label), leaf)
    agrees = torch.allclose(by_rule[0] / by_rule.norm(), expected / expected.norm(), atol=1e-3)
    assert agrees == (gradient == "implicit")


@pytest.mark.parametrize("method", METHODS)
def test_attack_does_not_change_the_model(method: Any) -> None:
    torch.manual_seed(0)
    model = eq.create_model(
        "mdeq-small", in_channels=1, channels=(8, 8), dropout=0.2, gradient="one_step"
    )
    model.train()
    model.head.eval()
    frozen = next(model.stem.parameters()).requires_grad_(False)
    model.head.classifier.bias.grad = torch.ones(10)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    solver, gradient = model.layer.solver, model.layer.gradient
    state = torch.get_rng_state()
    with eq.solving(model, record="equilibria") as record:
        attack(model, torch.rand(3, 1, 8, 8), torch.arange(3), eps=0.5, method=method)
    torch.set_rng_state(state)
    assert (model.training, model.stem.training, model.head.training) == (True, True, False)
    assert model.layer.cell.training
    assert (model.layer.solver, model.layer.gradient) == (solver, gradient)
    assert not record.equilibria
    assert not record.solutions
    assert not frozen.requires_grad
    assert sum(not p.requires_grad for p in model.parameters()) == 1
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert [g.tolist() for g in grads] == [[1.0] * 10]
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())


def test_failed_attack_does_not_change_the_model() -> None:
    model = dense_model("one_step").train()
    original = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=r"labels must be below 3.*got 3"):
        attack(model, torch.rand(2, 4).double(), torch.tensor([0, 3]), eps=0.1)
    assert model.training
    assert not model.layer.gradient.exact
    assert [p.requires_grad for p in model.parameters()] == original


@pytest.mark.parametrize(
    "name",
    [
        "opteq-small",
        "deep-opteq-small",
        "popteq-small",
        "mopteq-small",
        "geq-small",
        "mdeq-small",
        "mondeq-small",
        "resnet-small",
        "dnn-small",
    ],
)
def test_every_model_family_can_be_attacked(name: str) -> None:
    torch.manual_seed(0)
    model = eq.create_model(name, in_channels=1, tolerance=1e-4) if "eq" in name else None
    model = model or eq.create_model(name, in_channels=1)
    images = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        labels = model.eval()(images).argmax(dim=1)
    result = attack(model, images, labels, eps=0.5, steps=4)
    assert bool((result.loss > result.initial_loss).all())
    assert torch.equal(result.initial_predictions, labels)


def test_jiio_is_as_strong_as_pgd() -> None:
    model = digit_classifier("opteq")
    images, labels = digits(30)
    pgd = attack(model, images, labels, eps=0.6, steps=20)
    jiio = attack(model, images, labels, eps=0.6, method="jiio")
    assert float(jiio.loss.mean()) > 0.97 * float(pgd.loss.mean())
    assert abs(jiio.robust_accuracy - pgd.robust_accuracy) <= 0.05


def test_result_is_the_worst_iterate() -> None:
    """With steps that are far too long, the result is not better for the model than the start."""
    model = digit_classifier("opteq")
    images, labels = digits(25)
    wild = attack(model, images, labels, eps=0.3, step_size=50.0, steps=5)
    single = attack(model, images, labels, eps=0.3, step_size=50.0, steps=1)
    assert bool((wild.loss >= single.loss - 1e-3).all() | (wild.success & ~single.success).any())
    assert bool((wild.success >= single.success).all())
    assert bool((wild.success | (wild.loss >= wild.initial_loss - 1e-3)).all())


def test_restarts_never_weaken_the_attack_and_depend_on_the_generator() -> None:
    model = digit_classifier("opteq")
    images, labels = digits(25)

    def run(**options: Any) -> AttackResult:
        generator = torch.Generator().manual_seed(3)
        return attack(model, images, labels, eps=0.5, steps=3, generator=generator, **options)

    single, three = run(), run(restarts=3)
    assert bool((three.success >= single.success).all())
    assert float(three.loss.mean()) > float(single.loss.mean())
    assert torch.equal(run(restarts=3).images, three.images)
    random_start = run(random_start=True)
    assert not torch.equal(random_start.images, single.images)
    two = run(method="jiio", restarts=2)
    assert bool((two.success >= run(method="jiio").success).all())


def test_warm_start_saves_evaluations_and_keeps_the_result() -> None:
    model = digit_classifier("opteq")
    images, labels = digits(25)
    cold = attack(model, images, labels, eps=0.5, steps=10)
    warm = attack(model, images, labels, eps=0.5, steps=10, warm_start=True)
    assert warm.evaluations < 0.85 * cold.evaluations
    assert float(warm.loss.mean()) == pytest.approx(float(cold.loss.mean()), rel=0.01)


def test_margin_loss_differs_from_cross_entropy() -> None:
    model = digit_classifier("opteq")
    images, labels = digits(25)
    plain, margin = (
        attack(model, images, labels, eps=0.4, steps=5, loss=loss)  # type: ignore[arg-type]
        for loss in ("cross_entropy", "margin")
    )
    assert not torch.equal(plain.images, margin.images)
    assert margin.robust_accuracy < margin.accuracy - 0.1


@pytest.mark.parametrize("method", METHODS)
def test_result_does_not_depend_on_the_batch(method: Any) -> None:
    model = digit_classifier("opteq")
    images, labels = digits(6)
    together = attack(model, images, labels, eps=0.5, method=method, tolerance=1e-6)
    alone = attack(model, images[2:3], labels[2:3], eps=0.5, method=method, tolerance=1e-6)
    assert torch.allclose(alone.images, together.images[2:3], atol=2e-3)
    assert float(alone.loss[0]) == pytest.approx(float(together.loss[2]), rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_attack_with_zero_eps_returns_the_images(method: Any) -> None:
    images, labels = digits(3)
    result = attack(digit_classifier("opteq"), images, labels, eps=0.0, method=method)
    assert torch.equal(result.images, images)
    assert float(result.distance.max()) == 0
    assert torch.equal(result.logits, result.initial_logits)


@pytest.mark.parametrize("method", METHODS)
def test_budget_is_in_pixels_before_normalization(method: Any) -> None:
    """For an attack, a model that normalizes is the inner model with scaled inputs."""
    options = {"in_channels": 1, "tolerance": 1e-6}
    inner = eq.create_model("opteq-small", **options).eval()
    images, labels = torch.rand(4, 1, 8, 8), torch.arange(4)
    wrapped = eq.create_model("opteq-small", **options, normalize=((0.3,), (0.2,))).eval()
    wrapped.load_state_dict(inner.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(wrapped(images), inner((images - 0.3) / 0.2))
    result = attack(wrapped, images, labels, eps=0.4, method=method)
    assert bool((result.distance <= torch.tensor(0.4)).all())
    assert bool((result.loss > result.initial_loss).all())
    wide = attack(
        inner,
        (images - 0.3) / 0.2,
        labels,
        eps=0.4 / 0.2,
        clip=(-0.3 / 0.2, 0.7 / 0.2),
        method=method,
    )
    assert torch.allclose(wide.loss, result.loss, rtol=0.02)


def test_jiio_names_the_missing_parts_of_a_model() -> None:
    images, labels = digits(2)
    with pytest.raises(TypeError, match="must have the attributes stem, layer"):
        attack(digit_classifier("resnet"), images, labels, eps=0.1, method="jiio")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attack_works_without_gradient_mode(mode: Any) -> None:
    images, labels = digits(5)
    model = digit_classifier("opteq")  # trained here, if no other test has done so
    with mode():
        result = attack(model, images * 1.0, labels, eps=0.5, steps=3)
    assert float(result.loss.mean()) > float(result.initial_loss.mean())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": -1.0}, "eps must not be"),
        ({"eps": float("nan")}, "eps must not be"),
        ({"eps": float("inf")}, "eps must not be negative or infinite"),
        ({"norm": "l1"}, "norm must be one of l2, linf"),
        ({"method": "pdg"}, "method must be one of pgd, jiio, fgsm"),
        ({"loss": "hinge"}, "loss must be one of"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"restarts": 0}, "restarts must be at least 1"),
        ({"step_size": 0.0}, "step_size must be positive"),
        ({"step_size": float("nan")}, "step_size must be positive"),
        ({"step_size": float("inf")}, "step_size must be positive and finite"),
        ({"tolerance": -1e-3}, "tolerance must be in"),
        ({"method": "fgsm", "steps": 5}, "fgsm takes a single step, got steps=5"),
        ({"method": "fgsm", "step_size": 0.1}, "has length eps, got step_size=0.1"),
        ({"method": "jiio", "warm_start": True}, "warm_start needs method='pgd'"),
        ({"joint_options": {"sweeps": 1}}, "joint_options needs method='jiio'"),
        ({"clip": (1.0, 0.0)}, "clip must be"),
        ({"clip": (0.0, float("nan"))}, "clip must be"),
        ({"clip": (0.0,)}, "clip must be"),
        ({"clip": (0.0, 0.5)}, "images must be within clip"),
        ({"images": torch.full((2, 1, 8, 8), torch.nan)}, "NaN"),
        ({"images": torch.full((2, 1, 8, 8), torch.inf)}, "NaN or Inf"),
        ({"images": torch.zeros(0, 1, 8, 8)}, "at least one"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "2 non-negative integers"),
        ({"labels": torch.zeros(2)}, "2 non-negative integers"),
        ({"labels": torch.tensor([0, -1])}, "2 non-negative integers"),
        ({"labels": torch.tensor([0, 10])}, "labels must be below 10"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Any], message: str) -> None:
    images, labels = digits(2)
    options = {"images": images, "labels": labels, "eps": 0.1, **change}
    with pytest.raises(ValueError, match=message):
        attack(digit_classifier("opteq"), options.pop("images"), options.pop("labels"), **options)


def test_segmentation_model_is_rejected() -> None:
    model = nn.Conv2d(1, 3, 1)
    with pytest.raises(ValueError, match="need a classifier"):
        attack(model, torch.rand(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64), eps=0.1)


def test_joint_options_reach_the_engine() -> None:
    def joint(sweeps: int) -> dict[str, Any]:
        # A high limit disables additional sweeps.
        return {"sweeps": sweeps, "engine": {"name": "auto", "lag_limit": 1e9}}

    model, (images, labels) = digit_classifier("opteq"), digits(5)
    two, three = (
        attack(model, images, labels, eps=0.3, method="jiio", steps=5, joint_options=joint(sweeps))
        for sweeps in (2, 3)
    )
    assert three.vjps == two.vjps + 5


def test_adversarial_images_are_those_of_attack() -> None:
    model, (images, labels) = digit_classifier("opteq"), digits(8)
    result = attack(model, images, labels, eps=0.3, steps=4)
    settings = AttackSettings(eps=0.3, steps=4)
    assert torch.equal(adversarial_images(model, images, labels, settings), result.images)


def test_adversarial_images_of_jiio_are_as_strong_as_those_of_attack() -> None:
    model, (images, labels) = digit_classifier("opteq"), digits(16)
    settings = AttackSettings(eps=0.6, method="jiio", steps=10)
    alone = adversarial_images(model, images, labels, settings)
    assert float(settings.distance(images, alone).max()) <= float(torch.tensor(0.6))
    reported = attack(model, images, labels, settings)
    with torch.no_grad():
        losses = F.cross_entropy(model.eval()(alone), labels, reduction="none")
    assert float(losses.mean()) >= 0.98 * float(reported.loss.mean())


def test_results_of_batches_can_be_joined() -> None:
    model, (images, labels) = digit_classifier("opteq"), digits(8)
    parts = [attack(model, images[i : i + 4], labels[i : i + 4], eps=0.3, steps=4) for i in (0, 4)]
    whole = AttackResult.join(parts)
    assert whole.images.shape == images.shape
    assert whole.robust_accuracy == sum(part.robust_accuracy for part in parts) / 2
    assert whole.evaluations == sum(part.evaluations for part in parts)
    with pytest.raises(ValueError, match="at least one batch"):
        AttackResult.join([])


def test_confident_model_has_a_gradient() -> None:
    """Logits whose 1 − p rounds to zero in single precision still have a gradient."""

    class Certain(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            rows = images.flatten(1)
            return torch.stack([30 * rows[:, 0], 29 * rows[:, 1] - 20], dim=1)

    result = attack(Certain(), torch.tensor([[[[1.0, 0.5]]]]), torch.tensor([0]), eps=0.9, steps=5)
    expected = torch.tensor([-30.0, 29.0]) / torch.tensor([-30.0, 29.0]).norm()
    change = (result.images - torch.tensor([[[[1.0, 0.5]]]]))[0, 0, 0]
    assert float(change[0]) < -0.5
    assert bool(result.success.all())
    assert torch.sign(change).tolist() == torch.sign(expected).tolist()


class Unsteady(nn.Module):
    """Predicts class 0, and NaN for dark images."""

    def __init__(self, darkest: float) -> None:
        super().__init__()
        self.darkest = darkest

    def forward(self, images: Tensor) -> Tensor:
        brightness = images.flatten(1).mean(dim=1)
        logits = torch.stack([9 * brightness, 0 * brightness], dim=1)
        return torch.where((brightness < self.darkest)[:, None], torch.nan, logits)


@pytest.mark.parametrize("method", ["fgsm", "pgd"])
def test_nan_logits_count_as_wrong(method: Any) -> None:
    """The argmax of NaN logits is class 0, which must not count as a right prediction."""
    images, labels = torch.full((3, 1, 2, 2), 0.5), torch.tensor([0, 0, 1])
    result = attack(Unsteady(darkest=1.0), images, labels, eps=0.2, norm="linf", method=method)
    assert (result.accuracy, result.robust_accuracy, result.unanswered) == (0, 0, 3)
    assert result.predictions.tolist() == [-1, -1, -1]
    assert result.figures()["unanswered"] == 3
    darkened = attack(Unsteady(darkest=0.4), images, labels, eps=0.2, norm="linf", method=method)
    assert darkened.initial_predictions.tolist() == [0, 0, 0]
    assert darkened.predictions.tolist()[:2] == [-1, -1]
    assert darkened.success.all()
    assert darkened.unanswered == 0


def test_wilson_interval_agrees_with_scipy() -> None:
    """The ends are exact if nothing or everything was hit."""
    stats = pytest.importorskip("scipy.stats")
    for hits, count in ((8, 10), (0, 50), (50, 50), (881, 1000)):
        expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
        assert wilson_interval(hits, count) == pytest.approx(
            (expected.low, expected.high), abs=1e-6
        )
    assert wilson_interval(0, 50)[0] == 0
    assert wilson_interval(50, 50)[1] == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 20, 100])
def test_total_step_length_crosses_the_ball(steps: int) -> None:
    settings = AttackSettings(eps=0.5, method="pgd", steps=steps)
    lengths = [settings.step_length(step) for step in range(steps)]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(lengths) >= 0.5 * (1 if steps == 1 else 2) - 1e-12
