"""Nonlinear boundary-value problem as a layer, with coefficients learned from observations.

A bar is heated by f(x), conducts heat with coefficient k, and loses the heat a u³ (u = 0 at both
ends). The temperature u is the minimizer of an energy:

    −(k u′)′ + a u³ = f        u minimizes ∫ ½k(u′)² + ¼au⁴ − fu

Loads f and the resulting temperatures are observed; k and a are unknown. The layer minimizes the
discretized energy, and implicit differentiation gives the gradient of its minimizer in k and a.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import equilibria as eq

POINTS = 11
SPACING = 1 / (POINTS + 1)
CONDUCTION, LOSS = 0.02, 3.0
"""True coefficients, which the layer must learn."""


class HeatEnergy(eq.Energy):
    """Discretized energy of u at the inner points, minus the term ½‖u‖² that the layer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.log_conduction = nn.Parameter(torch.tensor(0.05).log())
        self.log_loss = nn.Parameter(torch.tensor(1.0).log())

    def value(self, state: eq.State, context: eq.Context) -> Tensor:
        assert isinstance(state, Tensor)
        slope = nn.functional.pad(state, (1, 1)).diff(dim=1) / SPACING
        conduction = 0.5 * self.log_conduction.exp() * slope.square().sum(dim=1)
        loss = 0.25 * self.log_loss.exp() * state.pow(4).sum(dim=1)
        added_by_layer = 0.5 * state.square().sum(dim=1)
        return conduction + loss - (context["x"] * state).sum(dim=1) - added_by_layer


def bar() -> eq.EquilibriumLayer:
    return eq.EquilibriumLayer(
        HeatEnergy(), activation="identity", tolerance=1e-6, max_iterations=2000
    )


def main(quick: bool = False) -> tuple[float, float]:
    """Return the learned conduction and loss coefficients."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        points = torch.linspace(0, 1, POINTS + 2)[1:-1]
        waves = torch.sin(torch.outer(torch.arange(1, 4), torch.pi * points))
        loads = 4 * torch.rand(6, 3) @ waves
        truth = bar()
        with torch.no_grad():
            truth.cell.energy.log_conduction.fill_(torch.tensor(CONDUCTION).log())
            truth.cell.energy.log_loss.fill_(torch.tensor(LOSS).log())
            observed = truth(loads) + 0.002 * torch.randn(6, POINTS)
        layer = bar()
        optimizer = torch.optim.LBFGS(
            layer.parameters(), lr=1, max_iter=5 if quick else 20, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            error = (layer(loads) - observed).square().mean()
            error.backward()
            return error

        optimizer.step(closure)
        learned = layer.cell.energy
        conduction = float(learned.log_conduction.detach().exp())
        loss = float(learned.log_loss.detach().exp())
    finally:
        torch.set_default_dtype(torch.float32)
    print(f"conduction {conduction:.4f} (true {CONDUCTION}), loss {loss:.3f} (true {LOSS})")
    return conduction, loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
