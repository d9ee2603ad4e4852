"""Predictions of a classifier for encoded images, with certificates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from equilibria.analysis.certified import nearest_rival
from equilibria.certificates import (
    Certificate,
    Certifier,
    NoCertificateError,
    SolvedBatch,
    certifier,
)
from equilibria.data import read_pixels
from equilibria.equilibrium import EquilibriumLayer
from equilibria.images import images_of
from equilibria.inference import Prediction, predict
from equilibria.inference.prediction import answers_of
from equilibria.serving.compiling import CompiledSolves

TOP = 5
"""Number of most likely classes in an answer."""


@dataclass(frozen=True)
class Answer:
    """Prediction for one image, with its certificate. Unknown numbers are None.

    Attributes:
        label: Predicted class; None if the logits are NaN or infinite.
        confidence: Softmax probability of that class.
        top: Softmax probabilities of the most likely classes.
        iterations: Number of iterations of the solve.
        converged: Whether the solve reached the tolerance.
        certified: Whether the exact equilibrium provably has the predicted class.
        radius: L2 distance (pixels in [0, 1]) within which the class provably does not change.
        margin: Difference between the logit of the predicted class and that of the runner-up.
        margin_error: Bound on the error of `margin` relative to the exact equilibrium.
        error: Bound on the distance between the state and the exact equilibrium.
        reason: Why the class or the radius is not certified; empty if both are.

    Examples:
        >>> answerer = eq.serving.Answerer(eq.load("digits-certified"))
        >>> (answer,) = answerer([eq.data.load_digits().test.images[0]])
        >>> answer.label, answer.certified, answer.radius > 0
        ('0', True, True)
    """

    label: str | None
    confidence: float | None
    top: dict[str, float]
    iterations: int | None
    converged: bool | None
    certified: bool
    radius: float | None
    margin: float | None
    margin_error: float | None
    error: float | None
    reason: str


class Answerer:
    """Classifier that returns an `Answer` per image.

    Args:
        model: Classifier with a known image size and class names, such as from `eq.load`.
        certificates: Whether to compute certificates, if the model supports them.

    Raises:
        ValueError: If the image size or the class names of the model are unknown.

    Examples:
        >>> answerer = eq.serving.Answerer(eq.load("digits-opteq"))
        >>> answerer([eq.data.load_digits().test.images[0]])[0].label
        '0'
    """

    def __init__(self, model: nn.Module, *, certificates: bool = True) -> None:
        images = images_of(model)
        if images is None:
            raise ValueError(
                "the image size of the model is unknown; load a trained model with eq.load"
            )
        if not images.names_classes:
            raise ValueError("the model has no class names; only classifiers can be served")
        self.model = model.eval()
        self.images = images
        self.no_certificates = "" if certificates else "certificates are switched off"
        # The prediction of an unrolled model is its last iterate, not the result of a solve.
        self.is_unrolled = any(
            isinstance(part, EquilibriumLayer) and part.gradient.from_zero
            for part in model.modules()
        )
        self.certify: Certifier | None = None
        if certificates:
            try:
                self.certify = certifier(model, images.image_shape)
            except NoCertificateError as error:
                self.no_certificates = str(error)
        self.compiled_solves = CompiledSolves(model)
        self.batches: Counter[str] = Counter()
        """Number of batches that were solved by each backend."""

    def compile(self, largest_batch: int) -> None:
        """Compile the solves of batches for which this is faster than eager solves.

        This takes seconds per batch size. Other threads may call the object meanwhile; its answers
        are then computed eagerly. A `CompileWarning` gives the reason if no graph can be made.

        Args:
            largest_batch: Largest number of images per batch.
        """
        if self.is_unrolled:  # the iterations of an unrolled model are part of its prediction
            return
        like = next(self.model.parameters())
        generator = torch.Generator().manual_seed(0)
        image = torch.rand(1, *self.images.image_shape, generator=generator).to(like.device)
        solve = self._predict if self.certify is None else self.certify.solve
        self.compiled_solves.prepare(solve, image, largest_batch)

    def decode(self, content: bytes) -> Tensor:
        """Decode an image file to a tensor in the model's image format.

        Args:
            content: Content of the file.

        Raises:
            DataFileError: If the content is not a readable image.
        """
        return read_pixels(content, self.images.frame, is_gray=self.images.is_gray)

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        """Return one answer per image, with one solve per layer for the whole batch.

        Answers do not depend on the rest of the batch.
        """
        batch = torch.stack(list(images)).to(next(self.model.parameters()).device)
        backend = self.compiled_solves.backend(len(batch))
        self.batches[backend] += 1
        with self.compiled_solves.block(backend):
            if self.certify is None:
                return [self._answer(prediction, None, 0) for prediction in self._predict(batch)]
            solved = self.certify.solve(batch)
        certificate = self.certify.judge(batch, solved)
        predictions = self._predict(batch, None if self.is_unrolled else solved)
        return [
            self._answer(prediction, certificate, index)
            for index, prediction in enumerate(predictions)
        ]

    def _predict(self, batch: Tensor, solved: SolvedBatch | None = None) -> list[Prediction]:
        """Return predictions, reusing the solved batch if there is one."""
        if solved is None:
            return cast("list[Prediction]", predict(self.model, batch, top=TOP))
        logits = solved.logits.float().cpu()
        predictions = answers_of(self.model, logits, solved.solution, [""] * len(batch), TOP)
        return cast("list[Prediction]", predictions)

    def _answer(
        self, prediction: Prediction, certificate: Certificate | None, index: int
    ) -> Answer:
        numbers: dict[str, float | None] = {}
        certified, reason = False, self.no_certificates
        if certificate is not None:
            certified = bool(certificate.certified_class[index])
            reason = certificate.reasons[index]
            margin, margin_error = nearest_rival(certificate, index) or (math.nan, math.nan)
            numbers = {
                "radius": float(certificate.radius[index]),
                "error": float(certificate.error[index]),
                "margin": margin,
                "margin_error": margin_error,
            }
        return Answer(
            label=prediction.label,
            confidence=finite(prediction.confidence),
            top=prediction.top,
            iterations=prediction.iterations,
            converged=prediction.converged,
            certified=certified,
            reason=reason,
            **{
                name: finite(numbers.get(name))
                for name in ("radius", "margin", "margin_error", "error")
            },
        )


def finite(number: float | None) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON does not support."""
    return number if number is not None and math.isfinite(number) else None
