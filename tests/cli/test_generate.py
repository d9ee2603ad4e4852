"""`equilibria generate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import equilibria as eq
from equilibria.training.packed import kept_latents
from tests.program import invoke

RECIPE = """
model: {{name: {model}, options: {{latent_dim: 8, {options}}}}}
data: {{name: digits, options: {{train_samples: 320, test_samples: 60}}}}
training: {{epochs: {epochs}, batch_size: 64, learning_rate: 0.01, weight_decay: 0, clip_norm: 20}}
task: {{name: {task}, options: {{{task_options}}}}}
threads: 1
"""
SMALL = ("--latents", 40, "--images", 24, "--samples", 20)


def trained(folder: Path, **parts: object) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(**parts), encoding="utf-8")
    result = invoke("train", recipe, "--output", folder / "run")
    assert result.exit_code == 0, result.output
    assert "PSNR" in result.output
    return folder / "run"


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(
        tmp_path_factory.mktemp("generator"),
        model="opteq-decoder",
        options="channels: 8, width: 8, kernel_size: 3, head_channels: 8",
        epochs=2,
        task="generator",
        task_options="iterations: 5, evaluation_iterations: 10",
    )


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(
        tmp_path_factory.mktemp("autoencoder"),
        model="mdeq-vae",
        options="channels: [4, 8], downsample: 1, head_channels: 8, tolerance: 1.0e-3",
        epochs=2,
        task="autoencoder",
        task_options="kl_weight: 0.01",
    )


def test_generate_draws_samples_and_reconstructions(generator: Path, tmp_path: Path) -> None:
    output = tmp_path / "samples.png"
    result = invoke("generate", generator, "--output", output, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert figures["sample_fid"] > 0
    assert (figures["fitted_to"], figures["images"], figures["density"]) == (40, 24, "gmm")
    (by_search,) = figures["reconstructions"]
    assert by_search["latents_by"] == "JIIO"
    assert by_search["psnr"] > 5
    assert by_search["fid"] > 0
    assert "a classifier trained on digits" in figures["features"]
    sizes = []
    for picture in (output, tmp_path / "samples-reconstructions.png"):
        with Image.open(picture) as image:
            sizes.append(image.size)
    # Both have two rows of ten images of 72 pixels; the second also has PSNRs and classes.
    assert all(width > 10 * 72 and 2 * 72 < height < 4 * 72 for width, height in sizes)
    assert sizes[1][1] > sizes[0][1]


def test_equal_seeds_give_equal_samples(generator: Path, tmp_path: Path) -> None:
    """The second call reads the feature network from the folder of the run."""
    assert (generator / "feature_network.safetensors").is_file()
    pictures, figures = [], []
    for seed in (1, 1, 2):
        output = tmp_path / "samples.png"
        options = ("--output", output, "--overwrite", "--seed", seed, *SMALL)
        result = invoke("generate", generator, *options, "--json")
        assert result.exit_code == 0, result.output
        pictures.append(output.read_bytes())
        figures.append(json.loads(result.output))
    assert pictures[0] == pictures[1] != pictures[2]
    assert figures[0] == figures[1]


def test_generate_prints_a_table(generator: Path, tmp_path: Path) -> None:
    table = invoke("generate", generator, "--output", tmp_path / "new.png", *SMALL).output
    assert "PSNR of reconstructions (JIIO), mean (dB)" in table
    assert "FID of samples" in table
    assert "features of a classifier trained on digits" in table
    assert "new-reconstructions.png" in table


def test_autoencoder_is_reconstructed_by_encoder_and_jiio(
    autoencoder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "samples.png"
    result = invoke(
        "generate", autoencoder, "--output", output, *SMALL, "--density", "vae-gmm", "--json"
    )
    assert result.exit_code == 0, result.output
    by_encoder, by_search = json.loads(result.output)["reconstructions"]
    assert (by_encoder["latents_by"], by_search["latents_by"]) == ("encoder", "JIIO")
    assert by_search["psnr"] > by_encoder["psnr"]


def test_wrong_arguments_are_errors(generator: Path, tmp_path: Path) -> None:
    wrong = invoke("generate", generator, *SMALL, "--density", "kde")
    assert wrong.exit_code == 2
    assert "density must be one of gmm, vae-gmm" in wrong.output
    missing = invoke("generate", tmp_path / "nothing")
    assert missing.exit_code == 2
    assert "folder of a finished run" in missing.output
    overrides = ("training.epochs=1", "data.options.train_samples=64", "model.options.channels=4")
    invoke("train", "digits-opteq", *overrides, "--output", tmp_path / "classifier")
    classifier = invoke("generate", tmp_path / "classifier")
    assert classifier.exit_code == 2
    assert "opteq-small is not a generator" in classifier.output


def test_exported_generator_draws_without_data(generator: Path, tmp_path: Path) -> None:
    """The file contains the latents to which a density is fitted."""
    file, output = tmp_path / "generator.safetensors", tmp_path / "samples.png"
    exported = invoke("export", generator, "--format", "safetensors", "--output", file)
    assert exported.exit_code == 0, exported.output
    latents = kept_latents(file)
    assert latents is not None
    assert torch.equal(latents, kept_latents(generator))
    assert eq.load(file)(latents[:2]).shape == (2, 1, 8, 8)
    drawn = invoke("generate", file, "--output", output, *SMALL, "--json")
    assert drawn.exit_code == 0, drawn.output
    assert output.is_file()


def test_latents_of_outdated_weights_are_ignored(generator: Path, tmp_path: Path) -> None:
    """A run with fewer epochs than its recipe uses a checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(generator, run)
    assert kept_latents(run) is not None
    shutil.rmtree(run / "checkpoints" / "epoch-00002")
    assert kept_latents(run) is None
