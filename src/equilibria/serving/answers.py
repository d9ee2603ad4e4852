"""What a model says of pictures that came as bytes, with what is certain of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

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
from equilibria.report.labels import nearest_rival
from equilibria.training import Prediction, predict
from equilibria.training.api import answers_of

TOP = 5
"""Classes in an answer, the most likely ones."""


@dataclass(frozen=True)
class Answer:
    """What a model says of one picture; numbers that are not known are None.

    Examples:
        >>> answerer = eq.serving.Answerer(eq.load("digits-certified"))
        >>> (answer,) = answerer([eq.data.load_digits().test.images[0]])
        >>> answer.label, answer.certified, answer.radius > 0
        ('0', True, True)
    """

    label: str | None
    """None where the model has no answer: its logits are NaN or infinite."""
    confidence: float | None
    top: dict[str, float]
    iterations: int | None
    converged: bool | None
    certified: bool
    """Whether the exact equilibrium has that class, for certain."""
    radius: float | None
    """No picture closer than this (L2, pixels in [0, 1]) has another class."""
    margin: float | None
    """The logit of the class less that of the next one."""
    margin_error: float | None
    """How far the margin may be from that at the exact equilibrium."""
    error: float | None
    """How far the state may be from the exact equilibrium."""
    reason: str
    """Why there is no certified class, or no radius."""


class Answerer:
    """Answers batches of pictures by a classifier that `eq.load` gave.

    Examples:
        >>> answerer = eq.serving.Answerer(eq.load("digits-opteq"))
        >>> answerer([eq.data.load_digits().test.images[0]])[0].label
        '0'
    """

    def __init__(self, model: nn.Module, *, certificates: bool = True) -> None:
        images = images_of(model)
        if images is None:
            raise ValueError("the model does not say what its images are like: take one of eq.load")
        if not images.names_classes:
            raise ValueError("the model names no classes: a run of a classifier is served")
        self.model = model.eval()
        self.images = images
        self.no_certificates = "" if certificates else "certificates were not asked for"
        # Their predictions are the last of a fixed number of iterates, not the result of a solve.
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

    def decode(self, content: bytes) -> Tensor:
        """A picture as the model sees it; a `DataFileError` where the bytes are none."""
        return read_pixels(content, self.images.frame, is_gray=self.images.is_gray)

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        """One answer per image, independent of the rest of the batch; the batch is solved once."""
        batch = torch.stack(list(images)).to(next(self.model.parameters()).device)
        if self.certify is None:
            return [self._answer(one, None, 0) for one in self._predicted(batch)]
        solved = self.certify.solve(batch)
        found = self.certify.judge(batch, solved)
        said = self._predicted(batch, None if self.is_unrolled else solved)
        return [self._answer(one, found, place) for place, one in enumerate(said)]

    def _predicted(self, batch: Tensor, solved: SolvedBatch | None = None) -> list[Prediction]:
        """The predictions of a batch, which is solved unless it has been solved already."""
        if solved is None:
            return cast("list[Prediction]", predict(self.model, batch, top=TOP))
        logits = solved.logits.float().cpu()
        said = answers_of(self.model, logits, solved.solution, [""] * len(batch), TOP)
        return cast("list[Prediction]", said)

    def _answer(self, said: Prediction, found: Certificate | None, place: int) -> Answer:
        known: dict[str, float | None] = {}
        certified, reason = False, self.no_certificates
        if found is not None:
            certified, reason = bool(found.certified_class[place]), found.reasons[place]
            margin, margin_error = nearest_rival(found, place) or (math.nan, math.nan)
            known = {
                "radius": float(found.radius[place]),
                "error": float(found.error[place]),
                "margin": margin,
                "margin_error": margin_error,
            }
        return Answer(
            label=said.label,
            confidence=finite(said.confidence),
            top=said.top,
            iterations=said.iterations,
            converged=said.converged,
            certified=certified,
            reason=reason,
            **{
                name: finite(known.get(name))
                for name in ("radius", "margin", "margin_error", "error")
            },
        )


def finite(number: float | None) -> float | None:
    """JSON has neither NaN nor infinity."""
    return number if number is not None and math.isfinite(number) else None
