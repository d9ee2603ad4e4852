"""Attacks: within their budget, by the true gradient, and without a trace in the model."""

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
    """A small smooth equilibrium in float64, far from a map that contracts quickly."""
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
def test_an_attack_stays_within_its_budget(method: Any, norm: Any) -> None:
    model = digit_classifier("opteq")
    images, labels = digits(30)
    before = images.clone()
    eps = 0.7 if norm == "l2" else 0.07
    found = attack(model, images, labels, norm=norm, eps=eps, method=method, steps=None)
    assert torch.equal(images, before)
    order = 2 if norm == "l2" else torch.inf
    limit = torch.tensor(eps)
    for change in (found.images - images, found.images.double() - images.double()):
        assert bool((change.flatten(1).norm(p=order, dim=1) <= limit).all())
    assert bool(((found.images >= 0) & (found.images <= 1)).all())
    assert float(found.distance.mean()) > 0.8 * eps
    assert torch.allclose(found.loss, losses(model, found.images, labels), rtol=1e-3, atol=1e-4)
    assert float(found.loss.mean()) > 2 * float(found.initial_loss.mean())
    assert found.robust_accuracy < found.accuracy
    assert found.evaluations > 1
    assert found.vjps >= 1
    assert (found.status is not None) == (method == "jiio")
    assert f"{found.robust_accuracy:.1%}" in found.summary()


@pytest.mark.parametrize("gradient", ["one_step", "phantom", "implicit"])
def test_the_step_follows_the_true_gradient_whatever_rule_trains_the_model(gradient: str) -> None:
    """One short step of PGD is along the gradient: that of finite differences, not the rule's."""
    model = dense_model(gradient)
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(1)).double()
    label = losses(model, x.expand(3, 4), torch.arange(3)).argmin()[None]
    found = attack(
        model, x, label, eps=1e-3, step_size=1e-3, steps=1, clip=None, loss="cross_entropy"
    )
    h = 1e-5
    shifts = h * torch.eye(4).double()
    ahead, behind = (losses(model, x + s * shifts, label.expand(4)) for s in (1, -1))
    expected = (ahead - behind) / (2 * h)
    step = (found.images - x)[0]
    assert torch.allclose(step / step.norm(), expected / expected.norm(), atol=1e-6)
    leaf = x.clone().requires_grad_()
    (own,) = torch.autograd.grad(F.cross_entropy(model(leaf), label), leaf)
    agrees = torch.allclose(own[0] / own.norm(), expected / expected.norm(), atol=1e-3)
    assert agrees == (gradient == "implicit")


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was(method: Any) -> None:
    torch.manual_seed(0)
    model = eq.create_model(
        "mdeq-small", in_channels=1, channels=(8, 8), dropout=0.2, gradient="one_step"
    )
    model.train()
    model.head.eval()
    frozen = next(model.stem.parameters()).requires_grad_(False)
    model.head.classifier.bias.grad = torch.ones(10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
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
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    model = dense_model("one_step").train()
    wanted = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match="none of the model's 3 classes"):
        attack(model, torch.rand(2, 4).double(), torch.tensor([0, 3]), eps=0.1)
    assert model.training
    assert not model.layer.gradient.exact
    assert [p.requires_grad for p in model.parameters()] == wanted


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
def test_every_family_can_be_attacked(name: str) -> None:
    torch.manual_seed(0)
    model = eq.create_model(name, in_channels=1, tolerance=1e-4) if "eq" in name else None
    model = model or eq.create_model(name, in_channels=1)
    images = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        labels = model.eval()(images).argmax(dim=1)
    found = attack(model, images, labels, eps=0.5, steps=4)
    assert bool((found.loss > found.initial_loss).all())
    assert torch.equal(found.initial_predictions, labels)


