"""A module beside itself: the same maps on other tensors, with nothing written to the original."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def twin(module: M, replaced: Callable[[Tensor], Tensor]) -> M:
    """A copy of a module that holds `replaced(t)` where it holds a tensor t.

    `torch.func.functional_call` puts tensors into the module itself for as long as it runs, which
    other threads see; a twin is its caller's alone, and costs a dictionary a submodule. Parameters,
    buffers and plain attributes count; all else is shared. A module that writes to more than its
    own attributes renews that in a method `on_twin`.

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
    # Not by the class's own `__new__`: torch.fx makes another class there.
    twins: dict[int, nn.Module] = {id(one): object.__new__(type(one)) for one in originals}
    for one in originals:
        own = vars(one).copy()
        for name, value in own.items():
            if isinstance(value, Tensor):
                own[name] = tensor(value)
            elif isinstance(value, nn.Module):
                own[name] = twins.get(id(value), value)
            elif isinstance(value, MethodType) and id(value.__self__) in twins:
                own[name] = MethodType(value.__func__, twins[id(value.__self__)])
        for kind in ("_parameters", "_buffers"):
            own[kind] = {name: tensor(held) for name, held in own[kind].copy().items()}
        children = own["_modules"].copy().items()
        own["_modules"] = {name: twins.get(id(child), child) for name, child in children}
        vars(twins[id(one)]).update(own)
    for found in twins.values():
        if renew := getattr(found, "on_twin", None):
            renew()
    return twins[id(module)]  # type: ignore[return-value]
