"""Feature regularizers R(z) (OptEq Table 2), and the energy term that adds one to the objective.

Two operators of Table 2 are corrected: the gradient step of feature incay expands instead of
shrinking, and that of decorrelation uses I − Proj, a factor 2 and the step size. Decorrelation and
HSIC act on a matrix with one row per channel, averaged over the image, and one column per sample,
so the feature of a sample depends on the others.

**Scale.** L1 and L2, like φ, are sums over all numbers of z: γ is a step size per number,
independent of the size of batch, image and network. The paper defines incay, decorrelation and HSIC
as *one* number for all of z or for the batch, so their gradient in each number of z decreases with
the count of numbers. scale="number" (the default) takes the average once per number of z;
scale="batch" is the definition of the paper. For an untrained `deep-opteq-199k`, 64 images of
CIFAR-10 and γ = 0.01, ‖γ∇R‖/‖z‖ is

                         L1    L2    incay  decorrelation  HSIC
    "number"             2e-2  1e-2  7e-3   8e-3           1e-3
    "batch"                          3e-10  3e-5           2e-6

The paper states neither γ nor the scale. With "number", γ means the same as for L1 and L2 (0.01 to
0.5 there), does not depend on the batch size, and has a visible effect at 0.01.

**Floor.** Decorrelation and HSIC divide each channel by its size over the batch. Without a floor ε
under that size, R is discontinuous where a channel vanishes and ∇R is unbounded nearby. No γ then
makes z − γ∇R(z) non-expansive, as the theory requires: with five samples and γ = 0.1, solves end at
residuals of 1e-2 to 1e-1, also with descent on the objective. With ε, ∇R is Lipschitz with constant
L ≤ 2/ε for decorrelation and about 1/ε for HSIC (1.5/ε for five samples). With the defaults and
γ = 0.1, γL is at most about 2, and 0.6 in the network above. The proximal steps of L1 and L2 need
no floor.
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
    """Base class of regularizers R(z) of the feature z.

    A regularizer is immutable and has no trainable parameters. It enters a fixed-point map through
    `step` (OptEq, Theorem 4): its proximal operator if there is one, otherwise a gradient step z −
    γ∇R(z). Subclasses define `value`, and may define `gradient` and `proximal`.

    Examples:
        >>> l1 = eq.energies.get_regularizer("l1")
        >>> l1.step(torch.tensor([[1.0, 0.05]]), 0.1)  # its proximal operator
        tensor([[0.9000, 0.0000]])
    """

    couples_batch: ClassVar[bool] = False
    """Whether R(z) of one sample depends on the others; inference then depends on the batch."""
    convex: ClassVar[bool] = True
    """Whether R is convex; otherwise an equilibrium may not minimize an objective with R."""

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """Return the regularizer R(z) of each sample, shape (B,), or of a coupled batch."""

    def gradient(self, z: Tensor) -> Tensor:
        """Return the gradient ∇R(z); by default by automatic differentiation of `value`."""
        with full_precision(z):
            return gradients_of(lambda leaves, _: self.value(*leaves), [z], Context())[0]

    def proximal(self, z: Tensor, gamma: float) -> Tensor | None:
        """Return the proximal point argmin_u γR(u) + ½‖u − z‖², or None without a closed form."""
        return None

    def step(self, z: Tensor, gamma: float) -> Tensor:
        """Return T_R(z), one step on the regularizer R with weight γ: the proximal operator of γR.

        Without a closed form of that it is the gradient step z − γ∇R(z).
        """
        proximal = self.proximal(z, gamma)
        return z - gamma * self.gradient(z) if proximal is None else proximal


NORMAL_MEDIAN = 0.9538725524089398
"""Median of |a − b| for independent a, b ~ N(0, 1)."""

MIN_VARIATION_ULPS = 32
"""Channels that vary by less than this, in units in the last place, are treated as constant."""

Bandwidth = Literal["deviation", "median"]


Scale = Literal["number", "batch"]


def _weight(z: Tensor, rows: int, scale: Scale) -> float:
    """Return the factor of a sum over pairs of rows: (numbers of z)/rows², or 1."""
    return z.numel() / max(rows, 1) ** 2 if scale == "number" else 1.0


@dataclass(frozen=True)
class Decorrelation(Regularizer):
    """Decorrelation ½ Σ_{i≠j} cos²(z_i, z_j) of features over the batch (OptEq Eq. 13). Not convex.

    z_i contains feature i of all samples, and cos² = ⟨z_i, z_j⟩²/((‖z_i‖² + Bε)(‖z_j‖² + Bε)).

    Args:
        rows: "channels": a feature is a channel, averaged over the image. "entries": every number
            of z is a feature, as in Eq. 13.
        scale: "number": half the average of cos² over pairs, once per number of z. "batch": the
            sum, once per batch, as in the paper.
        epsilon: ε, the mean square below which a feature loses weight; 0 in the paper. The
            Lipschitz constant of the gradient is at most 2/ε (a weak feature and strong parallel
            ones).

    Examples:
        >>> z = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])  # two identical features
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
    """HSIC, the dependence Σ_{i<j} (B−1)⁻² tr(K_i H K_j H) of channels over a batch of B samples.

    See Section 7.2.1 of OptEq. K_i is the Gaussian kernel matrix exp(−(z_ia − z_ib)²/2s_i²) of
    channel i, averaged over the image, and H is the centering matrix. With K̃ = HKH it equals ½(‖Σ
    K̃_i‖² − Σ‖K̃_i‖²)/(B−1)², which takes O(mB²) operations and memory for m channels instead of
    O(m²B²). Not convex. Constant channels contribute nothing.

    Args:
        bandwidth: s, a number or a rule (the paper does not state one). "deviation": 0.954 standard
            deviations of the channel, which is the median distance between samples of a normal
            distribution. "median": the sample median of the distances. See Notes.
        features: Number D of random frequencies that approximate the kernel in O(mBD) memory plus
            the smaller of two Gram matrices; None uses the exact kernel. One frequency is drawn
            from each of D equally likely strata, which is unbiased and has less variance than
            independent draws. "median" still computes all pairwise distances.
        seed: Seed of the random frequencies.
        scale: "number": the average over all m² pairs, once per number of z. "batch": the sum, once
            per batch, as in the paper.
        epsilon: ε, added to the variance of a channel in the rules for s, so that channels with
            less variance lose weight. With 0, R ignores the scale of channels and ∇R is unbounded.

    Notes:
        Gradients include the dependence of s on z. R hardly changes if a channel well above ε is
        scaled, so shrinking features does not lower it, as it would with a fixed s. The gradient of
        the sample median is discontinuous where another pair becomes the median, and iterations
        oscillate there: use "median" for comparisons, not for equilibria.

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
                    f"bandwidth must be a number, 'deviation' or 'median', got {self.bandwidth!r}"
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
            # A single sample has no pairs: avoid dividing zero by zero.
            return _weight(z, len(unit), self.scale) * value / max(unit.shape[1] - 1, 1) ** 2

    def _standardize(self, rows: Tensor) -> Tensor:
        """Return u_i = (z_i − mean)/s_i."""
        centered = rows - rows.mean(dim=1, keepdim=True)
        if not isinstance(self.bandwidth, str):
            return centered / self.bandwidth
        # Subtracting the mean leaves rounding errors in a constant channel.
        rounding = MIN_VARIATION_ULPS * torch.finfo(rows.dtype).eps * _largest(rows)
        variance = centered.square().sum(dim=1, keepdim=True) / max(rows.shape[1] - 1, 1)
        varies = variance > rounding.square()
        scale = NORMAL_MEDIAN * torch.where(varies, variance, 1.0).sqrt()
        if self.bandwidth == "median" and rows.shape[1] > 1:
            size = rows.shape[1]
            i, j = torch.triu_indices(size, size, offset=1, device=rows.device)
            distances = (rows[:, i] - rows[:, j]).abs()
            median = distances.median(dim=1, keepdim=True).values
            # More than half of the distances may be zero although the channel is not constant.
            scale = torch.where(median > rounding, median, scale)
        floor = NORMAL_MEDIAN * math.sqrt(self.epsilon)
        return centered / torch.hypot(scale, scale.new_tensor(floor))


def _kernel_dependence(unit: Tensor) -> Tensor:
    """Return ½(‖Σ K̃_i‖² − Σ‖K̃_i‖²) for kernels with bandwidth 1."""
    kernels = torch.exp(-0.5 * (unit[:, :, None] - unit[:, None, :]).square())
    centered = kernels - kernels.mean(dim=1, keepdim=True)
    centered = centered - centered.mean(dim=2, keepdim=True)
    return 0.5 * (centered.sum(dim=0).square().sum() - centered.square().sum())


def _fourier_features(unit: Tensor, frequencies: tuple[float, ...]) -> Tensor:
    """Return φ(u), centered over the batch, with ⟨φ(a), φ(b)⟩ ≈ exp(−(a − b)²/2) before centering.

    The inner product is the mean of cos ω(a − b) over the frequencies ω.
    """
    phases = unit[:, :, None] * unit.new_tensor(frequencies)
    features = torch.cat([phases.cos(), phases.sin()], dim=2) / math.sqrt(len(frequencies))
    return features - features.mean(dim=1, keepdim=True)


def _feature_dependence(features: Tensor) -> Tensor:
    """Return ½(‖Σ φ_iφ_iᵀ‖² − Σ‖φ_iφ_iᵀ‖²) for φ of shape (channels, batch, features)."""
    joined = features.transpose(0, 1).flatten(1)
    return 0.5 * (_gram(joined).square().sum() - _gram(features).square().sum())


def _gram(x: Tensor) -> Tensor:
    """Return the smaller one of XXᵀ and XᵀX, which have equal norms."""
    return x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x


def _stratified_normal(count: int, seed: int) -> tuple[float, ...]:
    """Return |ω| for ω ~ N(0, 1), one from each of `count` equally likely intervals.

    The sign of ω does not matter for cos ω(a − b).
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    offsets = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    strata = torch.arange(count, dtype=torch.float64, device="cpu")
    quantiles = (strata + offsets) / count
    frequencies: list[float] = torch.special.ndtri(0.5 + 0.5 * quantiles).tolist()
    return tuple(frequencies)


