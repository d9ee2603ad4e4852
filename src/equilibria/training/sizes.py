"""Estimate of the memory that a model needs, before it is built."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equilibria.equilibrium import EquilibriumLayer
from equilibria.models import create_model
from equilibria.models.registry import SOLVING

DEFAULT_GIGABYTES = 10.0
"""Default limit. The largest model of the papers, on a whole image of Cityscapes, needs 8.6 GB."""
WORKING_TENSORS = 8
"""Assumed memory of a solve, in tensors of the size of the largest activation."""
MAX_OPERATIONS = 20_000
"""Largest number of tensor operations for building and evaluating a model at the default limit;
the largest preset has 5,414."""
MAX_OPTION = 2**20
"""Largest number in the options at the default limit. A Python list of that length would not show
in the sizes of tensors."""

RAISE_LIMIT = (
    "if you trust the run, raise the limit (max_gigabytes=… in Python, --max-gigabytes on the "
    "command line)"
)
REMEDY = f"{RAISE_LIMIT}, or correct model.options"

_gigabytes: ContextVar[float] = ContextVar("gigabytes", default=DEFAULT_GIGABYTES)


class ModelSizeError(ValueError):
    """A model exceeds the limit for its memory or its number of operations."""


@contextmanager
def size_limit(gigabytes: float | None) -> Iterator[None]:
    """Set the memory limit of models in a block of code.

    Args:
        gigabytes: Limit in GB for the parameters and the activations of one sample; None keeps the
            current limit.

    Raises:
        ValueError: If the limit is not positive.

    Examples:
        >>> with eq.training.size_limit(0.5):
        ...     model = eq.load("digits-opteq")
    """
    if gigabytes is not None and not gigabytes > 0:
        raise ValueError(
            f"max_gigabytes must be positive, got {gigabytes}: omit it for the default of "
            f"{DEFAULT_GIGABYTES:g}"
        )
    token = _gigabytes.set(_gigabytes.get() if gigabytes is None else gigabytes)
    try:
        yield
    finally:
        _gigabytes.reset(token)


def current_limit() -> float:
    """Return the current memory limit in GB, for example for a child process."""
    return _gigabytes.get()


def check_file_size(path: Path) -> None:
    """Check that a file of weights is not larger than the memory limit.

    Raises:
        ModelSizeError: If it is larger.
    """
    size, limit = path.stat().st_size / 1e9, _gigabytes.get()
    if size > limit:
        raise ModelSizeError(
            f"{path} has {size:,.1f} GB, more than the limit of {limit:g} GB: {RAISE_LIMIT}"
        )


def check_model_size(name: str, options: Mapping[str, Any], sample: Sequence[int] = ()) -> None:
    """Check the size of a model without allocating its memory.

    The model is built on the meta device, whose tensors have shapes but no data. It is evaluated on
    one sample until a value is needed, which is in the first step of the solve. Models that cannot
    be built on the meta device are not checked.

    Args:
        name: Name of the model.
        options: Options of the model.
        sample: Channels, height and width of an image; empty to count only parameters.

    Raises:
        ModelSizeError: If the parameters and one sample's activations exceed the limit, or the
            model has an absurd number of layers.
    """
    limit = _gigabytes.get()
    for option, value in options.items():
        if option not in SOLVING:
            _check_option(name, option, value, limit)
    counted = _OperationCounter(name, limit)
    # Building the model later must draw the same initial weights, and will give the warnings.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.no_grad(), counted:
            try:
                with torch.device("meta"):
                    model = create_model(name, **options).eval()
                parameters = sum(map(_bytes, (*model.parameters(), *model.buffers())))
                working = max(WORKING_TENSORS, _states_kept(model))
                counted.is_built = True
                _evaluate(model, sample)
            except ModelSizeError:
                raise
            except Exception:
                return  # Building the model reports what is wrong.
    needed = (parameters + working * counted.largest_activation) / 1e9
    if needed > limit:
        image = f" and one image of {'×'.join(map(str, sample))}" if sample else ""
        raise ModelSizeError(
            f"the model {name!r} needs about {needed:,.1f} GB for its parameters{image}, "
            f"more than the limit of {limit:g} GB: {REMEDY}"
        )


def _check_option(name: str, option: str, value: Any, limit: float) -> None:
    allowed = MAX_OPTION * max(1.0, limit / DEFAULT_GIGABYTES)
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _check_option(name, option, inner, limit)
    elif isinstance(value, int) and abs(value) > allowed and "seed" not in option:
        raise ModelSizeError(
            f"the option {option} of the model {name!r} is {value:,}, more than the limit of "
            f"{allowed:,.0f}: {REMEDY}"
        )


def _states_kept(model: nn.Module) -> int:
    """Return the number of states that the solvers of a model keep at most."""
    solvers = (m.solving.solver for m in model.modules() if isinstance(m, EquilibriumLayer))
    return max((getattr(s, name, 0) for s in solvers for name in ("memory", "rank")), default=0)


def _evaluate(model: nn.Module, sample: Sequence[int]) -> None:
    """Evaluate a model on the meta device until it needs a value.

    The meta device is not the default device here, because tensors in caches would have no data.
    """
    inputs = [torch.zeros(1, *sample, device="meta")]
    if isinstance(latents := getattr(model, "latent_dim", None), int):
        inputs.append(torch.zeros(1, latents, device="meta"))
    for tensor in inputs:
        try:
            model(tensor)
        except ModelSizeError:
            raise
        except Exception:
            # The model read a value, which tensors on the meta device do not have, or it is a
            # decoder, whose input is not an image.
            continue


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of operations, which also records the size of the largest activation."""

    def __init__(self, name: str, limit: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.limit = name, limit
        self.is_built = False
        self.operations = self.largest_activation = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        if self.operations > MAX_OPERATIONS * max(1.0, self.limit / DEFAULT_GIGABYTES):
            if self.is_built:
                raise RuntimeError("stop: the evaluation takes too many operations")
            raise ModelSizeError(
                f"the model {self.name!r} takes more operations to build than the limit of "
                f"{self.operations - 1:,}: {REMEDY}"
            )
        result = func(*args, **(kwargs or {}))
        largest = max(map(_bytes, _tensors(result)), default=0)
        if largest > 1e9 * self.limit:
            raise ModelSizeError(
                f"the model {self.name!r} creates a tensor of {largest / 1e9:,.1f} GB, more than "
                f"the limit of {self.limit:g} GB: {REMEDY}"
            )
        if self.is_built:
            self.largest_activation = max(self.largest_activation, largest)
        return result


def _tensors(result: Any) -> list[Tensor]:
    values = result if isinstance(result, list | tuple) else [result]
    return [value for value in values if isinstance(value, Tensor)]
