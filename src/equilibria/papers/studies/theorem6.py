"""Experiment on OptEq's Theorem 6: gradient descent trains a wide Deep OptEq at a linear rate.

    equilibria reproduce theorem6 [widths=[16,64]] [steps=300] [seed=0]

Xie et al., "Optimization Induced Equilibrium Networks", TPAMI 2022, Section 6.2: for wide layers
ℓ(θ_t) ≤ ℓ(θ_0)(1 − ηQ₀)^t and ‖θ_t − θ*‖ ≤ Q₃(1 − ηQ₀)^{t/2}. The constants are in a supplement.
Here Q₀ is λ_min of the tangent kernel K = JJᵀ at the start, J = ∂prediction/∂θ. For ℓ = ½‖r‖² it is
the constant of ‖∇ℓ‖² ≥ 2Q₀ℓ at the start, and throughout in the limit of infinite width.

The assumptions of the theorem, and how the experiment meets them:

- The singular values of W_1, …, W_{L+1} are bounded away from zero: Gaussian rectangular matrices;
  the smallest singular value is measured.
- Fixed points exist and are bounded: ‖W_l‖ is about 0.7 at the start and not constrained. The
  theorem states that the norms stay bounded; the largest norm of a run is measured.
- σ is smooth, strongly monotone and 1-Lipschitz: `SmoothLeakyReLU`.
- The widths n_l are at least a polynomial of the number N of samples: approximated by growing n.
- η < min(1/Q₀, 1/Q₁) with Q₁ unknown: η = ½/λ_max(K).

The theorem is about K unrolled iterations; here the equilibrium is solved and differentiated
implicitly. Inputs are features (no g). There is no weight decay, with which the loss cannot vanish.

With the default settings the bound holds at every width. At 256 and 1024 all predictions of the
theorem hold: the loss never increases, no norm exceeds 0.76, the weights move by less than 0.5 %,
and the fitted rate is close to the (1 − ηQ₀)² of a linear model, twice the proven exponent. At 16
and 64 the loss vanishes although the assumptions fail: a norm exceeds 1, and the loss increases in
about 50 of 300 steps. With seeds 1 to 3 the bound holds at 256 and fails once at 16 and once at 64.
At 8 and 12 (seed 0) the norms grow until no equilibrium exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.activations import Activation
from equilibria.models import DeepOptEqCell, UnitLayer
from equilibria.papers.studies.study import Study, StudyOutcome, Work
from equilibria.report.style import LIGHT, count_along, drawing, dress_axes, figure_png, series

INITIAL_NORM = 0.7
LOSS_FLOOR = 1e-14
"""Losses below this share of the first one are rounding errors of the solves and are ignored."""


@dataclass(frozen=True)
class SmoothLeakyReLU(Activation):
    """Smooth leaky ReLU σ(a) = pa + q(√(a² + 1) − 1), p = (1+s)/2, q = (1−s)/2.

    Its slopes are strictly between s and 1.
    """

    name: ClassVar[str] = "smooth_leaky_relu"
    slope: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.slope < 1:
            raise ValueError(f"slope must be in (0, 1), got {self.slope}")

    @property
    def p(self) -> float:
        return (1 + self.slope) / 2

    @property
    def q(self) -> float:
        return (1 - self.slope) / 2

    @property
    def lipschitz(self) -> float:
        return 1.0

    def __call__(self, a: Tensor) -> Tensor:
        return self.p * a + self.q * ((a.square() + 1).sqrt() - 1)

    def derivative(self, a: Tensor) -> Tensor:
        return self.p + self.q * a / (a.square() + 1).sqrt()

    def primitive(self, a: Tensor) -> Tensor:
        root = a * (a.square() + 1).sqrt() + a.asinh()
        return self.p * a.square() / 2 + self.q * (root / 2 - a)

    def inverse(self, y: Tensor) -> Tensor:
        """Return the inverse σ⁻¹(y) of the activation, a root of a quadratic equation."""
        w = y + self.q
        return (self.p * w - self.q * (w.square() + self.slope).sqrt()) / self.slope

    def penalty(self, y: Tensor) -> Tensor:
        a = self.inverse(y)
        return a * y - self.primitive(a) - y.square() / 2

    def minimal_subgradient(self, y: Tensor, gradient: Tensor) -> Tensor:
        return gradient + self.inverse(y) - y


@dataclass(frozen=True)
class WidthSetting:
    """Settings of one training: sizes of the network and its data; `width` is that of each layer.

    It is the number of rows of every matrix W_l.
    """

    width: int
    depth: int = 2
    feature: int = 24
    samples: int = 16
    inputs: int = 24
    alpha: float = 0.8
    steps: int = 300
    seed: int = 0
    record_every: int = 5


@dataclass(frozen=True)
class WidthRun:
    """Measurements of one training of a network of some width, for OptEq's Theorem 6.

    In the following, ℓ is the loss, θ_t the weights after t steps and θ_T the final ones, η the
    learning rate, and Q₀ the smallest eigenvalue of the tangent kernel at the start.
    """

    setting: WidthSetting
    parameters: int
    learning_rate: float
    q0: float
    condition: float
    """λ_max/λ_min of the tangent kernel at the start."""
    losses: list[float]
    gradient_ratio: float
    """Smallest ‖∇ℓ‖²/2ℓ over the steps, ℓ the loss, divided by Q₀."""
    smallest_singular_value: float
    largest_norm: float
    movement: float
    """Relative change ‖θ_T − θ_0‖/‖θ_0‖ of the weights."""
    distances: list[float]
    """Distance ‖θ_t − θ_T‖ to the final weights, every `record_every` steps."""
    diverged: bool

    @property
    def bound(self) -> float:
        """Factor 1 − ηQ₀ per step by which Theorem 6 bounds the loss, with learning rate η.

        Q₀ is the smallest eigenvalue of the tangent kernel at the start.
        """
        return 1 - self.learning_rate * self.q0

    @property
    def rises(self) -> int:
        """Number of steps in which the loss increased, above the floor of rounding errors."""
        floor = LOSS_FLOOR * self.losses[0]
        pairs = zip(self.losses, self.losses[1:], strict=False)
        return sum(after > before > floor for before, after in pairs)

    @property
    def holds(self) -> bool:
        """Whether the loss is within Theorem 6's bound at every step, above rounding errors.

        The bound is ℓ_t ≤ ℓ_0(1 − ηQ₀)^t after t steps.
        """
        if self.diverged:
            return False
        first = self.losses[0]
        bounds = [max(first * self.bound**t, LOSS_FLOOR * first) for t in range(len(self.losses))]
        return all(loss <= b * (1 + 1e-9) for loss, b in zip(self.losses, bounds, strict=True))

    @property
    def rate(self) -> float:
        """Factor of the loss per step, fitted to the second half of the steps."""
        return fitted_rate(self.losses, LOSS_FLOOR * self.losses[0])

    @property
    def distance_rate(self) -> float:
        """Factor per step of the distance ‖θ_t − θ_T‖ to the final weights.

        It is fitted to the first two thirds, while θ_T is close to the limit compared with θ_t.
        """
        early = self.distances[: max(2, 2 * len(self.distances) // 3)]
        return math.pow(fitted_rate(early, 0.0), 1 / self.setting.record_every)


def fitted_rate(values: Sequence[float], floor: float) -> float:
    """Estimate the factor per step of values that fall geometrically.

    It is exp of the slope of a least-squares line through log(values), over their second half.

    Args:
        values: The values, one per step.
        floor: Values at or below it are left out before the second half is taken, as are values
            that are not finite.

    Returns:
        The factor; NaN if fewer than two values are left in the second half.
    """
    usable = [value for value in values if math.isfinite(value) and value > floor]
    tail = usable[len(usable) // 2 :]
    if len(tail) < 2:
        return math.nan
    times = torch.arange(len(tail), dtype=torch.float64)
    logs = torch.tensor(tail, dtype=torch.float64).log()
    times = times - times.mean()
    return float(((times * logs).sum() / times.square().sum()).exp())


class Network(nn.Module):
    """Network of the study: predictions W_{L+1} z*, z* the equilibrium of a Deep OptEq.

    The norms of the weights are not limited (OptEq, Eq. 5).
    """

    def __init__(self, setting: WidthSetting, generator: torch.Generator) -> None:
        super().__init__()

        def gaussian(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        n, m = setting.width, setting.feature
        self.units = []
        for _ in range(setting.depth):
            W, U = gaussian(n, m), gaussian(n, setting.inputs)
            with torch.no_grad():
                W.mul_(INITIAL_NORM / (math.sqrt(n) + math.sqrt(m)))
            bias = nn.Parameter(torch.zeros(n, dtype=torch.float64))
            activation = SmoothLeakyReLU()
            self.units.append(
                UnitLayer(W, U, bias=bias, activation=activation, alpha=setting.alpha)
            )
        self.layer = eq.EquilibriumLayer(
            cell=DeepOptEqCell(self.units),
            solver=eq.Anderson(tolerance=1e-11, max_iterations=300),
            gradient=eq.Implicit(tolerance=1e-11),
            strict=True,
        )
        self.readout = gaussian(1, m)
        with torch.no_grad():
            self.readout.div_(math.sqrt(m))

    def forward(self, x: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the predictions and the equilibrium z*."""
        z = self.layer(x, start)
        return z @ self.readout.mT, z

    @torch.no_grad()
    def singular_values(self) -> tuple[float, float]:
        """Return the smallest and the largest singular value of the weight matrices.

        The smallest is over the matrices W_l that act on the state, one per unit layer, and the
        readout W_{L+1}; the largest is over the W_l only. The input matrices do not count.
        """
        spectra = [torch.linalg.svdvals(unit.W.weights()[0]) for unit in self.units]
        smallest = min(float(s[-1]) for s in [*spectra, torch.linalg.svdvals(self.readout)])
        return smallest, max(float(s[0]) for s in spectra)

    def flat(self) -> Tensor:
        """Return all parameters as one vector."""
        return torch.cat([p.detach().flatten() for p in self.parameters()])


