"""Which samples share an input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.solvers.convergence import relative_residual


@dataclass(frozen=True)
class Groups:
    """The samples of each problem: one each, or several that share an x.

    Rows of samples become rows of problems by laying the samples of a group side by side; shorter
    groups are filled up with zeros.
    """

    problems: int
    samples: int
    of_sample: Tensor | None = None
    """The problem of each sample; None: its own."""
    place: Tensor | None = None
    """The position of each sample in its group."""
    width: int = 1
    """The size of the largest group."""

    @classmethod
    def of(cls, x0: Tensor, groups: Tensor | None) -> Groups:
        problems = len(x0)
        if groups is None:
            return cls(problems, problems)
        if groups.dim() != 1 or groups.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "groups must be a tensor of whole numbers, one a sample, not one of shape "
                f"{tuple(groups.shape)} and type {groups.dtype}"
            )
        groups = groups.to(x0.device, torch.int64)
        inside = (groups >= 0) & (groups < problems)
        if not bool(inside.all()):
            raise ValueError(
                f"groups names problems from {int(groups.min())} to {int(groups.max())}, but x0 "
                f"has one row a group, {problems} in all"
            )
        sizes = torch.bincount(groups, minlength=problems)
        if bool((sizes == 0).any()):
            raise ValueError("every group must have a sample: some row of x0 belongs to no sample")
        order = torch.argsort(groups, stable=True)
        first = torch.cumsum(sizes, 0) - sizes
        place = torch.empty_like(groups)
        place[order] = torch.arange(len(groups), device=x0.device) - first[groups[order]]
        return cls(problems, len(groups), groups, place, int(sizes.max()))

    def to_samples(self, x: Tensor) -> Tensor:
        """A row a problem as a row a sample."""
        return x if self.of_sample is None else x[self.of_sample]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each problem's samples."""
        if self.of_sample is None:
            return values
        return values.new_zeros(self.problems, *values.shape[1:]).index_add(
            0, self.of_sample, values
        )

    def relative_residual(self, point: Tensor, image: Tensor) -> Tensor:
        """‖image − point‖/‖image‖ of each problem; NaN counts as infinite."""
        residual = relative_residual(self.norm(image - point), self.norm(image))
        return residual.nan_to_num(nan=torch.inf)

    def norm(self, rows: Tensor) -> Tensor:
        """The 2-norm of all rows of each problem."""
        return self.sum(rows.square().sum(dim=1)).sqrt()

    def largest(self, values: Tensor) -> Tensor:
        """The largest of the values (none negative) of each problem; NaN counts as infinite."""
        return self.join(values.nan_to_num(nan=torch.inf)[:, None]).amax(dim=1)

    def join(self, rows: Tensor) -> Tensor:
        """Rows of samples side by side, one row a problem."""
        if self.of_sample is None or self.place is None:
            return rows
        buffer = rows.new_zeros(self.problems, self.width, rows.shape[1])
        buffer[self.of_sample, self.place] = rows
        return buffer.flatten(1)

    def split(self, joined: Tensor) -> Tensor:
        """The inverse of `join`."""
        if self.of_sample is None or self.place is None:
            return joined
        return joined.reshape(self.problems, self.width, -1)[self.of_sample, self.place]

    def join_all(self, z: Tensor, mu: Tensor, x: Tensor) -> Tensor:
        """(z, μ, x) as one row a problem."""
        return torch.cat([self.join(z), self.join(mu), x], dim=1)

    def split_all(self, joined: Tensor, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
        """z, μ and x with this many columns: the inverse of `join_all`."""
        states = (joined.shape[1] - inputs) // 2
        z, mu, x = torch.split(joined, [states, states, inputs], dim=1)
        return self.split(z), self.split(mu), x
