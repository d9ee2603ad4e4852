"""Models as generators of images, and the search for the latents of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.equilibrium import EquilibriumLayer
from equilibria.inputs.engines import get_engine
from equilibria.inputs.engines.base import Engine
from equilibria.inputs.input_result import InputResult
from equilibria.inputs.optimize import optimize_input
from equilibria.inputs.search_settings import SearchSettings
from equilibria.operators.measurements import about
from equilibria.registry import check_at_least_one, check_not_negative, check_positive, check_values
from equilibria.solvers import Picard

Measurement = Callable[[Tensor], Tensor]
"""A, from images to measured values, sample by sample."""
ADAM = Engine(name="adam", rule="adam", sweeps=3)
"""Adam on the latents of an explicit generator. Three sweeps make z and μ exact."""


@dataclass(frozen=True)
class Prior:
    """Prior −weight · ln p(x) of latents, added to the misfit of a measurement.

    For noise of variance σ² and weight 2σ² the minimizer is the most probable latent (MAP).

    Args:
        log_density: Function from latents to ln p of each, differentiable, such as
            `Density.log_likelihood`.
        weight: Weight of the prior, positive.

    Examples:
        >>> normal = eq.inputs.Prior(lambda x: -0.5 * x.square().sum(dim=1), weight=2.0)
        >>> normal(torch.ones(1, 3))
        tensor([3.])
    """

    log_density: Callable[[Tensor], Tensor]
    weight: float

    def __post_init__(self) -> None:
        check_positive(weight=self.weight)

    def __call__(self, latents: Tensor) -> Tensor:
        return -self.weight * self.log_density(latents).to(latents.dtype)


class ExplicitGenerator(nn.Module):
    """A generator without an equilibrium, in the form that input optimization needs.

    The decoder is the stem. The map T(z; x) = stem(x) does not depend on the state z, so one
    evaluation gives the equilibrium, and its adjoint is the gradient of the loss.

    Args:
        model: Decoder from latents to images, or a model with a `decode` method.
        latent_dim: Size of a latent.

    Examples:
        >>> from equilibria.inputs.latents import ExplicitGenerator
        >>> generator = ExplicitGenerator(torch.nn.Linear(2, 5), latent_dim=2)
        >>> generator(torch.zeros(3, 2)).shape
        torch.Size([3, 5])
    """

    def __init__(self, model: nn.Module, latent_dim: int) -> None:
        super().__init__()
        self.model = model
        self.latent_dim = latent_dim
        self.layer = EquilibriumLayer(_image, solver=Picard(), gradient="one_step")
        self.head = nn.Identity()

    def stem(self, latents: Tensor) -> Tensor:
        """Decode latents into images."""
        decode = getattr(self.model, "decode", self.model)
        images: Tensor = decode(latents)
        return images

    def forward(self, latents: Tensor) -> Tensor:
        return self.stem(latents)


def _image(z: Tensor, x: Tensor) -> Tensor:
    return x


def is_generator(model: nn.Module) -> bool:
    """Whether a model maps latents to images by an equilibrium layer.

    Examples:
        >>> from equilibria.inputs.latents import is_generator
        >>> is_generator(eq.load("mnist-generator"))
        True
    """
    parts = (callable(getattr(model, name, None)) for name in ("stem", "head"))
    layered = isinstance(getattr(model, "layer", None), EquilibriumLayer)
    return layered and all(parts) and isinstance(getattr(model, "latent_dim", None), int)


def generator_of(model: nn.Module, *, explicit: bool = True) -> nn.Module:
    """Return the generator in a model: the model, its `decoder`, or its `decode` method.

    Args:
        model: Generator or autoencoder. Without an equilibrium it needs a `latent_dim`.
        explicit: Whether models without an equilibrium are accepted.

    Raises:
        TypeError: If the model has no generator of an accepted kind.

    Examples:
        >>> from equilibria.inputs.latents import generator_of
        >>> from equilibria.models.generators.autoencoders import convolutional_autoencoder
        >>> model = convolutional_autoencoder(image_size=8, latent_dim=3, width=4)
        >>> generator_of(model)(torch.zeros(1, 3)).shape
        torch.Size([1, 1, 8, 8])
    """
    if is_generator(model):
        return model
    decoder = getattr(model, "decoder", None)
    if isinstance(decoder, nn.Module) and is_generator(decoder):
        return decoder
    if not explicit:
        raise TypeError(
            f"{type(model).__name__} is no EquilibriumDecoder: JIIO needs an equilibrium decoder "
            "(mdeq-decoder, opteq-decoder) or an autoencoder that has one (mdeq-vae)"
        )
    if isinstance(size := getattr(model, "latent_dim", None), int):
        return ExplicitGenerator(model, size)
    raise TypeError(
        f"{type(model).__name__} is no generator of images: it needs a `latent_dim`, and its "
        "`forward`, `decoder` or `decode` must map latents of that size to images"
    )


def zero_latents(generator: nn.Module, images: Tensor) -> Tensor:
    """Return one latent per image, all zero, on the generator's device."""
    size = generator.latent_dim
    assert isinstance(size, int)
    parameter = next(generator.parameters(), images)
    return torch.zeros(len(images), size, dtype=parameter.dtype, device=parameter.device)


