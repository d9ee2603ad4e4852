"""The scripts in examples/ run and return the expected results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
IS_EXPECTED: dict[str, Callable[[Any], bool]] = {
    "tabular": lambda accuracy: accuracy > 0.85,
    "sequence_attention": lambda accuracy: accuracy > 0.35,
    "graph": lambda accuracy: accuracy > 0.75,
    "physics": lambda result: abs(result[0] - 0.02) < 0.004 and abs(result[1] - 3) < 0.5,
    "training_loop": lambda accuracy: accuracy > 0.2,
    "compiled": lambda difference: difference < 1e-3,
    "bilevel": lambda result: result[1] < 1e-3,
}
"""Check of the result of each example."""


def test_every_example_is_tested_and_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(IS_EXPECTED)
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}.py]({name}.py)" in page for name in IS_EXPECTED)


# PyTorch's compiler reads .grad of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", IS_EXPECTED)
def test_examples_return_the_expected_results(name: str) -> None:
    if name == "graph":
        pytest.importorskip("networkx")
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert IS_EXPECTED[name](example.main(quick=True))
