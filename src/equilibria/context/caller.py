"""Warnings that point to a line of the user's code."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

_INTERNAL = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    contextlib.__file__,
)
"""Folders and files whose frames are skipped."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the nearest line outside of Equilibria and PyTorch.

    A fixed `stacklevel` does not work, because the number of frames depends on decorators, context
    managers, and the module that contains the layer.

    Args:
        message: Text of the warning.
        category: Class of the warning.

    Examples:
        >>> import warnings
        >>> from equilibria.context.caller import warn_caller
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_caller("the step size is 0", UserWarning)
        >>> str(caught[0].message)
        'the step size is 0'
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
