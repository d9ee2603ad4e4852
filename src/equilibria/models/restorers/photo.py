"""Photographs restored by the minimizer of what was measured and of a learned prior.

    y* = argmin (w/2)‖Ay − x‖² + R_σ(y),  w = (σ/ν)²

with ν the noise of x, σ the level that the prior is asked for, and R_σ no more concave than
`concavity` < 1. Where A is the identity that is strongly convex, and there is one y*. Where A hides
something no picture near the answer is better by more than a number that is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.context import Context, Layout, State
from equilibria.energies import DataFidelity, Energy, OpponentPrior, Quadratic, RidgePrior, Sum
from equilibria.energies.ridge import KNOTS
from equilibria.equilibrium import EnergyCell, EquilibriumLayer, Solving, StepBounds
from equilibria.gradients import Implicit
from equilibria.models.base import EquilibriumModel
from equilibria.models.blocks import check_images
from equilibria.operators import AveragePool, Blur, Identity, LinearOperator, Mask
from equilibria.operators.spectral import leading_vector, seeded_vector
from equilibria.registry import (
    check_at_least_one,
    check_not_negative,
    check_positive,
    check_positive_pixels,
)
from equilibria.solvers import Anderson, Solution, Solver
from equilibria.solvers.convergence import Iterate, StoppingCriterion
from equilibria.solvers.linear import conjugate_gradients

MIRRORED = 8
"""Pixels by which a picture goes on beyond its edges, reflected, while it is restored."""
GRAY_LEVEL = 1 / 255
STEEPEST = 1e-2
"""Of the gradient of the objective, its root mean square over the prior's noise level, where a
solve without a proof ends."""

WINDOW = 5
"""Pixels a side over which a first guess of a denoised picture looks."""
POWERS = 10
"""Steps of the power iteration that tells how steep a measurement of one's own is."""


class PhotoCell(EnergyCell):
    """A gradient step on G = data + prior, of length 1/L, m ≤ ∇²G ≤ L.

    It contracts by q = 1 − m/L where m > 0. m is −∞ where it is not known.
    """

    def __init__(
        self, data: DataFidelity, prior: Energy, curvature: float, convexity: float
    ) -> None:
        length = min(1.0, 1 / curvature)
        super().__init__(Sum(data, prior, Quadratic(Identity())), "identity", damping=length)
        self.curvature = curvature
        self.convexity = convexity

    @property
    def limits(self) -> StepBounds[float]:
        return StepBounds(None if self.convexity <= 0 else 1 - self.damping * self.convexity)

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        limit = self.limits.contraction
        return StepBounds(None if limit is None else torch.tensor(limit))


@dataclass(frozen=True)
class ErrorBelow(StoppingCriterion):
    """√(‖T(y) − y*‖²/pixels) ≤ `level`, proven: ‖T(y) − y*‖ ≤ q/(1−q)·‖T(y) − y‖."""

    level: float
    contraction: float

    def reached(self, iterate: Iterate) -> Tensor:
        proven = iterate.residuals.absolute * self.contraction / (1 - self.contraction)
        return proven <= self.level * math.sqrt(iterate.image.shape[1])


@dataclass(frozen=True)
class FlatBelow(StoppingCriterion):
    """The root mean square of ∇G is at most `level`; T(y) − y is `length` times −∇G."""

    level: float
    length: float

    def reached(self, iterate: Iterate) -> Tensor:
        size = math.sqrt(iterate.image.shape[1])
        return iterate.residuals.absolute <= self.length * self.level * size


