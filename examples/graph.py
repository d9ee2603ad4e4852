"""An implicit graph network on Zachary's karate club: who follows whom after the split?

Two of 34 members have a label, the two who quarreled. The features of all members are one
equilibrium of OptEq's energy, U and W graph convolutions Z ↦ ÂZWᵀ: what is known travels as far as
it has to, and ‖W‖ ≤ 0.95 makes the equilibrium unique.
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
    """The share of members without a label whose side is found."""
    torch.manual_seed(0)
    club = networkx.karate_club_graph()
    sides = torch.tensor([int(club.nodes[i]["club"] == "Officer") for i in club.nodes])
    one_way = torch.tensor(list(club.edges)).mT
    edges = torch.cat([one_way, one_way.flip(0)], dim=1)
    features, known = torch.eye(len(sides)), torch.tensor([0, 33])
    model = GraphNetwork(edges, len(sides))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(15 if quick else 60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features)[known], sides[known]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        answer = model(features).argmax(dim=1)
    hidden = torch.ones(len(sides), dtype=torch.bool).index_fill(0, known, False)
    right = float((answer == sides)[hidden].float().mean())
    print(
        f"{right:.1%} of {int(hidden.sum())} members on their side; {guarantee(model.layer.cell)}"
    )
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
