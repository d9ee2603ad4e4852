"""Drawing images: autoencoders, decoders trained alone, and restoring what was damaged."""

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
TRAINING_CHECK = 1e-3
"""The tolerance to which equilibria are solved anew after a search in training."""


def _drawn(images: Tensor, originals: Tensor) -> dict[str, Tensor]:
    """‖y − ŷ‖², the sum over the pixels of an image, and the PSNR in decibels."""
    return {"loss": squared_error(images, originals), "psnr": psnr(images, originals)}


@dataclass(frozen=True)
class Autoencoding(Task):
    """‖y − D(x)‖² with x from the encoder, plus what the kind asks for.

    kind: "vae" draws x and adds `kl_weight` · KL(q(x | y) ‖ N(0, I)) (Kingma and Welling, 2014);
        the weight is twice the variance of a pixel given x. "rae" adds `latent_weight` · ‖x‖²/2
        and `decoder_weight` times the squared norm of the decoder's weights (RAE-L2 of Ghosh et
        al., 2020). "ae" adds nothing. "auto": "vae" for a variational model, else "ae".
    density: what new images are drawn from, a name or a mapping with options (`fit_density`).

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
        """Reconstruct images from their encodings; of a VAE, from the means."""
        autoencoder, _ = self._checked(model)
        return Outcome(_drawn(autoencoder(inputs), inputs))

    def figures(self, found: Outcome) -> dict[str, float | None]:
        return {"psnr": found.mean("psnr"), "median_psnr": found.median("psnr")}

    def _checked(self, model: nn.Module) -> tuple[Autoencoder, Kind]:
        if not isinstance(model, Autoencoder):
            raise TypeError(
                f"{type(model).__name__} has no encoder: take an autoencoder (vae-conv, ae-conv, "
                "mdeq-vae, mdeq-ae), or train a decoder alone with task.name=generator"
            )
        if self.kind == "auto":
            return model, "vae" if model.variational else "ae"
        if (self.kind == "vae") != model.variational:
            wanted = "a variational" if self.kind == "vae" else "no variational"
            raise ValueError(
                f"kind={self.kind!r} takes {wanted} model: set model.options.variational to "
                f"{str(self.kind == 'vae').lower()}, or the kind to auto"
            )
        return model, self.kind


@dataclass(frozen=True, kw_only=True)
class Reconstruction(LatentSearch, Task):
    """minimize Σ min_x ‖y − D(x)‖² + ridge ‖x‖² over the decoder (JIIO Eq. 20).

    A training step finds the latents, from zero, and differentiates the optimal value (Eq. 19).
    The ridge is not in the paper: it keeps the latents, which are unbounded otherwise, at one
    scale, and with it the step of the search (`LatentSearch` has the other options).

    iterations, evaluation_iterations: steps of x in training and in evaluation (40 and 100 there).
    check_tolerance: of the equilibria and adjoints that the loss and its gradient are taken at.
    latent_noise: the decoder is trained at x + noise, as a VAE's is, with this deviation in units
        of the root mean square of the batch's latents: latents close to one that was found then
        draw about the same image, so that those between two draw an image too.
    density: of the latents, what new images are drawn from: a name, or a mapping with options. The
        paper's is {name: vae-gmm, hidden: 2096, codes: 384, components: 20}.

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
        """The latents of images, with the iterations of training or of evaluation."""
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
        found = self.find(model, inputs, training=True)
        if self.latent_noise:
            losses = self._noisy_value(generator_of(model), found, inputs)
        else:
            losses = optimal_value(found)
            # No forward pass found this equilibrium: who penalizes its Jacobian hears of it here.
            found.problem.layer.report_equilibrium(found.problem.stem(found.x), found.state)
        found.report_visited()
        return Outcome({"loss": losses}, solves=found)

    def _noisy_value(self, decoder: nn.Module, found: InputResult, images: Tensor) -> Tensor:
        """‖y − D(x + noise)‖² + ridge ‖x‖² at the latents x that were found without noise."""
        latents = found.x
        deviation = self.latent_noise * latents.square().mean().sqrt()
        drawn = decoder(latents + deviation * torch.randn_like(latents), start=found.state)
        return squared_error(drawn, images) + self.ridge * latents.square().sum(dim=1)

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Reconstruct images by JIIO alone, also with the decoder of an autoencoder."""
        found = self.find(model, inputs, training=False)
        norms = torch.linalg.vector_norm(found.x, dim=1)
        return Outcome({**_drawn(found.outputs(), inputs), "latent_norm": norms}, solves=found)

    def figures(self, found: Outcome) -> dict[str, float | None]:
        return {
            "psnr": found.mean("psnr"),
            "median_psnr": found.median("psnr"),
            "latent_norm": found.mean("latent_norm"),
        }


@torch.no_grad()
def latents_of(model: nn.Module, task: Task, images: Tensor, *, searched: bool = False) -> Tensor:
    """By the encoder of an autoencoder; by JIIO for a decoder trained alone, or if so asked for.

    The search is that of the task, or one without a ridge on a decoder that has an encoder.

    Examples:
        >>> from equilibria.models.generators.autoencoders import convolutional_autoencoder
        >>> from equilibria.tasks.images import latents_of
        >>> model = convolutional_autoencoder(image_size=8, latent_dim=3, width=4)
        >>> latents_of(model, eq.tasks.Autoencoding(), torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 3])
    """
    search = task if isinstance(task, Reconstruction) else Reconstruction(ridge=0.0)
    found = []
    for some in torch.split(images, LATENTS_AT_ONCE):
        start = model.encode(some) if isinstance(model, Autoencoder) else None
        if start is None or searched:
            start = search.find(model, some, start=start, training=False).x
        found.append(start)
    return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class ImageRestoration(LatentSearch, Task):
    """Learn to undo one kind of damage.

    A generator, which maps latents to images by an equilibrium, is trained through the inner
    problem (JIIO Eq. 24): the latents that explain ŷ best are found by JIIO, and the loss is
    ‖y − h(z*)‖² there. A model that takes `measurement` as a second argument gets (ŷ, A), any
    other the picture of ŷ (Eq. 23). Images have values in [0, 1].

    corruption: "inpaint", "denoise", "deblur" or "superres", or one of them with its options, as in
        {"denoise": {"noise": 0.4}}.
    engine: of the inner problem, as all options of `LatentSearch`. A decoder that is trained
        through it learns faster with "anderson" than with "secant", even though the latter comes
        closer to the optimal latents.
    stop_at_noise: end the inner problem where noise explains the misfit.
    outer: "detached" takes the optimal latent as a constant, as the paper does; "implicit"
        differentiates it too, which needs an inner problem that converges (a ridge helps).
    seed: of the damage that evaluations see, the same in every epoch.

    Examples:
        >>> from equilibria.models.restorers.model import deq_restorer
        >>> model = deq_restorer(in_channels=1, channels=8)
        >>> task = eq.tasks.ImageRestoration(corruption={"denoise": {"noise": 0.1}})
        >>> found = task.evaluate(model, [(torch.rand(2, 1, 8, 8), torch.zeros(2))])
        >>> "psnr" in found.figures
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
        """The damage that is undone."""
        if isinstance(self.corruption, str):
            return get_damage(self.corruption)
        if len(self.corruption) != 1:
            raise ValueError(
                "corruption is a name, or one name with options, such as {denoise: {noise: 0.4}}, "
                f"not {self.corruption}"
            )
        ((name, options),) = self.corruption.items()
        return get_damage(name, **options)

    @property
    def noise(self) -> float:
        """Where the inner problem ends; 0: it goes on."""
        return self.damage.noise if self.stop_at_noise else 0.0

    def evaluation_options(self) -> dict[str, Any]:
        """Of `restore`, as an evaluation calls it."""
        return {**self.options(), "iterations": self.evaluation_iterations, "noise": self.noise}

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        seen = self.damage.corrupt(inputs)
        restored = self._through(model, seen) if is_generator(model) else answer(model, seen)
        return Outcome({"loss": (restored - inputs).square().flatten(1).mean(dim=1)})

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """The mean squared error of a pixel; the PSNR is that of pictures, cut off to [0, 1].

        The solves are for a generator those of the inner problems, else those of the model.
        """
        seen = self.damage.corrupt(inputs, generator)
        solves: Solved | None = None
        if is_generator(model):
            options = self.evaluation_options()
            solves = found = restore(model, seen.measured, seen.measurement, **options)
            restored = found.images
        else:
            restored = answer(model, seen)
        values = {
            "loss": (restored - inputs).double().square().flatten(1).mean(dim=1),
            "psnr": picture_psnr(restored, inputs),
        }
        picture = seen.picture(tuple(inputs.shape[2:]))
        if picture is not None:
            values["measured_psnr"] = picture_psnr(picture, inputs)
        return Outcome(values, solves=solves)

    def figures(self, found: Outcome) -> dict[str, float | None]:
        """Mean and median over the images; what was measured is None where it is no picture."""
        return {
            "psnr": found.mean("psnr"),
            "median_psnr": found.median("psnr"),
            "measured_psnr": found.median("measured_psnr"),
        }

    def _through(self, model: nn.Module, seen: RestorationProblem) -> Tensor:
        """h(z*) at the latents of the inner problem, in the graph of the parameters (Eq. 24)."""
        found = self.run(
            model,
            seen.measured,
            seen.measurement,
            noise=self.noise,
            polish=self.outer == "implicit",
            check_tolerance=TRAINING_CHECK if self.outer == "detached" else None,
        )
        found.report_visited()
        latents = optimal_input(found, self.outer, strict=False)
        restored: Tensor = model(latents, start=found.state)
        return restored
