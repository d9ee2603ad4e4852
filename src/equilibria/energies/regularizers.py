"""Feature regularizers R(z) (OptEq Table 2), and the energy term that puts one into the objective.

The operators of Table 2 are corrected: the gradient step of feature incay must expand, not shrink,
and that of decorrelation has I − Proj, a factor 2 and the step size. Decorrelation and HSIC see a
matrix with a row for each channel, averaged over the image, and a column for each sample: the
feature of a sample depends on the others.

What γ weighs. L1 and L2 are sums over all numbers of z, as φ is: γ is a step for each number,
whatever the size of batch, image and network. Incay, decorrelation and HSIC are printed as *one*
number for all of z or for the batch, whose gradient in each number of z falls with their count.
With scale="number" (the default) they are averages, taken once for each number of z; with
scale="batch" they are counted as printed. For `deep-opteq-199k` as initialized, 64 images of
CIFAR-10 and γ = 0.01, ‖γ∇R‖/‖z‖ is

                         L1    L2    incay  decorrelation  HSIC
    "number"             2e-2  1e-2  7e-3   8e-3           1e-3
    "batch", as printed              3e-10  3e-5           2e-6

The paper states neither γ nor the scale; that of "number" is the one in which γ is what it is in
L1 and L2 (0.01 to 0.5 there), acts alike at every batch size, and is seen at 0.01.

Decorrelation and HSIC divide each channel by its size over the batch. Without a floor ε under that
size they jump where a channel vanishes and ∇R grows without bound near there: no γ makes z − γ∇R(z)
non-expansive, as the theory asks, and with five samples and γ = 0.1 solves end at residuals of 1e-2
to 1e-1, by descent on the objective too. With ε, ∇R is Lipschitz, with L at most 2/ε for
decorrelation and about 1/ε for HSIC (1.5/ε for five samples): by default γL is about 2 at γ = 0.1
at the most, and 0.6 in the network above. The proximal steps of L1 and L2 need no floor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, sum_per_sample
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.facts import Facts
from equilibria.energies.local_gradients import gradients_of
from equilibria.energies.terms import one_tensor
from equilibria.operators import as_operator
from equilibria.operators.compose import OperatorLike
from equilibria.operators.spectral import full_precision
from equilibria.registry import (
    Registry,
    check_at_least_one,
    check_choice,
    check_not_negative,
    check_positive,
)


class Regularizer(ABC):
    """A prior R(z) on the feature z.

    A regularizer is a value: frozen, without parameters. `step` is how it enters a fixed-point map
    (Theorem 4): the proximal operator where there is one, else a gradient step z − γ∇R(z).

    Examples:
        >>> l1 = eq.energies.get_regularizer("l1")
        >>> l1.step(torch.tensor([[1.0, 0.05]]), 0.1)  # its proximal operator
        tensor([[0.9000, 0.0000]])
    """

    couples_batch: ClassVar[bool] = False
    """Whether R relates the samples of a batch to each other: inference then depends on it."""
    convex: ClassVar[bool] = True
    """Without convexity an equilibrium is only stationary for the objective with R."""

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """R(z) of each sample; one number where R couples the batch."""

    def gradient(self, z: Tensor) -> Tensor:
        """∇R(z), by automatic differentiation of `value` where nothing shorter is known."""
        with full_precision(z):
            return gradients_of(lambda leaves, _: self.value(*leaves), [z], Context())[0]

    def proximal(self, z: Tensor, gamma: float) -> Tensor | None:
        """argmin_u γR(u) + ½‖u − z‖², or None where it has no closed form."""
        return None

    def step(self, z: Tensor, gamma: float) -> Tensor:
        """T_R(z): the proximal operator, or a gradient step."""
        proximal = self.proximal(z, gamma)
        return z - gamma * self.gradient(z) if proximal is None else proximal


NORMAL_MEDIAN = 0.9538725524089398
"""The median of |a − b| for independent a, b ~ N(0, 1)."""

CONSTANT = 32
"""A channel that varies by fewer units in the last place than this is taken as constant."""

Bandwidth = Literal["deviation", "median"]


Scale = Literal["number", "batch"]


def _weight(z: Tensor, rows: int, scale: Scale) -> float:
    """What a sum over pairs of rows is multiplied by: its average, for each number of z."""
    return z.numel() / max(rows, 1) ** 2 if scale == "number" else 1.0


@dataclass(frozen=True)
class Decorrelation(Regularizer):
    """½ Σ_{i≠j} cos²(z_i, z_j) (Eq. 13): rows that are orthogonal over the batch. Not convex.

    z_i holds feature i of all samples, and cos² = ⟨z_i, z_j⟩²/((‖z_i‖² + Bε)(‖z_j‖² + Bε)).

    rows: "channels": a feature is a channel, averaged over the image. "entries": every number of z
        is one, Z ∈ R^{m×B} as Eq. 13 prints it with m the size of z.
    scale: "number": ½ of the average of cos² over pairs, for each number of z. "batch": the sum, as
        printed, once for the batch.
    epsilon: the mean square below which a row counts less and less; 0 is as printed. L is 2/ε at
        most (a weak row beside strong ones that are all parallel).

    Examples:
        >>> z = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])  # two features that are the same
        >>> eq.energies.Decorrelation(epsilon=0.0).value(z)
        tensor(1.0000)
    """

    couples_batch: ClassVar[bool] = True
    convex: ClassVar[bool] = False
    rows: Literal["channels", "entries"] = "channels"
    scale: Scale = "number"
    epsilon: float = 0.1

    def __post_init__(self) -> None:
        check_choice(("channels", "entries"), rows=self.rows)
        check_choice(get_args(Scale), scale=self.scale)
        check_not_negative(epsilon=self.epsilon)

    def value(self, z: Tensor) -> Tensor:
        with full_precision(z):
            rows = _channel_rows(z if self.rows == "channels" else z.flatten(1))
            count, samples = rows.shape
            sizes = rows.square().sum(dim=1, keepdim=True) + samples * self.epsilon
            unit = rows / torch.where(sizes > 0, sizes, 1.0).sqrt()
            diagonal = unit.square().sum(dim=1)
            pairs = _gram(unit).square().sum() - diagonal.square().sum()
            return 0.5 * _weight(z, count, self.scale) * pairs


@dataclass(frozen=True)
class HSIC(Regularizer):
    """Σ_{i<j} (B−1)⁻² tr(K_i H K_j H) (Section 7.2.1): channels independent over the batch.

    K_i is the Gaussian kernel matrix exp(−(z_ia − z_ib)²/2s_i²) of channel i, averaged over the
    image; H centers. With K̃ = HKH it is ½(‖Σ K̃_i‖² − Σ‖K̃_i‖²)/(B−1)², in O(mB²) operations and
    memory for m channels rather than O(m²B²). Not convex.

    bandwidth: s, a number, or how it follows from the channel (the paper does not say):
        "deviation": 0.954 standard deviations, the median distance between samples where the
            channel is normal. The median heuristic, made smooth.
        "median": the median distance between the samples at hand.
        Both are differentiated: R hardly changes when a channel well above ε is scaled, so that it
        cannot be lowered by shrinking features, as it can with a fixed s or one that is held
        constant in the gradient (which is then that of no function). But the gradient of the
        sample median jumps whenever another pair of samples becomes the middle one, and an
        iteration chatters there instead of converging: "median" is for comparison, not for
        equilibria.
    features: with D given, the kernel is approximated by D random frequencies (cosine and sine of
        each), in O(mBD) memory beside the smaller of two Gram matrices. Frequencies are drawn from
        `seed`, one from each of D equally likely strata, which keeps the kernel unbiased and in one
        dimension leaves far less noise than independent ones. "median" still looks at all pairs.
    scale: "number": the average over all m² pairs, for each number of z. "batch": the sum, as
        printed, once for the batch.
    epsilon: what is added to a channel's variance for its bandwidth, if that is not a number: one
        that varies less counts less and less. 0 leaves R blind to the scale of a channel, and ∇R
        without a bound.

    A constant channel depends on nothing and contributes nothing.

    Examples:
        >>> z = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        >>> eq.energies.HSIC().value(z).shape
        torch.Size([])
    """

    couples_batch: ClassVar[bool] = True
    convex: ClassVar[bool] = False
    bandwidth: float | Bandwidth = "deviation"
    features: int | None = None
    seed: int = 0
    scale: Scale = "number"
    epsilon: float = 0.05
    frequencies: tuple[float, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if isinstance(self.bandwidth, str):
            if self.bandwidth not in ("deviation", "median"):
                raise ValueError(
                    f"bandwidth must be a number, 'deviation' or 'median', not {self.bandwidth!r}"
                )
        else:
            check_positive(bandwidth=self.bandwidth)
        check_at_least_one(features=self.features)
        check_choice(get_args(Scale), scale=self.scale)
        check_not_negative(epsilon=self.epsilon)
        if self.features is not None:
            object.__setattr__(self, "frequencies", _stratified_normal(self.features, self.seed))

    def value(self, z: Tensor) -> Tensor:
        with full_precision(z):
            unit = self._standardize(_channel_rows(z))
            if self.features is None:
                value = _kernel_dependence(unit)
            else:
                value = _feature_dependence(_fourier_features(unit, self.frequencies))
            # One sample has no pairs: its value is zero without a division by zero.
            return _weight(z, len(unit), self.scale) * value / max(unit.shape[1] - 1, 1) ** 2

    def _standardize(self, rows: Tensor) -> Tensor:
        """u_i = (z_i − mean)/s_i."""
        centered = rows - rows.mean(dim=1, keepdim=True)
        if not isinstance(self.bandwidth, str):
            return centered / self.bandwidth
        # Differences of equal numbers are not zero once a mean has been subtracted.
        rounding = CONSTANT * torch.finfo(rows.dtype).eps * _largest(rows)
        variance = centered.square().sum(dim=1, keepdim=True) / max(rows.shape[1] - 1, 1)
        varies = variance > rounding.square()
        scale = NORMAL_MEDIAN * torch.where(varies, variance, 1.0).sqrt()
        if self.bandwidth == "median" and rows.shape[1] > 1:
            size = rows.shape[1]
            one, other = torch.triu_indices(size, size, offset=1, device=rows.device)
            distances = (rows[:, one] - rows[:, other]).abs()
            median = distances.median(dim=1, keepdim=True).values
            # More than half of the distances may vanish in a channel that is not constant.
            scale = torch.where(median > rounding, median, scale)
        floor = NORMAL_MEDIAN * math.sqrt(self.epsilon)
        return centered / torch.hypot(scale, scale.new_tensor(floor))


def _kernel_dependence(unit: Tensor) -> Tensor:
    """½(‖Σ K̃_i‖² − Σ‖K̃_i‖²) for kernels of bandwidth 1."""
    kernels = torch.exp(-0.5 * (unit[:, :, None] - unit[:, None, :]).square())
    centered = kernels - kernels.mean(dim=1, keepdim=True)
    centered = centered - centered.mean(dim=2, keepdim=True)
    return 0.5 * (centered.sum(dim=0).square().sum() - centered.square().sum())


def _fourier_features(unit: Tensor, frequencies: tuple[float, ...]) -> Tensor:
    """φ(u), centered over the batch; ⟨φ(a), φ(b)⟩ = mean of cos ω(a − b) ≈ exp(−(a − b)²/2)."""
    phases = unit[:, :, None] * unit.new_tensor(frequencies)
    features = torch.cat([phases.cos(), phases.sin()], dim=2) / math.sqrt(len(frequencies))
    return features - features.mean(dim=1, keepdim=True)


def _feature_dependence(features: Tensor) -> Tensor:
    """½(‖Σ φ_iφ_iᵀ‖² − Σ‖φ_iφ_iᵀ‖²), φ a (channels, batch, features) tensor."""
    joined = features.transpose(0, 1).flatten(1)
    return 0.5 * (_gram(joined).square().sum() - _gram(features).square().sum())


def _gram(x: Tensor) -> Tensor:
    """XXᵀ or XᵀX, the smaller one: their norms are the same."""
    return x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x


def _stratified_normal(count: int, seed: int) -> tuple[float, ...]:
    """|ω| for ω ~ N(0, 1), one from each of `count` equally likely intervals; cosines are even."""
    generator = torch.Generator("cpu").manual_seed(seed)
    offsets = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    strata = torch.arange(count, dtype=torch.float64, device="cpu")
    quantiles = (strata + offsets) / count
    frequencies: list[float] = torch.special.ndtri(0.5 + 0.5 * quantiles).tolist()
    return tuple(frequencies)


def _largest(rows: Tensor) -> Tensor:
    """Largest |z| of each row, which may be empty."""
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], 1)
    return rows.detach().abs().amax(dim=1, keepdim=True)


def _channel_rows(z: Tensor) -> Tensor:
    """The channels of z as rows, averaged over the image, in float32 at least."""
    dtype = torch.promote_types(z.dtype, torch.float32)
    return (z.flatten(2).mean(dim=2, dtype=dtype) if z.dim() > 2 else z.to(dtype)).mT


Step = Literal["auto", "proximal", "gradient"]


@dataclass(frozen=True)
class L2(Regularizer):
    """½‖z‖²: feature decay.

    Examples:
        >>> eq.energies.L2().value(torch.tensor([[3.0, 4.0]]))
        tensor([12.5000])
    """

    def value(self, z: Tensor) -> Tensor:
        return 0.5 * sum_per_sample(z.square())

    def gradient(self, z: Tensor) -> Tensor:
        return z

    def proximal(self, z: Tensor, gamma: float) -> Tensor:
        return z / (1 + gamma)


@dataclass(frozen=True)
class L1(Regularizer):
    """‖z‖₁: sparsity. The feature that is sparse is `proximal(z*)`, not z* itself.

    Examples:
        >>> eq.energies.L1().proximal(torch.tensor([[-1.0, 0.2]]), 0.5)
        tensor([[-0.5000,  0.0000]])
    """

    def value(self, z: Tensor) -> Tensor:
        return sum_per_sample(z.abs())

    def gradient(self, z: Tensor) -> Tensor:
        return z.sign()

    def proximal(self, z: Tensor, gamma: float) -> Tensor:
        return z.sign() * (z.abs() - gamma).clamp_min(0)


@dataclass(frozen=True)
class Incay(Regularizer):
    """2/(‖z‖² + 2ε): feature incay, which lengthens features. Not convex.

    scale: "number": ‖z‖² is the mean of z² over a sample, and R is taken once for each of its
        numbers; "batch": both are sums, as printed. The step is (1 + 4γ/(‖z‖² + 2ε)²) z either way.
        L is 1/ε² at most.

    Examples:
        >>> eq.energies.Incay().value(torch.ones(1, 4))
        tensor([2.6667])
    """

    convex: ClassVar[bool] = False
    epsilon: float = 1.0
    scale: Scale = "number"

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)
        check_choice(get_args(Scale), scale=self.scale)

    def value(self, z: Tensor) -> Tensor:
        return 2 * self._count(z) / self._size(z)

    def gradient(self, z: Tensor) -> Tensor:
        return (-4 / self._size(z).square()).view(-1, *[1] * (z.dim() - 1)) * z

    def _size(self, z: Tensor) -> Tensor:
        return sum_per_sample(z.square()) / self._count(z) + 2 * self.epsilon

    def _count(self, z: Tensor) -> int:
        return math.prod(z.shape[1:]) if self.scale == "number" else 1


class FeatureRegularizer(Energy):
    """γR(z) at the feature z = Wᵀy (Theorem 4): the equilibrium minimizes φ + γR.

    step="gradient": the term is γR itself. step="proximal" (R need not be smooth): it is γ times
    the Moreau envelope of R with parameter γ, whose gradient step is the proximal operator; for L1
    that is Huber's function, and the sparse feature is `regularizer.proximal(z*, gamma)`. "auto"
    takes the proximal operator where R has one.

    Examples:
        >>> W = eq.Dense(4, 4, norm="bound", zeta=0.5)
        >>> energy = eq.Input(torch.eye(4)) + eq.Quadratic(W) + eq.FeatureRegularizer(W, "l2", 0.1)
        >>> eq.EquilibriumLayer(energy)(torch.ones(1, 4)).shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        W: OperatorLike,
        regularizer: str | Mapping[str, Any] | Regularizer,
        gamma: float,
        step: Step = "auto",
    ) -> None:
        super().__init__()
        regularizer = get_regularizer(regularizer)
        check_not_negative(gamma=gamma)
        check_choice(get_args(Step), step=step)
        has_proximal = regularizer.proximal(torch.zeros(1, 1), gamma) is not None
        if step == "proximal" and not has_proximal:
            raise ValueError(
                f"{type(regularizer).__name__} has no proximal operator in closed form: "
                "use step='gradient'"
            )
        self.W = as_operator(W)
        self.regularizer = regularizer
        self.gamma = gamma
        self.proximal = has_proximal and step != "gradient"
        self.facts = Facts(couples_batch=regularizer.couples_batch)

    @property
    def limits(self) -> Bounds[float]:
        # The Moreau envelope of a convex regularizer is convex too.
        return Bounds(concavity=0.0) if self.regularizer.convex else Bounds()

    @property
    def formula(self) -> str:
        return f"{self.gamma:g}·{type(self.regularizer).__name__}(Wᵀy)"

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        return {"W": self.W.weights(self.W.input_shape(layout[0]))}

    def value(self, state: State, context: Context) -> Tensor:
        z = self.W.adjoint(one_tensor(state, self), context.weights("W"))
        near = self.regularizer.proximal(z, self.gamma) if self.proximal else None
        if near is None:
            return self.gamma * self.regularizer.value(z)
        # γ M_R^γ(z) = γR(p) + ½‖z − p‖², p = prox_{γR}(z).
        return self.gamma * self.regularizer.value(near) + 0.5 * sum_per_sample((z - near).square())

    def descent(self, state: State, context: Context) -> State:
        weights = context.weights("W")
        z = self.W.adjoint(one_tensor(state, self), weights)
        near = self.regularizer.proximal(z, self.gamma) if self.proximal else None
        change = self.gamma * self.regularizer.gradient(z) if near is None else z - near
        descent: Tensor = -self.W(change, weights)
        return descent

    def extra_repr(self) -> str:
        return f"{self.regularizer}, gamma={self.gamma}"


_regularizers: Registry[Regularizer] = Registry(
    "regularizer",
    Regularizer,
    {"l1": L1, "l2": L2, "incay": Incay, "decorrelation": Decorrelation, "hsic": HSIC},
)
register_regularizer = _regularizers.register
list_regularizers = _regularizers.names
get_regularizer = _regularizers.resolve
