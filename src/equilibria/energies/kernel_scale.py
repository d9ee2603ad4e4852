"""How γ of the Gaussian kernel is set: γ = 0.2/M, M a typical energy of a patch (GEQ 4.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from equilibria.operators.norm_control import is_wrapped
from equilibria.registry import check_choice, check_positive, check_share

SHARE = 0.2
"""γM in GEQ Section 4.1: a patch of energy M gets the weight β = e^{−0.2} = 0.82."""

MOMENTUM = 0.1
"""The share of a training batch in the running statistic."""

FLOOR = 0.01
"""M per sample is at least this share of the median, or one patch near zero would silence all."""


class KernelScale(nn.Module, ABC):
    """γ of a Gaussian kernel, from the energies ‖r_p W_h‖² of all patches, shape (batch, N)."""

    couples_batch: bool = False
    follows_state: bool = False
    """Whether γ changes with the state, at every step."""
    follows_input: bool = True
    """Whether γ of a sample depends on its input."""

    @abstractmethod
    def at_start(self, energies: Tensor) -> Tensor:
        """γ for a solve, from the energies at y = 0: one number, or shape (batch, 1)."""

    def at_state(self, gamma: Tensor, energies: Tensor) -> Tensor:
        """γ for one step: the one of the solve, unless it follows the state."""
        return gamma


class FixedScale(KernelScale):
    """A constant γ."""

    follows_input = False

    def __init__(self, gamma: float) -> None:
        super().__init__()
        check_positive(gamma=gamma)
        self.gamma = float(gamma)

    def at_start(self, energies: Tensor) -> Tensor:
        return energies.new_tensor(self.gamma)

    def extra_repr(self) -> str:
        return f"{self.gamma}"


class RunningScale(KernelScale):
    """γ = 0.2/M, M a running mean over training batches of the mean energy of a patch at y = 0.

    M is kept in a buffer and is a constant of every forward pass, so that gradients are exact,
    samples do not influence each other, and in evaluation nothing changes. It is updated by
    forward passes that train (training mode, gradients enabled), after they have used it. A
    statistic that has seen nothing takes the first batch that comes, in training or evaluation.
    Samples that are not finite do not count.

    A forward pass that is recomputed at once (activation checkpointing) is recognised by its
    energy: it gets the M it had before, and counts once.
    """

    follows_input = False
    patch_energy: Tensor
    last_used: Tensor
    last_seen: Tensor

    def __init__(self, momentum: float = MOMENTUM) -> None:
        super().__init__()
        check_share(momentum=momentum)
        self.momentum = momentum
        self.pooled: Callable[[Tensor], Tensor] | None = None
        """Sums a tensor over the processes that share a training batch; None: there is but one."""
        # Zero stands for "nothing seen yet".
        self.register_buffer("patch_energy", torch.zeros(()))
        self.register_buffer("last_used", torch.zeros(()), persistent=False)
        self.register_buffer("last_seen", torch.zeros(()), persistent=False)

    def at_start(self, energies: Tensor) -> Tensor:
        trains = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            means = energies.detach().mean(dim=1)
            finite = means.isfinite()
            sums = torch.stack((means.where(finite, 0).sum(), finite.sum().to(means.dtype)))
            if trains and self.pooled is not None and not is_wrapped(sums):
                sums = self.pooled(sums)
            seen = (sums[0] / sums[1].clamp(min=1)).to(self.patch_energy.dtype)
            M = self._used(seen, trains)
            return SHARE / torch.where(M > 0, M, torch.ones_like(M))

    def _used(self, seen: Tensor, trains: bool) -> Tensor:
        """M for this forward pass; the statistic moves on."""
        known = torch.where(self.patch_energy > 0, self.patch_energy, seen)
        if is_wrapped(seen):  # what a torch.func transform computes must not outlive it
            return known
        if not trains:
            self.patch_energy.copy_(known)
            return known
        again = seen == self.last_seen
        used = torch.where(again, self.last_used, known)
        counts = ~again & (seen > 0)
        self.patch_energy.copy_(torch.where(counts, known.lerp(seen, self.momentum), known))
        self.last_used.copy_(used)
        self.last_seen.copy_(seen)
        return used

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}"


class PerSampleScale(KernelScale):
    """γ = 0.2/M, M of each sample its least energy of a patch at y = 0, in the graph.

    M is at least 0.01 of the median (of the mean, where most patches are zero). Gradients are
    exact, but the output's Lipschitz constant in the input is not bounded, so nothing can be
    certified about perturbed inputs.
    """

    def at_start(self, energies: Tensor) -> Tensor:
        median = energies.median(dim=1, keepdim=True).values
        typical = torch.where(median > 0, median, energies.mean(dim=1, keepdim=True))
        M = torch.maximum(energies.amin(dim=1, keepdim=True), FLOOR * typical)
        return SHARE / torch.where(M > 0, M, torch.ones_like(M))


class StepScale(KernelScale):
    """γ = 0.2/M, M the least energy of all patches in the batch at the current state, as printed.

    Detached at every step: the equilibrium is stationary for the objective with its own γ frozen,
    but minimizes none, the map has no known bound, gradients leave out how γ depends on everything,
    and the samples of a batch are coupled.
    The largest weight is e^{−0.2} always, and one patch near zero silences all others.
    """

    couples_batch = True
    follows_state = True

    def at_start(self, energies: Tensor) -> Tensor:
        energies = energies.detach()
        if energies.numel() == 0:
            return energies.new_tensor(SHARE)
        finite = torch.where(energies.isfinite(), energies, torch.inf)
        M = finite.amin().clamp(min=torch.finfo(energies.dtype).tiny)
        return SHARE / torch.where(M.isfinite(), M, torch.ones_like(M))

    def at_state(self, gamma: Tensor, energies: Tensor) -> Tensor:
        return self.at_start(energies)


def kernel_scale(gamma: str | float | KernelScale) -> KernelScale:
    """The policy that "running", "per-sample", "paper" or a number stands for."""
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
