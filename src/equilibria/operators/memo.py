"""A memory of values computed from tensors, which forgets when the tensors' values change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ENTRIES = 16
"""Evaluation over images of ever new sizes must not grow the memory without end."""


def is_wrapped(*tensors: Tensor) -> bool:
    """Whether a `torch.func` transform runs: what is computed then must not outlive it."""
    try:
        for tensor in tensors:
            tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


class TensorMemo:
    """Values that hold for the present content of one tensor, or of several together.

    The content itself is compared: `_version` does not see an edit through `.data`, which is what
    optimizers, weight averaging and DDP do. Plain data without graphs, outside the state_dict;
    it follows `deepcopy`, and a change of device or dtype empties it.
    """

    def __init__(self) -> None:
        self._content: tuple[Tensor, ...] = ()
        self._values: dict[object, Any] = {}

    def of(self, *tensors: Tensor) -> dict[object, Any]:
        """The values remembered for these tensors: empty if their content is not the last seen."""
        if is_wrapped(*tensors):
            return {}
        same = len(self._content) == len(tensors) and all(map(_same, self._content, tensors))
        if not same:
            self._content = tuple(tensor.detach().clone() for tensor in tensors)
            self._values = {}
        elif len(self._values) > ENTRIES:
            self._values.clear()
        return self._values


def _same(kept: Tensor, tensor: Tensor) -> bool:
    return kept.dtype == tensor.dtype and kept.device == tensor.device and torch.equal(kept, tensor)
