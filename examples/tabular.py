"""A custom energy for tabular data: classify tumors as benign or malignant from 30 measurements.

The features of a row minimize OptEq's energy plus a term that couples neighboring features:

    G(y) = 1ᵀf(y) + ½‖y‖² − ⟨Ux + b, y⟩ − ½‖Wᵀy‖² + 0.1 Σ_i √(1 + (y_i − y_{i+1})²)
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import equilibria as eq


@eq.energy_term
def neighbors(y: Tensor, x: Tensor) -> Tensor:
    """Convex penalty on differences, with linear growth so that large differences are allowed."""
    return (1 + (y[:, 1:] - y[:, :-1]).square()).sqrt().sum(dim=1)


def make_model(width: int = 16) -> nn.Module:
    U, W = eq.Dense(30, width), eq.Dense(width, width, norm="bound", zeta=0.6)
    layer = eq.EquilibriumLayer(eq.Input(U) + eq.Quadratic(W) + 0.1 * neighbors, tolerance=1e-3)
    return nn.Sequential(layer, nn.Linear(width, 2))


def main(quick: bool = False) -> float:
    """Return the accuracy on held-out rows."""
    torch.manual_seed(0)
    data = load_breast_cancer()
    x, labels = torch.tensor(data.data).float(), torch.tensor(data.target)
    order = torch.randperm(len(x))
    train, test = order[:400], order[400:]
    x = (x - x[train].mean(dim=0)) / x[train].std(dim=0)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
    for _ in range(10 if quick else 100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[train]), labels[train])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = float((model(x[test]).argmax(dim=1) == labels[test]).float().mean())
    baseline = LogisticRegression(max_iter=1000).fit(x[train], labels[train])
    print(f"accuracy of the equilibrium model: {accuracy:.1%} of {len(test)} rows")
    print(f"accuracy of logistic regression: {baseline.score(x[test], labels[test]):.1%}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
