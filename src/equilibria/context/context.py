"""The context: all tensors that a step of the map reads, except the state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Entry = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Context:
    """Tensors computed once per solve, by `inject`, and read by every step.

    The tensors are not detached: gradients reach the parameters and the input through them.

    Args:
        sample: Tensors with the batch in the first dimension, by name. Finished samples are
            removed from them by indexing.
        shared: Tensors that all samples share, such as normalized weights, by name.
        parts: Contexts of the parts of a composite, such as the terms of a sum, by name.

    Examples:
        >>> context = eq.Context(sample={"x": torch.arange(3.0)}, shared={"W": torch.eye(2)})
        >>> context.keep(torch.tensor([0, 2]))["x"]
        tensor([0., 2.])
    """

    sample: Mapping[str, Entry] = field(default_factory=dict)
    shared: Mapping[str, Entry] = field(default_factory=dict)
    parts: Mapping[str, Context] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor `name`.

        Raises:
            KeyError: If there is no such tensor.
        """
        entry = self.sample.get(name, self.shared.get(name))
        if isinstance(entry, Tensor):
            return entry
        raise KeyError(
            f"the context has no tensor {name!r}; it has {sorted([*self.sample, *self.shared])}. "
            "Add it in `inject` or `prepare`."
        )

    def weights(self, name: str) -> tuple[Tensor, ...]:
        """Return the effective weights of an operator (see `LinearOperator.weights`).

        Args:
            name: Name of the operator in `shared`.
        """
        return _tuple(self.shared[name])

    def several(self, name: str) -> tuple[Tensor, ...]:
        """Return per-sample tensors that are stored under one name, such as several inputs.

        Args:
            name: Name in `sample`.
        """
        return _tuple(self.sample[name])

    def with_sample(self, **entries: Entry) -> Context:
        """Return a context with additional per-sample tensors.

        Args:
            entries: The tensors, by name.
        """
        return Context({**self.sample, **entries}, self.shared, self.parts)

    def with_part(self, name: str, part: Context) -> Context:
        """Return a context with an additional part.

        Args:
            name: Name of the part.
            part: Its context.
        """
        return Context(self.sample, self.shared, {**self.parts, name: part})

    def with_shared(self, entries: Mapping[str, Entry]) -> Context:
        """Return a context with additional tensors that all samples share.

        Args:
            entries: The tensors, by name.
        """
        return Context(self.sample, {**self.shared, **entries}, self.parts)

    def keep(self, index: Tensor | slice) -> Context:
        """Return the context of a subset of the samples.

        Args:
            index: Indices of the samples, or a slice.
        """
        return Context(
            {name: _map_entry(lambda t: t[index], entry) for name, entry in self.sample.items()},
            self.shared,
            {name: part.keep(index) for name, part in self.parts.items()},
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order that `replace` expects."""
        return list(self._walk())

    def replace(self, tensors: Sequence[Tensor]) -> Context:
        """Return a context of the same structure with other tensors.

        Args:
            tensors: One tensor for each of `tensors()`, in that order.
        """
        remaining = iter(tensors)
        return self._map(lambda _: next(remaining))

    def is_per_sample(self) -> list[bool]:
        """Return for each of `tensors()` whether its first dimension is the batch."""
        sample = [len(_tuple(e)) * [True] for e in self.sample.values()]
        shared = [len(_tuple(e)) * [False] for e in self.shared.values()]
        parts = [part.is_per_sample() for part in self.parts.values()]
        return [flag for flags in (*sample, *shared, *parts) for flag in flags]

    def skeleton(self) -> Context:
        """Return a context of the same structure with empty tensors, for a later `replace`."""
        return self._map(lambda tensor: tensor.new_empty(0))

    def _walk(self) -> Iterator[Tensor]:
        for entries in (self.sample, self.shared):
            for entry in entries.values():
                if isinstance(entry, Tensor):
                    yield entry
                else:
                    yield from entry
        for part in self.parts.values():
            yield from part._walk()

    def _map(self, function: Callable[[Tensor], Tensor]) -> Context:
        return Context(
            {name: _map_entry(function, entry) for name, entry in self.sample.items()},
            {name: _map_entry(function, entry) for name, entry in self.shared.items()},
            {name: part._map(function) for name, part in self.parts.items()},
        )


def numbered(parts: Iterable[Context]) -> dict[str, Context]:
    """Name contexts by their position, for example those of branches or layers.

    Examples:
        >>> from equilibria.context.context import numbered
        >>> list(numbered([eq.Context(), eq.Context()]))
        ['0', '1']
    """
    return {str(index): part for index, part in enumerate(parts)}


def _tuple(entry: Entry) -> tuple[Tensor, ...]:
    return (entry,) if isinstance(entry, Tensor) else entry


def _map_entry(function: Callable[[Tensor], Tensor], entry: Entry) -> Entry:
    if isinstance(entry, Tensor):
        return function(entry)
    return tuple(function(tensor) for tensor in entry)


def is_exporting() -> bool:
    """Return whether `torch.export` is running; False with PyTorch before 2.7.

    Examples:
        >>> from equilibria.context.context import is_exporting
        >>> is_exporting()
        False
    """
    return bool(getattr(torch.compiler, "is_exporting", bool)())


P = ParamSpec("P")
R = TypeVar("R")


def run_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from `torch.compile`, without importing the compiler until it is used.

    For functions whose control flow depends on the data, such as a solve. Inside
    `torch.compile(model)` they run eagerly, and the code around them is compiled.

    Args:
        function: The function to exclude.

    Examples:
        >>> from equilibria.context.context import run_eagerly
        >>> @run_eagerly
        ... def depends_on_data(z):
        ...     return z if z.sum() > 0 else -z
        >>> depends_on_data(torch.tensor([-1.0]))
        tensor([1.])
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() and not is_exporting():
            disabled: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper
