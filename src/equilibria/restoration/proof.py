"""Restored photographs, and what is proven of them: error bound, possible gain, uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equilibria.models.restorers.photo import PhotoCell
from equilibria.registry import check_at_least_one, check_not_negative, check_positive_pixels
from equilibria.restoration.restorer import Restored
from equilibria.solvers import Solution
from equilibria.solvers.linear.conjugate_gradients import conjugate_gradients

GRAY_LEVEL = 1 / 255


@dataclass(frozen=True, kw_only=True)
class RestoredPhotos(Restored):
    """Restored photographs, and what is proven of them.

    Args:
        steepness: ‖∇G(y)‖ of each image, over the square root of its pixels.
        solution: The solve, with the mirrored edge.
        start: Where it began.
        cell: The map that was solved, with the objective G.
        is_scaled: Whether the solve, its trace and what is proven are those of transformed values
            (`RestorationProblem.scale`).
        noise_term: Value of the data term of each image where the misfit is that of the noise.

    Examples:
        >>> minimizer = eq.restoration.PhotoMinimizer(eq.models.photo_prior(), noise=0.1)
        >>> restored = minimizer.restore(torch.rand(1, 1, 24, 24))
        >>> restored.statement
        'within 0... gray levels of the exact minimizer'
        >>> restored.standard_errors(level=0.1, probes=2).shape
        torch.Size([1, 1, 40, 40])
    """

    steepness: Tensor
    solution: Solution
    start: Tensor
    cell: PhotoCell
    noise_term: Tensor
    is_scaled: bool = False

    @property
    def iterations(self) -> Tensor:
        """Number of iterations for each image."""
        return self.solution.iterations

    @property
    def bound(self) -> Tensor | None:
        """Proven bound of the root mean square distance to the exact minimizer y*.

        None where A hides something, so that the objective is not proven convex.
        """
        # ‖∇G(y)‖/m ≥ ‖y − y*‖.
        return self.steepness / self.cell.convexity if self.cell.convexity > 0 else None

    @cached_property
    def objective(self) -> Tensor:
        """G at the start of the solve and at the answer, (2, B)."""
        objective = self.cell.objective(self.solution.context)
        with torch.no_grad():
            ends = (self.start, self.solution.state)
            return torch.stack([objective.value(state) for state in ends])

    @property
    def statement(self) -> str:
        """What is proven of the images, in one sentence.

        How much better an image nearby can be is given as a share of the objective. Where that
        exceeds the objective, as for a flat image, it is given as a share of the value that the
        data term has if the misfit is that of the noise.
        """
        if self.bound is not None:
            levels = (
                f"within {float(self.bound.max()) * 255:.2f} gray levels of the exact minimizer"
            )
            return f"{levels}, in the scale of even noise" if self.is_scaled else levels
        done = bool(self.solution.converged.all())
        status = "converged" if done else "not converged"
        gain = self.gain_within()
        if gain is None:
            return (
                f"{status}; nothing is proven, because the measurement is not linear in the picture"
            )
        objective, of = self.objective[-1], ""
        if bool((gain >= objective).any()):
            # The objective of a flat picture is about zero, and no gain is a sensible share of it.
            objective, of = objective.maximum(self.noise_term), " of what the noise contributes"
        share = float((gain / objective).max())
        return (
            f"{status}; no picture within one gray level lowers the objective by more than "
            f"{share:.1%}{of}"
        )

    def gain_within(self, radius: float = GRAY_LEVEL) -> Tensor | None:
        """Bound how much lower G is at any picture z near the answer y.

        "Near" is a root mean square distance of at most `radius`.

        G(z) ≥ G(y) + ⟨∇G(y), z − y⟩ + (m/2)‖z − y‖², with m ≤ ∇²G everywhere: with −m the concavity
        of the prior, if A is linear. None where A is not.
        """
        check_not_negative(radius=radius)
        convexity = self.cell.convexity
        if math.isinf(convexity):
            return None
        state = self.solution.state
        assert isinstance(state, Tensor)
        far = torch.full_like(self.steepness, radius)
        if convexity > 0:
            far = far.minimum(self.steepness / convexity)
        return state[0].numel() * (self.steepness * far - convexity / 2 * far.square())

    def standard_errors(self, level: float, probes: int = 16, seed: int = 0) -> Tensor:
        """About how far each pixel may be from the truth: σ·√diag(H⁻¹), H = ∇²G at the answer.

        That is the posterior's deviation where G/σ² is its negative logarithm and is as curved
        everywhere as here. The diagonal is an estimate (Hutchinson: the mean of z·H⁻¹z over random
        signs z), and there is none where H is not positive. level: σ, that of the prior.
        """
        check_positive_pixels(level=level)
        check_at_least_one(probes=probes)
        state, length = self.solution.state, self.cell.damping
        assert isinstance(state, Tensor)
        y = state.detach().requires_grad_()
        with torch.enable_grad():
            image = self.cell.step(y, self.solution.context)
        assert isinstance(image, Tensor)

        def curved(rows: Tensor) -> Tensor:
            """H v = (v − Jv)/length of the gradient step, whose Jacobian J is symmetric."""
            (pulled,) = torch.autograd.grad(image, y, rows.reshape(y.shape), retain_graph=True)
            return (rows - pulled.flatten(1)) / length

        chance = torch.Generator().manual_seed(seed)
        total = torch.zeros_like(state)
        for _ in range(probes):
            signs = torch.randint(2, state.shape, generator=chance).to(state) * 2 - 1
            found = conjugate_gradients(
                curved, signs.flatten(1), tolerance=1e-2, max_iterations=200
            )
            total += signs * found.value.reshape(state.shape)
        return level * (total / probes).clamp_min(0).sqrt()
