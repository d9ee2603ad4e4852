"""Everything that a step of the map reads besides the state."""

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
    """Tensors computed once a solve, by `inject`, and read by every step.

    `sample` tensors have the batch first, so that finished samples can be dropped by indexing;
    `shared` ones (normalized weights, scales) belong to all samples. A composite, such as a sum of
    energy terms, keeps the contexts of its `parts` by their names. Nothing in a context is
    detached: gradients reach the parameters and the input through it.

    Examples:
        >>> context = eq.Context(sample={"x": torch.arange(3.0)}, shared={"W": torch.eye(2)})
        >>> context.keep(torch.tensor([0, 2]))["x"]
        tensor([0., 2.])
    """

    sample: Mapping[str, Entry] = field(default_factory=dict)
    shared: Mapping[str, Entry] = field(default_factory=dict)
    parts: Mapping[str, Context] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor called `name`."""
        entry = self.sample.get(name, self.shared.get(name))
        if isinstance(entry, Tensor):
            return entry
        raise KeyError(
            f"the context holds no tensor {name!r}; it has {sorted([*self.sample, *self.shared])}. "
            "Put it there in `inject` or `prepare`."
        )

    def weights(self, name: str) -> tuple[Tensor, ...]:
        """The effective weights of the operator called `name` (see `LinearOperator.weights`)."""
        return _tuple(self.shared[name])

    def several(self, name: str) -> tuple[Tensor, ...]:
        """The sample tensors called `name`, such as the inputs of a term that takes several."""
        return _tuple(self.sample[name])

    def with_sample(self, **entries: Entry) -> Context:
        """Return a context with more entries per sample."""
        return Context({**self.sample, **entries}, self.shared, self.parts)

    def with_part(self, name: str, part: Context) -> Context:
        """Return a context in which `name` has its own context."""
        return Context(self.sample, self.shared, {**self.parts, name: part})

    def with_shared(self, entries: Mapping[str, Entry]) -> Context:
        """Return a context with more entries that all samples share."""
        return Context(self.sample, {**self.shared, **entries}, self.parts)

    def keep(self, index: Tensor | slice) -> Context:
        """The context of the samples at `index`."""
        return Context(
            {name: _map_entry(lambda t: t[index], entry) for name, entry in self.sample.items()},
            self.shared,
            {name: part.keep(index) for name, part in self.parts.items()},
        )

    def tensors(self) -> list[Tensor]:
        """All tensors, in an order that `replace` understands."""
        return list(self._walk())

    def replace(self, tensors: Sequence[Tensor]) -> Context:
        """The same context with its tensors replaced, in the order of `tensors()`."""
        remaining = iter(tensors)
        return self._map(lambda _: next(remaining))

    def is_per_sample(self) -> list[bool]:
        """For each of `tensors()` whether it has a row a sample."""
        own = [len(_tuple(e)) * [True] for e in self.sample.values()]
        shared = [len(_tuple(e)) * [False] for e in self.shared.values()]
        parts = [part.is_per_sample() for part in self.parts.values()]
        return [flag for flags in (*own, *shared, *parts) for flag in flags]

    def skeleton(self) -> Context:
        """The structure alone, without the memory of its tensors, for a later `replace`."""
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
    """Parts that have an order and no names, such as branches and layers.

    Examples:
        >>> from equilibria.context.context import numbered
        >>> list(numbered([eq.Context(), eq.Context()]))
        ['0', '1']
    """
    return {str(place): part for place, part in enumerate(parts)}


def _tuple(entry: Entry) -> tuple[Tensor, ...]:
    return (entry,) if isinstance(entry, Tensor) else entry


def _map_entry(function: Callable[[Tensor], Tensor], entry: Entry) -> Entry:
    if isinstance(entry, Tensor):
        return function(entry)
    return tuple(function(tensor) for tensor in entry)


def is_exporting() -> bool:
    """Whether `torch.export` runs; torch before 2.7 does not say.

    Examples:
        >>> from equilibria.context.context import is_exporting
        >>> is_exporting()
        False
    """
    return bool(getattr(torch.compiler, "is_exporting", bool)())


P = ParamSpec("P")
R = TypeVar("R")


def run_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, without importing the compiler before anything is compiled.

    A solve is a loop that depends on the data, and the choice of a frequency is too: inside
    `torch.compile(model)` they run as they are, and what is around them is compiled.

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
