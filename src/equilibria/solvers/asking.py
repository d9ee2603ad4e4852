"""Where the host may look at numbers that a device holds."""

from __future__ import annotations

from torch import Tensor


def is_free_to_ask(numbers: Tensor) -> bool:
    """Whether a look costs nothing: on a CPU. Elsewhere the host waits until all is computed.

    Where it does, a solver looks for the ordinary case first, in which there is little to do;
    where it does not, it does what every case needs.
    """
    return numbers.device.type == "cpu"
