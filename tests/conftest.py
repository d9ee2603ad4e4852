"""Fixtures that every room's tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from equilibria.data import registry as data_sets

# Same examples on every run; the time of one example says more about the machine than the code.
settings.register_profile("equilibria", derandomize=True, deadline=None)
settings.load_profile("equilibria")

DEVICES = [
    "cpu",
    *(["cuda"] if torch.cuda.is_available() else []),
    *(["mps"] if torch.backends.mps.is_available() else []),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for the `real_data` fixture carries the marker of that name.

    Files with slow tests come first: at the end, no process of several waits for a long one.
    """
    for item in items:
        if "real_data" in getattr(item, "fixturenames", ()):
            item.add_marker("real_data")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _registered_data_sets() -> Iterator[None]:
    """A data set that a file of tests registers is gone after it, in whatever order files run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_sets._loaders, "_factories", dict(data_sets._loaders._factories))
        patch.setattr(data_sets, "_cards", dict(data_sets._cards))
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that is present."""
    return torch.device(request.param)


@pytest.fixture
def float64_device(device: torch.device) -> torch.device:
    """Every device that is present and computes in float64."""
    if device.type == "mps":
        pytest.skip("mps has no float64")
    return device


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that holds the real data sets in their standard on-disk formats."""
    folder = os.environ.get("EQUILIBRIA_DATA")
    if not folder:
        pytest.skip("NO REAL DATA: set EQUILIBRIA_DATA to the folder that holds the data sets")
    if not Path(folder).is_dir():
        pytest.fail(f"EQUILIBRIA_DATA names {folder}, which is not a folder")
    return Path(folder)
