"""A nonlinear boundary-value problem as a layer, its coefficients learned from observations.

A bar is heated by f(x), conducts heat with k, and loses it by a u³ (u = 0 at both ends):

    −(k u′)′ + a u³ = f        the minimizer of ∫ ½k(u′)² + ¼au⁴ − fu

Some loads f and the temperatures that follow are known; k and a are not. The layer minimizes the
discretized energy, and the implicit gradient tells how its minimizer moves with k and a.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import equilibria as eq

POINTS = 11
SPACING = 1 / (POINTS + 1)
CONDUCTION, LOSS = 0.02, 3.0
"""The truth, which nobody tells the layer."""


class HeatEnergy(eq.Energy):
    """Of u at the inner points: what is minimized besides the layer's own ½‖u‖²."""

    def __init__(self) -> None:
        super().__init__()
        self.log_conduction = nn.Parameter(torch.tensor(0.05).log())
        self.log_loss = nn.Parameter(torch.tensor(1.0).log())

    def value(self, state: eq.State, context: eq.Context) -> Tensor:
        assert isinstance(state, Tensor)
        slope = nn.functional.pad(state, (1, 1)).diff(dim=1) / SPACING
        conducted = 0.5 * self.log_conduction.exp() * slope.square().sum(dim=1)
        lost = 0.25 * self.log_loss.exp() * state.pow(4).sum(dim=1)
        own = 0.5 * state.square().sum(dim=1)
        return conducted + lost - (context["x"] * state).sum(dim=1) - own


def bar() -> eq.EquilibriumLayer:
    return eq.EquilibriumLayer(
        HeatEnergy(), activation="identity", tolerance=1e-6, max_iterations=2000
    )


def main(quick: bool = False) -> tuple[float, float]:
    """Conduction and loss as they were learned."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        place = torch.linspace(0, 1, POINTS + 2)[1:-1]
        waves = torch.sin(torch.outer(torch.arange(1, 4), torch.pi * place))
        loads = 4 * torch.rand(6, 3) @ waves
        truth = bar()
        with torch.no_grad():
            truth.cell.energy.log_conduction.fill_(torch.tensor(CONDUCTION).log())
            truth.cell.energy.log_loss.fill_(torch.tensor(LOSS).log())
            seen = truth(loads) + 0.002 * torch.randn(6, POINTS)
        layer = bar()
        optimizer = torch.optim.LBFGS(
            layer.parameters(), lr=1, max_iter=5 if quick else 20, line_search_fn="strong_wolfe"
        )

        def misfit() -> Tensor:
            optimizer.zero_grad()
            loss = (layer(loads) - seen).square().mean()
            loss.backward()
            return loss

        optimizer.step(misfit)
        found = layer.cell.energy
        conduction, loss = (
            float(one.detach().exp()) for one in (found.log_conduction, found.log_loss)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    print(f"conduction {conduction:.4f} (true {CONDUCTION}), loss {loss:.3f} (true {LOSS})")
    return conduction, loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
