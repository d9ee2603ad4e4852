"""Compare exported graphs with the model in PyTorch: `python -m benchmarks.exported RUN…`.

Measures the CPU time for a batch of test images of the run, in turns, in one process on one thread.
The contestants solve to the same relative residual: the model with its default solver, the model
with the plain iteration that the graphs use, the torch.export program, and the ONNX file in ONNX
Runtime.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch

import equilibria as eq
from benchmarks.timing import interleaved_medians
from equilibria.exports import torch_program
from equilibria.training.experiment import trained

TOLERANCE = 1e-4


def contestants(run: Path, batch: int, folder: Path) -> dict[str, Callable[[], object]]:
    experiment = trained(run)
    images, _ = experiment.some_test_images(batch)
    model = experiment.model
    for format_, ending in (("onnx", "onnx"), ("torch-export", "pt2")):
        eq.export(
            run,
            folder / f"graph.{ending}",
            format=format_,
            tolerance=TOLERANCE,
            images=images[:2],
            overwrite=True,
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / "graph.onnx", options)
    program = torch_program.runner(folder / "graph.pt2")
    pixels = images.numpy()

    def solved(solver: str | None) -> Callable[[], object]:
        def run_model() -> object:
            with torch.no_grad(), eq.solving(model, tolerance=TOLERANCE, solver=solver):
                return model(images)

        return run_model

    def run_program() -> object:
        with torch.no_grad():
            return program(images)

    return {
        "PyTorch": solved(None),
        "PyTorch, plain iteration": solved("picard"),
        "torch.export": run_program,
        "ONNX Runtime": lambda: session.run(None, {"images": pixels}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exported", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    header: list[str] = []
    for run in options.runs:
        for batch in options.batches:
            with tempfile.TemporaryDirectory() as folder:
                medians = interleaved_medians(
                    contestants(run, batch, Path(folder)), options.repeats, warm_up=3
                )
            if not header:
                header = ["run", "images", *medians]
                print("| " + " | ".join(header) + " |")
                print("|---|---:|" + "---:|" * len(medians))
            first = medians["PyTorch"]
            cells = [f"{1e3 * value:.2f} ms ({value / first:.2f}×)" for value in medians.values()]
            print(f"| {run.name} | {batch} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
