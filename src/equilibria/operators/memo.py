"""A memory of values computed from a tensor, which forgets when the tensor's values change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ENTRIES = 16
"""Evaluation over images of ever new sizes must not grow the memory without end."""


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a `torch.func` transform runs: what is computed then must not outlive it."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


class TensorMemo:
    """Values that hold for one tensor's present content.

    The content itself is compared: `_version` does not see an edit through `.data`, which is what
    optimisers, weight averaging and DDP do. Plain data without graphs, outside the state_dict;
    it follows `deepcopy`, and a change of device or dtype empties it.
    """

    def __init__(self) -> None:
        self._content: Tensor | None = None
        self._values: dict[object, Any] = {}

    def of(self, tensor: Tensor) -> dict[object, Any]:
        """The values remembered for this tensor: empty if its content is not the one seen last."""
        if is_wrapped(tensor):
            return {}
        kept = self._content
        same = (
            kept is not None
            and kept.dtype == tensor.dtype
            and kept.device == tensor.device
            and torch.equal(kept, tensor)
        )
        if not same:
            self._content = tensor.detach().clone()
            self._values = {}
        elif len(self._values) > ENTRIES:
            self._values.clear()
        return self._values
