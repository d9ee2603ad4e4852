"""Restoring damaged images: supervised training for one kind of damage (JIIO, Eqs. 23 and 24)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.inputs import (
    Corrupted,
    Corruption,
    LatentSearch,
    Outer,
    answer,
    get_corruption,
    is_generator,
    optimal_input,
    picture_of,
    restore,
)
from equilibria.tasks.base import TrainingStep
from equilibria.tasks.image_quality import MOST_DECIBEL, picture_psnr
from equilibria.tasks.solve_statistics import SolveStatistics

TRAINING_CHECK = 1e-3
"""The tolerance to which equilibria are solved anew after a search in training."""
BINS_PER_DECIBEL = 100


@dataclass(frozen=True)
class ImageRestoration:
    """Learn to undo one kind of damage.

    A generator, which maps latents to images by an equilibrium, is trained through the inner
    problem (Eq. 24): the latents that explain ŷ best are found by JIIO, and the loss is
    ‖y − h(z*)‖² there. A model that takes `measurement` as a second argument gets (ŷ, A), any
    other the picture of ŷ (Eq. 23). Images have values in [0, 1].

    corruption: "inpaint", "denoise", "deblur" or "superres", or one of them with its options, as in
        {"denoise": {"noise": 0.4}}.
    engine, iterations, sweeps, ridge, step_size, tolerance: of the inner problem (`LatentSearch`).
        A decoder that is trained through it learns faster with "anderson" than with "secant", even
        though the latter comes closer to the optimal latents.
    stop_at_noise: end the inner problem where noise explains the misfit.
    outer: "detached" takes the optimal latent as a constant, as the paper does; "implicit"
        differentiates it too, which needs an inner problem that converges (a ridge helps).
    seed: of the damage that evaluations see, the same in every epoch.
    """

    corruption: str | Mapping[str, Mapping[str, Any]] = "denoise"
    engine: str = "anderson"
    iterations: int = 40
    evaluation_iterations: int = 100
    sweeps: int = 4
    ridge: float = 0.0
    step_size: float | None = None
    tolerance: float = 1e-3
    stop_at_noise: bool = False
    outer: Outer = "detached"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("iterations", "evaluation_iterations", "sweeps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.outer not in ("detached", "implicit"):
            raise ValueError(f"outer must be 'detached' or 'implicit', not {self.outer!r}")
        _ = self.damage, self.search(1)

    @cached_property
    def damage(self) -> Corruption:
        """The corruption that is undone."""
        if isinstance(self.corruption, str):
            return get_corruption(self.corruption)
        if len(self.corruption) != 1:
            raise ValueError(
                "corruption is a name, or one name with options, such as {denoise: {noise: 0.4}}, "
                f"not {self.corruption}"
            )
        ((name, options),) = self.corruption.items()
        return get_corruption(name, **options)

    def search(self, iterations: int) -> LatentSearch:
        """The inner problem, with this many iterations."""
        return LatentSearch(
            engine=self.engine,
            iterations=iterations,
            ridge=self.ridge,
            noise=self.damage.noise if self.stop_at_noise else 0.0,
            sweeps=self.sweeps,
            step_size=self.step_size,
            tolerance=self.tolerance,
        )

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        seen = self.damage.corrupt(inputs)
        restored = self._through(model, seen) if is_generator(model) else answer(model, seen)
        loss = F.mse_loss(restored, inputs)
        return TrainingStep(loss=loss, samples=torch.full_like(loss.detach(), len(inputs)))

    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> RestorationEvaluation:
        return evaluate_restoration(self, model, batches)

    def _through(self, model: nn.Module, seen: Corrupted) -> Tensor:
        """h(z*) at the latents of the inner problem, in the graph of the parameters (Eq. 24)."""
        found = self.search(self.iterations).run(
            model,
            seen.measured,
            seen.measurement,
            polish=self.outer == "implicit",
            check_tolerance=TRAINING_CHECK if self.outer == "detached" else None,
        )
        latents = optimal_input(found, self.outer, strict=False)
        restored: Tensor = model(latents, found.state)
        return restored


@dataclass(frozen=True)
class RestorationEvaluation:
    """How images were restored, and how the solves went.

    PSNR is that of the pictures: values outside [0, 1] are cut off.
    """

    loss: float
    """The mean squared error of a pixel."""
    psnr: float
    """The mean over the images, in decibel."""
    median_psnr: float
    measured_psnr: float | None
    """The median of what was measured; None where that is no picture."""
    samples: int
    counts: Tensor
    """Images by their PSNR in hundredths of a decibel: restored ones, and measurements."""
    solves: SolveStatistics
    """For a generator those of the inner problems, else those of the model."""

    @property
    def accuracy(self) -> None:
        return None

    @property
    def score(self) -> float:
        """The median PSNR."""
        return self.median_psnr

    @property
    def figures(self) -> dict[str, float | None]:
        return {
            "psnr": self.psnr,
            "median_psnr": self.median_psnr,
            "measured_psnr": self.measured_psnr,
        }

    def with_solves(self, solves: SolveStatistics) -> RestorationEvaluation:
        return replace(self, solves=solves)

    def pooled(self, total: Callable[[Tensor], Tensor]) -> RestorationEvaluation:
        """All figures over all processes, the median to a hundredth of a decibel."""
        counts = total(self.counts)
        samples = int(counts[0].sum())
        if samples == self.samples:
            return self
        means = torch.tensor([self.loss, self.psnr]).double()
        loss, mean = (total(means * self.samples) / samples).tolist()
        return replace(
            self,
            loss=loss,
            psnr=mean,
            median_psnr=_middle(counts[0]),
            measured_psnr=None if self.measured_psnr is None else _middle(counts[1]),
            samples=samples,
            counts=counts,
        )


@torch.no_grad()
def evaluate_restoration(
    task: ImageRestoration, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
) -> RestorationEvaluation:
    """Damage images, always in the same way, and restore them with `model` in evaluation mode."""
    was_training = model.training
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    chance = torch.Generator().manual_seed(task.seed)
    solves = SolveStatistics()
    restored_psnr, measured_psnr, errors = [], [], []
    model.eval()
    try:
        for images, _ in batches:
            originals = images.to(device)
            seen = task.damage.corrupt(originals, chance)
            restored = _restored(task, model, seen, solves)
            restored_psnr.append(picture_psnr(restored, originals).cpu())
            errors.append((restored - originals).double().square().flatten(1).mean(dim=1).cpu())
            picture = picture_of(seen.measurement, seen.measured, originals.shape[2:])
            if picture is not None:
                measured_psnr.append(picture_psnr(picture, originals).cpu())
    finally:
        model.train(was_training)
    if not restored_psnr:
        raise ValueError("there is nothing to evaluate: the batches hold no image")
    values = torch.cat(restored_psnr)
    measured = torch.cat(measured_psnr) if measured_psnr else values[:0]
    return RestorationEvaluation(
        loss=float(torch.cat(errors).mean()),
        psnr=float(values.mean()),
        median_psnr=float(values.median()),
        measured_psnr=float(measured.median()) if len(measured) else None,
        samples=len(values),
        counts=torch.stack([_counted(values), _counted(measured)]),
        solves=solves,
    )


def _counted(decibel: Tensor) -> Tensor:
    most = round(MOST_DECIBEL * BINS_PER_DECIBEL)
    bins = (decibel * BINS_PER_DECIBEL).round().long()
    return torch.bincount(bins.clamp(0, most), minlength=most + 1)


def _middle(counts: Tensor) -> float:
    """The median of what was counted."""
    half = (int(counts.sum()) + 1) // 2
    return int(torch.searchsorted(counts.cumsum(0), half)) / BINS_PER_DECIBEL


def _restored(
    task: ImageRestoration, model: nn.Module, seen: Corrupted, solves: SolveStatistics
) -> Tensor:
    if not is_generator(model):
        restored = answer(model, seen)
        solves.observe(model)
        return restored
    search = vars(task.search(task.evaluation_iterations))
    found = restore(model, seen.measured, seen.measurement, **search)
    solves.iterations.append(found.iterations)
    solves.residuals.append(found.residual)
    solves.converged.append(found.converged)
    return found.images
