"""Tasks whose models generate images: autoencoders, decoders, and restoration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from equilibria.inputs import InputResult, optimal_input, optimal_value
from equilibria.inputs.latents import LatentSearch, generator_of, is_generator, squared_error
from equilibria.inputs.outer import Outer
from equilibria.models.generators.autoencoders import Autoencoder
from equilibria.models.generators.densities import check_density
from equilibria.registry import check_values
from equilibria.restoration import Damage, RestorationProblem, get_damage, restore
from equilibria.restoration.tiles import answer
from equilibria.tasks.base import Task
from equilibria.tasks.evaluation import Outcome, Solved
from equilibria.tasks.image_quality import picture_psnr, psnr

Kind = Literal["auto", "ae", "rae", "vae"]
LATENTS_AT_ONCE = 256
TRAINING_CHECK_TOLERANCE = 1e-3
"""Tolerance of the solves for equilibria after a search in training."""


def _errors(images: Tensor, originals: Tensor) -> dict[str, Tensor]:
    """Return ‖y − ŷ‖², summed over the pixels of an image, and the PSNR in decibels."""
    return {"loss": squared_error(images, originals), "psnr": psnr(images, originals)}


@dataclass(frozen=True)
class Autoencoding(Task):
    """Training of an autoencoder: reconstruct images y from the encoder's latents x.

    The loss is ‖y − D(x)‖² with the decoder D, plus a penalty.

    Args:
        kind: "vae" draws x and adds `kl_weight` · KL(q(x | y) ‖ N(0, I)) (Kingma and Welling,
            2014). "rae" adds `latent_weight` · ‖x‖²/2 and `decoder_weight` times the squared norm
            of the decoder's weights (RAE-L2 of Ghosh et al., 2020). "ae" adds nothing. "auto" is
            "vae" for a variational model and "ae" otherwise.
        kl_weight: Weight of the divergence: twice the variance of a pixel given x.
        latent_weight: Weight of ‖x‖²/2.
        decoder_weight: Weight of the squared norm of the decoder's weights.
        density: Density of latents from which new images are drawn, a name or a mapping with
            options (`fit_density`).

    Examples:
        >>> from equilibria.models.generators.autoencoders import convolutional_autoencoder
        >>> model = convolutional_autoencoder(image_size=8, latent_dim=3, width=4)
        >>> task = eq.tasks.Autoencoding(kind="rae")
        >>> task.training_step(model, torch.rand(2, 1, 8, 8), torch.zeros(2)).loss.requires_grad
        True
    """

    score: ClassVar[str] = "psnr"
    draws_pictures: ClassVar[bool] = True

    kind: Kind = "auto"
    kl_weight: float = 0.1
    latent_weight: float = 0.05
    decoder_weight: float = 1e-4
    density: str | Mapping[str, Any] = "gmm"

    def __post_init__(self) -> None:
        check_density(self.density)
        check_values(
            self,
            not_negative=("kl_weight", "latent_weight", "decoder_weight"),
            one_of={"kind": get_args(Kind)},
        )

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        autoencoder, kind = self._checked(model)
        latents, log_variance = autoencoder.posterior(inputs)
        extra = latents.new_zeros(())
        if kind == "vae":
            variance = log_variance.exp()
            divergence = (latents.square() + variance - 1 - log_variance).sum(dim=1) / 2
            extra = self.kl_weight * divergence
            latents = latents + variance.sqrt() * torch.randn_like(latents)
        elif kind == "rae":
            weights = [p.square().sum() for p in autoencoder.decoder.parameters() if p.dim() > 1]
            extra = self.latent_weight * latents.square().sum(dim=1) / 2
            extra = extra + self.decoder_weight * torch.stack(weights).sum()
        return Outcome({"loss": squared_error(autoencoder.decode(latents), inputs) + extra})

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Reconstruct images from their encodings, for a VAE from the means."""
        autoencoder, _ = self._checked(model)
        return Outcome(_errors(autoencoder(inputs), inputs))

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        return {"psnr": outcome.mean("psnr"), "median_psnr": outcome.median("psnr")}

    def _checked(self, model: nn.Module) -> tuple[Autoencoder, Kind]:
        if not isinstance(model, Autoencoder):
            raise TypeError(
                f"{type(model).__name__} has no encoder: use an autoencoder (vae-conv, ae-conv, "
                "mdeq-vae, mdeq-ae), or train a decoder by task.name=generator"
            )
        if self.kind == "auto":
            return model, "vae" if model.variational else "ae"
        if (self.kind == "vae") != model.variational:
            required = "a variational" if self.kind == "vae" else "a non-variational"
            raise ValueError(
                f"kind={self.kind!r} needs {required} model: set model.options.variational to "
                f"{str(self.kind == 'vae').lower()}, or the kind to auto"
            )
        return model, self.kind


