"""What the full settings are beside those of the papers."""

from __future__ import annotations

import pytest

from equilibria.papers import compared_settings, find_table, list_tables
from equilibria.papers.settings import SILENT, UNREAD
from tests.program import invoke


@pytest.mark.parametrize("table_id", [table.id for table in list_tables()])
def test_where_ours_is_not_the_papers_there_is_a_reason(table_id: str) -> None:
    lines = compared_settings(find_table(table_id))
    assert lines
    for line in lines:
        assert line.agrees is not False or line.why, (line.name, line.paper, line.ours, line.rows)
        assert line.agrees is None or line.paper not in (SILENT, UNREAD)


@pytest.mark.parametrize(
    ("table_id", "row", "name", "ours"),
    [
        ("jiio-t4a", "Unsupervised, JIIO-MDEQ-100", "task.options.iterations", "100"),
        ("jiio-t4a", "Supervised, JIIO-MDEQ-100", "training.jacobian_weight", "2"),
        ("jiio-t5", "CIFAR, trained on JIIO", "task.options.steps", "80"),
        ("jiio-t7", "JIIO: 100 iters, as in the paper", "training.batch_size", "80"),
        ("jiio-f6", "JIIO-MDEQ", "model.options.latent_dim", "384"),
        ("opteq-t3", "no Reg, α = 0.4", "training.decay", "0.5"),
        ("opteq-t5", "no Reg, α = 0.4", "training.decay", "0.7"),
        ("opteq-t5", "HSIC†, α = 0.01", "model.options.z0", "input"),
        ("mopteqs-t2b", "MOptEqs (0.48M)", "training.batch_size", "32"),
    ],
)
def test_settings_that_carry_a_table(table_id: str, row: str, name: str, ours: str) -> None:
    found = {
        line.ours
        for line in compared_settings(find_table(table_id))
        if line.name == name and any(label.startswith(row.split(" (")[0]) for label in line.rows)
    }
    assert ours in found


def test_the_command_prints_paper_ours_and_why() -> None:
    result = invoke("reproduce", "jiio-f6", "--settings")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for expected in ("Paper", "Ours", "Why", "25,000 steps", "20 epochs of 1,250 steps", "silent"):
        assert expected in words
