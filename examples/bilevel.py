"""A bilevel problem: how much regularization makes the validation loss least?

    λ* = argmin_λ ‖X_v w*(λ) − t_v‖²        w*(λ) = argmin_w ½‖Xw − t‖²/n + ½e^λ‖w‖²

The inner problem is an equilibrium layer, λ its input. First and second derivatives pass through
the minimizer, so that the outer problem is solved by Newton's method, in a handful of solves.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import equilibria as eq


class Ridge(eq.Energy):
    """½‖Xw − t‖²/n + ½e^λ‖w‖², without the layer's own ½‖w‖²; λ is the input of the layer."""

    X: Tensor
    t: Tensor

    def __init__(self, X: Tensor, t: Tensor) -> None:
        super().__init__()
        self.register_buffer("X", X)
        self.register_buffer("t", t)

    def initial_state(self, context: eq.Context) -> Tensor:
        return context["x"].new_zeros(len(context["x"]), self.X.shape[1])

    def value(self, state: eq.State, context: eq.Context) -> Tensor:
        assert isinstance(state, Tensor)
        fit = 0.5 * (state @ self.X.mT - self.t).square().mean(dim=1)
        return fit + 0.5 * (context["x"][:, 0].exp() - 1) * state.square().sum(dim=1)


def main(quick: bool = False) -> tuple[float, float]:
    """λ as Newton's method finds it, and how far that is from a search over the closed form."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(70, 12, generator=generator, dtype=torch.float64)
    truth = torch.randn(12, generator=generator, dtype=torch.float64)
    t = X @ truth + 3 * torch.randn(70, generator=generator, dtype=torch.float64)
    (X, Xv), (t, tv) = X.split([20, 50]), t.split([20, 50])
    layer = eq.EquilibriumLayer(
        Ridge(X, t),
        activation="identity",
        tolerance=1e-11,
        max_iterations=2000,
        gradient=eq.Implicit(tolerance=1e-11),
    )
    at = torch.tensor([[-2.0]], dtype=torch.float64)
    for step in range(5 if quick else 8):
        at = at.detach().requires_grad_()
        loss = (layer(at) @ Xv.mT - tv).square().mean()
        (slope,) = torch.autograd.grad(loss, at, create_graph=True)
        (bend,) = torch.autograd.grad(slope, at)
        told = (float(number.detach()) for number in (at, loss, slope))
        print("step {}: λ = {:+.6f}, loss {:.6f}, slope {:+.1e}".format(step, *told))
        # Where the loss is not convex, a step down the slope.
        move = slope / bend if float(bend) > 0 else slope.sign()
        at = at - move.clamp(-1, 1)
    found = float(at.detach())
    grid = torch.linspace(-8, 4, 120_001, dtype=torch.float64)
    gram, moment = X.mT @ X / len(X), X.mT @ t / len(X)
    values, vectors = torch.linalg.eigh(gram)
    weights = (vectors.mT @ moment) / (values + grid.exp()[:, None])
    losses = (weights @ (Xv @ vectors).mT - tv).square().mean(dim=1)
    best = float(grid[losses.argmin()])
    print(f"Newton: {found:.5f}; a search over 120,001 closed forms: {best:.5f}")
    return found, abs(found - best)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
