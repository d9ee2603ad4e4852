"""What a trained model offers as a generator G: latents → images."""

from __future__ import annotations

from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.equilibrium import Cell, EquilibriumLayer
from equilibria.solvers import Picard, Solution


class ExplicitGenerator(nn.Module):
    """A generator without an equilibrium, in the form that input optimization takes.

    The decoder is the stem; T(z; x) = stem(x) does not depend on z, so that one evaluation is the
    equilibrium, and μ is the gradient of the loss.
    """

    def __init__(self, model: nn.Module, latent_dim: int) -> None:
        super().__init__()
        self.model = model
        self.latent_dim = latent_dim
        self.layer = EquilibriumLayer(cell=_Given(), solver=Picard(), gradient="one_step")
        self.head = nn.Identity()

    def stem(self, latents: Tensor) -> Tensor:
        decode = getattr(self.model, "decode", self.model)
        images: Tensor = decode(latents)
        return images

    def forward(self, latents: Tensor) -> Tensor:
        return self.stem(latents)

    @property
    def last_solution(self) -> Solution | None:
        """None: nothing had to be solved."""
        return None


class _Given(Cell):
    """T(z; x) = x."""

    def inject(self, x: Tensor) -> Context:
        return Context(sample={"image": x})

    def initial_state(self, x: Tensor, context: Context) -> State:
        return x.detach().new_zeros(x.shape)

    def step(self, state: State, context: Context) -> State:
        image: Tensor = context["image"]
        return image


def is_generator(model: nn.Module) -> bool:
    """Whether a model itself maps latents, by an equilibrium, to images."""
    parts = (callable(getattr(model, name, None)) for name in ("stem", "head"))
    layered = isinstance(getattr(model, "layer", None), EquilibriumLayer)
    return layered and all(parts) and _latent_dim(model) is not None


def generator_of(model: nn.Module) -> nn.Module:
    """The generator in a model: itself, its `decoder`, or its `decode` method.

    A model without an equilibrium must say its `latent_dim`.
    """
    if is_generator(model):
        return model
    decoder = getattr(model, "decoder", None)
    if isinstance(decoder, nn.Module) and is_generator(decoder):
        return decoder
    size = _latent_dim(model)
    if size is not None:
        return ExplicitGenerator(model, size)
    raise TypeError(
        f"{type(model).__name__} is no generator of images: it needs a `latent_dim`, and maps "
        "latents of that size to images by itself, by its `decoder` or by its `decode`"
    )


def latent_dim(generator: nn.Module) -> int:
    size = _latent_dim(generator)
    if size is None:
        raise TypeError(f"{type(generator).__name__} does not say its `latent_dim`")
    return size


def _latent_dim(model: nn.Module) -> int | None:
    size = getattr(model, "latent_dim", None)
    return size if isinstance(size, int) else None
