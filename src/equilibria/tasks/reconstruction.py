"""Training a decoder alone: the latent of every image is found by JIIO at every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.context import Context
from equilibria.inputs import (
    InputResult,
    find_latents,
    generator_of,
    list_engines,
    optimal_value,
    squared_error,
)
from equilibria.solvers import Solution
from equilibria.tasks.base import TrainingStep
from equilibria.tasks.image_evaluation import ImageEvaluation
from equilibria.tasks.image_quality import psnr
from equilibria.tasks.solve_statistics import SolveStatistics


@dataclass(frozen=True)
class Reconstruction:
    """minimize Σ min_x ‖y − D(x)‖² + ridge ‖x‖² over the decoder (Eq. 20).

    A training step finds the latents, from zero, and differentiates the optimal value (Eq. 19).
    The ridge is not in the paper: it keeps the latents, which are unbounded otherwise, at one
    scale, and with it the step of the search.

    iterations, evaluation_iterations: steps of x in training and in evaluation (40 and 100 there).
    sweeps, engine, step_size, tolerance: of `optimize_input`.
    check_tolerance: of the equilibria and adjoints that the loss and its gradient are taken at.
    """

    iterations: int = 12
    evaluation_iterations: int = 40
    ridge: float = 0.01
    sweeps: int = 3
    engine: str = "secant"
    step_size: float | None = None
    tolerance: float = 1e-3
    check_tolerance: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("iterations", "evaluation_iterations", "sweeps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("tolerance", "check_tolerance"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.step_size is not None and not self.step_size > 0:
            raise ValueError(f"step_size must be positive, not {self.step_size}")
        if not self.ridge >= 0:
            raise ValueError(f"ridge must not be negative, but is {self.ridge}")
        if self.engine not in list_engines():
            raise ValueError(
                f"engine must be one of {', '.join(list_engines())}, not {self.engine!r}"
            )

    def find(
        self, model: nn.Module, images: Tensor, *, start: Tensor | None = None, training: bool
    ) -> InputResult:
        """The latents of images, with the iterations of training or of evaluation."""
        return find_latents(
            generator_of(model, explicit=False),
            images,
            start=start,
            ridge=self.ridge,
            iterations=self.iterations if training else self.evaluation_iterations,
            sweeps=self.sweeps,
            engine=self.engine,
            step_size=self.step_size,
            tolerance=self.tolerance,
            check_tolerance=self.check_tolerance,
        )

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        decoder = generator_of(model, explicit=False)
        found = self.find(decoder, inputs, training=True)
        loss = optimal_value(found).mean()
        _report(found)
        return TrainingStep(loss=loss, samples=loss.new_tensor(len(inputs), requires_grad=False))

    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> ImageEvaluation:
        """Reconstruct images by JIIO alone, also with the decoder of an autoencoder."""
        decoder = generator_of(model, explicit=False)
        was_training = decoder.training
        device = next(decoder.parameters()).device
        solves = SolveStatistics()
        errors, ratios, norms = [], [], []
        decoder.eval()
        try:
            for images, _ in batches:
                images = images.to(device)
                found = self.find(decoder, images, training=False)
                drawn = found.outputs()
                errors.append(squared_error(drawn, images).cpu())
                ratios.append(psnr(drawn, images).cpu())
                norms.append(torch.linalg.vector_norm(found.x, dim=1).cpu())
                solves.iterations.append(found.iterations)
                solves.residuals.append(found.residual)
                solves.converged.append(found.converged)
        finally:
            decoder.train(was_training)
        latent_norm = float(torch.cat(norms).mean()) if norms else None
        return ImageEvaluation.of(errors, ratios, solves, {"latent_norm": latent_norm})


def _report(found: InputResult) -> None:
    """Leave with the layer what its own forward pass would leave: equilibria and statistics."""
    layer = found.problem.layer
    layer.report_equilibrium(found.problem.stem(found.x), found.state)
    layer.last_solution = Solution(
        state=found.residual.new_empty(0),
        status=found.status,
        residual=found.residual,
        absolute_residual=torch.full_like(found.residual, torch.nan),
        iterations=found.iterations,
        evaluations=found.evaluations,
        sample_evaluations=found.evaluations * len(found.x),
        tolerance=found.tolerance,
        solver=found.engine,
        epsilon=torch.finfo(found.residual.dtype).eps,
        context=Context(),
    )
