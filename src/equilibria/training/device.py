"""Where to compute."""

from __future__ import annotations

import torch


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is the first of cuda, mps and cpu that is there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        # Backends that are not built in or find no hardware raise different things.
        raise ValueError(f"there is no device {name!r} here: use auto, cpu, cuda or mps") from None
    return device