@dataclass(frozen=True)
class RestoredPhotos:
    """Restored pictures, and what is known of them."""

    images: Tensor
    bound: Tensor | None
    """Of the root mean square distance to the exact minimizer y*; None where A hides something, so
    that the objective is not proven convex."""
    steepness: Tensor
    """‖∇G(y)‖ of each picture, over the square root of its pixels."""
    solution: Solution
    states: Sequence[State]
    """The start, and where the solve came by; only the two ends where no trace was asked for."""
    cell: PhotoCell
    strength: float
    """λ of the prior, as in `PhotoSettings`: the one given, or the one found."""
    noise_term: Tensor
    """The value of the data term of each picture where the misfit is that of the noise."""

    @cached_property
    def objective(self) -> Tensor:
        """G at the `states`, (states, pictures)."""
        objective = self.cell.objective(self.solution.context)
        with torch.no_grad():
            return torch.stack([objective.value(state) for state in self.states])

    def gain_within(self, radius: float = GRAY_LEVEL) -> Tensor | None:
        """How much lower G is, at the most, at any picture z whose root mean square distance to the
        answer y is at most `radius`.

        G(z) ≥ G(y) + ⟨∇G(y), z − y⟩ + (m/2)‖z − y‖², with m ≤ ∇²G everywhere: with −m the concavity
        of the prior, if A is linear. None where A is not.
        """
        check_not_negative(radius=radius)
        convexity = self.cell.convexity
        if math.isinf(convexity):
            return None
        state = self.solution.state
        assert isinstance(state, Tensor)
        far = torch.full_like(self.steepness, radius)
        if convexity > 0:
            far = far.minimum(self.steepness / convexity)
        return state[0].numel() * (self.steepness * far - convexity / 2 * far.square())

    def standard_errors(self, level: float, probes: int = 16, seed: int = 0) -> Tensor:
        """About how far each pixel may be from the truth: σ·√diag(H⁻¹), H = ∇²G at the answer.

        That is the posterior's deviation where G/σ² is its negative logarithm and is as curved
        everywhere as here. The diagonal is an estimate (Hutchinson: the mean of z·H⁻¹z over random
        signs z), and there is none where H is not positive. level: σ, that of the prior.
        """
        check_positive_pixels(level=level)
        check_at_least_one(probes=probes)
        state, length = self.solution.state, self.cell.damping
        assert isinstance(state, Tensor)
        y = state.detach().requires_grad_()
        with torch.enable_grad():
            image = self.cell.step(y, self.solution.context)
        assert isinstance(image, Tensor)

        def curved(rows: Tensor) -> Tensor:
            """H v = (v − Jv)/length of the gradient step, whose Jacobian J is symmetric."""
            (pulled,) = torch.autograd.grad(image, y, rows.reshape(y.shape), retain_graph=True)
            return (rows - pulled.flatten(1)) / length

        chance = torch.Generator().manual_seed(seed)
        total = torch.zeros_like(state)
        for _ in range(probes):
            signs = torch.randint(2, state.shape, generator=chance).to(state) * 2 - 1
            found = conjugate_gradients(
                curved, signs.flatten(1), tolerance=1e-2, max_iterations=200
            )
            total += signs * found.value.reshape(state.shape)
        return level * (total / probes).clamp_min(0).sqrt()


