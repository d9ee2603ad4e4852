"""Restored photographs with proven accuracy: error bound, possible gain, uncertainty."""

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
    """Restored photographs with bounds on their error.

    Args:
        steepness: Root mean square of ∇G(y) of each image, with the mirrored edge.
        solution: Solution, with the mirrored edge.
        start: Start of the solve, with the mirrored edge.
        cell: The map of the solve, with the objective G.
        is_scaled: Whether the solve, its trace and the bounds are those of transformed values
            (`RestorationProblem.scale`).
        noise_term: Data term of each image if the misfit equals the norm of the noise; None where
            `bound` is proven.

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
    noise_term: Tensor | None
    is_scaled: bool = False

    @property
    def iterations(self) -> Tensor:
        """Number of iterations for each image."""
        return self.solution.iterations

    @property
    def bound(self) -> Tensor | None:
        """Proven bound on the root mean square distance of `images` to the exact minimizer y*.

        None if A loses information, because the objective is then not proven convex.
        """
        if not self.cell.convexity > 0:
            return None
        # ‖y − y*‖ ≤ ‖∇G(y)‖/m includes the mirrored edge, which `images` does not contain.
        state = self.solution.state
        assert isinstance(state, Tensor)
        solved, returned = (math.prod(pixels.shape[1:]) for pixels in (state, self.images))
        return self.steepness / self.cell.convexity * math.sqrt(solved / returned)

    @cached_property
    def objective(self) -> Tensor:
        """G at the start and at the end of the solve, shape (2, B)."""
        objective = self.cell.objective(self.solution.context)
        with torch.no_grad():
            ends = (self.start, self.solution.state)
            return torch.stack([objective.value(state) for state in ends])

    @property
    def statement(self) -> str:
        """Sentence on the proven accuracy of the images.

        Without a bound on the error, it states the largest improvement of the objective by a nearby
        image, relative to the objective. For a nearly flat image, whose objective is about zero, it
        is relative to the data term at the noise level.
        """
        if self.bound is not None:
            levels = (
                f"within {float(self.bound.max()) * 255:.2f} gray levels of the exact minimizer"
            )
            return f"{levels}, on the scale with uniform noise" if self.is_scaled else levels
        done = bool(self.solution.converged.all())
        status = "converged" if done else "not converged"
        gain = self.gain_within()
        if gain is None:
            return (
                f"{status}; nothing is proven, because the measurement is not linear in the picture"
            )
        objective, of = self.objective[-1], ""
        if bool((gain >= objective).any()):
            # The objective of a flat picture is about zero, and every gain is a large share of it.
            assert self.noise_term is not None
            objective, of = objective.maximum(self.noise_term), " of the contribution of the noise"
        share = float((gain / objective).max())
        return (
            f"{status}; no picture within one gray level lowers the objective by more than "
            f"{share:.1%}{of}"
        )

    def gain_within(self, radius: float = GRAY_LEVEL) -> Tensor | None:
        """Return a bound on how much lower G is at any picture z near the result y.

        G(z) ≥ G(y) + ⟨∇G(y), z − y⟩ + (m/2)‖z − y‖², with m ≤ ∇²G everywhere. If A is linear, −m is
        the concavity of the prior. Both pictures include the mirrored edge.

        Args:
            radius: Largest root mean square distance between z and y.

        Returns:
            One bound per image, or None if A is not linear.
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
        """Estimate the standard error of each pixel: σ·√diag(H⁻¹), H = ∇²G at the result.

        This is the standard deviation of the posterior in Laplace's approximation, if its negative
        logarithm is G/σ². The diagonal is estimated by Hutchinson's method: the mean of z·H⁻¹z over
        random signs z. It needs a positive definite H.

        Args:
            level: σ, the noise level of the prior.
            probes: Number of random sign vectors z.
            seed: Seed of the random signs.

        Returns:
            Standard errors in the shape of the solved state, with the mirrored edge.
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
            """Return H v = (v − Jv)/length, with J the symmetric Jacobian of the gradient step."""
            (pulled,) = torch.autograd.grad(image, y, rows.reshape(y.shape), retain_graph=True)
            return (rows - pulled.flatten(1)) / length

        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros_like(state)
        for _ in range(probes):
            signs = torch.randint(2, state.shape, generator=generator).to(state) * 2 - 1
            solution = conjugate_gradients(
                curved, signs.flatten(1), tolerance=1e-2, max_iterations=200
            )
            total += signs * solution.value.reshape(state.shape)
        return level * (total / probes).clamp_min(0).sqrt()
