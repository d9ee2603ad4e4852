"""Compare the time for one image of the shipped models: `python -m benchmarks.one_image`.

Sides: the model, the model compiled by `eq.compile`, its ONNX file in ONNX Runtime, and a residual
network of nearly as many parameters, as it is and compiled by `torch.compile`. The model solves to
its own tolerance, also in the ONNX file. All sides take turns in one process on one thread; times
are medians of CPU time. The compiled model must give the logits of the model to its tolerance.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equilibria as eq
from benchmarks.timing import interleaved_medians
from equilibria.models.baselines.resnet import ResNet, resnet_small
from equilibria.models.registry import parameter_count

Run = Callable[[], Any]

CLASSIFIERS = ("digits-opteq", "digits-certified", "mnist-certified", "cifar10-certified")
GENERATOR = "mnist-generator"
LATENT = 24
ERROR = 1e-2
"""Largest difference of outputs, relative to the largest output, that the tolerances allow."""


def residual_network(parameters: int, in_channels: int) -> ResNet:
    """Return a residual network with about this many parameters."""
    candidates = (
        resnet_small(in_channels=in_channels, channels=(width, 2 * width, 4 * width))
        for width in range(4, 41)
    )
    return min(candidates, key=lambda network: abs(parameter_count(network) - parameters)).eval()


def without_gradients(model: Callable[..., Any], x: Tensor) -> Run:
    def run() -> Any:
        with torch.no_grad():
            return model(x)

    return run


def onnx_file(name: str, tolerance: float, x: Tensor) -> Run:
    """Return a run of the exported model in ONNX Runtime on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        eq.export(name, path, tolerance=tolerance)
        session = onnxruntime.InferenceSession(path, options)
    pixels = x.numpy()
    return lambda: session.run(None, {"images": pixels})


def row(name: str, repeats: int) -> str:
    """Return one row of the table."""
    model = eq.load(name)
    assert isinstance(model, nn.Module)
    layers = [part for part in model.modules() if isinstance(part, eq.EquilibriumLayer)]
    generator = torch.Generator().manual_seed(0)
    if name == GENERATOR:
        x = torch.randn(1, LATENT, generator=generator)
    else:
        x = torch.rand(1, *model.images.image_shape, generator=generator)  # type: ignore[union-attr, misc]
    sides = {"eager": without_gradients(model, x)}
    sides["compiled"] = without_gradients(eq.compile(model), x)
    expected, actual = sides["eager"](), sides["compiled"]()
    assert float((actual - expected).abs().max()) <= ERROR * float(expected.abs().max())
    size = f"{parameter_count(model):,}"
    if name != GENERATOR:
        sides["ONNX"] = onnx_file(name, max(layer.solver.tolerance for layer in layers), x)
        network = residual_network(parameter_count(model), x.shape[1])
        size = f"{size}; ResNet {parameter_count(network):,}"
        sides["ResNet"] = without_gradients(network, x)
        sides["ResNet, compiled"] = without_gradients(torch.compile(network), x)
    medians = interleaved_medians(sides, repeats, warm_up=5)
    names = ("eager", "compiled", "ONNX", "ResNet", "ResNet, compiled")
    cells = [f"{1e3 * medians[side]:.3f}" if side in medians else "–" for side in names]
    return f"| {name} ({size}) | " + " | ".join(cells) + " |"


def rows(names: list[str], repeats: int) -> Iterator[str]:
    """Yield the table line by line."""
    yield "| one image | eager, ms | compiled, ms | ONNX, ms | ResNet, ms | ResNet, compiled, ms |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in names:
        yield row(name, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_image", description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*CLASSIFIERS, GENERATOR])
    parser.add_argument("--repeats", type=int, default=101, help="rounds per row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in rows(options.models, options.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
