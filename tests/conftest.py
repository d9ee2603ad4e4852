"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from equilibria.data import registry as data_sets

# Same examples on every run, and no time limit, which would depend on the machine.
settings.register_profile("equilibria", derandomize=True, deadline=None)
settings.load_profile("equilibria")

DEVICES = [
    "cpu",
    *(["cuda"] if torch.cuda.is_available() else []),
    *(["mps"] if torch.backends.mps.is_available() else []),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use the fixture `real_data`, and run files with slow tests first.

    With several processes, this avoids waiting for a slow file at the end.
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
    """Forget data sets that a test file registers, so that the order of files does not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_sets._loaders, "_factories", dict(data_sets._loaders._factories))
        patch.setattr(data_sets, "_cards", dict(data_sets._cards))
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each available device."""
    return torch.device(request.param)


@pytest.fixture
def float64_device(device: torch.device) -> torch.device:
    """Each available device that supports float64."""
    if device.type == "mps":
        pytest.skip("mps has no float64")
    return device


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets in their standard formats."""
    folder = os.environ.get("EQUILIBRIA_DATA")
    if not folder:
        pytest.skip("no real data: set EQUILIBRIA_DATA to the folder of the data sets")
    if not Path(folder).is_dir():
        pytest.fail(f"EQUILIBRIA_DATA is {folder}, which is not a folder")
    return Path(folder)