class PhotoRestorer(nn.Module):
    """Restores pictures of any size, gray or colored, with values in [0, 1].

    A measurement of one's own is a linear operator or any differentiable map of images; the picture
    then ends at its edges. Where a map changes the size of pictures `restore` needs a `start`.

    noise: ν, of what was measured, as a fraction of the pixel range. level: σ of the prior, ν where
        nothing but noise was added.
    strength: λ of the prior: the data term weighs (σ/ν)²/λ.
    accuracy: where a solve ends, as a proven root mean square distance to the exact minimizer; by
        default a gray level.
    factor: how much finer the restored picture is.
    box: the step, or the steps, of a quantization that x went through (see `DataFidelity`).

    Examples:
        >>> restorer = eq.models.PhotoRestorer(eq.models.photo_prior(), noise=0.1)
        >>> found = restorer.restore(0.5 + 0.1 * torch.randn(1, 1, 24, 24))
        >>> found.images.shape, found.bound <= 1 / 255  # of the distance to the exact minimizer
        (torch.Size([1, 1, 24, 24]), tensor([True]))
        >>> restorer.restore(torch.rand(1, 1, 24, 24), eq.operators.Blur(1.5)).images.shape
        torch.Size([1, 1, 24, 24])
    """

    takes_measurement = True

    def __init__(
        self,
        prior: OpponentPrior,
        noise: float,
        *,
        level: float | None = None,
        strength: float = 1.0,
        accuracy: float = GRAY_LEVEL,
        max_iterations: int = 200,
        factor: int = 1,
        box: float | Tensor = 0.0,
    ) -> None:
        super().__init__()
        # A measurement that is no picture may have another unit than pixels.
        check_positive(noise=noise, strength=strength)
        check_positive_pixels(level=level, accuracy=accuracy)
        if level is None:
            check_positive_pixels(noise=noise)
        check_at_least_one(max_iterations=max_iterations, factor=factor)
        self.prior = prior
        self.noise = noise
        self.level = noise if level is None else level
        self.strength = strength
        self.accuracy = accuracy
        self.max_iterations = max_iterations
        self.factor = factor
        self.box = box
        self.solutions: list[Solution] = []
        """How the solves of `forward` ended, one a piece."""

    def reach(self, accuracy: float) -> int:
        """Pixels beyond which pieces take no notice of each other: a choice, and no proof. What cut
        edges change all the same is in the bound of the whole picture."""
        return 4 * self.prior.size

    @torch.no_grad()
    def forward(
        self, measured: Tensor, measurement: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The minimizer for a piece of a picture, which ends at its edges."""
        operator = Identity() if measurement is None else measurement
        start = self.guess(measured, operator)
        layer, inputs = self.layer(measured, operator, start)
        solution = layer.solve(inputs, start)
        self.solutions.append(solution.facts())
        assert isinstance(solution.state, Tensor)
        return solution.state

    @torch.no_grad()
    def restore(
        self,
        measured: Tensor,
        measurement: Callable[[Tensor], Tensor] | None = None,
        *,
        start: Tensor | None = None,
        solver: Solver[Any] | None = None,
        trace: bool = False,
    ) -> RestoredPhotos:
        """The minimizer; `start` and `solver` are for those who want to see that there is one."""
        padded, operator = self.mirrored(measured, measurement)
        edge = self.margin(operator) * self.factor
        begin = self.guess(padded, operator) if start is None else _reflected(start, edge)
        return self.finish(padded, operator, begin, solver=solver, trace=trace)

    def finish(
        self,
        padded: Tensor,
        operator: LinearOperator | Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        solver: Solver[Any] | None = None,
        trace: bool = False,
    ) -> RestoredPhotos:
        """The minimizer for what `mirrored` gives, from a start on; without the mirrored edge."""
        layer, inputs = self.layer(padded, operator, start)
        solution = layer.solve(inputs, start, solver=solver, trace="states" if trace else False)
        cell = layer.cell
        assert isinstance(cell, PhotoCell)
        state = solution.state
        assert isinstance(state, Tensor)
        states: list[State] = [start, state]
        if solution.trace is not None and solution.trace.states is not None:
            states = [start, *solution.trace.states]
        edge = self.margin(operator) * self.factor
        height, width = (size - edge for size in state.shape[2:])
        inside = state[..., edge:height, edge:width]
        image = cell.step(state, solution.context)
        assert isinstance(image, Tensor)
        steepness = ((image - state) / cell.damping).square().flatten(1).mean(dim=1).sqrt()
        # ‖∇G(y)‖/m ≥ ‖y − y*‖.
        bound = steepness / cell.convexity if cell.convexity > 0 else None
        known = getattr(operator, "known", padded.new_ones(())).to(padded).expand_as(padded)
        # (w/2)·ν² per measured value, with w = (σ/ν)²/λ.
        noise_term = 0.5 * self.level**2 / self.strength * known.flatten(1).sum(dim=1)
        return RestoredPhotos(
            inside,
            bound,
            steepness,
            solution,
            states,
            cell,
            strength=self.strength,
            noise_term=noise_term,
        )

    def layer(
        self,
        measured: Tensor,
        measurement: LinearOperator | Callable[[Tensor], Tensor],
        start: Tensor,
    ) -> tuple[EquilibriumLayer, tuple[Tensor, Tensor]]:
        """The equilibrium layer whose output is the minimizer, and its inputs."""
        context, layout = Context(), (tuple(start.shape[1:]),)
        spread = self.noise * math.sqrt(self.strength)
        data = DataFidelity(measurement, spread, box=self.box, image_shape=layout[0])
        weight = (self.level / spread) ** 2
        prior = self.prior.bounds(context, layout)
        assert prior.curvature is not None
        assert prior.concavity is not None
        bend, top = float(prior.concavity), float(prior.curvature)
        if isinstance(measurement, LinearOperator):
            norm = float(measurement.to(measured).norm_bound(layout[0]))
            known = weight if isinstance(measurement, Identity) and not data.has_box else 0.0
        else:
            norm, known = _norm_near(measurement, start), -math.inf
        cell = PhotoCell(data, self.prior, top + weight * norm**2, known - bend)
        contraction = cell.limits.contraction
        # No sample is dropped: a mask may have one for each.
        options: dict[str, Any] = {"max_iterations": self.max_iterations, "drop_share": 1.0}
        if contraction is None:
            stop: StoppingCriterion = FlatBelow(STEEPEST * self.level, cell.damping)
            solver = Anderson(memory=8, stop=stop, **options)
        else:
            # Where there is one minimizer, a bolder search finds it in fewer steps.
            stop = ErrorBelow(self.accuracy, contraction)
            solver = Anderson(memory=10, damping=3.0, stop=stop, **options)
        layer = EquilibriumLayer(cell, solver=solver, gradient=Implicit(tolerance=0.04))
        return layer, (measured, measured.new_full((len(measured),), self.level))

    def guess(
        self, measured: Tensor, measurement: LinearOperator | Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Where a solve starts: at the first picture, but of a small one at a smooth enlargement,
        not one of blocks, and of noise alone with less noise in it.

        That is, with mean μ and variance v of the pixels around each, μ + (v − n)₊/max(v, n)·
        (x − μ), n a little more than the variance of the noise (Lee, 1980).
        """
        if isinstance(measurement, AveragePool) and measurement.scale > 1:
            return F.interpolate(measured, scale_factor=measurement.scale, mode="bicubic")
        if not isinstance(measurement, Identity):
            return first_picture(measured, measurement)
        wider = _reflected(measured, WINDOW // 2)
        mean = F.avg_pool2d(wider, WINDOW, stride=1)
        variance = F.avg_pool2d(wider.square(), WINDOW, stride=1) - mean.square()
        floor = 1.5 * self.noise**2
        share = (variance - floor).clamp_min(0) / variance.clamp_min(floor)
        return mean + share * (measured - mean)

    def mirrored(
        self, measured: Tensor, measurement: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, LinearOperator | Callable[[Tensor], Tensor]]:
        """What was measured, going on beyond its edges; not with a measurement of one's own, whose
        size may be fixed."""
        check_images(measured, measured.shape[1] if measured.dim() == 4 else 1)
        if not bool(measured.isfinite().all()):
            raise ValueError("the picture has values that are NaN or infinite")
        operator = Identity() if measurement is None else measurement
        margin = self.margin(operator)
        if margin:
            check_positive_pixels(noise=self.noise)
        if isinstance(operator, Blur):
            operator.output_shape(tuple(measured.shape[1:]))
        if min(measured.shape[2:]) <= margin:
            height, width = measured.shape[2:]
            raise ValueError(
                f"a picture of {width}×{height} pixels is too small to be restored: it needs more "
                f"than {margin} a side"
            )
        if isinstance(operator, Mask):
            if not bool(operator.known.any()):
                raise ValueError("the mask hides every pixel: nothing is left to restore from")
            known = operator.known.to(measured).expand(-1, -1, *measured.shape[2:])
            operator = Mask(_reflected(known, margin))
        return _reflected(measured, margin), operator

    def margin(self, measurement: object) -> int:
        """Pixels of what was measured that are mirrored at every edge."""
        is_known = isinstance(measurement, Identity | Mask | Blur | AveragePool)
        return math.ceil(MIRRORED / self.factor) if is_known else 0


def _reflected(images: Tensor, margin: int) -> Tensor:
    return F.pad(images, (margin, margin, margin, margin), mode="reflect")


def _norm_near(measurement: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """About the norm of the derivative of a map at a picture, by a power iteration: no bound."""
    with torch.enable_grad():
        y = start[:1].detach().requires_grad_()
        image = measurement(y)

    def pulled(rows: Tensor) -> Tensor:
        return torch.autograd.grad(image, y, rows, retain_graph=True)[0]

    def pushed(direction: Tensor) -> Tensor:
        """Jv, as the derivative of ⟨Jᵀu, v⟩ in u."""
        with torch.enable_grad():
            rows = torch.zeros_like(image).requires_grad_()
            (back,) = torch.autograd.grad(image, y, rows, create_graph=True)
            return torch.autograd.grad(back, rows, direction)[0]

    first = seeded_vector(tuple(y.shape), y)
    return 1.1 * float(pushed(leading_vector(pushed, pulled, first, POWERS)).norm())


def first_picture(measured: Tensor, measurement: object) -> Tensor:
    """A picture to start from: what was measured, with holes filled by the mean around them."""
    if isinstance(measurement, Mask):
        known = measurement.known.to(measured).expand_as(measured)
        filled, seen, width = measured, known, 1
        while bool((seen == 0).any()) and width < max(measured.shape[2:]):
            width = 2 * width + 1
            kernel = {"kernel_size": width, "stride": 1, "padding": width // 2}
            total = F.avg_pool2d(measured * known, **kernel)  # type: ignore[arg-type]
            share = F.avg_pool2d(known, **kernel)  # type: ignore[arg-type]
            new = (seen == 0) & (share > 0)
            filled = torch.where(new, total / share.clamp_min(1e-12), filled)
            seen = torch.where(new, 1.0, seen)
        return filled
    picture = getattr(measurement, "picture", None)
    return measured if picture is None else picture(measured)


def photo_prior() -> OpponentPrior:
    """The trained prior that comes with the package.

    Examples:
        >>> prior = eq.models.photo_prior()
        >>> eq.models.PhotoRestorer(prior, noise=0.1).restore(torch.rand(1, 3, 16, 16)).images.shape
        torch.Size([1, 3, 16, 16])
    """
    with resources.as_file(resources.files("equilibria") / "weights") as folder:
        return load_prior(folder / "photo-prior.safetensors")


def save_prior(prior: OpponentPrior, file: Path) -> None:
    """Write a prior with what it is made of; `load_prior` reads it."""
    part = prior.luminance
    options = {
        "channels": len(part.log_scales),
        "kernel_size": part.size,
        "concavity": part.concavity,
        "steepness": part.steepness,
        "knots": part.knots,
    }
    save_file(prior.state_dict(), file, {"options": json.dumps(options)})


def load_prior(file: Path) -> OpponentPrior:
    with safe_open(file, framework="pt") as weights:
        options = json.loads(weights.metadata()["options"])
        prior = photo_denoiser(**options).prior
        prior.load_state_dict({name: weights.get_tensor(name) for name in weights.keys()})  # noqa: SIM118
    return prior.requires_grad_(False).eval()


class NoiseStem(nn.Module):
    """The picture, and the noise of each: that which is given, or one for all."""

    def __init__(self, in_channels: int, noise: float) -> None:
        super().__init__()
        check_positive_pixels(noise=noise)
        self.in_channels = in_channels
        self.noise = noise

    def forward(
        self, images: Tensor, noise: Tensor | Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        check_images(images, self.in_channels)
        level = noise if isinstance(noise, Tensor) else images.new_tensor(self.noise)
        return images, level.to(images).expand(len(images))


class PhotoDenoiser(EquilibriumModel):
    """argmin ½‖y − x‖² + R_σ(y), from pictures x and their noise σ: what the prior is trained in.

    A solve starts at x itself.
    """

    def __init__(self, prior: OpponentPrior, stem: NoiseStem, solving: Solving | None) -> None:
        steepest = prior.limits.curvature
        assert steepest is not None
        cell = PhotoCell(
            DataFidelity(),
            prior,
            1 + steepest,
            1 - max(prior.luminance.concavity, prior.colors.concavity),
        )
        super().__init__(stem, EquilibriumLayer(cell, solving=solving), nn.Identity())

    @property
    def prior(self) -> OpponentPrior:
        cell = self.layer.cell
        assert isinstance(cell, PhotoCell)
        energy = cell.energy
        assert isinstance(energy, Sum)
        prior = energy["opponent_prior"]
        assert isinstance(prior, OpponentPrior)
        return prior

    def features(self, *inputs: Any, start: State | None = None) -> Tensor:
        picture, noise = self.stem(*inputs)
        begin = picture.detach() if start is None else start
        feature: Tensor = self.layer((picture, noise), begin)
        return feature


def photo_denoiser(
    *,
    in_channels: int = 3,
    channels: int = 48,
    kernel_size: int = 9,
    concavity: float = 0.9,
    steepness: float = 30.0,
    knots: Sequence[float] = KNOTS,
    noise: float = 25 / 255,
    solving: Solving | None = None,
) -> PhotoDenoiser:
    """A denoiser whose prior then undoes any damage.

    channels, kernel_size: of the filters of the luminance; those of the colors are half as many,
        and two pixels smaller. concavity, steepness, knots: see `RidgePrior`. noise: of pictures
        that are given without one.

    Examples:
        >>> model = eq.models.photo_denoiser(in_channels=1, channels=4, kernel_size=5)
        >>> model(torch.rand(1, 1, 16, 16)).shape
        torch.Size([1, 1, 16, 16])
    """
    options: dict[str, Any] = {"concavity": concavity, "steepness": steepness, "knots": knots}
    luminance = RidgePrior((channels,), (kernel_size,), **options)
    colors = RidgePrior((max(1, channels // 2),), (max(2, kernel_size - 2),), **options)
    prior = OpponentPrior(luminance, colors)
    return PhotoDenoiser(prior, NoiseStem(in_channels, noise), solving)