def tangent_spectrum(network: Network, x: Tensor) -> Tensor:
    """Compute the eigenvalues of the tangent kernel K = JJᵀ, ascending.

    J is the Jacobian of the predictions in the parameters.
    """
    predictions, _ = network(x)
    parameters = list(network.parameters())
    rows = []
    for prediction in predictions.flatten():
        gradients = torch.autograd.grad(prediction, parameters, retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    J = torch.stack(rows)
    eigenvalues: Tensor = torch.linalg.eigvalsh(J @ J.mT)
    return eigenvalues


def train(setting: WidthSetting) -> WidthRun:
    """Train a network by full-batch gradient descent on ½‖prediction − target‖² in float64."""
    generator = torch.Generator().manual_seed(setting.seed)
    shape = (setting.samples, setting.inputs)
    x = F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=1)
    target = torch.randn(setting.samples, 1, generator=generator, dtype=torch.float64)
    network = Network(setting, generator)
    eigenvalues = tangent_spectrum(network, x)
    q0, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    learning_rate = 0.5 / largest
    parameters = list(network.parameters())
    smallest, norm = network.singular_values()
    losses: list[float] = []
    ratios: list[float] = []
    path: list[Tensor] = []
    start: Tensor | None = None
    diverged = False
    for step in range(setting.steps):
        try:
            predictions, z = network(x, start)
            loss = 0.5 * (predictions - target).square().sum()
            gradients = torch.autograd.grad(loss, parameters)
        except eq.ConvergenceError:
            diverged = True  # the norms have grown until no equilibrium exists
            break
        start = z.detach()
        losses.append(loss.item())
        if losses[-1] > LOSS_FLOOR * losses[0]:
            square = sum(float(g.square().sum()) for g in gradients)
            ratios.append(square / (2 * losses[-1]))
        if step % setting.record_every == 0:
            path.append(network.flat())
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=learning_rate)
        norm = max(norm, network.singular_values()[1])
    end = network.flat()
    return WidthRun(
        setting=setting,
        parameters=end.numel(),
        learning_rate=learning_rate,
        q0=q0,
        condition=largest / q0,
        losses=losses,
        gradient_ratio=min(ratios) / q0,
        smallest_singular_value=smallest,
        largest_norm=norm,
        movement=float((end - path[0]).norm() / path[0].norm()),
        distances=[float((point - end).norm()) for point in path],
        diverged=diverged,
    )


