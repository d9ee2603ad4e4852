"""Exported files compute the same results as the model and contain its certificate constants."""

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
    """Disable the logs of PyTorch's exporter, which pytest would capture."""
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


def single_precision(model: nn.Module) -> Any:
    """Convert a model to float32, with a tolerance near the floating-point precision."""
    model = model.float()
    for layer in model.modules():
        if isinstance(layer, eq.EquilibriumLayer):
            layer.solving = layer.solving.changed(tolerance=1e-6)
    return model


@pytest.mark.parametrize("name", [*FAMILIES, "reflections"])
@torch.no_grad()
def test_graphs_compute_the_same_logits_as_the_model(name: str) -> None:
    model = model_of(name)
    graph = model_graph(model, images(1), TIGHT, any_size=False)
    logits, residual, iterations = graph(images(4))
    torch.testing.assert_close(logits, model(images(4)), rtol=1e-8, atol=1e-8)
    assert bool((residual < 1e-8).all())
    assert bool((iterations < TIGHT.max_iterations).all())
    single = graph(images(4)[:1])
    torch.testing.assert_close(single[0], logits[:1], rtol=1e-8, atol=1e-8)
    assert int(single[2]) == int(iterations[0])


@pytest.mark.slow
def test_onnx_runtime_agrees_with_pytorch(tmp_path: Path) -> None:
    """The graph of MOptEqs contains all operators; docs/export.md tests OptEq."""
    pytest.importorskip("onnxruntime")
    model = single_precision(model_of("mopteq-small"))
    examples = images(8).float()
    exported = eq.export(model, tmp_path / "model.onnx", images=examples)
    assert exported.samples == exported.same_classes == exported.converged == 8
    assert exported.difference < 1e-4
    run = onnx_file.runner(exported.path)
    for batch in (examples[:1], examples[:3]):
        with torch.no_grad():
            torch.testing.assert_close(run(batch)[0], model(batch), rtol=1e-4, atol=1e-4)
    assert onnx_file.read_facts(exported.path) == exported.metadata
    import onnx

    assert "Loop" in {node.op_type for node in onnx.load(exported.path).graph.node}


