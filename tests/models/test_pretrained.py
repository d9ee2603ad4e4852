"""Trained models shipped with the package: cards, figures and commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import equilibria as eq
from equilibria.data import load_dataset
from equilibria.models.generators.densities import fit_density
from equilibria.models.pretrained import SHIPPED, pretrained_cards
from equilibria.training.experiment import trained_model
from equilibria.training.packed import kept_latents
from tests.program import invoke
from tools.ship import MAX_TOTAL_BYTES

CARDS = pretrained_cards()
ON_DIGITS = [name for name, card in CARDS.items() if card.data == "digits"]
"""Models whose data are in the package."""


def test_every_model_has_a_card_and_the_total_size_is_limited() -> None:
    files = {path.stem for path in SHIPPED.glob("*.safetensors")}
    assert files == set(CARDS)
    assert {"digits-opteq", "digits-certified", "photo-prior"} <= files
    assert sum(card.file.stat().st_size for card in CARDS.values()) <= MAX_TOTAL_BYTES
    for card in CARDS.values():
        assert card.recipe in eq.training.list_recipes()
        required = (card.summary, card.command, card.data, card.figures, card.measured_by, card.use)
        assert all(required)
        assert card.certificate, card.name
        assert card.command.startswith(f"equilibria train {card.recipe} ")
        assert card.model in eq.list_models()


@pytest.mark.parametrize("name", ON_DIGITS)
def test_figures_of_the_card_are_reproduced(name: str) -> None:
    figures = eq.evaluate(name).figures
    expected = CARDS[name].figures
    assert round(figures["accuracy"], 4) == pytest.approx(expected["accuracy"], abs=1 / 450)
    if "mean_radius" in expected:
        assert figures["mean_radius"] == pytest.approx(expected["mean_radius"], abs=0.01)


@torch.no_grad()
def test_card_of_the_generator_states_its_contraction_bound() -> None:
    decoder = eq.load("mnist-generator")
    bound = float(decoder.contraction_bound(torch.randn(3, 24)).max())
    assert f"q ≤ {bound:.2g}" in CARDS["mnist-generator"].certificate["equilibrium"]


@torch.no_grad()
def test_trained_models_load_by_name() -> None:
    model = eq.create_model("digits-opteq", pretrained=True, tolerance=1e-6)
    images, labels = load_dataset("digits").test.fetch(torch.arange(20))
    assert (model(images).argmax(dim=1) == labels).sum() >= 19
    assert model.images.class_names == tuple("0123456789")
    assert model.layer.solving.solver.tolerance == 1e-6
    loaded = eq.load("digits-opteq")
    torch.testing.assert_close(loaded(images), model(images), rtol=1e-2, atol=1e-2)
    assert all(
        torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items()
    )


def test_unknown_models_and_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match="did you mean 'digits-opteq'"):
        eq.create_model("digit-opteq", pretrained=True)
    with pytest.raises(ValueError, match="cannot change its option channels"):
        eq.create_model("digits-opteq", pretrained=True, channels=3)
    with pytest.raises(ValueError, match=r"equilibria restore noisy\.jpg"):
        eq.create_model("photo-prior", pretrained=True)
    with pytest.raises(FileNotFoundError, match="digits-opteq"):
        eq.load("no-such-run")
    with pytest.raises(FileNotFoundError, match="did you mean 'mnist-certified'"):
        eq.load("mnist-certfied")


def test_commands_accept_trained_models_by_name(tmp_path: Path) -> None:
    images, labels = load_dataset("digits").test.fetch(torch.arange(1))
    digit = tmp_path / "digit.png"
    Image.fromarray((images[0, 0] * 255).byte().numpy()).save(digit)
    predicted = invoke("predict", "--model", "digits-opteq", digit, "--json")
    assert predicted.exit_code == 0, predicted.output
    assert json.loads(predicted.output)[0]["label"] == str(int(labels[0]))
    certified = invoke("certify", "--model=digits-certified", digit, "--json")
    assert certified.exit_code == 0, certified.output
    assert "radius" in certified.output
    assert invoke("predict", "--model").exit_code == 2
    listed = json.loads(invoke("models", "--pretrained", "--json").output)
    assert [card["name"] for card in listed] == list(CARDS)
    assert "certified_accuracy" in invoke("models", "digits-certified", "--pretrained").output


def test_generator_needs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are as bright as MNIST and a classifier assigns them to most classes."""
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path))
    output = tmp_path / "samples.png"
    result = invoke("generate", "--model", "mnist-generator", "--output", output, "--json")
    assert result.exit_code == 0, result.output
    assert output.stat().st_size > 1000
    latents = kept_latents("mnist-generator")
    assert latents is not None
    options = trained_model("mnist-generator").recipe.task.options["density"]
    density = fit_density(options, latents, seed=0)
    generator = eq.create_model("mnist-generator", pretrained=True)
    images = eq.inputs.decode(generator, density.sample(64, seed=0))
    assert 0.1 < float(images.mean()) < 0.16
    classifier = eq.load("mnist-certified")
    classes = classifier(images).argmax(dim=1)
    assert len(classes.unique()) >= 8


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("certify", "--model", "mnist-generator", "x.png"), "needs a run that classifies images"),
        (("generate", "--model", "digits-opteq"), "is not a generator"),
        (("export", "--model", "photo-prior", "--format", "onnx"), "which cannot run alone"),
        (("restore", "digits-opteq", "x.png"), "digits-opteq is a trained model, not an image"),
        (("predict", "--model", "digit-opteq", "x.png"), "did you mean 'digits-opteq'"),
    ],
)
def test_models_of_another_task_are_rejected_without_a_traceback(
    command: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    result = invoke(*(tmp_path / part if part == "x.png" else part for part in command))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
