"""Properties of an energy term that need no computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Properties of an energy term; the defaults are safe for every term.

    Args:
        couples_batch: Whether the value of one sample depends on the others. Solver, adjoint and
            status then treat the batch as one problem.
        is_concave: Whether the energy E(y; x) is concave in the state y. The map σ(−∇E) is then
            monotone.
        is_quadratic: Whether ∇²E is the same matrix at every state and input.
        vanishes_at_zero: Whether ∇E(0; x) = 0.
        has_gradient: Whether `descent` is −∇ of `value`. False if `descent` treats a scale that
            follows the state as a constant; it is then not the gradient of any energy.
        owns_descent: Whether `descent` returns new tensors, which the caller may overwrite.
        calibrates: Whether the term has a `calibrate` method, which needs T(0), the map at the
            zero state.
        refresh_until: Number of first iterations of a solve in which `refresh` still changes the
            term, such as its frozen signs.

    Examples:
        >>> eq.Quadratic(torch.eye(2)).facts.is_concave
        True
    """

    couples_batch: bool = False
    is_concave: bool = False
    is_quadratic: bool = False
    vanishes_at_zero: bool = False
    has_gradient: bool = True
    owns_descent: bool = False
    calibrates: bool = False
    refresh_until: int = 0

    @classmethod
    def joined(cls, several: Iterable[Facts], *, owns_descent: bool = False) -> Facts:
        """Return the facts of a sum of terms.

        Args:
            several: Facts of each term.
            owns_descent: Whether `descent` of the sum returns new tensors.
        """
        facts = list(several)
        return cls(
            couples_batch=any(each.couples_batch for each in facts),
            is_concave=all(each.is_concave for each in facts),
            is_quadratic=all(each.is_quadratic for each in facts),
            vanishes_at_zero=all(each.vanishes_at_zero for each in facts),
            has_gradient=all(each.has_gradient for each in facts),
            owns_descent=owns_descent,
            calibrates=any(each.calibrates for each in facts),
            refresh_until=max((each.refresh_until for each in facts), default=0),
        )