@dataclass(frozen=True, kw_only=True)
class Reconstruction(LatentSearch, Task):
    """Training of a decoder D without an encoder: a search finds the latent x of each image y.

    The search minimizes ‖y − D(x)‖² + ridge · ‖x‖² over x, from x = 0, jointly with the decoder's
    equilibrium. The training loss is the minimum (Eq. 20 of "Joint inference and input
    optimization", JIIO), and its gradient in the weights is that of the envelope theorem (Eq. 19).

    Args:
        engine: As in `LatentSearch`.
        iterations: Largest number of search steps per image in training; 40 in the paper.
        ridge: Weight of ‖x‖². It is not in the paper; it keeps the scale of the latents, and thus
            the step size of the search, constant.
        sweeps: As in `LatentSearch`.
        step_size: As in `LatentSearch`.
        tolerance: As in `LatentSearch`.
        evaluation_iterations: Largest number of search steps per image in evaluations; 100 in the
            paper.
        check_tolerance: Tolerance to which the equilibrium and its adjoint are solved again at the
            latents found, before the loss and its gradient are computed.
        latent_noise: Train the decoder at x + noise, as a VAE does, with this standard deviation
            relative to the root mean square of the batch's latents. Nearby latents then decode to
            similar images.
        density: Density of latents from which new images are drawn, a name or a mapping with
            options. The paper uses {name: vae-gmm, hidden: 2096, codes: 384, components: 20}: a VAE
            with hidden layers of 2096 units and codes of length 384, which have a mixture of 20
            Gaussians.

    Examples:
        >>> from equilibria.models.generators.decoders import opteq_decoder
        >>> decoder = opteq_decoder(image_size=8, latent_dim=4, channels=8, width=8)
        >>> task = eq.tasks.Reconstruction(iterations=3)
        >>> task.training_step(decoder, torch.rand(2, 1, 8, 8), torch.zeros(2)).loss.requires_grad
        True
    """

    score: ClassVar[str] = "psnr"
    draws_pictures: ClassVar[bool] = True
    starts_at_zero: ClassVar[bool] = True

    engine: str = "secant"
    iterations: int = 12
    evaluation_iterations: int = 40
    ridge: float = 0.01
    check_tolerance: float = 1e-3
    latent_noise: float = 0.0
    density: str | Mapping[str, Any] = "gmm"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(
            self,
            at_least_one=("evaluation_iterations",),
            tolerances=("check_tolerance",),
            not_negative=("latent_noise",),
        )

    def find(
        self, model: nn.Module, images: Tensor, *, start: Tensor | None = None, training: bool
    ) -> InputResult:
        """Find the latents of images.

        Args:
            model: Equilibrium decoder, or an autoencoder with one.
            images: Images, shape (B, C, H, W).
            start: Latents to start from; by default zeros.
            training: Use the iterations of training instead of those of evaluations.
        """
        search = self if training else replace(self, iterations=self.evaluation_iterations)
        decoder = generator_of(model, explicit=False)
        return search.run(
            decoder,
            images,
            start=start,
            check_tolerance=self.check_tolerance,
            polish=not (training and self.latent_noise),
        )

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        result = self.find(model, inputs, training=True)
        if self.latent_noise:
            losses = self._noisy_value(generator_of(model), result, inputs)
        else:
            losses = optimal_value(result)
            # There was no forward pass, so report the equilibrium for a Jacobian penalty here.
            result.problem.layer.report_equilibrium(result.problem.stem(result.x), result.state)
        result.report_visited()
        return Outcome({"loss": losses}, solves=result)

    def _noisy_value(self, decoder: nn.Module, result: InputResult, images: Tensor) -> Tensor:
        """Return ‖y − D(x + noise)‖² + ridge ‖x‖² at latents x of a search without noise."""
        latents = result.x
        deviation = self.latent_noise * latents.square().mean().sqrt()
        decoded = decoder(latents + deviation * torch.randn_like(latents), start=result.state)
        return squared_error(decoded, images) + self.ridge * latents.square().sum(dim=1)

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Reconstruct images by JIIO, without the encoder of an autoencoder."""
        result = self.find(model, inputs, training=False)
        norms = torch.linalg.vector_norm(result.x, dim=1)
        return Outcome({**_errors(result.outputs(), inputs), "latent_norm": norms}, solves=result)

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        return {
            "psnr": outcome.mean("psnr"),
            "median_psnr": outcome.median("psnr"),
            "latent_norm": outcome.mean("latent_norm"),
        }


@torch.no_grad()
def latents_of(model: nn.Module, task: Task, images: Tensor, *, searched: bool = False) -> Tensor:
    """Return the latents of images, from the encoder of an autoencoder or by JIIO.

    Args:
        model: Autoencoder or decoder.
        task: Task that the model was trained for. JIIO uses its options if it is `Reconstruction`.
        images: Images, shape (B, C, H, W).
        searched: Use JIIO for autoencoders too, starting at the encoding.

    Examples:
        >>> from equilibria.models.generators.autoencoders import convolutional_autoencoder
        >>> from equilibria.tasks.images import latents_of
        >>> model = convolutional_autoencoder(image_size=8, latent_dim=3, width=4)
        >>> latents_of(model, eq.tasks.Autoencoding(), torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 3])
    """
    search = task if isinstance(task, Reconstruction) else Reconstruction(ridge=0.0)
    parts = []
    for batch in torch.split(images, LATENTS_AT_ONCE):
        latents = model.encode(batch) if isinstance(model, Autoencoder) else None
        if latents is None or searched:
            latents = search.find(model, batch, start=latents, training=False).x
        parts.append(latents)
    return torch.cat(parts)


@dataclass(frozen=True, kw_only=True)
class ImageRestoration(LatentSearch, Task):
    """Training to restore images with one kind of damage.

    A generator with an equilibrium layer is trained through the inner problem (JIIO Eq. 24): JIIO
    finds the latents that fit the damaged image ŷ best, and the loss is ‖y − h(z*)‖² there, with
    the original y and the image h(z*) decoded from the equilibrium z*. A model that sets
    `takes_measurement` is called with ŷ and the measurement operator A, any other model with the
    picture of ŷ (Eq. 23). Pixels are in [0, 1].

    Args:
        engine: Engine of the inner problem. Decoders train faster with "anderson" than with
            "secant", although the latter gets closer to the optimal latents.
        iterations: Largest number of steps of the inner problem in training.
        ridge: As in `LatentSearch`.
        sweeps: As in `LatentSearch`.
        step_size: As in `LatentSearch`.
        tolerance: As in `LatentSearch`.
        corruption: Name of a damage, such as "inpaint", "denoise", "deblur" or "superres", or a
            mapping with one name and its options, such as {"denoise": {"noise": 0.4}}.
        evaluation_iterations: Largest number of steps of the inner problem in evaluations.
        stop_at_noise: End the inner problem once the misfit is at most the expected norm of the
            noise.
        outer: "detached" treats the optimal latent as a constant, as the paper does. "implicit"
            differentiates it, which needs an inner problem that converges (a ridge helps).
        seed: Seed of the damage in evaluations.

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> model = deq_restorer(in_channels=1, channels=8)
        >>> task = eq.tasks.ImageRestoration(corruption={"denoise": {"noise": 0.1}})
        >>> evaluation = task.evaluate(model, [(torch.rand(2, 1, 8, 8), torch.zeros(2))])
        >>> "psnr" in evaluation.figures
        True
    """

    score: ClassVar[str] = "median_psnr"
    draws_pictures: ClassVar[bool] = True

    corruption: str | Mapping[str, Mapping[str, Any]] = "denoise"
    engine: str = "anderson"
    iterations: int = 40
    evaluation_iterations: int = 100
    sweeps: int = 4
    stop_at_noise: bool = False
    outer: Outer = "detached"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(
            self, at_least_one=("evaluation_iterations",), one_of={"outer": get_args(Outer)}
        )
        _ = self.damage

    @cached_property
    def damage(self) -> Damage:
        """The damage that the model learns to restore."""
        if isinstance(self.corruption, str):
            return get_damage(self.corruption)
        if len(self.corruption) != 1:
            raise ValueError(
                "corruption must be a name, or a mapping with one name and its options, such as "
                f"{{denoise: {{noise: 0.4}}}}, got {self.corruption}"
            )
        ((name, options),) = self.corruption.items()
        return get_damage(name, **options)

    @property
    def noise(self) -> float:
        """Noise level at which the inner problem ends; 0 if `stop_at_noise` is not set."""
        return self.damage.noise if self.stop_at_noise else 0.0

    def evaluation_options(self) -> dict[str, Any]:
        """Return the options of `restore` in an evaluation."""
        return {**self.options(), "iterations": self.evaluation_iterations, "noise": self.noise}

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        problem = self.damage.corrupt(inputs)
        if is_generator(model):
            restored = self._restored_by_generator(model, problem)
        else:
            restored = answer(model, problem)
        return Outcome({"loss": (restored - inputs).square().flatten(1).mean(dim=1)})

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Return the mean squared error per pixel, and the PSNR of pictures clamped to [0, 1].

        The solves are those of the inner problems for a generator, otherwise those of the model.
        """
        problem = self.damage.corrupt(inputs, generator)
        solves: Solved | None = None
        if is_generator(model):
            options = self.evaluation_options()
            solves = result = restore(model, problem.measured, problem.measurement, **options)
            restored = result.images
        else:
            restored = answer(model, problem)
        values = {
            "loss": (restored - inputs).double().square().flatten(1).mean(dim=1),
            "psnr": picture_psnr(restored, inputs),
        }
        picture = problem.picture(tuple(inputs.shape[2:]))
        if picture is not None:
            values["measured_psnr"] = picture_psnr(picture, inputs)
        return Outcome(values, solves=solves)

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        """Return the mean and median PSNR, and the median of the measured pictures, if any."""
        return {
            "psnr": outcome.mean("psnr"),
            "median_psnr": outcome.median("psnr"),
            "measured_psnr": outcome.median("measured_psnr"),
        }

    def _restored_by_generator(self, model: nn.Module, problem: RestorationProblem) -> Tensor:
        """Return h(z*) at the latents of the inner problem, differentiable (Eq. 24)."""
        result = self.run(
            model,
            problem.measured,
            problem.measurement,
            noise=self.noise,
            polish=self.outer == "implicit",
            check_tolerance=TRAINING_CHECK_TOLERANCE if self.outer == "detached" else None,
        )
        result.report_visited()
        latents = optimal_input(result, self.outer, strict=False)
        restored: Tensor = model(latents, start=result.state)
        return restored
