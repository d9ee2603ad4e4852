"""The study on digits, shortened: models, seeds and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.data import load_digits
from equilibria.papers.studies import digits
from equilibria.papers.studies.family import FAMILY, Contestant, contestants, unavailable
from equilibria.papers.studies.fitting import fit, study_settings
from equilibria.papers.studies.study import Work
from equilibria.training import TrainingSettings

BUILDABLE = [contestant for contestant in FAMILY if contestant.missing is None]


def test_names_select_models() -> None:
    assert len({contestant.name for contestant in FAMILY}) == len(FAMILY)
    assert contestants() == BUILDABLE
    assert len(unavailable()) == len(FAMILY) - len(BUILDABLE)
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


def test_study_settings_apply_to_every_layer() -> None:
    model = eq.create_model("opteq-small", in_channels=1)
    with study_settings(model, 1e-3):
        assert model.layer.solver.tolerance == 1e-3
        assert isinstance(model.layer.gradient, eq.OneStep)


@pytest.mark.parametrize("contestant", BUILDABLE, ids=lambda contestant: contestant.name)
def test_every_model_of_the_family_learns(contestant: Contestant) -> None:
    """Eight steps on one batch give an accuracy above chance."""
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


def test_same_seed_gives_the_same_training() -> None:
    (contestant,) = contestants(["dnn-small"])
    training = load_digits().train.subset(torch.arange(300))
    settings = TrainingSettings(epochs=1, batch_size=32, learning_rate=2e-2, seed=3)
    first, second = (fit(contestant, training, training, settings) for _ in range(2))
    assert first.correct == second.correct
    assert first.training_accuracy == second.training_accuracy


def test_study_of_digits_writes_a_row_per_model(tmp_path: Path) -> None:
    given = ["models=[dnn-small, opteq-small]", "epochs=1", "budget=1e9", "validate=true"]
    result = digits.STUDY.carry_out(digits.STUDY.configure(given), Work(tmp_path))
    assert "1010 digits to train on, 337 held-out training images" in result.text
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in result.text.splitlines()
        if line.startswith("| ")
    ]
    assert rows[1][:2] == ["Plain network", "11,610"]
    assert rows[2][:2] == ["OptEq", "23,882"]
    assert rows[2][-2:] == ["100.0%", "no"]
    assert json.loads((tmp_path / "digits.json").read_text())["runs"][1]["parameters"] == 23882
    with pytest.raises(ValueError, match="opteq-small"):
        digits.STUDY.carry_out(digits.STUDY.configure(["models=[optek-small]"]), Work(tmp_path))
