"""Assignment of samples to the inputs that they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.solvers.convergence import relative_residual


@dataclass(frozen=True)
class Groups:
    """Assignment of samples to optimization problems: one each, or several that share one input.

    Rows of samples become rows of problems by concatenating the samples of a group. Shorter groups
    are padded with zeros.

    Attributes:
        problems: Number of problems.
        samples: Number of samples.
        of_sample: Index of the problem of each sample; None if sample i belongs to problem i.
        place: Position of each sample in its group; None if `of_sample` is.
        width: Size of the largest group.
    """

    problems: int
    samples: int
    of_sample: Tensor | None = None
    place: Tensor | None = None
    width: int = 1

    @classmethod
    def of(cls, x0: Tensor, groups: Tensor | None) -> Groups:
        problems = len(x0)
        if groups is None:
            return cls(problems, problems)
        if groups.dim() != 1 or groups.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "groups must be a tensor of integers with one entry per sample, got shape "
                f"{tuple(groups.shape)} and type {groups.dtype}"
            )
        groups = groups.to(x0.device, torch.int64)
        inside = (groups >= 0) & (groups < problems)
        if not bool(inside.all()):
            raise ValueError(
                f"groups must hold indices of rows of x0, from 0 to {problems - 1}, got "
                f"{int(groups.min())} to {int(groups.max())}"
            )
        sizes = torch.bincount(groups, minlength=problems)
        if bool((sizes == 0).any()):
            unused = int((sizes == 0).nonzero()[0])
            raise ValueError(
                f"row {unused} of x0 has no sample: every row must occur in groups; remove unused "
                "rows of x0"
            )
        order = torch.argsort(groups, stable=True)
        first = torch.cumsum(sizes, 0) - sizes
        place = torch.empty_like(groups)
        place[order] = torch.arange(len(groups), device=x0.device) - first[groups[order]]
        return cls(problems, len(groups), groups, place, int(sizes.max()))

    def to_samples(self, x: Tensor) -> Tensor:
        """Expand rows of problems to rows of samples."""
        return x if self.of_sample is None else x[self.of_sample]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the samples of each problem."""
        if self.of_sample is None:
            return values
        return values.new_zeros(self.problems, *values.shape[1:]).index_add(
            0, self.of_sample, values
        )

    def relative_residual(self, point: Tensor, image: Tensor) -> Tensor:
        """Return ‖image − point‖/‖image‖ of each optimization problem; NaN counts as infinite."""
        residual = relative_residual(self.norm(image - point), self.norm(image))
        return residual.nan_to_num(nan=torch.inf)

    def norm(self, rows: Tensor) -> Tensor:
        """Return one 2-norm per optimization problem, over the rows of all samples in its group.

        Args:
            rows: One row per sample, shape (samples, N).
        """
        return self.sum(rows.square().sum(dim=1)).sqrt()

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of the non-negative values of each problem; NaN counts as infinite."""
        return self.join(values.nan_to_num(nan=torch.inf)[:, None]).amax(dim=1)

    def join(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of the samples of each problem, shape (problems, width · N)."""
        if self.of_sample is None or self.place is None:
            return rows
        buffer = rows.new_zeros(self.problems, self.width, rows.shape[1])
        buffer[self.of_sample, self.place] = rows
        return buffer.flatten(1)

    def split(self, joined: Tensor) -> Tensor:
        """Invert `join`."""
        if self.of_sample is None or self.place is None:
            return joined
        return joined.reshape(self.problems, self.width, -1)[self.of_sample, self.place]

    def join_all(self, z: Tensor, mu: Tensor, x: Tensor) -> Tensor:
        """Concatenate states z, adjoints μ and inputs x to one row per problem."""
        return torch.cat([self.join(z), self.join(mu), x], dim=1)

    def split_all(self, joined: Tensor, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Invert `join_all`: return states, adjoints, and inputs with `inputs` columns."""
        states = (joined.shape[1] - inputs) // 2
        z, mu, x = torch.split(joined, [states, states, inputs], dim=1)
        return self.split(z), self.split(mu), x