def test_jiio_is_as_strong_as_pgd() -> None:
    model = digit_classifier("opteq")
    images, labels = digits(30)
    pgd = attack(model, images, labels, eps=0.6, steps=20)
    jiio = attack(model, images, labels, eps=0.6, method="jiio")
    assert float(jiio.loss.mean()) > 0.97 * float(pgd.loss.mean())
    assert abs(jiio.robust_accuracy - pgd.robust_accuracy) <= 0.05


def test_of_all_iterates_the_worst_counts() -> None:
    """Steps far too long jump about: the result is still no better for the model than a start."""
    model = digit_classifier("opteq")
    images, labels = digits(25)
    wild = attack(model, images, labels, eps=0.3, step_size=50.0, steps=5)
    one = attack(model, images, labels, eps=0.3, step_size=50.0, steps=1)
    assert bool((wild.loss >= one.loss - 1e-3).all() | (wild.success & ~one.success).any())
    assert bool((wild.success >= one.success).all())
    assert bool((wild.success | (wild.loss >= wild.initial_loss - 1e-3)).all())


def test_restarts_only_help_and_chance_is_the_generators() -> None:
    model = digit_classifier("opteq")
    images, labels = digits(25)

    def run(**options: Any) -> AttackResult:
        chance = torch.Generator().manual_seed(3)
        return attack(model, images, labels, eps=0.5, steps=3, generator=chance, **options)

    once, thrice = run(), run(restarts=3)
    assert bool((thrice.success >= once.success).all())
    assert float(thrice.loss.mean()) > float(once.loss.mean())
    assert torch.equal(run(restarts=3).images, thrice.images)
    start = run(random_start=True)
    assert not torch.equal(start.images, once.images)
    several = run(method="jiio", restarts=2)
    assert bool((several.success >= run(method="jiio").success).all())


def test_warm_solves_are_shorter_and_lead_to_the_same_place() -> None:
    model = digit_classifier("opteq")
    images, labels = digits(25)
    cold = attack(model, images, labels, eps=0.5, steps=10)
    warm = attack(model, images, labels, eps=0.5, steps=10, warm_start=True)
    assert warm.evaluations < 0.85 * cold.evaluations
    assert float(warm.loss.mean()) == pytest.approx(float(cold.loss.mean()), rel=0.01)


