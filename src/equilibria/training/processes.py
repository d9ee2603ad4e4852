"""Choice of a device, and the interface of processes that train one model together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from equilibria.data import Selection, Source


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """Return a device.

    Args:
        name: Name of the device, or "auto" for the first of cuda, mps and cpu that is available.

    Raises:
        ValueError: If the device is not available.

    Examples:
        >>> from equilibria.training.processes import choose_device
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if isinstance(name, torch.device):
        return name
    accelerators = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    available = [*(kind for kind, is_available in accelerators.items() if is_available), "cpu"]
    if name == "auto":
        return torch.device(available[0])
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        # Backends that are not built in and those without hardware raise different exceptions.
        choices = " or ".join(["auto", *available])
        raise ValueError(f"the device {name!r} is not available: use {choices}") from None
    return device


def now(device: torch.device) -> float:
    """Return a time in seconds, for measuring durations.

    On a CPU it is the CPU time, which excludes waiting for a core. On other devices it is the
    wall-clock time after a synchronization.

    Args:
        device: Device that computes.

    Examples:
        >>> from equilibria.training.processes import now
        >>> start = now(torch.device("cpu"))
        >>> now(torch.device("cpu")) >= start
        True
    """
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Flush denormal numbers (below 1e-38 in absolute value) to zero on a CPU.

    Gradients that pass through many contracting steps become denormal, and arithmetic on denormal
    numbers is about twenty times slower on many CPUs. The setting holds for this thread, which
    includes autograd, and for threads that it starts afterwards. PyTorch's worker threads keep the
    setting they were started with, so that the commands `train` and `reproduce` apply this first.

    Examples:
        >>> from equilibria.training.processes import denormals_as_zero
        >>> with denormals_as_zero():
        ...     tiny = torch.full((64,), 1e-30) * 1e-10
        >>> float(tiny.sum()) < 1e-37
        True
    """
    tiny = torch.tensor(torch.finfo(torch.float32).tiny)
    before = bool(tiny / 2 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


class Processes:
    """A single training process; `distributed.ProcessGroup` is a group that trains together.

    Each process has a part of every batch. `total` sums values over the processes, and
    `sum_gradients` sums gradients.

    Examples:
        >>> from equilibria.training.processes import ALONE
        >>> alone = ALONE
        >>> alone.leads, alone.count, alone.part_of(torch.arange(3))
        (True, 1, tensor([0, 1, 2]))
    """

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and reports."""
        return self.rank == 0

    def joined(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for training, in which statistics of a batch cover all its parts."""
        return nullcontext()

    def part_of(self, source: Source) -> Source:
        """Return every `count`-th sample, starting with the rank of this process."""
        if self.count == 1:
            return source
        return Selection(source, torch.arange(self.rank, len(source), self.count))

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes, without gradients."""
        return values

    def gathered(self, values: Tensor) -> Tensor:
        """Return the concatenated vectors of all processes."""
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradient of each parameter by its sum over the processes."""

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast the tensors of the first process, in place."""

    def first_message(self, own: str | None) -> str | None:
        """Return the message of the lowest rank that has one, or None."""
        return own


ALONE = Processes()
