"""The task of puzzles."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.tasks.puzzle import Puzzle, area_under_curve
from tests.program import invoke


def test_a_sample_is_correct_if_all_its_cells_are() -> None:
    logits = torch.zeros(3, 2, 2, 2)
    logits[:, 1] = 1.0
    targets = torch.ones(3, 2, 2, dtype=torch.long)
    targets[1, 0, 0] = 0
    logits[2] = torch.nan
    outcome = Puzzle().training_step(nn.Identity(), logits, targets)
    assert outcome.values["correct"].tolist() == [True, False, False]
    assert outcome.values["cells"].tolist() == [1.0, 0.75, 0.0]
    expected = F.cross_entropy(logits[:2], targets[:2], reduction="none").mean(dim=(1, 2))
    torch.testing.assert_close(outcome.values["loss"][:2], expected)
    with pytest.raises(ValueError, match="one label per cell"):
        Puzzle().training_step(nn.Identity(), logits, targets[:, :1])


def test_the_area_under_the_curve_is_the_share_of_ordered_pairs() -> None:
    torch.manual_seed(0)
    scores, positive = torch.randint(5, (40,)).double(), torch.rand(40) < 0.4
    pairs = scores[positive][:, None] - scores[~positive]
    expected = (pairs > 0).double().mean() + (pairs == 0).double().mean() / 2
    area = area_under_curve(scores, positive)
    assert area is not None
    assert math.isclose(area, float(expected))
    assert area_under_curve(scores, torch.ones(40, dtype=torch.bool)) is None


class Bistable(nn.Module):
    """Logits (−z, z) at a fixed point of z = tanh(3z + x), which is positive or negative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = eq.EquilibriumLayer(
            lambda z, x: torch.tanh(3 * z + x), solver="picard", tolerance=1e-6
        )

    @property
    def last_solution(self) -> eq.Solution | None:
        return self.layer.last_solution

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return torch.stack([-z, z], dim=1)


def test_figures_of_trust() -> None:
    x = torch.tensor([[3.0], [3.0], [-3.0], [0.01]])
    targets = torch.tensor([[1], [0], [0], [1]])
    several = Puzzle(starts=6, pick="vote").evaluate(Bistable(), [(x, targets)])
    assert several.figures["accuracy_converged"] == several.accuracy
    agreement = several.values["agreement"]
    assert agreement[:3].tolist() == [1.0, 1.0, 1.0], "unique fixed points"
    assert agreement[3] < 1
    independence = several.figures["path_independence"]
    assert independence is not None
    assert math.isclose(independence, float(agreement.mean()))
    assert several.figures["agreement_auc"] is not None
    one = Puzzle().evaluate(Bistable(), [(x, targets)])
    assert "path_independence" not in one.figures
    assert one.figures["cell_accuracy"] == one.accuracy == 0.75


def test_a_run_is_evaluated_on_puzzles_of_another_size(tmp_path: Path) -> None:
    changes = ["training.epochs=1", "data.options.count=128", "model.options.channels=4"]
    changes += ["data.options.test_count=4", "data.options.validation_count=2"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        changes.append("model.options.max_iterations=5")
        eq.train("maze-reasoner", *changes, output=tmp_path / "run", progress=False)
        model = eq.load(tmp_path / "run")
        with eq.solving(model, max_iterations=3, starts=2, record=True) as record:
            result = eq.evaluate(model, "mazes", task=Puzzle(), test_size=15, count=0, test_count=6)
        pixels = eq.data.load_dataset("mazes", count=1, size=15, test_count=0).train.images[0]
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "maze.png")
        files = ("predict", tmp_path / "run", tmp_path / "maze.png", "--output", tmp_path / "drawn")
        drawn = invoke(*files, "--json")
        (path,) = eq.predict(tmp_path / "run", tmp_path / "maze.png")
    assert drawn.exit_code == 0, drawn.output
    assert path.classes.shape == (15, 15), "the file is not scaled to the size in training"
    assert result.samples == 6
    assert int(record.solutions[0].iterations.max()) == 3
    assert "path_independence" in result.figures
