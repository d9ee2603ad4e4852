"""Compare the training step of MOptEqs with that of a residual network of the same size.

    python -m benchmarks.explicit --threads 1

Both models get the same images, have features of the same resolution and nearly the same number of
parameters, and are timed in turns in one process. The equilibrium model is trained with the default
tolerance (1e-2) and each gradient rule. A second table splits its time into parts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import cpu_seconds, interleaved_medians
from equilibria.equilibrium import Solving
from equilibria.models import EquilibriumClassifier
from equilibria.models.baselines.resnet import ResNet, resnet_small
from equilibria.models.mopteq.models import mopteq
from equilibria.models.registry import parameter_count

TOLERANCE = 1e-2
RULES = {"one step": "one_step", "phantom": "phantom", "implicit": "implicit"}
SIZES: dict[str, dict[str, object]] = {
    "small": {"widths": (16, 32, 32), "stem_depth": 1},
    "193k": {"widths": (64, 128, 128), "stem_depth": 2, "pool": 1, "bias": False},
}


def residual_network(parameters: int) -> ResNet:
    """Return one stage of basic blocks at one resolution with about this many parameters."""
    candidates = [
        resnet_small(channels=(channels,), blocks=(blocks,))
        for blocks in range(1, 13)
        for channels in range(28, 37)
    ]
    return min(candidates, key=lambda network: abs(parameter_count(network) - parameters))


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def stages(model: EquilibriumClassifier, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the CPU seconds of the parts of one training step."""
    times: dict[str, float] = {}

    def timed(name: str, run: Callable[[], object]) -> object:
        result: list[object] = []
        times[name] = cpu_seconds(lambda: result.append(run()))
        return result[0]

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    layer = model.layer
    features = timed("stem", lambda: model.stem(images))
    assert isinstance(features, Tensor)
    timed("inject (Ux + b, norms of W, scales)", lambda: layer.cell.inject(features))
    timed("inject and solve", lambda: layer.solve(features))
    loss = timed("whole forward pass", lambda: F.cross_entropy(model(images), labels))
    assert isinstance(loss, Tensor)
    timed("backward pass", loss.backward)
    timed("optimizer", optimizer.step)
    inject = times["inject (Ux + b, norms of W, scales)"]
    times["solve"] = times.pop("inject and solve") - inject
    whole = times.pop("whole forward pass")
    times["step in the graph, head, loss"] = whole - times["stem"] - inject - times["solve"]
    order = ["stem", "inject (Ux + b, norms of W, scales)", "solve"]
    order += ["step in the graph, head, loss", "backward pass", "optimizer"]
    return {name: times[name] for name in order}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.explicit", description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=8, help="height and width of the images")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args(arguments)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    images = torch.randn(settings.batch, 3, settings.size, settings.size)
    labels = torch.randint(0, 10, (settings.batch,))
    console = Console(highlight=False, width=100)
    for name, options in SIZES.items():
        _compare(console, name, options, images, labels, settings.repeats)
    return 0


def _compare(
    console: Console,
    name: str,
    options: dict[str, object],
    images: Tensor,
    labels: Tensor,
    repeats: int,
) -> None:
    models = {}
    for rule, gradient in RULES.items():
        torch.manual_seed(0)
        models[rule] = mopteq(solving=Solving(gradient=gradient, tolerance=TOLERANCE), **options)  # type: ignore[arg-type]
    baseline = residual_network(parameter_count(models["one step"]))
    contestants = {rule: training_step(model, images, labels) for rule, model in models.items()}
    contestants["ResNet"] = training_step(baseline, images, labels)
    medians = interleaved_medians(contestants, repeats, warm_up=2)
    channels, height = 32, images.shape[2]
    table = Table(title=f"MOptEqs {name}: training step, {channels} channels at {height}×{height}")
    for column in ("model", "parameters", "evaluations", "ms", "ratio"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row, seconds in medians.items():
        model = models.get(row, baseline)
        solution = model.last_solution if isinstance(model, EquilibriumClassifier) else None
        table.add_row(
            row,
            f"{parameter_count(model):,}",
            "" if solution is None else f"{solution.evaluations}",
            f"{1e3 * seconds:.1f}",
            f"{seconds / medians['ResNet']:.2f}",
        )
    console.print(table)
    rounds = [stages(models["one step"], images, labels) for _ in range(repeats)]
    parts_table = Table(title="time of the parts of a training step with the one-step rule")
    parts_table.add_column("part")
    parts_table.add_column("ms", justify="right")
    parts_table.add_column("share", justify="right")
    parts = {part: statistics.median(r[part] for r in rounds) for part in rounds[0]}
    for part, seconds in parts.items():
        parts_table.add_row(part, f"{1e3 * seconds:.1f}", f"{seconds / sum(parts.values()):.0%}")
    console.print(parts_table)


if __name__ == "__main__":
    raise SystemExit(main())
