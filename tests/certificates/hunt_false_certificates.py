"""Long search for false certificates.

    python -m tests.certificates.hunt_false_certificates [NAME …]

NAME is a family of random models (by default all) or the folder of a trained run. Random models
have usual norms or ‖W‖ within 1e-6 of 1, and usual margins or one of 1e-7. Prints the number of
checked (sample, model) pairs and of false certificates.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import torch

import equilibria as eq
from equilibria.training.experiment import trained
from tests.certificates.certified_bank import FAMILIES, Hunt, images, narrow_margins, random_model

SAMPLES = 500
ATTACKED = 8


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    total = Hunt()
    for name in names or FAMILIES:
        if name in FAMILIES:
            _random(name, total)
        else:
            _trained(name, total)
        print(f"{name}: {total.pairs} pairs, {total}", flush=True)


def _random(family: str, hunt: Hunt) -> None:
    for seed, zeta in itertools.product(range(2), (0.9, 1 - 1e-6)):
        model, x = random_model(family, seed, zeta), images(SAMPLES)
        if seed % 2:
            narrow_margins(model, x, 1e-7)
        hunt.check(model, x, attacked=ATTACKED)


def _trained(run: str, hunt: Hunt) -> None:
    experiment = trained(run)
    x, _ = experiment.some_test_images(SAMPLES)
    for tolerance in (1e-2, 1e-3, 1e-4):
        with eq.solving(experiment.model, tolerance=tolerance):
            hunt.check(experiment.model, x)
    hunt.check(experiment.model, x[:ATTACKED], attacked=ATTACKED)


if __name__ == "__main__":
    main(sys.argv[1:])
