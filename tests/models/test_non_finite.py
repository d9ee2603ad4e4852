"""NaN and infinite values in images, and in the parameters and buffers of models."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.models import NonFiniteInputError, NonFiniteWeightsWarning
from tests.models.test_presets import fraction

IMAGE_MODELS = [
    name
    for name in eq.list_models()
    if name.endswith(("small", "-digits", "vae-conv", "segmentation", "dncnn", "deq-restorer"))
    and "imagenet" not in name
]


def batch_for(name: str) -> Tensor:
    """Return four images of the channels and the size that a model expects."""
    options = eq.models.model_options(name)
    size = options.get("image_size") or 32
    return torch.rand(4, options["in_channels"], size, size)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_evaluation_returns_nan_for_the_non_finite_image_only(name: str, bad: float) -> None:
    model = fraction(name).eval()
    images = batch_for(name)
    clean = model(images)
    images[2, :, 3, 3] = bad
    outputs = model(images)
    assert outputs[2].isnan().all()
    others = [0, 1, 3]
    torch.testing.assert_close(outputs[others], clean[others], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_training_batch_with_a_non_finite_image_raises_before_any_buffer_changes(
    name: str, bad: float
) -> None:
    model = fraction(name).train()
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    images = batch_for(name)
    images[1, 0, 0, 0] = bad
    with pytest.raises(NonFiniteInputError, match=r"1 of 4 samples .* \(1\): remove them"):
        model(images)
    for n, b in model.named_buffers():
        assert torch.equal(b, buffers[n]), n


def test_compiled_models_refuse_a_non_finite_training_batch() -> None:
    model = fraction("mopteq-small").train()
    images = batch_for("mopteq-small")
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteInputError, match="1 of 4 samples"):
        torch.compile(model, backend="eager")(images)
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_features_of_a_non_finite_training_batch_raise() -> None:
    model = eq.create_model("mopteq-small").train()
    images = torch.rand(2, 3, 32, 32)
    images[0] = torch.nan
    with pytest.raises(NonFiniteInputError):
        model.features(images)


@pytest.mark.parametrize("name", ["mopteq-small", "resnet-small"])
@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_non_finite_weights_warn_at_load_and_at_the_first_pass(
    name: str,
) -> None:
    model = fraction(name).eval()
    buffer = next(n for n, _ in model.named_buffers() if n.endswith("running_mean"))
    poisoned = copy.deepcopy(model.state_dict())
    poisoned[buffer].fill_(torch.nan)
    with pytest.warns(NonFiniteWeightsWarning, match=buffer.replace(".", r"\.")):
        model.load_state_dict(poisoned)
    fresh = fraction(name).eval()
    fresh.get_buffer(buffer).fill_(torch.nan)
    with pytest.warns(NonFiniteWeightsWarning, match="outputs are meaningless"):
        outputs = fresh(batch_for(name))
    assert outputs.isnan().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonFiniteWeightsWarning)
        fresh(batch_for(name))  # warns once


def test_vmap_over_images_raises_with_advice() -> None:
    model = eq.create_model("opteq-small").eval()
    with pytest.raises(NotImplementedError, match="pass the whole batch"):
        torch.func.vmap(model)(torch.rand(2, 1, 3, 16, 16))
