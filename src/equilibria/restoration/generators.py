"""Restoration with a generator as the prior (JIIO, Section 4.2, Eqs. 21 and 22)."""

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
    """Restored images, and the outcome of the search for their latents, image by image.

    Attributes:
        images: Images h(z*) of the generator, shape (B, C, H, W).
        latents: Latents of the images, shape (B, latent_dim).
        misfit: ‖ŷ − A h(z*)‖² of each image at an accurate equilibrium, without penalties.
        status: `Status` code of each search.
        residual: Largest relative residual of the equilibrium, its adjoint and the latent.
        iterations: Number of steps of each search.
        evaluations: Calls of the map T in all searches, each for the whole batch.
        messages: Outcome of each search in words, with the remedy.
        engine: Name of the engine of the search.

    Examples:
        >>> decoder = eq.load("mnist-generator")
        >>> image = decoder(torch.zeros(1, 24)).detach()
        >>> restored = eq.restore(decoder, image, eq.operators.Identity(), iterations=3)
        >>> restored.latents.shape, restored.images.shape
        (torch.Size([1, 24]), torch.Size([1, 1, 28, 28]))
    """

    images: Tensor
    latents: Tensor
    misfit: Tensor
    status: Tensor
    residual: Tensor
    iterations: Tensor
    evaluations: int
    messages: tuple[str, ...]
    engine: str

    @property
    def converged(self) -> Tensor:
        """Whether the search for each image converged, shape (B,)."""
        return self.status == int(Status.CONVERGED)

    def summary(self) -> str:
        """Return one line on all images, with the remedy for the worst of them."""
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
    """Find the images of a generator that fit measurements best (Eq. 22).

        problem = Denoising(noise=0.2).corrupt(images)
        restored = restore(generator, problem.measured, problem.measurement, noise=problem.noise)

    Args:
        generator: Equilibrium decoder, an autoencoder with one, or any module with a `latent_dim`
            that maps latents to images. The latter are searched by Adam (Bora et al., 2017).
        measured: Measured values ŷ, one row per image.
        measurement: A, any differentiable map of images.
        start: Latents to start from, shape (B, latent_dim); by default zeros.
        starts: Number of searches, of which the best counts for each image. All but the first start
            at random latents.
        spread: Standard deviation of the random latents.
        seed: Seed of the random latents.
        noise: Standard deviation of the noise. A search ends once the misfit is at most the
            expected norm of the noise (see `LatentSearch.run`).
        prior: Prior of the latents, such as a density fitted to latents of training images.
        **search: Options of `LatentSearch`: engine, iterations, ridge and others.

    Returns:
        The images with their latents and the outcome of each search.

    Raises:
        TypeError: If the model is no generator.
        ValueError: If the measured values or the start have a wrong shape.

    Examples:
        >>> from equilibria.models.generators.decoders import opteq_decoder
        >>> decoder = opteq_decoder(image_size=8, latent_dim=4, channels=8, width=8)
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(2, 1, 8, 8))
        >>> eq.restore(decoder, problem.measured, problem.measurement, iterations=5).images.shape
        torch.Size([2, 1, 8, 8])
    """
    check_at_least_one(starts=starts)
    check_not_negative(spread=spread)
    settings = LatentSearch(**search)
    constant = as_constant(generator_of(generator), evaluating=True)
    measured = about(measurement).only_measured(measured)
    first = zero_latents(constant, measured) if start is None else start
    randomness = torch.Generator().manual_seed(seed)
    best: Restoration | None = None
    lowest = torch.empty(0)
    for count in range(starts):
        random = torch.randn(first.shape, generator=randomness).to(first) * spread
        begin = random if count else first
        result = settings.run(constant, measured, measurement, begin, noise=noise, prior=prior)
        penalized = bool(settings.ridge) or prior is not None
        restored = _restoration(result, measured, measurement, noise, penalized)
        loss = result.loss.nan_to_num(nan=torch.inf)
        best = restored if best is None else _selected(loss < lowest, restored, best)
        lowest = loss if count == 0 else torch.minimum(loss, lowest)
    assert best is not None
    return best


def _restoration(
    result: InputResult, measured: Tensor, measurement: Measurement, noise: float, penalized: bool
) -> Restoration:
    images = result.outputs()
    error = misfit(images, measured, measurement)
    # At the noise level the loss is zero, and so is the adjoint: its residual is only rounding.
    explained = error <= noise**2 * entries(measured, measurement)
    explained &= noise > 0 and not penalized
    messages = (
        f"reached the noise level {noise:g} within {int(result.iterations[row])} iterations"
        if reached
        else result.message(row)
        for row, reached in enumerate(explained.tolist())
    )
    status = torch.where(explained, int(Status.CONVERGED), result.status)
    return Restoration(
        images=images,
        latents=result.x,
        misfit=error,
        status=status.to(result.status.dtype),
        residual=torch.where(explained, result.state_residual, result.residual),
        iterations=result.iterations,
        evaluations=result.evaluations,
        messages=tuple(messages),
        engine=result.engine,
    )


def _selected(rows: Tensor, new: Restoration, old: Restoration) -> Restoration:
    """Return `new` in these rows and `old` elsewhere, with the evaluations of both."""

    def selected(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return torch.where(rows.reshape(-1, *(1,) * (a.dim() - 1)), a, b)
        if isinstance(a, tuple):
            triples = zip(rows.tolist(), a, b, strict=True)
            return tuple(first if row else second for row, first, second in triples)
        return a

    values = {f.name: selected(getattr(new, f.name), getattr(old, f.name)) for f in fields(new)}
    return Restoration(**{**values, "evaluations": new.evaluations + old.evaluations})
