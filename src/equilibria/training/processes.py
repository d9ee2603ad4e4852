"""Where to compute, and the processes that train one model together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from equilibria.data import Selection, Source


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """The device called `name`; "auto" is the first of cuda, mps and cpu that is there.

    Examples:
        >>> from equilibria.training.processes import choose_device
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if isinstance(name, torch.device):
        return name
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    present = [*(kind for kind, is_there in there.items() if is_there), "cpu"]
    if name == "auto":
        return torch.device(present[0])
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        # Backends that are not built in or find no hardware raise different things.
        choices = " or ".join(["auto", *present])
        raise ValueError(f"there is no device {name!r} here: use {choices}") from None
    return device


def now(device: torch.device) -> float:
    """Return a time in seconds.

    Processor time on a CPU, which excludes waiting for a core; on other devices the clock, after
    a synchronization.

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
    """Numbers that are smaller than the smallest normal one (1e-38) count as zero on a CPU.

    A gradient that is pulled back through many contracting steps ends in such numbers, with which
    many processors compute twenty times slower. The setting is one of a thread: it holds for this
    one, in which autograd runs too, and for those that it starts from now on. Torch's own worker
    threads, once started, keep what held then: the commands `train` and `reproduce` set it first.

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
    """One process that trains alone; `distributed.ProcessGroup` is several that train together.

    Each takes its share of every batch. What is a sum over the batch becomes the sum over all of
    them by `total`, gradients by `sum_gradients`.

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
        """Around the training of a model: what it computes of a batch, it computes of all parts."""
        return nullcontext()

    def part_of(self, source: Source) -> Source:
        """Every `count`-th sample, beginning with this process's rank."""
        if self.count == 1:
            return source
        return Selection(source, torch.arange(self.rank, len(source), self.count))

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the processes, without gradients."""
        return values

    def gathered(self, values: Tensor) -> Tensor:
        """The vectors of all processes, one after another."""
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradient of each parameter by its sum over the processes."""

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the values that the first one has."""

    def first_message(self, own: str | None) -> str | None:
        """What the first process says that has something to say; None if nobody has."""
        return own


ALONE = Processes()
