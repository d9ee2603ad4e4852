"""torch.compile applied to a layer.

`torch.compile(model)` compiles everything outside of the equilibrium layer. The solve, a loop that
depends on the data, runs without compilation. Outputs and gradients are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import equilibria as eq


def main(quick: bool = False) -> float:
    """Return the largest relative difference of an output or a gradient."""
    backend = "eager" if quick else "inductor"
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    U, W = eq.Dense(8, 32), eq.Dense(32, 32, norm="bound", zeta=0.8)
    energy = eq.Input(U) + eq.Quadratic(W)
    plain = eq.EquilibriumLayer(energy, tolerance=1e-5)
    compiled = torch.compile(plain, backend=backend)

    def results(layer: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        output = layer(x)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [U.kernel, W.kernel])]

    pairs = zip(results(compiled), results(plain), strict=True)
    largest = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    print(f"largest difference of outputs and gradients, relative to their maximum: {largest:.1e}")
    return largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
