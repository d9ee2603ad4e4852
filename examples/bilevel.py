"""Bilevel optimization: find the amount of regularization with the smallest validation loss.

    λ* = argmin_λ ‖X_v w*(λ) − t_v‖²        w*(λ) = argmin_w ½‖Xw − t‖²/n + ½e^λ‖w‖²

The inner problem is an equilibrium layer with input λ. First and second derivatives pass through
the minimizer, so Newton's method solves the outer problem in a few steps.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import equilibria as eq


class Ridge(eq.Energy):
    """Inner objective ½‖Xw − t‖²/n + ½e^λ‖w‖², minus the term ½‖w‖² that the layer adds.

    The input of the layer is λ.
    """

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
    """Return λ from Newton's method, and its distance from a grid search over the closed form."""
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
    lam = torch.tensor([[-2.0]], dtype=torch.float64)
    for step in range(5 if quick else 8):
        lam = lam.detach().requires_grad_()
        loss = (layer(lam) @ Xv.mT - tv).square().mean()
        (first,) = torch.autograd.grad(loss, lam, create_graph=True)
        (second,) = torch.autograd.grad(first, lam)
        numbers = (float(number.detach()) for number in (lam, loss, first))
        print("step {}: λ = {:+.6f}, loss {:.6f}, derivative {:+.1e}".format(step, *numbers))
        # Take a gradient step where the loss is not convex.
        change = first / second if float(second) > 0 else first.sign()
        lam = lam - change.clamp(-1, 1)
    result = float(lam.detach())
    grid = torch.linspace(-8, 4, 120_001, dtype=torch.float64)
    gram, moment = X.mT @ X / len(X), X.mT @ t / len(X)
    values, vectors = torch.linalg.eigh(gram)
    weights = (vectors.mT @ moment) / (values + grid.exp()[:, None])
    losses = (weights @ (Xv @ vectors).mT - tv).square().mean(dim=1)
    best = float(grid[losses.argmin()])
    print(f"Newton: λ = {result:.5f}; grid search over 120,001 values: λ = {best:.5f}")
    return result, abs(result - best)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
