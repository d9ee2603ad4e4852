"""Twins of modules: copies that hold other tensors and share everything else."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def twin(module: M, replaced: Callable[[Tensor], Tensor]) -> M:
    """Return a copy of a module with every tensor t replaced by `replaced(t)`.

    Replaces parameters, buffers and tensors in attributes; everything else is shared. Unlike
    `torch.func.functional_call`, which modifies the module while it runs, this is safe with
    threads; it costs one dictionary per submodule. A module that writes to shared objects must
    replace them in a method `on_twin`.

    Args:
        module: Module to copy.
        replaced: Returns the tensor of the copy; called once per tensor.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> from equilibria.context.twin import twin
        >>> half = twin(layer, lambda tensor: tensor.detach() / 2)
        >>> torch.allclose(half(torch.ones(1, 2)), layer(torch.ones(1, 2)) / 2)
        True
    """
    tensors: dict[int, Tensor] = {}

    def tensor(held: Tensor | None) -> Tensor | None:
        if held is None:
            return None
        if id(held) not in tensors:
            tensors[id(held)] = replaced(held)
        return tensors[id(held)]

    originals = list(module.modules())
    # The `__new__` of torch.fx modules would create another class.
    twins: dict[int, nn.Module] = {
        id(original): object.__new__(type(original)) for original in originals
    }
    for original in originals:
        attributes = vars(original).copy()
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                attributes[name] = tensor(value)
            elif isinstance(value, nn.Module):
                attributes[name] = twins.get(id(value), value)
            elif isinstance(value, MethodType) and id(value.__self__) in twins:
                attributes[name] = MethodType(value.__func__, twins[id(value.__self__)])
        for kind in ("_parameters", "_buffers"):
            attributes[kind] = {
                name: tensor(held) for name, held in attributes[kind].copy().items()
            }
        children = attributes["_modules"].copy().items()
        attributes["_modules"] = {name: twins.get(id(child), child) for name, child in children}
        vars(twins[id(original)]).update(attributes)
    for new in twins.values():
        if on_twin := getattr(new, "on_twin", None):
            on_twin()
    return twins[id(module)]  # type: ignore[return-value]
