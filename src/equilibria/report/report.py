"""The report of a trained classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

from equilibria.report.convergence import Convergence
from equilibria.report.figures import convergence_figure, image_png, training_figure
from equilibria.report.gallery import Exhibit
from equilibria.report.page import (
    data_uri,
    fact_table,
    figure,
    page,
    paragraph,
    section,
    tiles,
)
from equilibria.report.story import Story
from equilibria.report.summary import Summary
from equilibria.training import EpochMetrics


@dataclass(frozen=True)
class ClassifierReport:
    """Everything that the report shows."""

    model_name: str
    data_name: str
    class_names: Sequence[str]
    story: Story
    summary: Summary
    picard: Convergence
    comparison: Convergence | None
    exhibits: Sequence[Exhibit]
    history: Sequence[EpochMetrics]
    footer: str = ""

    def html(self) -> str:
        """One self-contained HTML page."""
        evaluation = self.summary.evaluation
        return page(
            title=f"{self.model_name} on {self.data_name}",
            lead="An image classifier whose hidden feature is the equilibrium of one layer, tested "
            f"on {evaluation.samples} images that it has not been trained on.",
            body=[
                tiles(self._headline()),
                self._what_one_sees(),
                self._convergence(),
                self._gallery(),
                self._confusion(),
                self._training(),
                section("All figures", fact_table(self.summary.rows())),
            ],
            footer=self.footer,
        )

    def _headline(self) -> list[tuple[str, str]]:
        solves = self.summary.evaluation.solves
        facts = [("test accuracy", f"{self.summary.evaluation.accuracy:.2%}")]
        if solves.mean_iterations is not None and solves.share_converged is not None:
            facts.append(("iterations, mean", f"{solves.mean_iterations:.1f}"))
            facts.append(("of the solves converged", f"{solves.share_converged:.1%}"))
        facts.append(("parameters", f"{self.summary.parameters:,}"))
        return facts

    def _what_one_sees(self) -> str:
        formula = "\n".join(line for line in (self.story.objective, self.story.equilibrium) if line)
        return section(
            "What the network computes",
            paragraph(
                "What the classifier at the end gets to see is not the output of a fixed number of "
                "layers. For every image the network "
                + (
                    "solves an optimization problem and passes on the solution:"
                    if self.picard.objective is not None
                    else "iterates one map until nothing changes, and passes on where it arrives:"
                )
            ),
            f'<div class="formula">{escape(formula)}</div>',
            paragraph(self.story.reading, "note"),
        )

    def _convergence(self) -> str:
        samples = self.picard.residual.shape[1]
        has_objective = self.picard.objective is not None
        sentences = [
            f"A plain fixed-point iteration (Picard) on {samples} test images; a thin line is one "
            "image, the thick one their mean."
        ]
        if self.picard.objective is not None:
            start, end = self.picard.objective[0].mean(), self.picard.objective[-1].mean()
            everywhere = " at every iteration" if self.picard.objective_falls else ""
            sentences.append(
                f"Left: the objective falls{everywhere}, on average from {start:,.2f} to "
                f"{end:,.2f}; shown is how far it is above its minimum."
            )
        sentences.append(
            f"{'Right: h' if has_objective else 'H'}ow far an iterate is from being its own image."
        )
        if self.picard.proven_residual() is not None:
            sentences.append("The dashed line is what the contraction bound q of the map proves.")
        if self.comparison is not None:
            sentences.append(
                f"To the same tolerance, {self.picard.solver} takes {self.picard.iterations} "
                f"iterations and {self.comparison.solver}, the solver that the network uses, "
                f"{self.comparison.iterations}."
            )
        return section(
            "The way to the equilibrium",
            figure(
                convergence_figure(self.picard, self.comparison),
                alternative="Curves of "
                + ("the hidden objective and of " if has_objective else "")
                + "the residual over the iterations; all fall.",
                caption=" ".join(sentences),
            ),
        )

    def _gallery(self) -> str:
        evaluation = self.summary.evaluation
        mistakes = evaluation.samples - evaluation.correct
        shown = sum(not exhibit.is_right for exhibit in self.exhibits)
        if mistakes == 0:
            text = f"All {evaluation.samples} test images are classified correctly; some of them:"
        else:
            text = (
                f"{mistakes} of the {evaluation.samples} test images "
                f"{'is' if mistakes == 1 else 'are'} classified wrongly. "
                f"{'All of them' if shown == mistakes else f'The first {shown}'}"
                " (framed in red), and some that are right:"
            )
        cards = "".join(self._card(exhibit) for exhibit in self.exhibits)
        return section("Some test images", paragraph(text), f'<div class="gallery">{cards}</div>')

    def _card(self, exhibit: Exhibit) -> str:
        predicted = escape(self.class_names[exhibit.prediction])
        true = escape(self.class_names[exhibit.label])
        verdict = "right" if exhibit.is_right else "wrong"
        iterations = "" if exhibit.iterations is None else f"<br>{exhibit.iterations} iterations"
        return (
            f'<div class="exhibit {verdict}">'
            f'<img src="{data_uri(image_png(exhibit.image), "image/png")}" '
            f'alt="test image of class {true}">'
            f"<div><b>predicted {predicted}</b><br>true {true} · {exhibit.confidence:.0%} sure"
            f"{iterations}</div></div>"
        )

    def _confusion(self) -> str:
        table = confusion_table(self.summary.evaluation.confusion, self.class_names)
        return section(
            "Confusion matrix",
            paragraph("How many images of each true class (row) were taken for which (column)."),
            f'<div class="scroll">{table}</div>',
        )

    def _training(self) -> str:
        return section(
            "Training",
            figure(
                training_figure(self.history),
                alternative="Curves of the training loss and of the iterations over the epochs.",
                caption="The loss that was minimized, with augmented images and softened labels "
                "where these are used, so it stays above that of clean images.",
            ),
        )


def confusion_table(confusion: Tensor, class_names: Sequence[str]) -> str:
    """Counts as a table, shaded by their share of the true class."""
    names = [escape(name) for name in class_names]
    header = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = []
    for true, (name, counts) in enumerate(zip(names, confusion.tolist(), strict=True)):
        cells = "".join(
            _confusion_cell(count, sum(counts), is_right=predicted == true)
            for predicted, count in enumerate(counts)
        )
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return f'<table class="confusion"><tr><th></th>{header}</tr>{"".join(rows)}</table>'


def _confusion_cell(count: int, total: int, *, is_right: bool) -> str:
    if count == 0:
        return '<td class="zero">·</td>'
    kind = "" if is_right else ' class="miss"'
    shade = 0.08 + 0.42 * count / total
    return f'<td{kind} style="background: rgba(var(--heat), {shade:.2f})">{count}</td>'
