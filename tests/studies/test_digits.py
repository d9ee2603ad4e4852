"""The studies on digits, shortened: who takes part, what is paired, what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.data import load_digits
from equilibria.training import TrainingSettings
from studies import digits, noisy_digits
from studies._family import FAMILY, Contestant, contestants, left_out
from studies._paired import Difference, deviation
from studies._training import fit, studied

BUILDABLE = [contestant for contestant in FAMILY if contestant.missing is None]


def test_names_choose_models() -> None:
    assert len({contestant.name for contestant in FAMILY}) == len(FAMILY)
    assert contestants() == BUILDABLE
    assert len(left_out()) == len(FAMILY) - len(BUILDABLE)
    perturbed, foreign = contestants(["mopteq-small+pe", "opteq-small"])
    model = perturbed.build(in_channels=1, num_classes=10)
    assert model.layer.cell.refresh_until > 0
    assert model.eval().layer.cell.refresh_until == 0
    assert model.head.pool.output_size == 4
    assert foreign.title == "OptEq"
    assert contestants(["deep-opteq-162k"]) == [Contestant(*["deep-opteq-162k"] * 3)]
    with pytest.raises(ValueError, match="opteq-small"):
        contestants(["optek-small"])
    unregistered = Contestant("none", "None", "no-such-model")
    assert unregistered.missing == "not registered"


def test_solves_of_every_layer_are_set() -> None:
    model = eq.create_model("opteq-small", in_channels=1)
    with studied(model, 1e-3):
        assert model.layer.solver.tolerance == 1e-3
        assert isinstance(model.layer.gradient, eq.OneStep)


@pytest.mark.parametrize("contestant", BUILDABLE, ids=lambda contestant: contestant.name)
def test_every_member_of_the_family_learns(contestant: Contestant) -> None:
    """Eight steps on one batch, which is then known better than by chance."""
    batch = load_digits().train.subset(torch.arange(64))
    settings = TrainingSettings(epochs=8, batch_size=64, learning_rate=2e-2)
    outcome = fit(contestant, batch, batch, settings)
    assert outcome.samples == 64
    assert outcome.training_accuracy > 0.3
    assert outcome.seconds > 0
    if isinstance(contestant.build(in_channels=1, num_classes=10), eq.models.EquilibriumClassifier):
        assert outcome.share_converged == 1
        assert outcome.mean_iterations is not None
    else:
        assert outcome.share_converged is None


def test_the_same_seed_gives_every_model_the_same_run() -> None:
    (contestant,) = contestants(["dnn-small"])
    training, test = noisy_digits.draw(load_digits(), 3)
    settings = TrainingSettings(epochs=1, batch_size=32, learning_rate=2e-2, seed=3)
    first, second = (fit(contestant, training, test, settings) for _ in range(2))
    assert first.correct == second.correct
    assert first.training_accuracy == second.training_accuracy


def test_a_seed_draws_the_images() -> None:
    data = load_digits()
    training, test = noisy_digits.draw(data, 0)
    again, test_again = noisy_digits.draw(data, 0)
    assert torch.equal(training.images, again.images)
    assert torch.equal(test.images, test_again.images)
    assert len(training) == 300
    assert torch.equal(test.labels, data.test.labels)
    other, _ = noisy_digits.draw(data, 1)
    assert not torch.equal(training.labels, other.labels)
    # The corners are black in nearly every digit: what is there is the noise.
    corner = test.images[:, 0, 0, 0]
    assert corner.std().item() == pytest.approx(0.35, abs=0.05)
    assert corner.mean().item() == pytest.approx(0, abs=0.06)


def test_validation_never_sees_a_held_out_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy_digits, "CORRUPTION", lambda images, labels, _: (images, labels))
    data = load_digits()
    training, validation = noisy_digits.draw(data, 100, validate=True)

    def images_of(split: object) -> list[bytes]:
        return sorted(image.numpy().tobytes() for image in split.images)

    assert sorted(images_of(training) + images_of(validation)) == images_of(data.train)


def test_paired_differences() -> None:
    from scipy.stats import ttest_rel

    model = {0: 0.91, 1: 0.88, 2: 0.93, 3: 0.9}
    reference = {3: 0.9, 2: 0.9, 1: 0.89, 0: 0.9, 9: 0.1}
    difference = Difference.between(model, reference)
    assert difference.values == pytest.approx((0.01, -0.01, 0.03, 0.0))
    assert difference.mean == pytest.approx(0.0075)
    assert difference.signs == (2, 1, 1)
    assert difference.verdict == "undecided"
    expected = ttest_rel(list(model.values()), [reference[seed] for seed in model])
    interval = expected.confidence_interval(0.95)
    assert difference.interval == pytest.approx((interval.low, interval.high))
    assert Difference((0.02, 0.03, 0.025)).verdict == "above"
    assert Difference((-0.02, -0.03, -0.025)).verdict == "below"
    assert Difference((0.02,)).interval == (-math.inf, math.inf)
    assert math.isnan(deviation([1.0]))


def test_the_digits_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--models", "dnn-small", "opteq-small"]
    assert digits.main([*models, "--epochs", "1", "--budget", "1e9", "--validate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1010 digits to train on, 337 training images left out")
    assert lines[2].split()[:3] == ["Plain", "network", "11,610"]
    assert lines[3].split()[:2] == ["OptEq", "23,882"]
    assert lines[3].split()[-2:] == ["100.0%", "no"]
    with pytest.raises(SystemExit):
        digits.main(["--models", "optek-small"])


def test_the_noisy_study_writes_its_results_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    command = ["--output", str(folder), "--models", "opteq-small", "dnn-small", "--epochs", "1"]
    assert noisy_digits.main([*command, "--seeds", "0"]) == 0
    assert noisy_digits.main([*command, "--seeds", "0", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("seed 0, OptEq:") == 1
    assert printed.count("seed 1, OptEq:") == 1
    content = json.loads((folder / "noisy-digits.json").read_text(encoding="utf-8"))
    assert content["setting"]["noise"] == 0.35
    assert [(run["name"], run["seed"]) for run in content["runs"]] == [
        (name, seed) for seed in (0, 1) for name in ("opteq-small", "dnn-small")
    ]
    correct = {(run["name"], run["seed"]): run["correct"] for run in content["runs"]}
    differences = [correct["dnn-small", s] - correct["opteq-small", s] for s in (0, 1)]
    text = (folder / "noisy-digits.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| Plain network"))
    assert f"{100 * sum(differences) / 2 / 450:+.2f} ±" in row
    assert (folder / "noisy-digits.png").read_bytes().startswith(b"\x89PNG")

    def untrained(*_: object, **__: object) -> None:
        raise AssertionError("a recorded run was repeated")

    monkeypatch.setattr(noisy_digits, "fit", untrained)
    assert noisy_digits.main([*command, "--seeds", "1", "0"]) == 0
    with pytest.raises(SystemExit):
        noisy_digits.main([*command, "--learning-rate", "0.5"])
    assert "another setting" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        noisy_digits.main([*command, "--reference", "geq-small"])
    assert "not among the models" in capsys.readouterr().err
