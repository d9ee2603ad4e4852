"""A model as a file computes what the model does, and says how sure that is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.certificates.constants import certificate_constants
from equilibria.exports import ExportError, onnx_file, torch_program
from equilibria.exports.graph import Loop, model_graph
from equilibria.models.reflection.model import reflection_network
from tests.models.small import images, settled, small_model
from tests.program import invoke

FAMILIES = ["opteq-small", "deep-opteq-small", "popteq-small", "mopteq-small", "geq-small"]
TIGHT = Loop(tolerance=1e-13, max_iterations=2000)


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """torch logs every step of an export, and pytest would keep it all."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def reflections() -> Any:
    options = {"image_size": 6, "filters": (3,), "units": (5,), "channels": 2, "zeta": 1.5}
    model = reflection_network(
        **options, num_classes=3, in_channels=2, solving=eq.Solving(tolerance=1e-13)
    )
    return model.double().eval()


def model_of(name: str, **options: Any) -> Any:
    return reflections() if name == "reflections" else settled(small_model(name, **options))


def single(model: nn.Module) -> Any:
    """In the precision of files, solved as tightly as that permits."""
    model = model.float()
    for layer in model.modules():
        if isinstance(layer, eq.EquilibriumLayer):
            layer.solving = layer.solving.changed(tolerance=1e-6)
    return model


@pytest.mark.parametrize("name", [*FAMILIES, "reflections"])
@torch.no_grad()
def test_the_graph_of_a_model_computes_what_the_model_does(name: str) -> None:
    model = model_of(name)
    graph = model_graph(model, images(1), TIGHT, any_size=False)
    logits, residual, iterations = graph(images(4))
    torch.testing.assert_close(logits, model(images(4)), rtol=1e-8, atol=1e-8)
    assert bool((residual < 1e-8).all())
    assert bool((iterations < TIGHT.max_iterations).all())
    alone = graph(images(4)[:1])
    torch.testing.assert_close(alone[0], logits[:1], rtol=1e-8, atol=1e-8)
    assert int(alone[2]) == int(iterations[0])


@pytest.mark.slow
def test_onnx_runtime_agrees_with_pytorch(tmp_path: Path) -> None:
    """Of MOptEqs, whose graph holds all that the others' do; docs/export.md does OptEq."""
    pytest.importorskip("onnxruntime")
    model = single(model_of("mopteq-small"))
    shown = images(8).float()
    found = eq.export(model, tmp_path / "model.onnx", images=shown)
    assert found.samples == found.same_classes == found.converged == 8
    assert found.difference < 1e-4
    run = onnx_file.runner(found.path)
    for some in (shown[:1], shown[:3]):
        with torch.no_grad():
            torch.testing.assert_close(run(some)[0], model(some), rtol=1e-4, atol=1e-4)
    assert onnx_file.read_facts(found.path) == found.metadata
    import onnx

    assert "Loop" in {node.op_type for node in onnx.load(found.path).graph.node}


