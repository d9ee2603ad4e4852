"""Compare the default solver with scipy's L-BFGS-B: `python -m benchmarks.energies`.

Counts evaluations of the gradient per sample up to ‖T(y) − y‖ ≤ 1e-5 ‖T(y)‖. A product with the
Hessian counts as an evaluation.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import torch

import equilibria as eq
from benchmarks.energy_bank import BANK, HELD_OUT, HELD_OUT_SEED, Entry, inputs

TOLERANCE = 1e-5
SAMPLES = 6
ACTIVATIONS = {"relu": (0.0, None), "identity": (None, None)}
"""Bounds with which L-BFGS-B minimizes the same objective, by activation."""


class _StationaryError(Exception):
    """L-BFGS-B has reached the tolerance."""


def lbfgs_evaluations(entry: Entry, activation: str, x: torch.Tensor, seed: int = 0) -> int | None:
    """Return the number of evaluations until L-BFGS-B reaches the tolerance, or None."""
    from scipy.optimize import minimize

    layer = eq.EquilibriumLayer(entry.energy(seed), activation=activation)
    objective, cell = layer.objective(x), layer.cell
    context = cell.inject(x)
    count = 0

    def evaluate(y: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal count
        count += 1
        with torch.no_grad():
            state = torch.as_tensor(y)[None]
            descent = cell.energy.descent(state, context)
            image = cell.activation(descent)
            if (image - state).norm() <= TOLERANCE * image.norm():
                raise _StationaryError
            return float(objective.value(state)), (state - descent)[0].numpy()

    options = {"maxiter": 20_000, "maxfun": 20_000, "ftol": 0, "gtol": 0}
    bounds = [ACTIVATIONS[activation]] * entry.size
    try:
        minimize(
            evaluate,
            np.zeros(entry.size),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options=options,
        )
    except _StationaryError:
        return count
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.energies", description=__doc__)
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="use energies that were not used for any choice in the solver",
    )
    held_out = parser.parse_args().held_out
    bank, seed = (HELD_OUT, HELD_OUT_SEED) if held_out else (BANK, 0)
    ahead = fewer = total = 0
    for activation in ACTIVATIONS:
        print(
            f"\n| energy, {activation} | solver | ours | L-BFGS-B | ratio |\n|---|---|---|---|---|"
        )
        for entry in bank:
            layer = eq.EquilibriumLayer(
                entry.energy(seed), activation=activation, tolerance=TOLERANCE
            ).eval()
            x = inputs(SAMPLES, seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", eq.ConvergenceWarning)
                solution = layer.solve(x)
            counts = [
                lbfgs_evaluations(entry, activation, x[row : row + 1], seed)
                for row in range(SAMPLES)
            ]
            reached = [count for count in counts if count is not None]
            ours = solution.sample_evaluations / SAMPLES
            theirs = float(np.mean(reached)) if reached else float("nan")
            failed = SAMPLES - len(reached)
            total += 1
            converged = bool(solution.converged.all())
            ahead += converged and (failed > 0 or ours <= theirs)
            fewer += converged and (failed > 0 or ours < theirs)
            print(
                f"| {entry.name} | {solution.solver} | {ours:.0f} | {theirs:.0f}"
                f"{f' ({failed} never)' if failed else ''} | {ours / theirs:.2f} |"
                + ("" if converged else " not all converged")
            )
    print(f"\nFewer evaluations than L-BFGS-B in {fewer} of {total}, at most as many in {ahead}.")


if __name__ == "__main__":
    main()
