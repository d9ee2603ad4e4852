"""How much memory a model of a recipe needs, estimated before it is built."""

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

USUAL_GIGABYTES = 10.0
"""The largest model of the papers, on a whole image of Cityscapes, needs 8.6."""
WORKING_TENSORS = 8
"""A solve is taken to need memory for so many tensors of the size of the largest."""
MOST_OPERATIONS = 20_000
"""Tensor operations of building a model and of one evaluation; the largest preset has 5,414."""
LARGEST_NUMBER = 2**20
"""The largest number among the options at the usual limit. Counting tensors would not notice a
list of that length."""

ALLOW = (
    "that are allowed: if you trust the run, allow more (max_gigabytes=… in Python, "
    "--max-gigabytes on the command line)"
)
REMEDY = f"{ALLOW}, or correct model.options"

_gigabytes: ContextVar[float] = ContextVar("gigabytes", default=USUAL_GIGABYTES)


class ModelSizeError(ValueError):
    """A model of a recipe needs more memory, or more operations, than is allowed."""


@contextmanager
def size_limit(gigabytes: float | None) -> Iterator[None]:
    """Set the memory that models may need in this block.

    Args:
        gigabytes: Limit for the parameters and one sample's activations; None changes nothing.

    Raises:
        ValueError: If the limit is not positive.

    Examples:
        >>> with eq.training.size_limit(0.5):
        ...     model = eq.load("digits-opteq")
    """
    if gigabytes is not None and not gigabytes > 0:
        raise ValueError(
            f"max_gigabytes must be above 0, got {gigabytes}: leave it out for {USUAL_GIGABYTES:g}"
        )
    token = _gigabytes.set(_gigabytes.get() if gigabytes is None else gigabytes)
    try:
        yield
    finally:
        _gigabytes.reset(token)


def present_limit() -> float:
    """Gigabytes that a model may need now, for a process that this one starts."""
    return _gigabytes.get()


def check_file_size(path: Path) -> None:
    """Refuse a file of weights that is larger than a model may be.

    Raises:
        ModelSizeError: If it is.
    """
    size, limit = path.stat().st_size / 1e9, _gigabytes.get()
    if size > limit:
        raise ModelSizeError(f"{path} has {size:,.1f} GB, more than the {limit:g} GB {ALLOW}")


def check_model_size(name: str, options: Mapping[str, Any], sample: Sequence[int] = ()) -> None:
    """Refuse a model that is too large, without allocating any of its memory.

    The model is built on the meta device, whose tensors have sizes only, and evaluated on one
    sample as far as that is possible without numbers, which is up to the first step of the solve.
    Models that cannot be built on the meta device are not checked.

    Args:
        name: Model, as `create_model` takes it.
        options: Its options.
        sample: Channels, height and width of an image; empty to count the parameters alone.

    Raises:
        ModelSizeError: If the parameters and one sample's activations exceed the limit, or the
            model has an absurd number of layers.
    """
    limit = _gigabytes.get()
    for option, value in options.items():
        if option not in SOLVING:
            _check_numbers(name, option, value, limit)
    counted = _Counted(name, limit)
    # Initial weights are drawn elsewhere, and warnings given when the model is really built.
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
            f"more than the {limit:g} GB {REMEDY}"
        )


def _check_numbers(name: str, option: str, value: Any, limit: float) -> None:
    allowed = LARGEST_NUMBER * max(1.0, limit / USUAL_GIGABYTES)
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _check_numbers(name, option, inner, limit)
    elif isinstance(value, int) and abs(value) > allowed and "seed" not in option:
        raise ModelSizeError(
            f"the option {option} of the model {name!r} is {value:,}, more than the "
            f"{allowed:,.0f} {REMEDY}"
        )


def _states_kept(model: nn.Module) -> int:
    """Return the number of states that the solvers of a model keep at most."""
    solvers = (m.solving.solver for m in model.modules() if isinstance(m, EquilibriumLayer))
    return max((getattr(s, name, 0) for s in solvers for name in ("memory", "rank")), default=0)


def _evaluate(model: nn.Module, sample: Sequence[int]) -> None:
    """Evaluate a model on the meta device until it needs a number.

    That is not the default device here: a tensor that a module keeps for later would have no data.
    """
    inputs = [torch.zeros(1, *sample, device="meta")]
    if isinstance(latents := getattr(model, "latent_dim", None), int):
        inputs.append(torch.zeros(1, latents, device="meta"))
    for one in inputs:
        try:
            model(one)
        except ModelSizeError:
            raise
        except Exception:
            # A tensor on the meta device has no numbers to be read; a decoder takes no images.
            continue


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and remembers the size of the largest tensor of an evaluation."""

    def __init__(self, name: str, limit: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.limit = name, limit
        self.is_built = False
        self.operations = self.largest_activation = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        if self.operations > MOST_OPERATIONS * max(1.0, self.limit / USUAL_GIGABYTES):
            if self.is_built:
                raise RuntimeError("enough is known of the evaluation")
            raise ModelSizeError(
                f"the model {self.name!r} takes more operations to build than the "
                f"{self.operations - 1:,} {REMEDY}"
            )
        result = func(*args, **(kwargs or {}))
        largest = max(map(_bytes, _tensors(result)), default=0)
        if largest > 1e9 * self.limit:
            raise ModelSizeError(
                f"the model {self.name!r} makes a tensor of {largest / 1e9:,.1f} GB, more than the "
                f"{self.limit:g} GB {REMEDY}"
            )
        if self.is_built:
            self.largest_activation = max(self.largest_activation, largest)
        return result


def _tensors(result: Any) -> list[Tensor]:
    several = result if isinstance(result, list | tuple) else [result]
    return [one for one in several if isinstance(one, Tensor)]
