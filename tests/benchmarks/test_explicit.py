"""The comparison with explicit networks: equal sizes, and the parts of a step."""

from __future__ import annotations

import pytest
import torch

from benchmarks.explicit import SIZES, main, residual_network, stages
from equilibria.equilibrium import Solving
from equilibria.models.mopteq.models import mopteq
from equilibria.models.registry import parameter_count


@pytest.mark.parametrize("name", list(SIZES))
def test_residual_network_has_the_size_of_the_model(name: str) -> None:
    parameters = parameter_count(mopteq(**SIZES[name]))
    assert parameter_count(residual_network(parameters)) == pytest.approx(parameters, rel=0.02)


def test_parts_of_a_step_are_timed() -> None:
    solving = Solving(gradient="one_step", tolerance=1e-2)  # type: ignore[arg-type]
    model = mopteq(channels=4, widths=(3,), scales=(1,), solving=solving)
    parts = stages(model, torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    assert {"solve", "backward pass"} <= set(parts)
    assert all(p.grad is not None for p in model.parameters())


def test_command_prints_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--batch", "2", "--repeats", "1", "--size", "4"]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "ratio" in printed
    assert "time of the parts" in printed
