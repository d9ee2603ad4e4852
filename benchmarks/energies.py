"""`python -m benchmarks.energies`: what the default solver needs, beside scipy's L-BFGS-B.

Counts, not times: evaluations of the gradient a sample, to the same stationarity ‖T(y) − y‖ ≤
1e-5 ‖T(y)‖. A product with the Hessian counts as an evaluation too.
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
"""With the bounds in which L-BFGS-B minimizes the same objective."""


class _StationaryError(Exception):
    """The outside minimizer is as close to stationary as ours was asked to be."""


def outside(entry: Entry, activation: str, x: torch.Tensor, seed: int = 0) -> int | None:
    """Evaluations of L-BFGS-B until its point is stationary; None if it never is."""
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
        "--held-out", action="store_true", help="energies by which nothing was ever chosen"
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
            counts = [outside(entry, activation, x[row : row + 1], seed) for row in range(SAMPLES)]
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
    print(f"\nFewer evaluations than L-BFGS-B in {fewer} of {total}, no more in {ahead}.")


if __name__ == "__main__":
    main()