def table(runs: Sequence[WidthRun]) -> str:
    """Return a text table with one line per width."""
    lines = [
        "  width   weights  s_min  max‖W‖  moved   λ-cond  PL÷Q0  "
        "loss: first → last      rises     rate  (1−ηQ0)²  1−ηQ0   bound   "
        "‖θ−θ*‖ rate  (1−ηQ0)^½"
    ]
    for run in runs:
        verdict = "lost" if run.diverged else ("holds" if run.holds else "broken")
        lines.append(
            f"{run.setting.width:7d} {run.parameters:9d} {run.smallest_singular_value:6.3f} "
            f"{run.largest_norm:7.3f} {run.movement:6.4f} {run.condition:8.1f} "
            f"{run.gradient_ratio:6.2f}  {run.losses[0]:9.2e} → {run.losses[-1]:9.2e}  "
            f"{run.rises:5d} {run.rate:8.5f}  {run.bound**2:8.5f}  {run.bound:7.5f} {verdict:6s}  "
            f"{run.distance_rate:11.5f}  {math.sqrt(run.bound):9.5f}"
        )
    return "\n".join(lines)


@drawing()
def figure(runs: Sequence[WidthRun]) -> Any:
    """Plot loss and distance to the final weights, with the rates of OptEq's Theorem 6 dashed.

    Args:
        runs: One finished training per network width.
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.4, 4.2), layout="constrained")
    losses, distances = drawn.subplots(1, 2)
    for index, run in enumerate(runs):
        color = series(index)["color"]
        times = range(len(run.losses))
        relative = [loss / run.losses[0] for loss in run.losses]
        losses.plot(times, relative, color=color, label=f"width {run.setting.width}")
        bounds = [run.bound**t for t in times]
        losses.plot(times, bounds, color=color, linestyle="--", linewidth=1)
        interval = run.setting.record_every
        recorded = [interval * k for k in range(len(run.distances))]
        relative = [distance / run.distances[0] for distance in run.distances]
        distances.plot(recorded, relative, color=color)
        limits = [run.bound ** (t / 2) for t in recorded]
        distances.plot(recorded, limits, color=color, linestyle="--", linewidth=1)
    losses.plot([], [], color=LIGHT.ink, linestyle="--", linewidth=1, label="Theorem 6")
    losses.set(yscale="log", ylim=(1e-16, 3))
    losses.set_ylabel(r"$\ell(\theta_t)\,/\,\ell(\theta_0)$")
    losses.set_title(r"training loss, and $(1-\eta Q_0)^t$")
    losses.legend(frameon=False, loc="lower left")
    distances.set(yscale="log", ylim=(1e-8, 3))
    distances.set_ylabel(r"$\|\theta_t-\theta_T\|\,/\,\|\theta_0-\theta_T\|$")
    distances.set_title(r"distance to the last weights, and $(1-\eta Q_0)^{t/2}$")
    for axes in (losses, distances):
        count_along(axes, "step t")
        dress_axes(axes)
    return drawn


@dataclass(frozen=True)
class Theorem6Settings:
    """Settings of the study, with one training per width.

    Args:
        widths: Numbers of rows of the W_l.
        steps: Number of steps of gradient descent.
        seed: Seed of the problem and the initial weights.
    """

    widths: tuple[int, ...] = (16, 64, 256, 1024)
    steps: int = 300
    seed: int = 0


def carry_out(settings: Theorem6Settings, work: Work) -> StudyOutcome:
    """Train a network of each width and compare its loss with the bound of the theorem."""
    runs = []
    for place, width in enumerate(settings.widths):
        work.on_progress(place, len(settings.widths), f"width {width}")
        runs.append(train(WidthSetting(width, steps=settings.steps, seed=settings.seed)))
    text = table(runs)
    return StudyOutcome(
        data={"runs": [{**asdict(run), "holds": run.holds} for run in runs]},
        text="```\n" + text + "\n```",
        about="rate: fitted factor of the loss per step. bound: whether the loss stays below "
        "ℓ₀(1 − ηQ₀)^t at every step.",
        picture=figure_png(figure(runs)),
    )


STUDY = Study(
    "theorem6",
    "OptEq, Theorem 6",
    "Gradient descent trains a wide Deep OptEq at a linear rate",
    Theorem6Settings,
    carry_out,
)
