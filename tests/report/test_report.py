"""The report: complete, self-contained, and safe for any text."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

import equilibria as eq
from equilibria.analysis import RunFindings, follow_solve, measure_run
from equilibria.report import report_page
from equilibria.report.figures import convergence_charts, themed
from equilibria.report.sheets import image_png
from equilibria.report.tables import run_rows
from equilibria.training.experiment import Experiment
from equilibria.training.recipe import recipe_from_data
from tests.report.pages import Checker, experiment, history, report

SIZE = re.compile(r"font-size: ([\d.]+)px")


@pytest.fixture(scope="module")
def run() -> RunFindings:
    return report(width=8)


@pytest.fixture(scope="module")
def html(run: RunFindings) -> str:
    return report_page([run], "seed 0")


def test_report_is_self_contained(html: str) -> None:
    page = Checker(html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert "url(" not in html
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.references
    assert all(reference.startswith("data:image/") for reference in page.references)


def test_report_has_all_sections(html: str) -> None:
    page = Checker(html)
    for piece in (
        "opteq-small on digits",
        "G(y; x) = 1ᵀf(y) + ½‖y‖²",
        "decreases in every iteration",
        "Certificates",
        "class certified",
        "margin over",
        "contributions",
        "add up to the margin",
        "Accuracy and errors",
        "Calibration",
        "Grad-CAM",
        "Features at the equilibrium",
        "Training loss",
        "Test accuracy",
        "Contraction bound q",
        "Hidden objective, equilibrium",
        "seed 0",
    ):
        assert piece in page.text, piece
    assert html.count("<article") == 9
    # Image, saliency map and gradient of each example; one correlation of channels.
    assert len(page.references) == 3 * 9 + 1


def test_accuracy_and_errors_come_before_certificates(html: str) -> None:
    text = Checker(html).text
    titles = (
        *("test accuracy", "Accuracy and errors", "Some test images", "Confidence"),
        *("Certificates", "What the network computes", "Training loss", "All figures"),
    )
    places = [text.index(title) for title in titles]
    assert places == sorted(places)


def test_certified_classes_are_distinguished_from_true_classes(run: RunFindings, html: str) -> None:
    """Regression: a model that is nearly always wrong had "100 % of 40 classes certified"."""
    text = Checker(html).text
    assert run.certified is not None
    certificate = run.certified.certificate
    right = certificate.certified_class & (certificate.prediction == run.certified.labels)
    assert run.certified.count == len(run.certified) == 40
    assert run.certified.wrong == 40 - int(right.sum()) > 20
    assert f"40 of 40 test images have a certified class; {run.certified.wrong} of these" in text
    assert "It can differ from the true label" in text
    assert "class certified, but wrong" in text
    assert "classes certified" not in text
    assert ("Class certified", "100.0% (40 of 40)") in run_rows(run)
    assert f"{run.evaluation.correct} of 40 test images are classified correctly" in text
    assert run.wrong == sum(count for _, _, count in run.confused)
    actual, predicted, count = run.confused[0]
    assert f"Most frequent errors: {actual} classified as {predicted} ({count}×)" in text


def test_report_of_a_segmentation_counts_pixels(run: RunFindings) -> None:
    text = Checker(report_page([replace(run, unit="test labelled pixel")])).text
    for piece in ("errors on 40 test labelled pixels", "of 40 test labelled pixels are classified"):
        assert piece in text


def test_details_of_certificates_are_collapsed(html: str) -> None:
    full = Checker(html).text
    visible = Checker(re.sub(r"<details>.*?</details>", "", html, flags=re.DOTALL)).text
    for piece in ("Stationarity", "Fenchel gap", "Firmness", "Contraction q, largest"):
        assert piece in full
        assert piece not in visible
    for piece in ("Class certified", "Certified and right", "Radius, weighted, median"):
        assert piece in visible


def test_missing_measurements_are_listed_with_their_commands(html: str) -> None:
    text = Checker(html).text
    assert "Accuracy under attack: equilibria report a run" in text
    assert "Larger radii, from activation patterns: equilibria report a run --refine" in text


def test_report_escapes_names(run: RunFindings) -> None:
    name = '<script>alert("x")</script>'
    names = [name] + [f"<{index}> & co" for index in range(9)]
    assert run.explanation is not None
    changed = replace(
        run,
        name=name,
        model_name=name,
        class_names=names,
        explanation=replace(run.explanation, class_names=tuple(names)),
    )
    for reports in ([changed], [changed, run]):
        page = Checker(report_page(reports, name))
        assert "script" not in page.tags
        assert name in page.text
        assert "<3> & co" in page.text


def test_report_of_several_runs_compares_them(run: RunFindings) -> None:
    others = [
        replace(run, name="the second"),
        report("geq-small", title="a third", widths=(8, 8)),
        report("mopteq-small", title="a fourth", widths=(8, 8), scales=(1, 2)),
        measure_run(plain(), history(1), name="a plain one"),
    ]
    html = report_page([run, *others])
    page = Checker(html)
    for name in ("a run", "the second", "a third", "a fourth", "a plain one"):
        assert name in page.text
    for piece in ("β, branch 1", "average H", "gaussian kernel, branch 1", "diversity"):
        assert piece in page.text
    assert html.count('class="confusion"') == 5
    assert html.count("What the network computes") == 1


def plain() -> Experiment:
    recipe = {
        "model": {"name": "resnet-small"},
        "data": {"name": "digits", "options": {"train_samples": 20, "test_samples": 20}},
        "training": {"epochs": 1},
    }
    return Experiment.of(recipe_from_data(recipe))


def test_report_of_a_model_without_equilibrium_has_no_equilibrium_sections() -> None:
    page = Checker(report_page([measure_run(plain(), history())]))
    for piece in ("resnet-small on digits", "Accuracy and errors", "Calibration", "Training loss"):
        assert piece in page.text
    for piece in ("equilibrium of one layer", "Certificates", "Convergence to"):
        assert piece not in page.text


def test_report_of_a_run_without_classes_has_no_confusion() -> None:
    recipe = {
        "model": {"name": "dncnn"},
        "data": {
            "name": "digits",
            "options": {"train_samples": 8, "test_samples": 8},
            "normalize": False,
        },
        "task": {"name": "restoration", "options": {"corruption": "denoise"}},
        "training": {"epochs": 1},
    }
    restorer = measure_run(Experiment.of(recipe_from_data(recipe)), history(1))
    page = Checker(report_page([restorer]))
    assert "PSNR, mean (dB)" in page.text
    assert "Accuracy and errors" not in page.text


def test_report_of_adversarial_training_has_confusion() -> None:
    plain_experiment = experiment(width=8)
    recipe = replace(
        plain_experiment.recipe,
        task=replace(
            plain_experiment.recipe.task, name="adversarial", options={"eps": 0.1, "steps": 1}
        ),
    )
    robust = measure_run(Experiment.of(recipe), history(1))
    page = Checker(report_page([robust]))
    for piece in ("Robust accuracy", "Accuracy and errors", "Calibration"):
        assert piece in page.text


def test_report_of_a_model_without_objective_shows_residuals_only() -> None:
    page = Checker(report_page([report("deep-opteq-small", widths=(4, 4, 4))]))
    assert "no objective exists" in page.text
    assert "Hidden objective, equilibrium" not in page.text
    assert "The objective decreases" not in page.text
    assert "input, layer 2" in page.text
    page = Checker(report_page([report("mdeq-small", channels=(4, 4))]))
    assert "The contributions of terms are not known" in page.text
    assert "None of 40 test images has a certified class" in page.text


def test_chart_files_are_reproducible_and_legible() -> None:
    model = eq.create_model("opteq-small", in_channels=1, channels=8, width=8)
    convergence = follow_solve(model, torch.rand(3, 1, 8, 8), eq.Picard())
    first, second = (themed(convergence_charts(convergence)) for _ in range(2))
    assert first == second
    assert first.light != first.dark
    for kind, svg in vars(first).items():
        root = ElementTree.fromstring(svg)
        texts = [e for e in root.iter() if e.tag.endswith("}text")]
        words = ["".join(text.itertext()).strip() for text in texts]
        for piece in ("Hidden objective above its minimum", "Residual", "iteration k", "Picard"):
            assert piece in words
        if kind.startswith("narrow"):
            # Phone screens are at least 300 pixels wide without margins.
            scale = 300 / float(root.attrib["width"])
            sizes = [float(size) for t in texts for size in SIZE.findall(t.get("style") or "")]
            assert min(sizes) * scale > 9.5


def test_pictures_have_descriptions(html: str) -> None:
    described = re.findall(r'<img [^>]*alt="([^"]*)"', html)
    drawn = re.findall(r'<svg [^>]*role="img" aria-label="([^"]*)"', html)
    assert len(described) == html.count("<img ")
    assert len(drawn) == html.count("<svg ") >= 6
    assert all(len(text) > 20 for text in [*described, *drawn])
    assert any("hidden objective" in text and "Picard" in text for text in drawn)


@pytest.mark.parametrize("channels", [1, 3])
def test_image_png_encodes_gray_and_color(channels: int) -> None:
    assert image_png(torch.rand(channels, 4, 4)).startswith(b"\x89PNG")
