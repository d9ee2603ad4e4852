"""Restorers with a trained model: one forward pass, or a search for a generator's latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.equilibrium import solving
from equilibria.restoration.fill import seamless_fill
from equilibria.restoration.generators import restore
from equilibria.restoration.problem import RestorationProblem
from equilibria.restoration.restorer import Restored, Restorer, Solve, solves_of, worst
from equilibria.restoration.tiles import answer, answer_in_tiles, takes_any_size


class ModelRestorer(Restorer):
    """Base class of restorers with a trained model.

    Attributes:
        channels: Number of color channels that the model accepts; None if it accepts any.
    """

    channels: int | None

    @property
    def any_size(self) -> bool:
        """Whether the model accepts images of any size."""
        return False

    def restore(self, problem: RestorationProblem) -> Restored:
        """Restore images with any number of channels.

        A model for gray images restores each color separately. A model for color images gets a gray
        image as three equal channels. Pixels that were measured without noise are put back.
        """
        started = perf_counter()
        channels = problem.measured.shape[1]
        if self.channels in (None, channels):
            generated, images, solves = self._restored(problem)
        else:
            inner, back = _in_channels(problem, int(self.channels or channels))
            generated, images, solves = self._restored(inner)
            is_filled = images is not generated
            generated = back(generated)
            images = back(images) if is_filled else generated
            solves = [worst(solves)]
        return Restored(
            problem=problem,
            images=images,
            generated=generated,
            solves=solves,
            seconds=perf_counter() - started,
        )

    def _restored(self, problem: RestorationProblem) -> tuple[Tensor, Tensor, list[Solve]]:
        generated, solves = self.generate(problem)
        if problem.noise or not problem.about.hides:
            return generated, generated, solves
        images = seamless_fill(problem.measurement, problem.measured, generated)  # type: ignore[arg-type]
        return generated, images, solves

    def generate(self, problem: RestorationProblem) -> tuple[Tensor, list[Solve]]:
        """Return the output of the model, and the outcome of the solve of each image."""
        raise NotImplementedError


@dataclass(frozen=True)
class LearnedRestorer(ModelRestorer):
    """Restorer that applies a trained model in one forward pass.

    Args:
        model: Called with the measured picture and, if it sets `takes_measurement`, the operator.
        channels: Number of color channels that the model accepts; None if it accepts any.
        tile: Side in pixels of the tiles of large pictures, for a model that accepts any size.

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> from equilibria.restoration.learned import LearnedRestorer
        >>> model = deq_restorer(in_channels=1, channels=8).eval()
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(1, 3, 8, 8))
        >>> LearnedRestorer(model, channels=1).restore(problem).images.shape
        torch.Size([1, 3, 8, 8])
    """

    model: nn.Module
    channels: int | None = None
    tile: int | None = None

    @property
    def any_size(self) -> bool:
        return takes_any_size(self.model)

    @torch.no_grad()
    def generate(self, problem: RestorationProblem) -> tuple[Tensor, list[Solve]]:
        with solving(self.model, record=True) as record:
            if self.any_size:
                images = answer_in_tiles(self.model, problem, self.tile)
            else:
                images = answer(self.model, problem)
        tiles = [solves_of(solution, solution.message) for solution in record.solutions]
        solves = [worst(row) for row in zip(*tiles, strict=True)] or [Solve()] * len(images)
        return images, solves


@dataclass(frozen=True)
class GeneratorRestorer(ModelRestorer):
    """Restorer that searches for the latents whose image fits the measurement best (`restore`).

    Args:
        generator: Model that maps latents to images.
        channels: Number of color channels of its images; None uses that of the measurement.
        search: Options of `restore`: iterations, ridge, starts, engine, prior.
        stop_at_noise: End a search once the misfit is at most the expected norm of the noise.
        seed: Seed of the random starts.

    Examples:
        >>> from equilibria.models.generators.decoders import opteq_decoder
        >>> from equilibria.restoration.learned import GeneratorRestorer
        >>> decoder = opteq_decoder(image_size=8, latent_dim=4, channels=8, width=8)
        >>> problem = eq.restoration.Inpainting(window=3).corrupt(torch.rand(2, 1, 8, 8))
        >>> restorer = GeneratorRestorer(decoder, search={"iterations": 3})
        >>> len(restorer.restore(problem).solves)
        2
    """

    generator: nn.Module
    channels: int | None = None
    search: dict[str, Any] = field(default_factory=dict)
    stop_at_noise: bool = False
    seed: int = 0

    @torch.no_grad()
    def generate(self, problem: RestorationProblem) -> tuple[Tensor, list[Solve]]:
        search = dict(self.search)
        if self.stop_at_noise:
            search["noise"] = problem.noise
        result = restore(
            self.generator, problem.measured, problem.measurement, seed=self.seed, **search
        )
        return result.images, solves_of(result, lambda row: result.messages[row])


def _in_channels(
    problem: RestorationProblem, channels: int
) -> tuple[RestorationProblem, Callable[[Tensor], Tensor]]:
    """Return the problem of one image in `channels` channels, and the inverse transform."""
    if channels == 1:
        # The colors of the image become the samples of a batch.
        measured = problem.measured.transpose(0, 1)
        return replace(problem, measured=measured), lambda images: images.transpose(0, 1)
    measured = problem.measured.expand(-1, channels, -1, -1)
    return replace(problem, measured=measured), lambda images: images.mean(dim=1, keepdim=True)
