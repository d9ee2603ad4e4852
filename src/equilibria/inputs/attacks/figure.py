"""Images under attack, drawn as a PNG; matplotlib is imported where it is used."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from equilibria.inputs.attacks.result import AttackResult

DRAWN_IMAGES = 8
RIGHT, WRONG = "#24292f", "#c62828"
ROWS = ("image", "change", "attacked")


def attack_png(images: Tensor, result: AttackResult, class_names: Sequence[str]) -> bytes:
    """Some images, what was added to them (magnified), and what the model then says."""
    from matplotlib.figure import Figure

    chosen = _telling(result)
    change = (result.images - images.to(result.images)).cpu()
    reach = float(change[chosen].abs().max()) or 1.0
    figure = Figure(figsize=(1.5 * len(chosen), 5.4), layout="constrained")
    before, after = result.initial_predictions, result.predictions
    for column, index in enumerate(chosen):
        panels = (
            (images[index], class_names[int(before[index])], int(before[index])),
            (0.5 + 0.5 * change[index] / reach, f"× {0.5 / reach:.2g}", None),
            (result.images[index], class_names[int(after[index])], int(after[index])),
        )
        for row, (panel, caption, predicted) in enumerate(panels):
            axis = figure.add_subplot(3, len(chosen), row * len(chosen) + column + 1)
            axis.imshow(_shown(panel), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            right = predicted is None or predicted == int(result.labels[index])
            axis.set_title(caption, fontsize=9, color=RIGHT if right else WRONG)
            if column == 0:
                axis.set_ylabel(ROWS[row], fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _telling(result: AttackResult) -> list[int]:
    """Images that the attack turned, then those that withstood it."""
    right = result.initial_predictions == result.labels
    order = [right & result.success, right & ~result.success, ~right]
    return [int(i) for kind in order for i in kind.nonzero().squeeze(1)][:DRAWN_IMAGES]


def _shown(image: Tensor) -> Any:
    pixels = image.detach().cpu().float().clamp(0, 1)
    return (pixels[0] if len(pixels) == 1 else pixels.movedim(0, 2)).numpy()
