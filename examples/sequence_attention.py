"""An energy with attention: which value belongs to this key?

A sequence holds pairs of a key and a value, tokens x_s. A query is a noisy key alone. The state y,
a token, minimizes

    G(y) = ½‖y‖² − (1/β) log Σ_s exp(β⟨Ky, Kx_s⟩) − ⟨c, y⟩        c: the query, its value unknown

whose stationary points are y = c + Kᵀ Σ_s softmax_s(β⟨Ky, Kx_s⟩) Kx_s: a head of attention that
looks again at what it has found (a modern Hopfield network). β and K are learned.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import equilibria as eq

KEY, VALUE, PAIRS = 6, 4, 8


class Attention(eq.Energy):
    """−(1/β) log Σ_s exp(β⟨Ky, Kx_s⟩); a term with parameters of its own is a class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.K = nn.Parameter(torch.eye(width))
        self.log_beta = nn.Parameter(torch.tensor(1.5))

    def value(self, state: eq.State, context: eq.Context) -> Tensor:
        assert isinstance(state, Tensor)
        _, tokens = context.several("x")
        beta = self.log_beta.exp()
        scores = ((state @ self.K)[:, None] * (tokens @ self.K)).sum(dim=2)
        return -torch.logsumexp(beta * scores, dim=1) / beta


class Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = KEY + VALUE
        energy = eq.Input(eq.operators.Identity(), bias=False) + Attention(width)
        self.layer = eq.EquilibriumLayer(energy, activation="identity", tolerance=1e-3)
        self.head = nn.Linear(width, VALUE)

    def forward(self, query: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer((query, tokens)))
        return logits


def made(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (count, width), tokens (count, pairs, width), and the class of the wanted value."""
    keys = nn.functional.normalize(torch.randn(count, PAIRS, KEY), dim=2)
    values = torch.randint(VALUE, (count, PAIRS))
    tokens = torch.cat([keys, nn.functional.one_hot(values, VALUE).float()], dim=2)
    wanted = torch.randint(PAIRS, (count,))
    rows = torch.arange(count)
    noisy = keys[rows, wanted] + 0.1 * torch.randn(count, KEY)
    query = nn.functional.pad(noisy, (0, VALUE))
    return query, tokens, values[rows, wanted]


def main(quick: bool = False) -> float:
    """The share of values that are recalled, on sequences that were not seen."""
    torch.manual_seed(0)
    model = Recall()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(12 if quick else 100):
        query, tokens, label = made(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(query, tokens), label).backward()
        optimizer.step()
    model.eval()
    query, tokens, label = made(500)
    with torch.no_grad():
        right = float((model(query, tokens).argmax(dim=1) == label).float().mean())
    beta = float(model.layer.cell.energy["attention"].log_beta.detach().exp())
    print(f"recalled: {right:.1%} (by chance {1 / VALUE:.0%}); β = {beta:.1f}")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
