"""torch.compile: around a model, and of the step inside the solver.

`torch.compile(model)` compiles stem and head; the solve, a loop that depends on the data, runs as
it is. `EquilibriumLayer(compile_step=True)` compiles the map that the solver evaluates. Derivatives
are the same in both.
"""

from __future__ import annotations

import argparse

import torch

import equilibria as eq


def main(quick: bool = False) -> float:
    """The largest difference of an output or a gradient."""
    backend = "eager" if quick else "inductor"
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    U, W = eq.Dense(8, 32), eq.Dense(32, 32, norm="bound", zeta=0.8)
    energy = eq.Input(U) + eq.Quadratic(W)
    plain = eq.EquilibriumLayer(energy, tolerance=1e-5)
    ways = {
        "torch.compile(model)": torch.compile(plain, backend=backend),
        "compile_step": eq.EquilibriumLayer(energy, tolerance=1e-5, compile_step=backend),
    }

    def outcome(layer: torch.nn.Module) -> list[torch.Tensor]:
        output = layer(x)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [U.kernel, W.kernel])]

    wanted, largest = outcome(plain), 0.0
    for name, layer in ways.items():
        pairs = zip(outcome(layer), wanted, strict=True)
        difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        largest = max(largest, difference)
        print(f"{name}: outputs and gradients differ by {difference:.1e} of the largest")
    return largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
