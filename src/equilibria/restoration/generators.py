"""Restoring images with a generator as the prior (JIIO, Section 4.2, Eqs. 21 and 22)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.inputs.input_result import InputResult
from equilibria.inputs.latents import (
    LatentSearch,
    Measurement,
    Prior,
    entries,
    generator_of,
    misfit,
    zero_latents,
)
from equilibria.inputs.problem import as_constant
from equilibria.operators.measurements import about
from equilibria.registry import check_at_least_one, check_not_negative
from equilibria.solvers import Status


@dataclass(frozen=True)
class Restoration:
    """Restored images, and how far the search for their latents came, image by image.

    Examples:
        >>> decoder = eq.load("mnist-generator")
        >>> image = decoder(torch.zeros(1, 24)).detach()
        >>> found = eq.restore(decoder, image, eq.operators.Identity(), iterations=3)
        >>> found.latents.shape, found.images.shape
        (torch.Size([1, 24]), torch.Size([1, 1, 28, 28]))
    """

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
        """Whether each sample converged, shape (B,)."""
        return self.status == int(Status.CONVERGED)

    def summary(self) -> str:
        """One line on all images, with the remedy for the worst of them."""
        total, done = len(self.status), int(self.converged.sum())
        worst = int(torch.argmax(self.status))
        tail = "" if done == total else f"; image {worst}: {self.messages[worst]}"
        return f"{done} of {total} images converged ({self.engine}){tail}"


def restore(
    generator: nn.Module,
    measured: Tensor,
    measurement: Measurement,
    *,
    start: Tensor | None = None,
    starts: int = 1,
    spread: float = 1.0,
    seed: int = 0,
    noise: float = 0.0,
    prior: Prior | None = None,
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
    noise: of the measurements; the search ends where it explains the misfit (`LatentSearch.run`).
    prior: of the latents: a density that was fitted to those of training images, with a weight.
    search: the options of `LatentSearch`: engine, iterations, ridge, …

    Examples:
        >>> from equilibria.models.generators.decoders import opteq_decoder
        >>> decoder = opteq_decoder(image_size=8, latent_dim=4, channels=8, width=8)
        >>> seen = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(2, 1, 8, 8))
        >>> eq.restore(decoder, seen.measured, seen.measurement, iterations=5).images.shape
        torch.Size([2, 1, 8, 8])
    """
    check_at_least_one(starts=starts)
    check_not_negative(spread=spread)
    settings = LatentSearch(**search)
    chosen = as_constant(generator_of(generator), evaluating=True)
    measured = about(measurement).only_measured(measured)
    first = zero_latents(chosen, measured) if start is None else start
    chance = torch.Generator().manual_seed(seed)
    best: Restoration | None = None
    lowest = torch.empty(0)
    for count in range(starts):
        drawn = torch.randn(first.shape, generator=chance).to(first) * spread
        begin = drawn if count else first
        found = settings.run(chosen, measured, measurement, begin, noise=noise, prior=prior)
        penalized = bool(settings.ridge) or prior is not None
        result = _restoration(found, measured, measurement, noise, penalized)
        loss = found.loss.nan_to_num(nan=torch.inf)
        best = result if best is None else _better(loss < lowest, result, best)
        lowest = loss if count == 0 else torch.minimum(loss, lowest)
    assert best is not None
    return best


def _restoration(
    found: InputResult, measured: Tensor, measurement: Measurement, noise: float, penalized: bool
) -> Restoration:
    images = found.outputs()
    left = misfit(images, measured, measurement)
    # Nothing pulls at such a latent any more, so that its adjoint is zero but for rounding.
    explained = left <= noise**2 * entries(measured, measurement)
    explained &= noise > 0 and not penalized
    messages = (
        f"reached the noise level {noise:g} within {int(found.iterations[row])} iterations"
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
        engine=found.engine,
    )


def _better(rows: Tensor, one: Restoration, other: Restoration) -> Restoration:
    """`one` in these rows, `other` elsewhere; both searches were made."""

    def chosen(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return torch.where(rows.reshape(-1, *(1,) * (a.dim() - 1)), a, b)
        if isinstance(a, tuple):
            pairs = zip(rows.tolist(), a, b, strict=True)
            return tuple(mine if row else its for row, mine, its in pairs)
        return a

    found = {f.name: chosen(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)}
    return Restoration(**{**found, "evaluations": one.evaluations + other.evaluations})
