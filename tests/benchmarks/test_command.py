"""The command lines: `python -m benchmarks` and `equilibria bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import equilibria
from benchmarks import command, peer, problems
from benchmarks.contest import Settings
from benchmarks.results import Duel, from_json
from benchmarks.rows import ROWS, Row
from benchmarks.rows import forward as forward_rows
from equilibria.cli import app
from equilibria.cli import bench as cli_bench

needs_peer = pytest.mark.skipif(
    not peer.is_installed(), reason="TorchDEQ is not installed: it comes with the extra 'bench'"
)


def tiny(settings: Settings) -> Iterator[Duel]:
    problem = problems.conv(channels=2, size=4, batch=2, norm=0.5)
    yield forward_rows.solve_duel(problem, 1e-3, settings, row="tiny", topic="forward")


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_list_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ROWS)


@needs_peer
def test_row_is_printed_and_written_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(ROWS, "tiny", Row("tiny", "for this test", tiny))
    file = tmp_path / "run.json"
    options = ["--quick", "--rows", "tiny", "--repeats", "1", "--threads", "1"]
    assert command.main([*options, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "÷ tuned" in printed
    assert "tiny" in printed
    run = json.loads(file.read_text())
    assert run["command"] == " ".join(["python -m benchmarks", *options])
    assert run["threads"] == 1
    assert run["versions"]["torchdeq"] == "0.1.0"
    assert str(tmp_path) not in file.read_text()
    (row,) = run["rows"]
    result = from_json(row)
    assert isinstance(result, Duel)
    for contestant in (result.ours, result.tuned, result.default):
        assert contestant is not None
        assert contestant.reached
        assert contestant.error is not None
        assert 0 < contestant.error <= 1.01e-3
        assert contestant.evaluations is not None
        assert contestant.evaluations > 1


def test_name_of_a_topic_selects_its_rows() -> None:
    names = [row.name for row in command._chosen_rows(["backward", "mixed", "backward-deep"])]
    assert names == ["backward-conv", "backward-hard-conv", "backward-deep", "mixed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "forwards"], "there is no row 'forwards'"),
        (["--repeats", "0"], "at least 1"),
        (["--speed"], "unrecognized arguments"),
    ],
)
def test_invalid_option_is_an_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_missing_peer_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer, "is_installed", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--quick", "--rows", "mixed"])
    assert "make bench" in capsys.readouterr().err


def test_peak_memory_is_the_increase_during_the_run() -> None:
    """Measured in a separate process, as in the benchmarks: freed memory is reused otherwise."""
    code = (
        "import torch\nfrom benchmarks.peak import peak_mebibytes\n"
        "print(peak_mebibytes(lambda: torch.ones(64, 2**18)))"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert float(run.stdout) == pytest.approx(64, abs=16), run.stderr


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_program_passes_its_options_to_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(given: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(given[2:])
        return subprocess.CompletedProcess(given, 3)

    monkeypatch.setattr(cli_bench, "checkout", lambda: Path("somewhere"))
    monkeypatch.setattr(subprocess, "run", run)
    result = invoke("--quick", "--rows", "mixed", "growth", "--help")
    assert result.exit_code == 3
    assert calls == [["--quick", "--rows", "mixed", "growth", "--help"]]


def test_program_runs_the_benchmarks_of_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = cli_bench.checkout()
    if root is None:
        pytest.skip("the package is not installed in place")
    # A folder of this name in the current folder must not be used.
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert invoke("--list").exit_code == 0
    assert "forward-dense" in capfd.readouterr().out


def test_missing_checkout_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages" / "equilibria" / "__init__.py"
    monkeypatch.setattr(equilibria, "__file__", str(installed))
    result = invoke("--quick")
    assert result.exit_code == 2
    assert "make bench" in result.output
    assert sys.executable not in result.output
