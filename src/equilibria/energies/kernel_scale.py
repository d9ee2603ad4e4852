"""Choice of γ for the Gaussian kernel: γ = 0.2/M, M a typical patch energy (GEQ 4.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from equilibria.operators.norm_control import is_wrapped
from equilibria.registry import check_choice, check_positive, check_share

TYPICAL_EXPONENT = 0.2
"""γM in GEQ Section 4.1: a patch of energy M gets the weight β = e^{−0.2} = 0.82."""

MOMENTUM = 0.1
"""Weight of a training batch in the running mean."""

MIN_FRACTION_OF_MEDIAN = 0.01
"""Lower limit of M per sample, as a fraction of the median patch energy.

Without it, one patch near zero would make the weights of all other patches vanish.
"""


class KernelScale(nn.Module, ABC):
    """Rule that chooses the scale γ of a Gaussian kernel from the energies of its patches.

    The energy of a patch p is ‖r_p W_h‖² with r = Ux + b − Wy (see `GaussianKernel`); energies have
    shape (B, patches).
    """

    couples_batch: bool = False
    follows_state: bool = False
    """Whether the scale γ is recomputed from the state at every step."""
    follows_input: bool = True
    """Whether the scale γ of a sample depends on its input."""

    @abstractmethod
    def at_start(self, energies: Tensor) -> Tensor:
        """Return the kernel scale γ for a solve, a scalar or shape (B, 1).

        Args:
            energies: Energies of the patches at the state y = 0.
        """

    def at_state(self, gamma: Tensor, energies: Tensor) -> Tensor:
        """Return the kernel scale γ for one step; by default that of the solve.

        Args:
            gamma: Scale for the solve.
            energies: Energies of the patches at the current state.
        """
        return gamma


class FixedScale(KernelScale):
    """A constant scale γ of a Gaussian kernel."""

    follows_input = False

    def __init__(self, gamma: float) -> None:
        super().__init__()
        check_positive(gamma=gamma)
        self.gamma = float(gamma)

    def at_start(self, energies: Tensor) -> Tensor:
        return energies.new_tensor(self.gamma)

    def extra_repr(self) -> str:
        return f"{self.gamma}"


class HeldScale(KernelScale):
    """γ = 0.2/M with a constant M that is a tensor, for graphs with fixed weights."""

    follows_input = False
    patch_energy: Tensor

    def __init__(self, patch_energy: Tensor) -> None:
        super().__init__()
        self.register_buffer("patch_energy", patch_energy.clone())

    def at_start(self, energies: Tensor) -> Tensor:
        return TYPICAL_EXPONENT / self.patch_energy


class RunningScale(KernelScale):
    """Kernel scale γ = 0.2/M, M the running mean of patch energies at y = 0 over training batches.

    M is a buffer and constant within a forward pass. Gradients are therefore exact, samples do not
    affect each other, and M is fixed in evaluation. Forward passes in training mode with gradients
    enabled update M after using it. The first batch initializes M, also in evaluation mode.
    Non-finite samples are ignored.

    A forward pass that is recomputed immediately (activation checkpointing) is recognized by its
    energy: it gets the same M as before and is counted once.
    """

    follows_input = False
    patch_energy: Tensor
    last_used: Tensor
    last_batch: Tensor

    def __init__(self, momentum: float = MOMENTUM) -> None:
        super().__init__()
        check_share(momentum=momentum)
        self.momentum = momentum
        self.pooled: Callable[[Tensor], Tensor] | None = None
        """Sums a tensor over the processes that share a training batch; None for one process."""
        # Zero means "no batch yet".
        self.register_buffer("patch_energy", torch.zeros(()))
        self.register_buffer("last_used", torch.zeros(()), persistent=False)
        self.register_buffer("last_batch", torch.zeros(()), persistent=False)

    def at_start(self, energies: Tensor) -> Tensor:
        is_update = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            means = energies.detach().mean(dim=1)
            finite = means.isfinite()
            sums = torch.stack((means.where(finite, 0).sum(), finite.sum().to(means.dtype)))
            if is_update and self.pooled is not None and not is_wrapped(sums):
                sums = self.pooled(sums)
            batch_mean = (sums[0] / sums[1].clamp(min=1)).to(self.patch_energy.dtype)
            return _gamma(self._update(batch_mean, is_update))

    def _update(self, batch_mean: Tensor, is_update: bool) -> Tensor:
        """Return M for this forward pass and update the running mean."""
        current = torch.where(self.patch_energy > 0, self.patch_energy, batch_mean)
        if is_wrapped(batch_mean):  # tensors of a torch.func transform must not outlive it
            return current
        if not is_update:
            self.patch_energy.copy_(current)
            return current
        is_recomputed = batch_mean == self.last_batch
        used = torch.where(is_recomputed, self.last_used, current)
        counts = ~is_recomputed & (batch_mean > 0)
        updated = current.lerp(batch_mean, self.momentum)
        self.patch_energy.copy_(torch.where(counts, updated, current))
        self.last_used.copy_(used)
        self.last_batch.copy_(batch_mean)
        return used

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}"


class PerSampleScale(KernelScale):
    """Kernel scale γ = 0.2/M, M the smallest patch energy of each sample at y = 0, in the graph.

    M is at least 0.01 of the median (of the mean if most patches are zero). Gradients are exact.
    The output has no Lipschitz bound in the input, so no robustness radius can be certified.
    """

    def at_start(self, energies: Tensor) -> Tensor:
        median = energies.median(dim=1, keepdim=True).values
        typical = torch.where(median > 0, median, energies.mean(dim=1, keepdim=True))
        return _gamma(
            torch.maximum(energies.amin(dim=1, keepdim=True), MIN_FRACTION_OF_MEDIAN * typical)
        )


class StepScale(KernelScale):
    """Kernel scale γ = 0.2/M of the GEQ paper, M the batch's smallest patch energy at the state.

    γ is detached at every step. The equilibrium is stationary for the objective with γ frozen at
    its value there, but minimizes no objective. The map has no known bound, gradients ignore the
    dependence of γ on state and parameters, and the samples of a batch are coupled. The largest
    weight is always e^{−0.2}, and one patch near zero makes all other weights vanish.
    """

    couples_batch = True
    follows_state = True

    def at_start(self, energies: Tensor) -> Tensor:
        energies = energies.detach()
        if energies.numel() == 0:
            return energies.new_tensor(TYPICAL_EXPONENT)
        finite = torch.where(energies.isfinite(), energies, torch.inf)
        M = finite.amin().clamp(min=torch.finfo(energies.dtype).tiny)
        return TYPICAL_EXPONENT / torch.where(M.isfinite(), M, torch.ones_like(M))

    def at_state(self, gamma: Tensor, energies: Tensor) -> Tensor:
        return self.at_start(energies)


def _gamma(M: Tensor) -> Tensor:
    """Return 0.2/M, with M = 1 if it is zero."""
    return TYPICAL_EXPONENT / torch.where(M > 0, M, torch.ones_like(M))


def kernel_scale(gamma: str | float | KernelScale) -> KernelScale:
    """Return the rule for the kernel scale: "running", "per-sample", "paper", or a number."""
    if isinstance(gamma, KernelScale):
        return gamma
    if isinstance(gamma, int | float):
        return FixedScale(gamma)
    policies: dict[str, type[KernelScale]] = {
        "running": RunningScale,
        "per-sample": PerSampleScale,
        "paper": StepScale,
    }
    check_choice(("a number", *policies), gamma=gamma)
    return policies[gamma]()
