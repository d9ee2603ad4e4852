"""Facts about a term that need no computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Facts about an energy term; by default the safe answer to every question.

    Args:
        couples_batch: The value of one sample depends on the others. The batch is then one problem
            for the solver, the adjoint and the status.
        is_concave: E is concave in y. The map σ(−∇E) is then monotone.
        is_quadratic: ∇²E is the same matrix at every state and every input.
        vanishes_at_zero: ∇E(0; x) = 0.
        has_gradient: `descent` is −∇ of `value`. False where a scale follows the state and is
            treated as a constant: such a term is the energy of no map.
        owns_descent: `descent` returns new tensors, which the caller may overwrite.
        calibrates: The term has a `calibrate` method that must see the first image of a solve.
        refresh_until: How many iterations of a solve renew the context by `refresh`.

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
        """Facts of an energy made of several terms.

        Args:
            several: The facts of each term.
            owns_descent: Whether the descent of the whole is new memory.
        """
        facts = list(several)
        return cls(
            couples_batch=any(one.couples_batch for one in facts),
            is_concave=all(one.is_concave for one in facts),
            is_quadratic=all(one.is_quadratic for one in facts),
            vanishes_at_zero=all(one.vanishes_at_zero for one in facts),
            has_gradient=all(one.has_gradient for one in facts),
            owns_descent=owns_descent,
            calibrates=any(one.calibrates for one in facts),
            refresh_until=max((one.refresh_until for one in facts), default=0),
        )
