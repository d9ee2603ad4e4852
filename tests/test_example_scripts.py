"""The scripts in examples/ run, and find what they say; one after the other in this process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOUND: dict[str, Callable[[Any], bool]] = {
    "tabular": lambda accuracy: accuracy > 0.85,
    "sequence_attention": lambda recalled: recalled > 0.35,
    "graph": lambda right: right > 0.75,
    "physics": lambda found: abs(found[0] - 0.02) < 0.004 and abs(found[1] - 3) < 0.5,
    "training_loop": lambda accuracy: accuracy > 0.2,
    "compiled": lambda difference: difference < 1e-3,
    "bilevel": lambda found: found[1] < 1e-3,
}
"""What must hold of the answer of each."""


def test_every_example_is_run_and_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(FOUND)
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}.py]({name}.py)" in page for name in FOUND)


# torch's compiler looks at the gradients of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", FOUND)
def test_an_example_runs(name: str) -> None:
    if name == "graph":
        pytest.importorskip("networkx")
    place = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert place is not None
    assert place.loader is not None
    example = importlib.util.module_from_spec(place)
    place.loader.exec_module(example)
    assert FOUND[name](example.main(quick=True))