@torch.no_grad()
def decode(model: nn.Module, latents: Tensor, *, batch: int = 256) -> Tensor:
    """Decode latents into images, in batches.

    Args:
        model: Generator or autoencoder.
        latents: Latents, shape (B, latent_dim).
        batch: Number of latents that are decoded at once.

    Returns:
        Images, shape (B, C, H, W).

    Raises:
        TypeError: If the model has no generator.

    Examples:
        >>> from equilibria.models.generators.decoders import opteq_decoder
        >>> decoder = opteq_decoder(image_size=8, latent_dim=4, channels=8, width=8)
        >>> eq.inputs.decode(decoder, torch.randn(3, 4)).shape
        torch.Size([3, 1, 8, 8])
    """
    generator = generator_of(model)
    check_at_least_one(batch=batch)
    return torch.cat([generator(part) for part in torch.split(latents, batch)])


@dataclass(frozen=True, kw_only=True)
class LatentSearch:
    """Settings of a search for the latents x whose images fit measurements best (JIIO Eq. 22).

    It minimizes ‖ŷ − A h(z*)‖² + ridge · ‖x‖², with the measurements ŷ, their operator A, and the
    image h(z*) that the generator decodes from its equilibrium z* at x.

    Args:
        engine: Engine of `optimize_input`; "auto" is "secant" for equilibria and Adam for explicit
            networks.
        iterations: Largest number of steps of x.
        ridge: Factor of ‖x‖², which is added to the misfit. For latents that are N(0, I), such as a
            VAE's, the variance of the noise gives the most probable latent.
        sweeps: As in `SearchSettings`.
        step_size: As in `SearchSettings`.
        tolerance: As in `SearchSettings`.

    Examples:
        >>> decoder = eq.load("mnist-generator")
        >>> image = decoder(torch.zeros(1, 24)).detach()
        >>> from equilibria.inputs.latents import LatentSearch
        >>> search = LatentSearch(iterations=3)
        >>> result = search.run(decoder, image, start=torch.ones(1, 24))
        >>> bool(result.loss < result.initial_loss)
        True
    """

    engine: str | Mapping[str, Any] | Engine = "auto"
    iterations: int = 100
    ridge: float = 0.0
    sweeps: int = 3
    step_size: float | None = None
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        check_values(
            self,
            at_least_one=("iterations", "sweeps"),
            positive=("step_size",),
            tolerances=("tolerance",),
            not_negative=("ridge",),
        )
        if self.engine != "auto":
            get_engine(self.engine)

    def options(self) -> dict[str, Any]:
        """Return the fields of `LatentSearch`, without those that a subclass adds."""
        return {field.name: getattr(self, field.name) for field in fields(LatentSearch)}

    def run(
        self,
        generator: nn.Module,
        measured: Tensor,
        measurement: Measurement | None = None,
        start: Tensor | None = None,
        *,
        noise: float = 0.0,
        prior: Prior | None = None,
        **settings: Any,
    ) -> InputResult:
        """Search for the latents whose images fit the measurements best.

        Args:
            generator: Generator of images, as `generator_of` returns it.
            measured: Measured values, one row per image.
            measurement: The operator A; None if `measured` are images.
            start: Latents to start from; by default zeros.
            noise: Standard deviation of the noise in the measurements. The search ends once the
                misfit is at most the expected norm of the noise (the discrepancy principle).
            prior: Prior of the latents, added to the misfit.
            **settings: Further fields of `SearchSettings`, such as `check_tolerance`.
        """
        check_not_negative(noise=noise)

        def penalty(latents: Tensor) -> Tensor:
            ridge = self.ridge * latents.square().sum(dim=1)
            return ridge if prior is None else ridge + prior(latents)

        first = zero_latents(generator, measured)
        if start is not None:
            if start.shape != first.shape:
                raise ValueError(
                    f"start must hold one latent per image, shape {tuple(first.shape)}, got "
                    f"{tuple(start.shape)}"
                )
            first = start.to(first)

        def loss(images: Tensor) -> Tensor:
            """Return ‖ŷ − A·images‖² less its expected value for noise, at least zero."""
            error = misfit(images, measured, measurement)
            if not noise:
                return error
            return (error - noise**2 * entries(measured, measurement)).clamp_min(0)

        engine = self.engine
        if engine == "auto":
            engine = ADAM if isinstance(generator, ExplicitGenerator) else "secant"
        return optimize_input(
            generator,
            loss,
            first,
            penalty=penalty if self.ridge or prior is not None else None,
            engine=engine,
            iterations=self.iterations,
            settings=SearchSettings(
                sweeps=self.sweeps,
                step_size=self.step_size,
                tolerance=self.tolerance,
                **settings,
            ),
        )


