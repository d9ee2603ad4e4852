"""Restoring images with a generator as the prior (JIIO, Section 4.2, Eqs. 21 and 22)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.inputs.joint import Engine, InputResult, optimize_input
from equilibria.inputs.restoration.generators import ExplicitGenerator, generator_of, latent_dim
from equilibria.inputs.restoration.measurements import Mask, Measurement
from equilibria.solvers import Status

ADAM = Engine(rule="adam", sweeps=3)
"""Adam on the latents of an explicit generator: after three sweeps z and μ are exact."""


@dataclass(frozen=True)
class Restoration:
    """Restored images, and how far the search for their latents came, image by image."""

    images: Tensor
    """h(z*), as the generator makes them."""
    latents: Tensor
    misfit: Tensor
    """‖ŷ − A h(z*)‖² at an equilibrium that was solved anew, tightly; without penalties."""
    status: Tensor
    residual: Tensor
    """The largest relative residual of the equilibrium, its adjoint and the latent."""
    iterations: Tensor
    evaluations: int
    """Calls of the map T in all searches, each for the whole batch."""
    messages: tuple[str, ...]
    """How the search of each image ended, with the remedy."""
    engine: str

    @property
    def converged(self) -> Tensor:
        return self.status == int(Status.CONVERGED)

    def summary(self) -> str:
        """One line on all images, with the remedy for the worst of them."""
        total, done = len(self.status), int(self.converged.sum())
        worst = int(torch.argmax(self.status))
        tail = "" if done == total else f"; image {worst}: {self.messages[worst]}"
        return f"{done} of {total} images converged ({self.engine}){tail}"


@dataclass(frozen=True, kw_only=True)
class LatentSearch:
    """How the latents of images are searched for.

    engine: of `optimize_input`; "auto" is "secant" for equilibria and Adam for explicit networks.
    ridge: ridge·‖x‖² is added to the misfit. Where latents are N(0, I), as a VAE's, the variance of
        the noise makes the result the most probable latent.
    noise: the standard deviation of the noise in the measurements. The search then ends once the
        misfit is what such noise explains (the discrepancy principle): to go on would fit noise.
    """

    engine: str | Engine = "auto"
    iterations: int = 100
    ridge: float = 0.0
    noise: float = 0.0
    sweeps: int = 3
    step_size: float | None = None
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("ridge", "noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")

    def run(
        self,
        generator: nn.Module,
        measured: Tensor,
        measurement: Measurement,
        start: Tensor,
        **options: Any,
    ) -> InputResult:
        """Minimize Eq. 22 from the latents `start`; `options` go to `optimize_input`."""
        explicit = isinstance(generator, ExplicitGenerator)
        return optimize_input(
            generator,
            self.loss(measured, measurement),
            start,
            penalty=self._penalty if self.ridge else None,
            engine=(ADAM if explicit else "secant") if self.engine == "auto" else self.engine,
            iterations=self.iterations,
            sweeps=self.sweeps,
            step_size=self.step_size,
            tolerance=self.tolerance,
            **options,
        )

    def engine_for(self, generator: nn.Module) -> str:
        """The name of the engine that runs on this generator."""
        if self.engine != "auto":
            return self.engine if isinstance(self.engine, str) else "own"
        return "adam" if isinstance(generator, ExplicitGenerator) else "secant"

    def loss(self, measured: Tensor, measurement: Measurement) -> Callable[[Tensor], Tensor]:
        """‖ŷ − A·‖² of each image, less what noise explains."""
        if not self.noise:
            return lambda images: misfit(images, measured, measurement)
        explained = self.noise**2 * entries(measured, measurement)
        return lambda images: (misfit(images, measured, measurement) - explained).clamp_min(0)

    def _penalty(self, latents: Tensor) -> Tensor:
        return self.ridge * latents.square().sum(dim=1)


def restore(
    generator: nn.Module,
    measured: Tensor,
    measurement: Measurement,
    *,
    start: Tensor | None = None,
    starts: int = 1,
    spread: float = 1.0,
    seed: int = 0,
    **search: Any,
) -> Restoration:
    """The images of a generator that best explain measurements (Eq. 22).

        seen = Denoising(noise=0.2).corrupt(images)
        restored = restore(generator, seen.measured, seen.measurement, noise=seen.noise)

    generator: an equilibrium decoder, an autoencoder with one, or any module with a `latent_dim`
        that maps latents to images; Adam then searches (Bora et al., 2017).
    measured: ŷ, one row an image; `measurement`: A, any differentiable map of images.
    start: latents to start from, by default zero.
    starts: how many searches; all but the first start at random, `spread` times N(0, I), and the
        best answer counts for each image.
    search: the options of `LatentSearch`: engine, iterations, ridge, noise, …
    """
    if starts < 1:
        raise ValueError(f"starts must be at least 1, not {starts}")
    chosen, settings = generator_of(generator), LatentSearch(**search)
    was_training = chosen.training
    chosen.eval()
    try:
        if isinstance(measurement, Mask):
            measured = measurement(measured)
        first = _zeros(chosen, measured) if start is None else start
        chance = torch.Generator().manual_seed(seed)
        best: Restoration | None = None
        lowest = torch.empty(0)
        for count in range(starts):
            drawn = torch.randn(first.shape, generator=chance).to(first) * spread
            found = settings.run(chosen, measured, measurement, drawn if count else first)
            result = _restoration(chosen, found, measured, measurement, settings)
            loss = found.loss.nan_to_num(nan=torch.inf)
            best = result if best is None else _better(loss < lowest, result, best)
            lowest = loss if count == 0 else torch.minimum(loss, lowest)
        assert best is not None
        return best
    finally:
        chosen.train(was_training)


def misfit(images: Tensor, measured: Tensor, measurement: Measurement) -> Tensor:
    """‖ŷ − A·images‖² of each image."""
    seen = measurement(images)
    if seen.shape != measured.shape:
        raise ValueError(
            f"the measurement makes {tuple(seen.shape)} of images {tuple(images.shape)}, but the "
            f"measured values have shape {tuple(measured.shape)}"
        )
    return (measured - seen).square().flatten(1).sum(dim=1)


def entries(measured: Tensor, measurement: Measurement) -> Tensor:
    """How many numbers were measured of each image."""
    if isinstance(measurement, Mask):
        return measurement(torch.ones_like(measured)).flatten(1).sum(dim=1)
    return measured.new_full((len(measured),), measured[0].numel())


def _restoration(
    generator: nn.Module,
    found: InputResult,
    measured: Tensor,
    measurement: Measurement,
    search: LatentSearch,
) -> Restoration:
    images = found.outputs()
    left = misfit(images, measured, measurement)
    # Nothing pulls at such a latent any more, so that its adjoint is zero but for rounding.
    explained = left <= search.noise**2 * entries(measured, measurement)
    explained &= torch.tensor(search.noise > 0 and not search.ridge, device=left.device)
    messages = (
        f"reached the noise level {search.noise:g} within {int(found.iterations[row])} iterations"
        if reached
        else found.message(row)
        for row, reached in enumerate(explained.tolist())
    )
    return Restoration(
        images=images,
        latents=found.x,
        misfit=left,
        status=torch.where(explained, int(Status.CONVERGED), found.status).to(found.status.dtype),
        residual=torch.where(explained, found.state_residual, found.residual),
        iterations=found.iterations,
        evaluations=found.evaluations,
        messages=tuple(messages),
        engine=search.engine_for(generator),
    )


def _better(rows: Tensor, one: Restoration, other: Restoration) -> Restoration:
    """`one` in these rows, `other` elsewhere."""

    def chosen(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(rows.reshape(-1, *(1,) * (a.dim() - 1)), a, b)

    return Restoration(
        images=chosen(one.images, other.images),
        latents=chosen(one.latents, other.latents),
        misfit=chosen(one.misfit, other.misfit),
        status=chosen(one.status, other.status),
        residual=chosen(one.residual, other.residual),
        iterations=chosen(one.iterations, other.iterations),
        evaluations=one.evaluations + other.evaluations,
        messages=tuple(
            a if row else b
            for row, a, b in zip(rows.tolist(), one.messages, other.messages, strict=True)
        ),
        engine=one.engine,
    )


def _zeros(generator: nn.Module, measured: Tensor) -> Tensor:
    parameter = next(generator.parameters(), measured)
    return torch.zeros(
        len(measured), latent_dim(generator), dtype=parameter.dtype, device=parameter.device
    )