def _largest(rows: Tensor) -> Tensor:
    """Return max |z| of each row; 0 for empty rows."""
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], 1)
    return rows.detach().abs().amax(dim=1, keepdim=True)


def _channel_rows(z: Tensor) -> Tensor:
    """Return the channels of z as rows, averaged over the image, at least in float32."""
    dtype = torch.promote_types(z.dtype, torch.float32)
    return (z.flatten(2).mean(dim=2, dtype=dtype) if z.dim() > 2 else z.to(dtype)).mT


Step = Literal["auto", "proximal", "gradient"]


@dataclass(frozen=True)
class L2(Regularizer):
    """Feature decay ½‖z‖².

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
    """Sparsity penalty ‖z‖₁; the sparse feature is `proximal(z*, gamma)`, not z* itself.

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
    """Feature incay 2/(‖z‖² + 2ε), which increases the norm of features. Not convex.

    The gradient step is (1 + 4γ/(‖z‖² + 2ε)²) z. The Lipschitz constant of the gradient is at most
    1/ε².

    Args:
        epsilon: ε, positive.
        scale: "number": ‖z‖² is the mean of z² per sample, and R is counted once per number of z.
            "batch": the sum of z², and R is counted once, as in the paper.

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
    """Energy γR(z) of the feature z = Wᵀy, with a regularizer R (OptEq, Theorem 4).

    Args:
        W: Linear operator from features z to states y, or a matrix.
        regularizer: A `Regularizer`, its name, or a mapping with `name` and options.
        gamma: γ, the weight of the regularizer.
        step: "gradient": the term is γR, and R must be smooth. "proximal": the term is γ times the
            Moreau envelope of R with parameter γ, whose gradient step is the proximal operator. For
            L1 the envelope is the Huber function, and the sparse feature is
            `regularizer.proximal(z*, gamma)`. "auto": "proximal" if R has a proximal operator in
            closed form, otherwise "gradient".

    Raises:
        ValueError: If `step` is "proximal" and R has no proximal operator in closed form.

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
                f"{type(regularizer).__name__} has no proximal operator in closed form; "
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
        p = self.regularizer.proximal(z, self.gamma) if self.proximal else None
        if p is None:
            return self.gamma * self.regularizer.value(z)
        # The Moreau envelope is γ M_R^γ(z) = γR(p) + ½‖z − p‖² with p = prox_{γR}(z).
        return self.gamma * self.regularizer.value(p) + 0.5 * sum_per_sample((z - p).square())

    def descent(self, state: State, context: Context) -> State:
        weights = context.weights("W")
        z = self.W.adjoint(one_tensor(state, self), weights)
        p = self.regularizer.proximal(z, self.gamma) if self.proximal else None
        gradient = self.gamma * self.regularizer.gradient(z) if p is None else z - p
        descent: Tensor = -self.W(gradient, weights)
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
