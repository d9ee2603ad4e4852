"""Which samples share an input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Members:
    """The samples of each problem: one each, or groups that share an x.

    Rows of samples become rows of problems by laying the samples of a group side by side; shorter
    groups are filled up with zeros.
    """

    problems: int
    samples: int
    groups: Tensor | None = None
    place: Tensor | None = None
    """The position of each sample in its group."""
    width: int = 1
    """The size of the largest group."""

    @classmethod
    def of(cls, x0: Tensor, groups: Tensor | None) -> Members:
        problems = len(x0)
        if groups is None:
            return cls(problems, problems)
        if groups.dim() != 1 or groups.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "groups must be a tensor of whole numbers, one a sample, not one of shape "
                f"{tuple(groups.shape)} and type {groups.dtype}"
            )
        groups = groups.to(x0.device, torch.int64)
        sizes = torch.zeros(problems, dtype=torch.int64, device=x0.device)
        inside = (groups >= 0) & (groups < problems)
        if not bool(inside.all()):
            raise ValueError(
                f"groups names problems from {int(groups.min())} to {int(groups.max())}, but x0 "
                f"has one row a group, {problems} in all"
            )
        sizes.index_add_(0, groups, torch.ones_like(groups))
        if bool((sizes == 0).any()):
            raise ValueError("every group must have a sample: some row of x0 belongs to no sample")
        order = torch.argsort(groups, stable=True)
        first = torch.cumsum(sizes, 0) - sizes
        place = torch.empty_like(groups)
        place[order] = torch.arange(len(groups), device=x0.device) - first[groups[order]]
        return cls(problems, len(groups), groups, place, int(sizes.max()))

    def spread(self, x: Tensor) -> Tensor:
        """A row a problem as a row a sample."""
        return x if self.groups is None else x[self.groups]

    def collect(self, values: Tensor) -> Tensor:
        """The sum of each problem's samples."""
        if self.groups is None:
            return values
        return values.new_zeros(self.problems, *values.shape[1:]).index_add(0, self.groups, values)

    def norm(self, rows: Tensor) -> Tensor:
        """The 2-norm of all rows of each problem."""
        return self.collect(rows.square().sum(dim=1)).sqrt()

    def worst(self, values: Tensor) -> Tensor:
        """The largest of the values (none negative) of each problem; NaN counts as infinite."""
        return self.join(values.nan_to_num(nan=torch.inf)[:, None]).amax(dim=1)

    def join(self, rows: Tensor) -> Tensor:
        """Rows of samples side by side, one row a problem."""
        if self.groups is None or self.place is None:
            return rows
        buffer = rows.new_zeros(self.problems, self.width, rows.shape[1])
        buffer[self.groups, self.place] = rows
        return buffer.flatten(1)

    def part(self, joined: Tensor) -> Tensor:
        """The inverse of `join`."""
        if self.groups is None or self.place is None:
            return joined
        return joined.reshape(self.problems, self.width, -1)[self.groups, self.place]
