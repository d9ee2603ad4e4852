"""How norms are computed: in float32 at least, never under autocast, graph-free on demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor itself, or its float32 copy: eigenvalues and norms do not run in half."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@contextmanager
def full_precision(tensor: Tensor) -> Iterator[None]:
    """Switches autocast off on the tensor's device."""
    with torch.autocast(tensor.device.type, enabled=False):
        yield


@contextmanager
def graph_free(tensor: Tensor) -> Iterator[None]:
    """No graph and no autocast, for values that are kept.

    Inference mode is left too: a tensor made inside it could not enter a graph later, so that an
    evaluation would poison the cache of the next training step.
    """
    with torch.inference_mode(False), torch.no_grad(), full_precision(tensor):
        yield
