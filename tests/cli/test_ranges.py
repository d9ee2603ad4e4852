"""Numbers outside their natural range are errors of all commands, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.program import invoke

GRAY = "must be in (0, 1] (a fraction of the pixel range), got 25. Did you mean 25/255 = 0.098?"
RESIDUAL = "must be in (0, 1) (a relative residual), got 5"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "small.png"
    Image.new("L", (28, 28), 128).save(path)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["restore", "{picture}", "--noise", "25"], f"noise {GRAY}"),
        (["restore", "{picture}", "--noise", "-1"], "noise must be in (0, 1]"),
        (["restore", "{picture}", "--task", "deblur", "--blur", "-1"], "blur must be positive"),
        (
            ["restore", "{picture}", "--task", "superres", "--factor", "1"],
            "factor must be at least",
        ),
        (
            ["restore", "{picture}", "--task", "superres", "--factor", "100000"],
            "factor must be at most 16, got 100000",
        ),
        (
            ["restore-run", "mnist-generator", "{picture}", "--task", "denoise", "--noise", "25"],
            f"noise {GRAY}",
        ),
        (
            ["attack", "digits-opteq", "{picture}", "--norm", "linf", "--eps", "25"],
            "eps must be in [0, 1] (a fraction of the pixel range), got 25. Did you mean 25/255",
        ),
        (
            ["attack", "digits-opteq", "{picture}", "--eps", "25", "--method", "all"],
            "eps must be at most 8, the largest distance (l2) between two images of shape 1×8×8",
        ),
        (["attack", "digits-opteq", "--eps", "25"], "eps must be at most 8"),
        (["attack", "digits-opteq", "--eps", "25", "--curve"], "eps must be at most 8"),
        (["certify", "digits-opteq", "{picture}", "--tolerance", "5"], f"tolerance {RESIDUAL}"),
        (["export", "digits-opteq", "--tolerance", "5"], f"tolerance {RESIDUAL}"),
        (["tune", "opteq-small", "--tolerances", "1e-2,5"], f"tolerance {RESIDUAL}"),
        (["train", "digits-opteq", "training.tolerance=5"], f"tolerance {RESIDUAL}"),
        (["train", "digits-opteq", "model.options.tolerance=5"], f"tolerance {RESIDUAL}"),
        (
            ["train", "digits-opteq", "model.options.init_scale=-1"],
            "init_scale must not be",
        ),
        (
            [
                "train",
                "digits-opteq",
                "task={name: classification, options: {label_smoothing: 10}}",
            ],
            "label_smoothing must be in [0, 1), got 10. Did you mean 10% = 0.1?",
        ),
        (["serve", "digits-opteq", "--megabytes", "inf"], "megabytes must be positive"),
        (["serve", "digits-opteq", "--seconds", "inf"], "seconds must be positive and finite"),
    ],
    ids=lambda value: " ".join(value).replace("{picture} ", "") if isinstance(value, list) else "",
)
def test_number_outside_its_range_is_an_error(
    picture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    if arguments[0] == "serve":
        pytest.importorskip("starlette")
        monkeypatch.setattr("equilibria.serving.run_server", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    result = invoke(*(argument.replace("{picture}", str(picture)) for argument in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == [picture.name], "nothing was written"
