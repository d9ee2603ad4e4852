"""Files of runs: atomic writes and checksums."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

import equilibria as eq
from equilibria.training import DamagedFileError, load_weights, save_weights
from equilibria.training.files import (
    atomic_writer,
    read_weights,
    sealed_json,
    unsealed,
    write_atomically,
)
from equilibria.training.processes import choose_device


def test_write_atomically_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def interrupted_write(path: Path) -> None:
    with atomic_writer(path) as file:
        file.write(b"incomplete")
        raise RuntimeError("power cut")


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(RuntimeError, match="power cut"):
        interrupted_write(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_first_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="power cut"):
        interrupted_write(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_weights_are_restored(tmp_path: Path, norm: str) -> None:
    def make() -> torch.nn.Module:
        return eq.create_model("opteq-small", in_channels=1, channels=8, width=8, norm=norm)

    model, copy = make(), make()
    images = torch.rand(3, 1, 8, 8)
    model(images)
    save_weights(model, tmp_path / "model.safetensors", {"model": "opteq-small"})
    if norm == "estimate":
        copy(images)  # The first input determines the shape of the vector of the power iteration.
    load_weights(copy, tmp_path / "model.safetensors")
    assert torch.equal(model.eval()(images), copy.eval()(images))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["model"] == "opteq-small"


def test_flipped_bits_in_a_weights_file_are_detected(tmp_path: Path) -> None:
    """Only bits in the name or text of the checksum may pass; the weights are then correct."""
    model, path = torch.nn.Linear(2, 3), tmp_path / "model.safetensors"
    save_weights(model, path, {"model": "linear"})
    content, undetected = path.read_bytes(), 0
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            weights = read_weights(path)
        except DamagedFileError:
            continue
        undetected += 1
        for name, value in model.state_dict().items():
            assert torch.equal(weights[name], value), bit
    assert undetected <= 8 * (len("sha256") + 64)


def test_weights_without_a_checksum_can_be_loaded(tmp_path: Path) -> None:
    model, path = torch.nn.Linear(2, 3), tmp_path / "model.safetensors"
    path.write_bytes(save(dict(model.state_dict())))
    assert torch.equal(read_weights(path)["weight"], model.weight)


def test_flipped_bits_in_sealed_json_are_detected() -> None:
    data = {"loss": 0.1 + 0.2, "names": ["\u00e4", 'b"'], "none": None, "nested": {"sha256": "x"}}
    text = sealed_json(data)
    assert unsealed(text, "it") == data
    content = text.encode()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            result = unsealed(damaged.decode(), "it")
        except ValueError:
            continue
        assert {key: result.get(key) for key in data} == data, damaged


def test_json_without_a_checksum_raises() -> None:
    with pytest.raises(DamagedFileError, match=r"results\.json is damaged: its checksum"):
        unsealed('{"accuracy": 0.5}', "results.json")


def test_system_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def on_a_full_disk() -> None:
        with atomic_writer(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        on_a_full_disk()
    assert list(tmp_path.iterdir()) == []


def test_choose_device() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match=r"'abacus' is not available: use auto or .*cpu"):
        choose_device("abacus")


def test_shared_weights_are_restored(tmp_path: Path) -> None:
    def model() -> eq.EquilibriumLayer:
        W = eq.Dense(12, 16, norm="bound", zeta=0.6)
        energy = eq.Input(eq.Dense(8, 16)) + eq.Quadratic(W)
        return eq.EquilibriumLayer(energy + eq.FeatureRegularizer(W, "l2", 0.1))

    saved, loaded = model(), model()
    save_weights(saved, tmp_path / "weights.safetensors")
    load_weights(loaded, tmp_path / "weights.safetensors")
    x = torch.randn(3, 8)
    assert torch.equal(saved(x), loaded(x))
    assert len(list(loaded.parameters())) == 3


def test_equal_weights_give_equal_files(tmp_path: Path) -> None:
    """safetensors alone writes metadata in random order."""
    model, path = torch.nn.Linear(3, 2), tmp_path / "weights.safetensors"
    written = set()
    for _ in range(20):
        save_weights(model, path, {"model": "ä", "epoch": "1", "score": "0.5"})
        written.add(path.read_bytes())
    assert len(written) == 1
    torch.testing.assert_close(read_weights(path), model.state_dict())
