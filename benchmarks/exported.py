"""`python -m benchmarks.exported RUN…`: exported graphs beside the model in PyTorch.

Processor time of a batch of the run's test images, in turns, in one process and on one thread, all
solved to the same relative residual: the model as it solves by default, and by the plain iteration
that the graphs have; the torch.export program; the ONNX file in ONNX Runtime.
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
    asked = parser.parse_args()
    torch.set_num_threads(1)
    header: list[str] = []
    for run in asked.runs:
        for batch in asked.batches:
            with tempfile.TemporaryDirectory() as folder:
                found = interleaved_medians(
                    contestants(run, batch, Path(folder)), asked.repeats, warm_up=3
                )
            if not header:
                header = ["run", "images", *found]
                print("| " + " | ".join(header) + " |")
                print("|---|---:|" + "---:|" * len(found))
            first = found["PyTorch"]
            cells = [f"{1e3 * value:.2f} ms ({value / first:.2f}×)" for value in found.values()]
            print(f"| {run.name} | {batch} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
