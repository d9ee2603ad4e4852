"""Seconds of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock_of(device: torch.device) -> Callable[[], float]:
    """Processor time on a CPU; elsewhere the clock, once the device has done its work."""
    if device.type == "cpu":
        return time.process_time

    def synchronized() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return synchronized