def find_latents(
    decoder: nn.Module, images: Tensor, *, start: Tensor | None = None, **search: Any
) -> InputResult:
    """Find the latents x of each image y that minimize ‖y − D(x)‖² + ridge ‖x‖², D the decoder.

    This is the inner problem of JIIO's Eq. 20.

    Args:
        decoder: D, an equilibrium decoder.
        images: Images y, shape (B, C, H, W).
        start: Latents to start from; by default zeros, as in the paper.
        **search: Options of `LatentSearch`; by default 40 iterations of "secant".

    Returns:
        The latents as `x`, with their losses and whether each search converged.

    Examples:
        >>> from equilibria.models.generators.decoders import opteq_decoder
        >>> decoder = opteq_decoder(image_size=8, latent_dim=4, channels=8, width=8)
        >>> eq.inputs.find_latents(decoder, torch.rand(2, 1, 8, 8), iterations=3).x.shape
        torch.Size([2, 4])
    """
    settings = LatentSearch(**{"engine": "secant", "iterations": 40, **search})
    return settings.run(decoder, images, start=start)


def squared_error(outputs: Tensor, images: Tensor) -> Tensor:
    """Return the squared error ‖y − ŷ‖² of each image, summed over its pixels.

    Examples:
        >>> from equilibria.inputs.latents import squared_error
        >>> squared_error(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
        tensor([4.])
    """
    if outputs.shape != images.shape:
        raise ValueError(
            f"the model generates images of shape {tuple(outputs.shape)}, but the given images "
            f"have shape {tuple(images.shape)}: set the model's in_channels and image_size to match"
        )
    return (outputs - images).square().flatten(1).sum(dim=1)


def misfit(images: Tensor, measured: Tensor, measurement: Measurement | None = None) -> Tensor:
    """Return the squared distance ‖measured − A·image‖² of each image, A the measurement operator.

    Examples:
        >>> from equilibria.inputs.latents import misfit
        >>> misfit(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
        tensor([4.])
    """
    if measurement is None:
        return squared_error(images, measured)
    values = measurement(images)
    if values.shape != measured.shape:
        raise ValueError(
            f"the measurement maps images of shape {tuple(images.shape)} to shape "
            f"{tuple(values.shape)}, but the measured values have shape {tuple(measured.shape)}"
        )
    return squared_error(values, measured)


def entries(measured: Tensor, measurement: Measurement | None = None) -> Tensor:
    """Return the number of measured values of each image.

    Examples:
        >>> mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> from equilibria.inputs.latents import entries
        >>> entries(torch.rand(1, 1, 2, 2), eq.operators.Mask(mask[None, None]))
        tensor([2.])
    """
    return about(measurement).counted(measured).flatten(1).sum(dim=1)
