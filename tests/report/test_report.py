"""The report: whole, self-contained, and safe with any text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

import equilibria as eq
from equilibria.data import Split
from equilibria.report import (
    ClassifierReport,
    Example,
    choose_examples,
    follow_solve,
    model_formula,
)
from equilibria.report.figures import convergence_figure
from equilibria.report.sheets import image_png
from equilibria.tasks import Classification, Evaluation
from equilibria.training import EpochMetrics

SIZE = re.compile(r"font-size: ([\d.]+)px")
VOID = {"meta", "br", "img", "source"}


class Checker(HTMLParser):
    """Collects what a page refers to and sees that its tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "srcset", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def make_report(name: str = "opteq-small", title: str = "a model", **options: object) -> str:
    model = eq.create_model(name, in_channels=1, channels=8, num_classes=3, **options)
    split = Split(torch.rand(12, 1, 8, 8), torch.arange(12) % 3)
    batches = [(split.images, split.labels)]
    evaluation = Classification().evaluate(model, batches)
    metrics = EpochMetrics(
        epoch=1,
        loss=1.0,
        accuracy=0.5,
        share_converged=1.0,
        mean_iterations=8.0,
        gradient_norm=1.0,
        learning_rate=0.1,
        seconds=1.0,
    )
    bound = model.contraction_bound(split.images)
    report = ClassifierReport(
        model_name=title,
        data_name="<digits>",
        class_names=["zero", "one & only", "<two>"],
        formula=model_formula(model),
        evaluation=evaluation,
        parameters=1234,
        contraction=None if bound is None else float(bound.max()),
        picard=follow_solve(model, split.images, eq.Picard(tolerance=1e-6, max_iterations=300)),
        comparison=follow_solve(model, split.images, eq.Anderson(tolerance=1e-6)),
        examples=choose_examples(split, evaluation),
        history=[metrics],
        footer="seed 0",
    )
    return report.html()


@pytest.fixture(scope="module")
def html() -> str:
    torch.manual_seed(0)
    return make_report(width=8)


def test_report_needs_nothing_beside_itself(html: str) -> None:
    page = check(html)
    assert re.search(r"https?://", html) is None
    assert "url(" not in html
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.references
    assert all(reference.startswith("data:image/") for reference in page.references)


def test_report_holds_its_pieces(html: str) -> None:
    page = check(html)
    for piece in (
        "a model on <digits>",
        "G(y; x) = 1ᵀf(y) + ½‖y‖²",
        "falls at every iteration",
        "Confusion matrix",
        "Test accuracy",
        "Contraction bound q",
        "Hidden objective, equilibrium",
        "predicted",
        "iterations",
        "1,234",
    ):
        assert piece in page.text
    pictures = sum(reference.startswith("data:image/png") for reference in page.references)
    assert pictures == html.count('class="example ') >= 8
    assert sum(reference.startswith("data:image/svg") for reference in page.references) == 8


def test_report_escapes_what_it_is_given() -> None:
    html = make_report(title='<script>alert("x")</script>', width=8)
    page = check(html)
    assert "script" not in page.tags
    assert '<script>alert("x")</script>' in page.text
    assert "<two>" in page.text
    assert "one & only" in page.text


def test_report_of_a_model_without_objective_says_so() -> None:
    page = check(make_report("deep-opteq-small", widths=(4, 4, 4)))
    assert "no objective exists" in page.text
    assert "Hidden objective, equilibrium" not in page.text
    assert "The objective falls" not in page.text


def test_figures_are_the_same_on_every_run() -> None:
    model = eq.create_model("opteq-small", in_channels=1, channels=8, width=8)
    convergence = follow_solve(model, torch.rand(3, 1, 8, 8), eq.Picard())
    first, second = convergence_figure(convergence), convergence_figure(convergence)
    assert first == second
    assert first.light != first.dark


def test_a_figure_says_what_it_shows_and_can_be_read_on_a_phone() -> None:
    model = eq.create_model("opteq-small", in_channels=1, channels=8, width=8)
    convergence = follow_solve(model, torch.rand(3, 1, 8, 8), eq.Picard())
    for kind, svg in vars(convergence_figure(convergence)).items():
        root = ElementTree.fromstring(svg)
        texts = [e for e in root.iter() if e.tag.endswith("}text")]
        said = ["".join(text.itertext()).strip() for text in texts]
        for piece in ("Hidden objective above its minimum", "Residual", "iteration k", "Picard"):
            assert piece in said
        counts = [text for text in said if re.fullmatch(r"\d+", text)]
        assert "0" in counts, "iterations are whole numbers"
        if kind.startswith("narrow"):
            # In points; such a page is 300 pixels wide at least, but for its margins.
            scale = 300 / float(root.attrib["width"].removesuffix("pt"))
            sizes = [float(found) for t in texts for found in SIZE.findall(t.get("style") or "")]
            assert min(sizes) * scale > 9.5


def test_every_picture_has_a_description(html: str) -> None:
    described = re.findall(r'<img [^>]*alt="([^"]*)"', html)
    assert len(described) == html.count("<img ")
    assert all(len(text) > 20 for text in described)
    assert any("hidden objective" in text and "Picard" in text for text in described)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_become_png(channels: int) -> None:
    assert image_png(torch.rand(channels, 4, 4)).startswith(b"\x89PNG")


def evaluation_of(labels: torch.Tensor, predictions: torch.Tensor) -> Evaluation:
    logits = torch.nn.functional.one_hot(predictions, 2).float()
    return Classification().evaluate(torch.nn.Identity(), [(logits, labels)])


def test_gallery_shows_mistakes_first_then_class_after_class() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 0, 1])
    predictions = torch.tensor([0, 0, 1, 1, 1, 1, 0])
    split = Split(torch.arange(7.0).reshape(7, 1, 1, 1), labels)

    def shown(**limits: int) -> list[int]:
        chosen: list[Example] = choose_examples(split, evaluation_of(labels, predictions), **limits)
        return [int(example.image) for example in chosen]

    assert shown(count=6, mistakes=2) == [2, 5, 0, 3, 1, 4]
    assert shown(count=4, mistakes=6) == [2, 5, 6, 0]
    assert shown() == [2, 5, 6, 0, 3, 1, 4]