def test_the_margin_is_another_loss() -> None:
    model = digit_classifier("opteq")
    images, labels = digits(25)
    plain, margin = (
        attack(model, images, labels, eps=0.4, steps=5, loss=loss)  # type: ignore[arg-type]
        for loss in ("cross_entropy", "margin")
    )
    assert not torch.equal(plain.images, margin.images)
    assert margin.robust_accuracy < margin.accuracy - 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_sample_does_not_depend_on_its_batch(method: Any) -> None:
    model = digit_classifier("opteq")
    images, labels = digits(6)
    together = attack(model, images, labels, eps=0.5, method=method, tolerance=1e-6)
    alone = attack(model, images[2:3], labels[2:3], eps=0.5, method=method, tolerance=1e-6)
    assert torch.allclose(alone.images, together.images[2:3], atol=2e-3)
    assert float(alone.loss[0]) == pytest.approx(float(together.loss[2]), rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_an_attack_of_length_zero_changes_nothing(method: Any) -> None:
    images, labels = digits(3)
    found = attack(digit_classifier("opteq"), images, labels, eps=0.0, method=method)
    assert torch.equal(found.images, images)
    assert float(found.distance.max()) == 0
    assert torch.equal(found.logits, found.initial_logits)


@pytest.mark.parametrize("method", METHODS)
def test_a_normalization_belongs_to_the_model(method: Any) -> None:
    """The budget is that of the pixels: a model that normalizes is a scaled one to an attack."""
    options = {"in_channels": 1, "tolerance": 1e-6}
    inner = eq.create_model("opteq-small", **options).eval()
    images, labels = torch.rand(4, 1, 8, 8), torch.arange(4)
    wrapped = eq.create_model("opteq-small", **options, normalize=((0.3,), (0.2,))).eval()
    wrapped.load_state_dict(inner.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(wrapped(images), inner((images - 0.3) / 0.2))
    found = attack(wrapped, images, labels, eps=0.4, method=method)
    assert bool((found.distance <= torch.tensor(0.4)).all())
    assert bool((found.loss > found.initial_loss).all())
    wide = attack(
        inner,
        (images - 0.3) / 0.2,
        labels,
        eps=0.4 / 0.2,
        clip=(-0.3 / 0.2, 0.7 / 0.2),
        method=method,
    )
    assert torch.allclose(wide.loss, found.loss, rtol=0.02)


def test_jiio_says_which_models_it_takes() -> None:
    images, labels = digits(2)
    with pytest.raises(TypeError, match="needs a stem, a layer"):
        attack(digit_classifier("resnet"), images, labels, eps=0.1, method="jiio")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_where_gradients_are_off(mode: Any) -> None:
    images, labels = digits(5)
    model = digit_classifier("opteq")  # trained here, if no other test has done so
    with mode():
        found = attack(model, images * 1.0, labels, eps=0.5, steps=3)
    assert float(found.loss.mean()) > float(found.initial_loss.mean())


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
        ({"method": "fgsm", "steps": 5}, "fgsm is one step"),
        ({"method": "fgsm", "step_size": 0.1}, "leave out step_size"),
        ({"method": "jiio", "warm_start": True}, "warm_start is for method='pgd'"),
        ({"joint_options": {"sweeps": 1}}, "joint_options is for method='jiio'"),
        ({"clip": (1.0, 0.0)}, "clip must be"),
        ({"clip": (0.0, float("nan"))}, "clip must be"),
        ({"clip": (0.0,)}, "clip must be"),
        ({"clip": (0.0, 0.5)}, "outside the range"),
        ({"images": torch.full((2, 1, 8, 8), torch.nan)}, "NaN"),
        ({"images": torch.full((2, 1, 8, 8), torch.inf)}, "NaN or Inf"),
        ({"images": torch.zeros(0, 1, 8, 8)}, "at least one"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "2 whole numbers"),
        ({"labels": torch.zeros(2)}, "2 whole numbers"),
        ({"labels": torch.tensor([0, -1])}, "2 whole numbers"),
        ({"labels": torch.tensor([0, 10])}, "none of the model's 10 classes"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    images, labels = digits(2)
    options = {"images": images, "labels": labels, "eps": 0.1, **change}
    with pytest.raises(ValueError, match=message):
        attack(digit_classifier("opteq"), options.pop("images"), options.pop("labels"), **options)


def test_a_segmenter_is_no_classifier() -> None:
    model = nn.Conv2d(1, 3, 1)
    with pytest.raises(ValueError, match="needs a classifier"):
        attack(model, torch.rand(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64), eps=0.1)


def test_joint_options_reach_the_engine() -> None:
    def joint(sweeps: int) -> dict[str, Any]:
        """Without those that a lag asks for."""
        return {"sweeps": sweeps, "engine": {"name": "auto", "lag_limit": 1e9}}

    model, (images, labels) = digit_classifier("opteq"), digits(5)
    two, three = (
        attack(model, images, labels, eps=0.3, method="jiio", steps=5, joint_options=joint(sweeps))
        for sweeps in (2, 3)
    )
    assert three.vjps == two.vjps + 5


def test_the_images_alone() -> None:
    model, (images, labels) = digit_classifier("opteq"), digits(8)
    found = attack(model, images, labels, eps=0.3, steps=4)
    settings = AttackSettings(eps=0.3, steps=4)
    assert torch.equal(adversarial_images(model, images, labels, settings), found.images)


def test_the_images_of_a_search_alone_are_as_strong_as_those_it_reports_on() -> None:
    """Training takes them without the solves that only tell how good they are."""
    model, (images, labels) = digit_classifier("opteq"), digits(16)
    settings = AttackSettings(eps=0.6, method="jiio", steps=10)
    alone = adversarial_images(model, images, labels, settings)
    assert float(settings.distance(images, alone).max()) <= float(torch.tensor(0.6))
    reported = attack(model, images, labels, settings)
    with torch.no_grad():
        losses = F.cross_entropy(model.eval()(alone), labels, reduction="none")
    assert float(losses.mean()) >= 0.98 * float(reported.loss.mean())


def test_batches_join_to_the_whole() -> None:
    model, (images, labels) = digit_classifier("opteq"), digits(8)
    parts = [attack(model, images[i : i + 4], labels[i : i + 4], eps=0.3, steps=4) for i in (0, 4)]
    whole = AttackResult.join(parts)
    assert whole.images.shape == images.shape
    assert whole.robust_accuracy == sum(part.robust_accuracy for part in parts) / 2
    assert whole.evaluations == sum(part.evaluations for part in parts)
    with pytest.raises(ValueError, match="nothing to join"):
        AttackResult.join([])


def test_a_model_that_is_certain_is_attacked_all_the_same() -> None:
    """Logits so far apart that 1 − p is zero in single precision still have a gradient."""

    class Certain(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            rows = images.flatten(1)
            return torch.stack([30 * rows[:, 0], 29 * rows[:, 1] - 20], dim=1)

    found = attack(Certain(), torch.tensor([[[[1.0, 0.5]]]]), torch.tensor([0]), eps=0.9, steps=5)
    expected = torch.tensor([-30.0, 29.0]) / torch.tensor([-30.0, 29.0]).norm()
    change = (found.images - torch.tensor([[[[1.0, 0.5]]]]))[0, 0, 0]
    assert float(change[0]) < -0.5
    assert bool(found.success.all())
    assert torch.sign(change).tolist() == torch.sign(expected).tolist()


class Unsteady(nn.Module):
    """Sure of class 0, and NaN where an image is dark."""

    def __init__(self, darkest: float) -> None:
        super().__init__()
        self.darkest = darkest

    def forward(self, images: Tensor) -> Tensor:
        brightness = images.flatten(1).mean(dim=1)
        logits = torch.stack([9 * brightness, 0 * brightness], dim=1)
        return torch.where((brightness < self.darkest)[:, None], torch.nan, logits)


@pytest.mark.parametrize("method", ["fgsm", "pgd"])
def test_no_answer_is_a_wrong_one(method: Any) -> None:
    """The largest of NaN is class 0: a model of NaN was taken for right on all images of it."""
    images, labels = torch.full((3, 1, 2, 2), 0.5), torch.tensor([0, 0, 1])
    found = attack(Unsteady(darkest=1.0), images, labels, eps=0.2, norm="linf", method=method)
    assert (found.accuracy, found.robust_accuracy, found.unanswered) == (0, 0, 3)
    assert found.predictions.tolist() == [-1, -1, -1]
    assert found.figures()["unanswered"] == 3
    turned = attack(Unsteady(darkest=0.4), images, labels, eps=0.2, norm="linf", method=method)
    assert turned.initial_predictions.tolist() == [0, 0, 0]
    assert turned.predictions.tolist()[:2] == [-1, -1]
    assert turned.success.all()
    assert turned.unanswered == 0


def test_wilsons_interval() -> None:
    """Beside that of scipy, and exact where nothing or all was hit."""
    stats = pytest.importorskip("scipy.stats")
    for hits, count in ((8, 10), (0, 50), (50, 50), (881, 1000)):
        expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
        assert wilson_interval(hits, count) == pytest.approx(
            (expected.low, expected.high), abs=1e-6
        )
    assert wilson_interval(0, 50)[0] == 0
    assert wilson_interval(50, 50)[1] == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 20, 100])
def test_steps_together_cross_the_ball_however_few_they_are(steps: int) -> None:
    settings = AttackSettings(eps=0.5, method="pgd", steps=steps)
    lengths = [settings.step_length(step) for step in range(steps)]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(lengths) >= 0.5 * (1 if steps == 1 else 2) - 1e-12
