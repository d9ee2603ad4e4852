"""Nothing is converted back and forth between a file's bytes and a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria as eq
from equilibria.data import Split
from equilibria.tasks import Classification
from equilibria.training import TrainingSettings, fit

BATCH = 8


class Conversions(TorchDispatchMode):
    """The types that tensors as large as a batch of images are converted from and to."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[tuple[torch.dtype, torch.dtype]] = []
        self.formats: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.name().split(".")[0]
        if name in ("aten::_to_copy", "aten::clone") and made.numel() >= BATCH * 3 * 16 * 16:
            given = args[0]
            if given.dtype != made.dtype:
                self.types.append((given.dtype, made.dtype))
            if pixel_by_pixel(given) != pixel_by_pixel(made):
                self.formats.append("pixels" if pixel_by_pixel(made) else "channels")
        return made


def pixel_by_pixel(images: Tensor) -> bool:
    return images.dim() == 4 and (
        images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    )


def test_a_training_step_converts_an_image_once() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * BATCH, 3, 16, 16), generator=generator, dtype=torch.uint8)
    data = Split(images, torch.arange(2 * BATCH) % 10)
    torch.manual_seed(0)
    model = eq.create_model("opteq-small", normalize=((0.5,) * 3, (0.2,) * 3))
    settings = TrainingSettings(epochs=1, batch_size=BATCH, gradient="implicit")
    with Conversions() as found, eq.solving(model, record=True) as record:
        fit(model, Classification(), data, settings)
    assert len(record.solutions) == 2
    # Bytes become numbers; σ′ of a ReLU is true or false, and becomes a number in the backward.
    step = [(torch.uint8, torch.float32), (torch.bool, torch.float32)]
    assert found.types == step * 2
    assert found.formats == ["pixels"] * 2
