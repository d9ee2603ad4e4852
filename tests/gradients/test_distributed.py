"""DistributedDataParallel: two processes give the gradient of one on the whole batch."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import equilibria as eq
from equilibria.training.distributed import Place, joined_group
from tests.models.small import equilibrium_models, images, settled, small_model

LABELS = torch.tensor([0, 2, 1, 1])
RULES = {"implicit": eq.Implicit(), "unrolled": eq.Unrolled(steps=200), "one step": eq.OneStep()}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = Place(rank, 2, rank, 2, meeting_point=Path(folder) / "meeting-point")
    with joined_group(place, torch.device("cpu")):
        results = gradients_of_half(rank)
        # A wrapper that still exists keeps the threads of the group alive, and threads that are
        # alive when the interpreter exits abort the process.
        gc.collect()
    if rank == 0:
        torch.save(results, Path(folder) / "gradients.pt")


def gradients_of_half(rank: int) -> dict[str, Tensor]:
    half = slice(2 * rank, 2 * rank + 2)
    results = {}
    for name in equilibrium_models():
        for adjoint, rule in RULES.items():
            model = settled(small_model(name, gradient=rule))
            parallel = DistributedDataParallel(model)
            F.cross_entropy(parallel(images(4)[half]), LABELS[half]).backward()
            for n, parameter in model.named_parameters():
                assert parameter.grad is not None
                results[f"{name}|{adjoint}|{n}"] = parameter.grad.clone()
    return results


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    multiprocessing.spawn(worker, args=(str(tmp_path),), nprocs=2)
    results = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for name in equilibrium_models():
        model = settled(small_model(name))
        F.cross_entropy(model(images(4)), LABELS).backward()
        for n, parameter in model.named_parameters():
            for adjoint in ("implicit", "unrolled"):
                gradient = results[f"{name}|{adjoint}|{n}"]
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
