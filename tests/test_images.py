"""Image specifications of models, `model.images`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import equilibria as eq
from equilibria.models import ImageSpec, images_of

GRAY = ImageSpec(
    class_names=("dark", "bright"),
    image_shape=(1, 8, 8),
    frame=eq.data.Framing((8, 8)),
    normalization=None,
    names_classes=True,
    kind="classification",
)


def test_a_created_model_keeps_the_specification_it_was_given() -> None:
    model = eq.create_model("opteq-small", images=GRAY, num_classes=2, in_channels=1)
    assert images_of(model) == GRAY
    assert images_of(eq.create_model("opteq-small")) is None
    assert images_of(eq.create_model("resnet-small", images=GRAY)) == GRAY


def test_an_images_attribute_of_another_type_is_ignored() -> None:
    model = torch.nn.Linear(2, 2)
    model.images = torch.zeros(3)
    assert images_of(model) is None


def test_a_pretrained_model_has_the_specification_of_its_file() -> None:
    model = eq.create_model("digits-opteq", pretrained=True)
    assert images_of(model) == images_of(eq.load("digits-opteq")) is not None
    with pytest.raises(ValueError, match="its own image specification"):
        eq.create_model("digits-opteq", pretrained=True, images=GRAY)


def test_stored_specifications_can_be_read_back() -> None:
    normalized = replace(GRAY, normalization=((0.5,), (0.2,)), ignore_index=3)
    for images in (GRAY, normalized):
        restored = ImageSpec.from_data(images.as_data())
        assert restored.as_data() == images.as_data()
        assert (restored.frame, restored.image_shape) == (images.frame, images.image_shape)


def test_a_stored_specification_without_a_kind_raises() -> None:
    data = GRAY.as_data()
    del data["kind"]
    with pytest.raises(ValidationError, match="kind"):
        ImageSpec.from_data(data)


def test_a_model_with_a_specification_predicts_files_and_can_be_exported(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = eq.create_model("opteq-small", images=GRAY, num_classes=2, in_channels=1).eval()
    pixels = torch.rand(1, 8, 8).mul(255).round() / 255
    eq.data.image_from_tensor(pixels).save(tmp_path / "image.png")
    (from_file,) = eq.predict(model, tmp_path / "image.png")
    (from_pixels,) = eq.predict(model, pixels[None])
    assert from_file.label in GRAY.class_names
    assert (from_file.label, from_file.confidence) == (from_pixels.label, from_pixels.confidence)
    exported = eq.export(model, tmp_path / "model.pt2", format="torch-export")
    assert exported.metadata["classes"] == ["dark", "bright"]
    assert exported.metadata["images"]["shape"] == [1, 8, 8]


def test_a_model_without_a_specification_accepts_only_tensors(tmp_path: Path) -> None:
    eq.data.image_from_tensor(torch.rand(1, 8, 8)).save(tmp_path / "image.png")
    model = eq.create_model("opteq-small", in_channels=1)
    with pytest.raises(ValueError, match="does not describe its images"):
        eq.predict(model, tmp_path / "image.png")
    assert eq.predict(model, torch.rand(1, 1, 8, 8))[0].label in set("0123456789")
