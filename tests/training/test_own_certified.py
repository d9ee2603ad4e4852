"""Certified networks for images of the user: their choice, training and certificates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.data import DataFileError, from_dataset
from equilibria.training import load_recipe
from equilibria.training.own_certified import CertifiedFacts, certified_choice
from tests.data.photos import KINDS, photo, write_photos
from tests.data.test_own_images import Labelled
from tests.program import invoke

CERTIFIED = "task.name=certified"


def folder_of(place: Path, size: tuple[int, int], count: int, mode: str = "RGB") -> Path:
    for kind, name in enumerate(KINDS):
        (place / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            photo(kind, i, size).convert(mode).save(place / name / f"{i}.png")
    return place


def test_the_network_and_the_radius_depend_on_the_images(tmp_path: Path) -> None:
    color = load_recipe(folder_of(tmp_path / "color", (60, 90), 20), [CERTIFIED])
    gray = load_recipe(folder_of(tmp_path / "gray", (29, 29), 20, "L"), [CERTIFIED])
    assert color.data.options == {"size": 32}
    assert gray.data.options == {"size": 29, "gray": True}
    assert color.model.name == "reflection-patches"
    assert gray.model.name == "reflection-vectors"
    assert color.task.options["radius"] == pytest.approx(36 / 255, rel=0.01)
    assert gray.task.options["radius"] == pytest.approx(3 / 255 * 29, rel=0.01)
    for recipe in (color, gray):
        assert not recipe.data.normalize
        assert recipe.task.options["eps"] > recipe.task.options["radius"]
        assert 0.2 < recipe.model.options["center"] < 0.8
        assert "A fifth of every class is held out for tests" in recipe.about
        assert "1-Lipschitz" in recipe.about


@pytest.mark.parametrize("side", [8, 16, 20, 24, 32, 37])
@pytest.mark.parametrize("is_gray", [False, True])
def test_the_network_fits_images_of_any_size_and_is_1_lipschitz(side: int, is_gray: bool) -> None:
    choice = certified_choice(CertifiedFacts(side, is_gray, 0.4), 100, {})
    channels = 1 if is_gray else 3
    torch.manual_seed(side)
    model = eq.create_model(
        choice["model"]["name"],
        image_size=side,
        in_channels=channels,
        num_classes=3,
        **choice["model"]["options"],
    ).eval()
    x, y = torch.rand(2, 4, channels, side, side)
    with torch.no_grad(), eq.solving(model, tolerance=1e-6):
        moved = (model.features(x) - model.features(y)).flatten(1).norm(dim=1)
    assert bool((moved <= (x - y).flatten(1).norm(dim=1) * (1 + 1e-5)).all())


def test_a_folder_is_trained_on_and_new_photos_are_certified(tmp_path: Path) -> None:
    """The classes are bright at the top and at the bottom."""
    folder, run = write_photos(tmp_path / "photos", 30), tmp_path / "run"
    changes = ("data.options.size=8", "training.epochs=4")
    result = invoke("train", folder, "--certified", *changes, "--output", run, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["samples"] == 12
    assert figures["accuracy"] > 0.9
    assert figures["certified_accuracy"] > 0.7
    photo(1, 77, (50, 40)).save(tmp_path / "new.jpg")
    (answer,) = json.loads(invoke("certify", run, tmp_path / "new.jpg", "--json").stdout)
    assert answer["label"] == KINDS[1]
    assert answer["certified"]
    assert answer["radius"] > 0


def test_samples_in_memory_get_a_certified_network(tmp_path: Path) -> None:
    data = from_dataset(Labelled(30), size=8)
    model = eq.train(
        None, CERTIFIED, "training.epochs=1", data=data, output=tmp_path / "run", device="cpu"
    )
    images, _ = data.test.fetch(torch.arange(4))
    assert eq.certify(model, images).certified_class.all()
    oblong = torch.utils.data.TensorDataset(torch.rand(20, 3, 8, 12), torch.arange(20) % 2)
    with pytest.raises(ValueError, match="square images, got 8×12"):
        eq.train(None, CERTIFIED, data=eq.data.from_dataset(oblong), output=tmp_path / "other")


@pytest.mark.parametrize(
    ("size", "count", "changes", "message"),
    [
        ((40, 40), 4, (), f"class '{KINDS[0]}' has 3 training images.*at least 5 per class"),
        ((6, 5), 10, (), r"too small: the median of the shorter side is 5 pixels.*size=8"),
        ((40, 40), 10, ("data.options.size=[16, 32]",), r"got data.options.size=\[16, 32\]"),
    ],
)
def test_folders_that_cannot_be_certified_are_rejected(
    tmp_path: Path, size: tuple[int, int], count: int, changes: tuple[str, ...], message: str
) -> None:
    folder = folder_of(tmp_path / "photos", size, count)
    with pytest.raises(ValueError, match=message):
        load_recipe(folder, [CERTIFIED, *changes])
    result = invoke("train", folder, "--certified", *changes, "--output", tmp_path / "run")
    assert result.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_one_class_and_other_sources_are_rejected(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "photos", (9, 9), 6)
    for image in (folder / KINDS[1]).iterdir():
        image.unlink()
    (folder / KINDS[1]).rmdir()
    with pytest.raises(DataFileError, match="only one class"):
        load_recipe(folder, [CERTIFIED])
    result = invoke("train", "digits-opteq", "--certified", "--output", tmp_path / "run")
    assert result.exit_code == 2
    assert "digits-certified" in result.output
