"""Measure the memory of a training step per image, for models and for their stems alone.

    python -m benchmarks.model_memory mopteq-imagenet-10m:one_step mdeq-10m:implicit

Each argument is a model and a gradient rule. `MODEL+recompute` recomputes the stem in the backward
pass. Images are 256×256; `unrolled` takes 10 steps, like the pretraining of MDEQ. All tensors that
operations allocate are counted until they are freed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional as F

from equilibria.models import EquilibriumClassifier, create_model
from equilibria.papers.memory import peak_bytes

SIZE = 256
FEATURES = 64
"""Resolution after the stem: set for MDEQ, the default of MOptEqs for ImageNet."""
UNROLLED = 10
CPU = torch.device("cpu")
MEBIBYTE = 2.0**20


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    print("| model | gradient | MiB per image | stem alone |\n|---|---|---:|---:|")
    for argument in arguments:
        name, gradient = argument.split(":")
        print(f"| {name} | {gradient} | {growth(name, gradient):.0f} | {growth(name, None):.0f} |")


def growth(name: str, gradient: str | None) -> float:
    """Return the MiB that a second image adds to the peak; without `gradient`, for the stem."""
    name, _, recompute = name.partition("+")
    options: dict[str, Any] = {"downsample": SIZE // FEATURES} if name.startswith("mdeq") else {}
    options |= {recompute: True} if recompute else {}
    if gradient is not None:
        steps = {"steps": UNROLLED} if gradient == "unrolled" else {}
        options["gradient"] = {"name": gradient, **steps}
    torch.manual_seed(0)
    model = create_model(name, num_classes=10, **options).train()
    assert isinstance(model, EquilibriumClassifier)
    step(model, 1, gradient is None)  # One-time allocations do not count.
    peaks = {
        count: peak_bytes(lambda count=count: step(model, count, gradient is None), CPU)
        for count in (1, 2)
    }
    return (peaks[2] - peaks[1]) / MEBIBYTE


def step(model: EquilibriumClassifier, images: int, stem_only: bool) -> None:
    model.zero_grad(set_to_none=True)
    pictures = torch.rand(images, 3, SIZE, SIZE)
    if stem_only:
        model.stem(pictures).sum().backward()
        return
    F.cross_entropy(model(pictures), torch.zeros(images, dtype=torch.long)).backward()


if __name__ == "__main__":
    main(sys.argv[1:])
