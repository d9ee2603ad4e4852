"""Implicit graph network on Zachary's karate club: predict the side of each member after the split.

Only two of the 34 members, the leaders of the two sides, have a label. The features of all members
are one equilibrium of OptEq's energy with graph convolutions U and W, Z ↦ ÂZWᵀ. Information spreads
over the whole graph, and ‖W‖ ≤ 0.95 makes the equilibrium unique.
"""

from __future__ import annotations

import argparse

import networkx
import torch
from torch import nn

import equilibria as eq
from equilibria.equilibrium.capabilities import guarantee
from equilibria.operators import GraphConv


class GraphNetwork(nn.Module):
    def __init__(self, edges: torch.Tensor, nodes: int, width: int = 8) -> None:
        super().__init__()
        U = GraphConv(edges, nodes, width)
        W = GraphConv(edges, width, width, norm="bound", zeta=0.95)
        self.layer = eq.EquilibriumLayer(eq.Input(U) + eq.Quadratic(W), tolerance=1e-4)
        self.head = nn.Linear(width, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(features[None]))[0]
        return logits


def main(quick: bool = False) -> float:
    """Return the accuracy on members without a label."""
    torch.manual_seed(0)
    club = networkx.karate_club_graph()
    sides = torch.tensor([int(club.nodes[i]["club"] == "Officer") for i in club.nodes])
    one_way = torch.tensor(list(club.edges)).mT
    edges = torch.cat([one_way, one_way.flip(0)], dim=1)
    features, labeled = torch.eye(len(sides)), torch.tensor([0, 33])
    model = GraphNetwork(edges, len(sides))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(15 if quick else 60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features)[labeled], sides[labeled]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        predictions = model(features).argmax(dim=1)
    unlabeled = torch.ones(len(sides), dtype=torch.bool).index_fill(0, labeled, False)
    accuracy = float((predictions == sides)[unlabeled].float().mean())
    print(
        f"accuracy {accuracy:.1%} on {int(unlabeled.sum())} members; equilibrium: "
        f"{guarantee(model.layer.cell)}"
    )
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
