"""Memory that the solves of a thread use one after the other.

What a solve on a CPU remembers is some megabytes, which the system hands out and takes back with
every solve; each page then costs a fault when it is first written, together up to a fifth of the
time. So a thread keeps the last of these buffers. Other devices have an allocator that does.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

LARGEST = 2**25
"""Bytes that are kept, for each thread of PyTorch: a memory of a block of samples and some more."""


class _Kept(threading.local):
    """What this thread keeps: one buffer at most."""

    buffer: Tensor | None = None


_kept = _Kept()


class Scratch:
    """Room for `count` numbers of the type of `like`, until it is given back.

    Whoever takes it while another solve has it gets memory of its own; of what is given back the
    larger is kept.
    """

    def __init__(self, like: Tensor, count: int) -> None:
        size = count * like.element_size()
        # Not for tensors that only stand for others, as while a program is being exported.
        shared = like.device.type == "cpu" and type(like) in (Tensor, torch.nn.Parameter)
        self._shared = shared and 0 < size <= LARGEST * torch.get_num_threads()
        self._buffer: Tensor | None = None
        if not self._shared:
            self.room = like.new_empty(count)
            return
        kept, _kept.buffer = _kept.buffer, None
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):  # or it could be used in inference mode alone
                kept = torch.empty(size, dtype=torch.uint8)
        self._buffer = kept
        self.room = kept[:size].view(like.dtype)

    def give_back(self) -> None:
        """The numbers are no longer needed."""
        buffer, self._buffer = self._buffer, None
        del self.room
        kept = _kept.buffer
        if buffer is not None and (kept is None or kept.numel() < buffer.numel()):
            _kept.buffer = buffer
