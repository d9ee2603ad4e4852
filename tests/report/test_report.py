"""The report: whole, self-contained, and safe with any text."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

import equilibria as eq
from equilibria.report import RunReport, follow_solve, report_page, run_report
from equilibria.report.figures import convergence_charts, themed
from equilibria.report.page import choose_examples
from equilibria.report.sheets import image_png
from equilibria.training.experiment import Experiment
from equilibria.training.recipe import recipe_from_data
from tests.report.pages import Checker, experiment, history, report

SIZE = re.compile(r"font-size: ([\d.]+)px")


@pytest.fixture(scope="module")
def found() -> RunReport:
    return report(width=8)


@pytest.fixture(scope="module")
def html(found: RunReport) -> str:
    return report_page([found], "seed 0")


def test_report_needs_nothing_beside_itself(html: str) -> None:
    page = Checker(html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert "url(" not in html
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.references
    assert all(reference.startswith("data:image/") for reference in page.references)


def test_report_holds_its_pieces(html: str) -> None:
    page = Checker(html)
    for piece in (
        "opteq-small on digits",
        "G(y; x) = 1ᵀf(y) + ½‖y‖²",
        "falls at every iteration",
        "Certificates",
        "class certified",
        "margin over",
        "what pulled it",
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
    # Image, saliency and gradient of each; the correlation of channels.
    assert len(page.references) == 3 * 9 + 1


def test_accuracy_and_errors_come_before_certificates(html: str) -> None:
    text = Checker(html).text
    titles = (
        *("test accuracy", "Accuracy and errors", "Some test images", "Confidence"),
        *("Certificates", "What the network computes", "Training loss", "All figures"),
    )
    places = [text.index(title) for title in titles]
    assert places == sorted(places)


def test_a_certified_class_is_not_mistaken_for_the_true_one(found: RunReport, html: str) -> None:
    """The page said "100 % of 40 classes certified" of a model that is nearly always wrong."""
    text = Checker(html).text
    assert found.certified is not None
    certificate = found.certified.certificate
    right = certificate.certified_class & (certificate.prediction == found.certified.labels)
    assert found.certified.count == len(found.certified) == 40
    assert found.certified.wrong == 40 - int(right.sum()) > 20
    assert f"Of 40 test images 40 have a certified class; {found.certified.wrong} of these" in text
    assert "it is not the true label, so a certified class can be wrong" in text
    assert "class certified, though wrong" in text
    assert "classes certified" not in text
    assert ("Class certified", "100.0% (40 of 40)") in found.rows()
    assert f"{found.evaluation.correct} of 40 test images are classified correctly" in text
    assert found.wrong == sum(count for _, _, count in found.confused)
    actual, predicted, count = found.confused[0]
    assert f"Most frequent errors: {actual} taken for {predicted} ({count}×)" in text


def test_a_segmentation_counts_pixels(found: RunReport) -> None:
    text = Checker(report_page([replace(found, unit="test labelled pixel")])).text
    for piece in ("errors on 40 test labelled pixels", "of 40 test labelled pixels are classified"):
        assert piece in text


def test_numbers_behind_certificates_are_folded_away(html: str) -> None:
    whole = Checker(html).text
    unfolded = Checker(re.sub(r"<details>.*?</details>", "", html, flags=re.DOTALL)).text
    for piece in ("Stationarity", "Fenchel gap", "Firmness", "Contraction q, largest"):
        assert piece in whole
        assert piece not in unfolded
    for piece in ("Class certified", "Certified and right", "Radius, weighted, median"):
        assert piece in unfolded


def test_what_was_not_measured_is_said_with_the_command_that_does(html: str) -> None:
    said = Checker(html).text
    assert "Accuracy under attack: equilibria report a run" in said
    assert "Larger radii, by activation patterns: equilibria report a run --refine" in said


def test_report_escapes_what_it_is_given(found: RunReport) -> None:
    name = '<script>alert("x")</script>'
    names = [name] + [f"<{place}> & co" for place in range(9)]
    assert found.explanation is not None
    changed = replace(
        found,
        name=name,
        model_name=name,
        class_names=names,
        explanation=replace(found.explanation, class_names=tuple(names)),
    )
    for reports in ([changed], [changed, found]):
        page = Checker(report_page(reports, name))
        assert "script" not in page.tags
        assert name in page.text
        assert "<3> & co" in page.text


def test_runs_stand_side_by_side(found: RunReport) -> None:
    others = [
        replace(found, name="the second"),
        report("geq-small", title="a third", widths=(8, 8)),
        report("mopteq-small", title="a fourth", widths=(8, 8), scales=(1, 2)),
        run_report(plain(), history(1), name="a plain one"),
    ]
    html = report_page([found, *others])
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


def test_a_model_without_an_equilibrium_has_a_report_without_one() -> None:
    page = Checker(report_page([run_report(plain(), history())]))
    for piece in ("resnet-small on digits", "Accuracy and errors", "Calibration", "Training loss"):
        assert piece in page.text
    for piece in ("equilibrium of one layer", "Certificates", "The way to"):
        assert piece not in page.text


def test_a_run_that_names_no_classes_has_a_short_report() -> None:
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
    made = run_report(Experiment.of(recipe_from_data(recipe)), history(1))
    page = Checker(report_page([made]))
    assert "PSNR, mean (dB)" in page.text
    assert "Accuracy and errors" not in page.text


def test_adversarial_training_has_confusion_too() -> None:
    made = experiment(width=8)
    recipe = replace(
        made.recipe,
        task=replace(made.recipe.task, name="adversarial", options={"eps": 0.1, "steps": 1}),
    )
    found = run_report(Experiment.of(recipe), history(1))
    page = Checker(report_page([found]))
    for piece in ("Robust accuracy", "Accuracy and errors", "Calibration"):
        assert piece in page.text


@pytest.mark.slow
def test_everything_is_measured_where_there_is_time() -> None:
    made = experiment(width=8, test_samples=10)
    whole = run_report(made, history(), name="a run", quick=False, refine=True)
    assert whole.robustness is not None
    assert set(whole.robustness.over_eps) == {"pgd", "jiio", "fgsm"}
    assert whole.certified is not None
    assert "pattern" in whole.certified.certificate.radii
    assert whole.left_out == []
    page = Checker(report_page([whole]))
    assert "Accuracy over the distance" in page.text
    assert "What is not here" not in page.text
    given = run_report(made, history(), robustness=whole.robustness)
    assert given.robustness == whole.robustness


def test_report_of_a_model_without_objective_says_so() -> None:
    page = Checker(report_page([report("deep-opteq-small", widths=(4, 4, 4))]))
    assert "no objective exists" in page.text
    assert "Hidden objective, equilibrium" not in page.text
    assert "The objective falls" not in page.text
    assert "input, layer 2" in page.text
    page = Checker(report_page([report("mdeq-small", channels=(4, 4))]))
    assert "Terms of the objective cannot be weighed" in page.text
    assert "None of 40 test images has a certified class" in page.text


def test_charts_are_the_same_on_every_run_and_on_files() -> None:
    model = eq.create_model("opteq-small", in_channels=1, channels=8, width=8)
    convergence = follow_solve(model, torch.rand(3, 1, 8, 8), eq.Picard())
    first, second = (themed(convergence_charts(convergence)) for _ in range(2))
    assert first == second
    assert first.light != first.dark
    for kind, svg in vars(first).items():
        root = ElementTree.fromstring(svg)
        texts = [e for e in root.iter() if e.tag.endswith("}text")]
        said = ["".join(text.itertext()).strip() for text in texts]
        for piece in ("Hidden objective above its minimum", "Residual", "iteration k", "Picard"):
            assert piece in said
        if kind.startswith("narrow"):
            # Such a page is 300 pixels wide at least, but for its margins.
            scale = 300 / float(root.attrib["width"])
            sizes = [float(found) for t in texts for found in SIZE.findall(t.get("style") or "")]
            assert min(sizes) * scale > 9.5


def test_every_picture_has_a_description(html: str) -> None:
    described = re.findall(r'<img [^>]*alt="([^"]*)"', html)
    drawn = re.findall(r'<svg [^>]*role="img" aria-label="([^"]*)"', html)
    assert len(described) == html.count("<img ")
    assert len(drawn) == html.count("<svg ") >= 6
    assert all(len(text) > 20 for text in [*described, *drawn])
    assert any("hidden objective" in text and "Picard" in text for text in drawn)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_become_png(channels: int) -> None:
    assert image_png(torch.rand(channels, 4, 4)).startswith(b"\x89PNG")


def test_examples_are_mistakes_first_then_class_after_class() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 0, 1])
    predictions = torch.tensor([0, 0, 1, 1, 1, 1, 0])

    def shown(**limits: int) -> list[int]:
        return choose_examples(labels, predictions, **limits).tolist()

    assert shown(count=6, mistakes=2) == [2, 5, 0, 3, 1, 4]
    assert shown(count=4, mistakes=6) == [2, 5, 6, 0]
    assert shown() == [2, 5, 6, 0, 3, 1, 4]
