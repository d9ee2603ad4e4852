"""Reports of small models, and a parser that checks pages."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import torch

from equilibria.analysis import RunFindings, measure_run
from equilibria.training import EpochMetrics
from equilibria.training.experiment import Experiment
from equilibria.training.recipe import recipe_from_data

VOID = {"meta", "br", "img", "source"}
SMALL = {"channels": 8}


class Checker(HTMLParser):
    """Collects the references, tags and text of a page; its tags must be balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "srcset", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += " ".join(data.split()) + " "


def experiment(name: str = "opteq-small", *, test_samples: int = 40, **options: Any) -> Experiment:
    """Return an untrained experiment, which suffices for tests of pages."""
    recipe = {
        "model": {"name": name, "options": {**SMALL, **options}},
        "data": {"name": "digits", "options": {"train_samples": 40, "test_samples": test_samples}},
        "training": {"epochs": 1},
    }
    torch.manual_seed(0)
    return Experiment.of(recipe_from_data(recipe))


def history(count: int = 3) -> list[EpochMetrics]:
    return [
        EpochMetrics(
            epoch=1 + index,
            loss=2.0 / (1 + index),
            accuracy=0.5,
            share_converged=1.0,
            mean_iterations=8.0,
            gradient_norm=1.0,
            learning_rate=0.1,
            seconds=1.0,
        )
        for index in range(count)
    ]


def report(name: str = "opteq-small", *, title: str = "a run", **options: Any) -> RunFindings:
    return measure_run(experiment(name, **options), history(), name=title)
