"""Where to compute."""

from __future__ import annotations

import torch


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is the first of cuda, mps and cpu that is there."""
    present = present_devices()
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


def present_devices() -> list[str]:
    """The kinds of device there are, the fastest first."""
    devices = ["cpu"]
    if torch.backends.mps.is_available():
        devices.insert(0, "mps")
    if torch.cuda.is_available():
        devices.insert(0, "cuda")
    return devices