def test_a_pytorch_program_needs_no_code_of_ours(tmp_path: Path) -> None:
    model = single(model_of("deep-opteq-small"))
    found = eq.export(
        model, tmp_path / "model.pt2", format="torch-export", images=images(5).float()
    )
    assert found.same_classes == 5
    assert found.difference < 1e-4
    assert torch_program.read_facts(found.path) == found.metadata
    logits, _, _ = torch.export.load(found.path).module()(images(2).float())
    with torch.no_grad():
        torch.testing.assert_close(logits, model(images(2).float()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["opteq-small", "deep-opteq-small", "geq-small", "reflections"])
@torch.no_grad()
def test_the_constants_in_a_file_give_what_certify_gives(name: str) -> None:
    model = model_of(name)
    shown = images(6)
    constants = certificate_constants(model, tuple(shown.shape[1:]))
    assert all(q < 1 for q in constants["contraction"])
    rough = model_graph(model, shown[:1], Loop(tolerance=1e-3), any_size=False)
    logits, residual, _ = rough(shown)
    exact = model(shown)
    best = logits.argmax(dim=1)

    def margins(of: Tensor) -> Tensor:
        return of.gather(1, best[:, None]) - of

    error = torch.tensor(constants["margin_error"]).double()[best] * residual[:, None]
    assert bool(((margins(logits) - margins(exact)).abs() <= error + 1e-9).all())
    slope = torch.tensor(constants["margin_slope"]).double()[best]
    radii = ((margins(logits) - error) / slope).scatter(1, best[:, None], torch.inf).amin(dim=1)
    proven = eq.certify(model, shown, refine=False).radii["global"]
    assert bool((radii.clamp_min(0) <= proven * (1 + 1e-6)).all())


@torch.no_grad()
def test_unrolled_steps_are_as_far_away_as_the_metadata_say(tmp_path: Path) -> None:
    model = single(model_of("opteq-small"))
    shown = images(4).float()
    found = eq.export(
        model, tmp_path / "model.pt2", format="torch-export", unrolled=3, images=shown
    )
    program = torch.export.load(found.path)
    assert not any("while_loop" in str(node.target) for node in program.graph.nodes)
    assert found.converged is None
    _, residual, iterations = program.module()(shown)
    assert iterations.tolist() == [3] * 4
    cell, feature = model.layer.cell, model.stem(shown)
    context = cell.inject(feature)
    start = cell.initial_state(feature, context)
    first, state = cell.step(start, context), start
    for _ in range(3):
        state = cell.step(state, context)
    distance = (state - model.solve(shown).state).flatten(1).norm(dim=1)
    (factor,) = found.metadata["iteration"]["error_of_first_residual"]
    assert bool((distance <= factor * (first - start).flatten(1).norm(dim=1) + 1e-4).all())
    (q,) = found.metadata["certificate"]["contraction"]
    assert bool((distance <= q / (1 - q) * residual + 1e-4).all())


def test_images_of_any_size_where_weights_do_not_depend_on_it(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"bounded for images of one size.*norm: null"):
        model_graph(model_of("opteq-small"), images(1), TIGHT, any_size=True)
    free = {"norm": None, "init_scale": 0.3}
    with pytest.raises(ExportError, match="pool: 1"):
        model_graph(model_of("opteq-small", **free), images(1), TIGHT, any_size=True)
    model = single(model_of("opteq-small", **free, pool=1))
    path = tmp_path / "model.pt2"
    found = eq.export(model, path, format="torch-export", any_size=True, images=images(3).float())
    assert found.metadata["images"]["shape"] == [2, "any", "any"]
    run, others = torch_program.runner(path), images(2, size=9).float()
    with torch.no_grad():
        torch.testing.assert_close(run(others)[0], model(others), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet-small", {}, "no stem, equilibrium layer and head"),
        ("mdeq-small", {}, "nothing proves that a plain iteration of MDEQCell converges"),
        ("mopteq-small", {"sign": "freeze"}, "sign='smooth'"),
        ("geq-small", {"gamma": "paper"}, "couples the samples"),
        ("geq-small", {}, "seen no data yet"),
    ],
)
def test_what_cannot_be_exported_says_why(name: str, options: Any, message: str) -> None:
    model = eq.create_model(name, in_channels=2, **options).eval()
    with pytest.raises(ExportError, match=message):
        model_graph(model, images(1).float(), Loop(), any_size=False)


def test_a_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    there = tmp_path / "model.onnx"
    there.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite"):
        eq.export(nn.Identity(), there)
    assert there.read_text() == "mine"
    with pytest.raises(ValueError, match="onnx"):
        eq.export(nn.Identity(), tmp_path / "other", format="tflite")  # type: ignore[arg-type]


def test_a_run_in_one_file_is_the_run(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "packed.safetensors"
    eq.train("digits-opteq", "training.epochs=1", "data.options.train_samples=100", output=run)
    assert invoke("export", run, "--format", "safetensors", "--output", file).exit_code == 0
    model, packed = eq.load(run), eq.load(file)
    shown = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(shown), packed(shown))
    assert packed.images.class_names == model.images.class_names
    assert packed.images.frame == model.images.frame
    assert eq.evaluate(file).accuracy == eq.evaluate(run).accuracy
    again = invoke("export", run, "--format", "safetensors", "--output", file)
    assert again.exit_code == 2
    assert "exists" in again.output
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        eq.load(file)
    with pytest.raises(ValueError, match="without a description of their model"):
        eq.load(run / "model.safetensors")
