"""An energy with attention that retrieves the value of a key from a sequence.

The tokens x_s of a sequence are pairs of a key and a value. The query c is a noisy key without a
value. The state y, a token, minimizes

    G(y) = ½‖y‖² − (1/β) log Σ_s exp(β⟨Ky, Kx_s⟩) − ⟨c, y⟩

Its stationary points y = c + Kᵀ Σ_s softmax_s(β⟨Ky, Kx_s⟩) Kx_s are fixed points of an attention
head, as in a modern Hopfield network. β and K are learned.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import equilibria as eq

KEY, VALUE, PAIRS = 6, 4, 8


class Attention(eq.Energy):
    """Energy term −(1/β) log Σ_s exp(β⟨Ky, Kx_s⟩) with trainable K and β."""

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


def random_batch(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (count, width), tokens (count, pairs, width), and classes of the values."""
    keys = nn.functional.normalize(torch.randn(count, PAIRS, KEY), dim=2)
    values = torch.randint(VALUE, (count, PAIRS))
    tokens = torch.cat([keys, nn.functional.one_hot(values, VALUE).float()], dim=2)
    targets = torch.randint(PAIRS, (count,))
    rows = torch.arange(count)
    noisy = keys[rows, targets] + 0.1 * torch.randn(count, KEY)
    query = nn.functional.pad(noisy, (0, VALUE))
    return query, tokens, values[rows, targets]


def main(quick: bool = False) -> float:
    """Return the accuracy of retrieved values on new sequences."""
    torch.manual_seed(0)
    model = Recall()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(12 if quick else 100):
        query, tokens, label = random_batch(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(query, tokens), label).backward()
        optimizer.step()
    model.eval()
    query, tokens, label = random_batch(500)
    with torch.no_grad():
        accuracy = float((model(query, tokens).argmax(dim=1) == label).float().mean())
    beta = float(model.layer.cell.energy["attention"].log_beta.detach().exp())
    print(f"accuracy {accuracy:.1%} (chance level {1 / VALUE:.0%}); β = {beta:.1f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