def test_torch_programs_run_without_this_package(tmp_path: Path) -> None:
    model = single_precision(model_of("deep-opteq-small"))
    exported = eq.export(
        model, tmp_path / "model.pt2", format="torch-export", images=images(5).float()
    )
    assert exported.same_classes == 5
    assert exported.difference < 1e-4
    assert torch_program.read_facts(exported.path) == exported.metadata
    logits, _, _ = torch.export.load(exported.path).module()(images(2).float())
    with torch.no_grad():
        torch.testing.assert_close(logits, model(images(2).float()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["opteq-small", "deep-opteq-small", "geq-small", "reflections"])
@torch.no_grad()
def test_exported_constants_give_valid_error_bounds_and_radii(name: str) -> None:
    model = model_of(name)
    examples = images(6)
    constants = certificate_constants(model, tuple(examples.shape[1:]))
    assert all(q < 1 for q in constants["contraction"])
    approximate = model_graph(model, examples[:1], Loop(tolerance=1e-3), any_size=False)
    logits, residual, _ = approximate(examples)
    exact = model(examples)
    best = logits.argmax(dim=1)

    def margins(of: Tensor) -> Tensor:
        return of.gather(1, best[:, None]) - of

    error = torch.tensor(constants["margin_error"]).double()[best] * residual[:, None]
    assert bool(((margins(logits) - margins(exact)).abs() <= error + 1e-9).all())
    slope = torch.tensor(constants["margin_slope"]).double()[best]
    radii = ((margins(logits) - error) / slope).scatter(1, best[:, None], torch.inf).amin(dim=1)
    proven = eq.certify(model, examples, refine=False).radii["global"]
    assert bool((radii.clamp_min(0) <= proven * (1 + 1e-6)).all())


@torch.no_grad()
def test_metadata_bound_the_error_of_unrolled_steps(tmp_path: Path) -> None:
    model = single_precision(model_of("opteq-small"))
    examples = images(4).float()
    exported = eq.export(
        model, tmp_path / "model.pt2", format="torch-export", unrolled=3, images=examples
    )
    program = torch.export.load(exported.path)
    assert not any("while_loop" in str(node.target) for node in program.graph.nodes)
    assert exported.converged is None
    _, residual, iterations = program.module()(examples)
    assert iterations.tolist() == [3] * 4
    cell, feature = model.layer.cell, model.stem(examples)
    context = cell.inject(feature)
    start = cell.initial_state(feature, context)
    first, state = cell.step(start, context), start
    for _ in range(3):
        state = cell.step(state, context)
    distance = (state - model.solve(examples).state).flatten(1).norm(dim=1)
    (factor,) = exported.metadata["iteration"]["error_of_first_residual"]
    assert bool((distance <= factor * (first - start).flatten(1).norm(dim=1) + 1e-4).all())
    (q,) = exported.metadata["certificate"]["contraction"]
    assert bool((distance <= q / (1 - q) * residual + 1e-4).all())


def test_any_size_needs_weights_that_do_not_depend_on_the_size(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"bounded for images of one size.*norm: null"):
        model_graph(model_of("opteq-small"), images(1), TIGHT, any_size=True)
    free = {"norm": None, "init_scale": 0.3}
    with pytest.raises(ExportError, match="pool: 1"):
        model_graph(model_of("opteq-small", **free), images(1), TIGHT, any_size=True)
    model = single_precision(model_of("opteq-small", **free, pool=1))
    path = tmp_path / "model.pt2"
    exported = eq.export(
        model, path, format="torch-export", any_size=True, images=images(3).float()
    )
    assert exported.metadata["images"]["shape"] == [2, "any", "any"]
    run, others = torch_program.runner(path), images(2, size=9).float()
    with torch.no_grad():
        torch.testing.assert_close(run(others)[0], model(others), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet-small", {}, "no stem, equilibrium layer and head"),
        ("mdeq-small", {}, "MDEQCell has neither a proof that plain iterations converge"),
        ("mopteq-small", {"sign": "freeze"}, "sign='smooth'"),
        ("geq-small", {"gamma": "paper"}, "couples the samples"),
        ("geq-small", {}, "has no data yet"),
    ],
)
def test_unsupported_models_raise_with_the_reason(name: str, options: Any, message: str) -> None:
    model = eq.create_model(name, in_channels=2, **options).eval()
    with pytest.raises(ExportError, match=message):
        model_graph(model, images(1).float(), Loop(), any_size=False)


def test_existing_files_are_not_replaced_by_default(tmp_path: Path) -> None:
    existing = tmp_path / "model.onnx"
    existing.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite"):
        eq.export(nn.Identity(), existing)
    assert existing.read_text() == "mine"
    with pytest.raises(ValueError, match="onnx"):
        eq.export(nn.Identity(), tmp_path / "other", format="tflite")  # type: ignore[arg-type]


def test_a_packed_run_equals_the_run(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "packed.safetensors"
    eq.train("digits-opteq", "training.epochs=1", "data.options.train_samples=100", output=run)
    assert invoke("export", run, "--format", "safetensors", "--output", file).exit_code == 0
    model, packed = eq.load(run), eq.load(file)
    examples = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(examples), packed(examples))
    assert packed.images.class_names == model.images.class_names
    assert packed.images.frame == model.images.frame
    assert eq.evaluate(file).accuracy == eq.evaluate(run).accuracy
    second = invoke("export", run, "--format", "safetensors", "--output", file)
    assert second.exit_code == 2
    assert "exists" in second.output
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        eq.load(file)
    with pytest.raises(ValueError, match="without a description of their model"):
        eq.load(run / "model.safetensors")
