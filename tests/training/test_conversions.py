"""Training does not convert images needlessly between dtypes and memory formats."""

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
    """Record of the dtype and format conversions of tensors of the size of a batch of images."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[tuple[torch.dtype, torch.dtype]] = []
        self.formats: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name().split(".")[0]
        if name in ("aten::_to_copy", "aten::clone") and result.numel() >= BATCH * 3 * 16 * 16:
            source = args[0]
            if source.dtype != result.dtype:
                self.types.append((source.dtype, result.dtype))
            if is_channels_last(source) != is_channels_last(result):
                self.formats.append("pixels" if is_channels_last(result) else "channels")
        return result


def is_channels_last(images: Tensor) -> bool:
    return images.dim() == 4 and (
        images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    )


def test_a_training_step_converts_images_once() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * BATCH, 3, 16, 16), generator=generator, dtype=torch.uint8)
    data = Split(images, torch.arange(2 * BATCH) % 10)
    torch.manual_seed(0)
    model = eq.create_model("opteq-small", normalize=((0.5,) * 3, (0.2,) * 3))
    settings = TrainingSettings(epochs=1, batch_size=BATCH, gradient="implicit")
    with Conversions() as conversions, eq.solving(model, record=True) as record:
        fit(model, Classification(), data, settings)
    assert len(record.solutions) == 2
    # Bytes become floats, and in the backward pass the boolean derivative of ReLU does.
    step = [(torch.uint8, torch.float32), (torch.bool, torch.float32)]
    assert conversions.types == step * 2
    assert conversions.formats == ["pixels"] * 2
