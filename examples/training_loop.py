"""An equilibrium model in a third-party training loop.

Lightning and similar trainers call `training_step` and `configure_optimizers` of a module. The
model is an ordinary `nn.Module`; `last_solution` has the results of a solve for logging.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import equilibria as eq


class DigitModule(nn.Module):
    """Stand-in for a LightningModule: derive from that instead, the rest stays the same."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = eq.create_model(
            "opteq-small", in_channels=1, tolerance=1e-2, gradient="one_step"
        )

    def training_step(self, batch: tuple[Tensor, Tensor], step: int) -> dict[str, Any]:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        solution = self.model.last_solution
        return {"loss": loss, "iterations": float(solution.iterations.float().mean())}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Trainer:
    """Stand-in for the third-party trainer."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps

    def fit(self, module: DigitModule, loader: DataLoader[Any]) -> None:
        optimizer = module.configure_optimizers()
        module.train()
        step = 0
        while step < self.max_steps:
            for batch in loader:
                logged = module.training_step(batch, step)
                optimizer.zero_grad()
                logged["loss"].backward()
                optimizer.step()
                step += 1
                if step % 20 == 0 or step == self.max_steps:
                    print(
                        f"step {step}: loss {float(logged['loss'].detach()):.3f}, "
                        f"{logged['iterations']:.1f} iterations"
                    )
                if step == self.max_steps:
                    break


def main(quick: bool = False) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    digits = eq.data.load_dataset("digits")
    images, labels = digits.train.fetch(torch.arange(len(digits.train)))
    module = DigitModule()
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    Trainer(max_steps=12 if quick else 200).fit(module, loader)
    images, labels = digits.test.fetch(torch.arange(len(digits.test)))
    module.eval()
    with torch.no_grad():
        accuracy = float((module.model(images).argmax(dim=1) == labels).float().mean())
    print(f"accuracy {accuracy:.1%} on {len(labels)} test digits")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
