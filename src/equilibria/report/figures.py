"""Charts of report pages and of files for light, dark, and narrow pages; sheets of attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch import Tensor

from equilibria.analysis.calibration import Calibration
from equilibria.analysis.convergence import Convergence
from equilibria.analysis.disk import CertifiedDisk
from equilibria.analysis.features import Relations
from equilibria.inputs import AttackResult, RobustnessCurves
from equilibria.report.charts import Chart, Series, recolored, side_by_side
from equilibria.report.sheets import Sheet, SheetRow
from equilibria.report.style import DARK, LEAST_FACTOR, LIGHT, SERIES, wrapped
from equilibria.training import EpochMetrics

MAX_THIN_LINES = 24
"""Largest number of samples with a separate line in a chart."""
ATTACKED_IMAGES = 8
ATTACKED_SIDE = 144
"""Smallest longer side of an image in a sheet of attacks, in pixels."""


@dataclass(frozen=True)
class ThemedFigure:
    """A figure as SVG for light and dark pages; the narrow versions are for phone screens."""

    light: bytes
    dark: bytes
    narrow_light: bytes
    narrow_dark: bytes

    def files(self, name: str) -> dict[str, bytes]:
        """Return the contents by file name; the names start with `name`."""
        return {
            f"{name}-{kind.replace('_', '-')}.svg": content for kind, content in vars(self).items()
        }


def convergence_charts(picard: Convergence, other: Convergence | None = None) -> list[Chart]:
    """Draw the objective, if there is one, and the residual along a solve.

    Args:
        picard: The solve.
        other: A solve by another solver, whose mean residual is drawn for comparison.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> convergence = eq.analysis.follow_solve(model, images, eq.Picard(tolerance=1e-4))
        >>> from equilibria.report.figures import convergence_charts
        >>> [chart.title for chart in convergence_charts(convergence)]
        ['Hidden objective above its minimum', 'Residual']
    """
    count = picard.residual.shape[1]
    charts = []
    excess = picard.excess()
    if excess is not None:
        charts.append(
            Chart(
                title="Hidden objective above its minimum",
                x="iteration k",
                y="objective − minimum",
                series=_bundle(excess, picard.stops, picard.solver),
                description=f"The hidden objective minus its minimum over the iterations of "
                f"{picard.solver}, for {count} images, on a logarithmic axis.",
                log=True,
                integer_x=True,
            )
        )
    series = _bundle(picard.residual, picard.stops, picard.solver)
    if other is not None:
        mean = _mean(other.residual, other.stops)
        series.append(Series(mean, other.solver, "second"))
    proven = picard.proven_residual()
    if proven is not None:
        label = f"proven: qᵏ, q = {picard.contraction:.2f}"
        series.append(Series(list(enumerate(proven.tolist())), label, "third", "dashed"))
    comparison = "" if other is None else f", compared with {other.solver}"
    charts.append(
        Chart(
            title="Residual",
            x="iteration k",
            y="‖yₖ − T(yₖ)‖",
            series=series,
            description=f"The residual over the iterations of {picard.solver}, for {count} "
            f"images, on a logarithmic axis{comparison}.",
            log=True,
            integer_x=True,
        )
    )
    return charts


def training_charts(history: Sequence[EpochMetrics]) -> list[Chart]:
    """Draw loss and, for equilibrium models, the mean number of iterations over the epochs."""
    losses = [(metrics.epoch, metrics.loss) for metrics in history]
    values = [loss for _, loss in losses]
    charts = [
        Chart(
            title="Training loss",
            x="epoch",
            y="mean over batches",
            series=[Series(losses)],
            description=f"The training loss over {len(history)} epochs, from {values[0]:.3g} to "
            f"{values[-1]:.3g}.",
            log=min(values) > 0 and max(values) > LEAST_FACTOR * min(values),
            integer_x=True,
        )
    ]
    counts = [(m.epoch, m.mean_iterations) for m in history if m.mean_iterations is not None]
    if counts:
        most = max(value for _, value in counts)
        charts.append(
            Chart(
                title="Iterations to the equilibrium",
                x="epoch",
                y="mean",
                series=[Series(counts, color="second")],
                description=f"The mean number of iterations of a solve over {len(history)} epochs, "
                f"from {counts[0][1]:.1f} to {counts[-1][1]:.1f}.",
                integer_x=True,
                limits=(0.0, 1.15 * most or 1.0),
            )
        )
    return charts


def calibration_chart(calibration: Calibration) -> Chart:
    """Draw accuracy over confidence."""
    series = [
        Series([(0.0, 0.0), (1.0, 1.0)], "perfect calibration", "third", "dashed"),
        Series(calibration.points, "the model"),
        Series(calibration.points, kind="dots"),
    ]
    return Chart(
        title="Calibration",
        x="confidence",
        y="accuracy",
        series=series,
        description="Accuracy over the confidence of the model; expected calibration error "
        f"{calibration.error:.3f}.",
        limits=(0.0, 1.0),
    )


def robustness_charts(curves: RobustnessCurves) -> list[Chart]:
    """Draw accuracy under attack over distance and number of steps, and certified accuracy.

    Examples:
        >>> model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> settings = eq.inputs.AttackSettings(norm="l2", eps=0.5, steps=1)
        >>> batch = digits.images[:4], digits.labels[:4]
        >>> curves = eq.inputs.measure_robustness(model, *batch, settings, methods=["fgsm"])
        >>> from equilibria.report.figures import robustness_charts
        >>> len(robustness_charts(curves))  # one step has no curve over the steps
        1
    """
    norm = {"l2": "L2", "linf": "L∞"}[curves.norm]
    colors = dict(zip(curves.over_eps, SERIES, strict=False))
    clean = (0.0, curves.accuracy)
    certified = [Series(curves.certified, "certified", "third", "area")] if curves.certified else []
    distances = [
        Series([clean, *((p.eps, p.accuracy) for p in points)], method, colors[method])
        for method, points in curves.over_eps.items()
    ]
    lowest = {m: points[-1].accuracy for m, points in curves.over_eps.items()}
    final = ", ".join(f"{method} {share:.0%}" for method, share in lowest.items())
    charts = [
        Chart(
            title="Accuracy over the distance",
            x=f"ε in {norm}, in pixels of [0, 1]",
            y=f"share of {curves.samples} test images",
            series=[*certified, *distances],
            description=f"The accuracy under attack over the distance in {norm}, from "
            f"{curves.accuracy:.0%} without an attack; at the largest distance: {final}.",
            limits=(0.0, 1.0),
        )
    ]
    if curves.over_steps:
        steps = [
            Series([(p.steps, p.accuracy) for p in points], method, colors[method])
            for method, points in curves.over_steps.items()
        ]
        charts.append(
            Chart(
                title="Accuracy over the steps",
                x="steps of the attack",
                y=f"at ε = {curves.step_eps:g}",
                series=steps,
                description="The accuracy under attack over the steps of each search, at a "
                f"distance of {curves.step_eps:g}.",
                integer_x=True,
                limits=(0.0, 1.0),
            )
        )
    return charts


def radius_chart(certified: Sequence[tuple[float, float]], samples: int) -> Chart:
    """Draw certified accuracy over the distance."""
    return Chart(
        title="Certified accuracy",
        x="distance in L2, in pixels of [0, 1]",
        y=f"share of {samples} images, certified and right",
        series=[Series(certified, color="fourth", kind="area")],
        description="The share of test images with a certificate for the right class up to a "
        f"distance: {certified[0][1]:.0%} at distance 0, none beyond {certified[-1][0]:.3g}.",
        limits=(0.0, 1.0),
    )


def disk_chart(disk: CertifiedDisk) -> Chart:
    """Draw the certified disk of an image, and where the class changes in a plane around it."""
    width, height = disk.frame[0]
    return Chart(
        title="Certified disk of one image",
        x="change in the steepest direction",
        y="change in a random direction, in L2",
        series=[
            Series(disk.circle, f"certified: {disk.radius:.3g}", "fourth"),
            Series(disk.boundary, "class changes, or nowhere up to the frame", "second", "dashed"),
            Series(disk.frame, color="third", kind="thin"),
            Series([(0.0, 0.0)], "image", kind="dots"),
        ],
        description=f"A plane around a test image: a circle with its certified radius "
        f"{disk.radius:.3g}, and the nearest points with another class, which are all outside of "
        f"it. They were found on {disk.changed} of {len(disk.boundary) - 1} rays, up to "
        f"{width:.3g} in the steepest direction.",
        limits=(-1.1 * height, 1.1 * height),
    )


def relation_chart(relations: Relations) -> Chart:
    """Draw heritage and diversity, one dot per image (MOptEqs, Figure 2)."""
    points = list(zip(relations.heritage.tolist(), relations.diversity.tolist(), strict=True))
    return Chart(
        title="Heritage and diversity",
        x="average H (larger is better)",
        y="average D (smaller is better)",
        series=[Series(points, kind="dots")],
        description="Average heritage and diversity between neighboring branches, one dot per "
        f"image; means {float(relations.heritage.mean()):.3g} and "
        f"{float(relations.diversity.mean()):.3g}.",
    )


def themed(charts: Sequence[Chart]) -> ThemedFigure:
    """Draw charts as SVG files: side by side, and below each other for narrow screens.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> convergence = eq.analysis.follow_solve(model, images, eq.Picard(tolerance=1e-4))
        >>> from equilibria.report.figures import convergence_charts, themed
        >>> themed(convergence_charts(convergence)).light[:4]
        b'<svg'
    """
    charts_and_heights = [(chart.drawn(), chart.height) for chart in charts]
    drawn = {
        shape: side_by_side(charts_and_heights, columns=columns)
        for shape, columns in (("", len(charts)), ("narrow_", 1))
    }
    return ThemedFigure(
        **{
            f"{shape}{name}": recolored(svg, theme).encode()
            for shape, svg in drawn.items()
            for name, theme in (("light", LIGHT), ("dark", DARK))
        }
    )


def attack_png(images: Tensor, result: AttackResult, class_names: Sequence[str]) -> bytes:
    """Draw images, magnified changes, and attacked images with their predictions, as PNG.

    Args:
        images: Original images, shape (B, C, H, W).
        result: Result of the attack on them.
        class_names: Names of the classes.

    Examples:
        >>> model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> result = eq.attack(model, digits.images[:2], digits.labels[:2], eps=0.5, steps=2)
        >>> from equilibria.report.figures import attack_png
        >>> attack_png(digits.images[:2], result, model.images.class_names)[1:4]
        b'PNG'
    """
    # Images whose prediction the attack changed come first, then those that withstood it.
    before, after = result.initial_predictions, result.predictions
    right = before == result.labels
    order = [right & result.success, right & ~result.success, ~right]
    chosen = [int(i) for group in order for i in group.nonzero().squeeze(1)][:ATTACKED_IMAGES]
    change = (result.images - images.to(result.images)).cpu()
    reach = float(change[chosen].abs().max()) or 1.0

    def notes(predictions: Tensor) -> list[str]:
        texts = []
        for index in chosen:
            predicted = int(predictions[index])
            text = "no answer" if predicted == -1 else f"predicted {class_names[predicted]}"
            is_right = predicted == int(result.labels[index])
            texts.append(wrapped(text if is_right else f"wrong: {text}", 20, 2))
        return texts

    rows = [
        SheetRow("image", images[chosen], notes(before)),
        SheetRow(f"change × {0.5 / reach:.2g}", 0.5 + 0.5 * change[chosen] / reach),
        SheetRow("attacked", result.images[chosen], notes(after)),
    ]
    return Sheet(rows, least_side=ATTACKED_SIDE).png()


def drawn_files(
    files: Sequence[Path], folder: Path, *kinds: str, overwrite: bool = False
) -> list[tuple[Path, ...]]:
    """Return the paths of the pictures of each image file, one per kind.

    The name of a picture is that of its image and the kind, with a number if two images have the
    same name. No picture overwrites an image in `files`.

    Args:
        files: Image files.
        folder: Folder of the pictures.
        kinds: Suffixes of the pictures' names.
        overwrite: Allow paths that exist.

    Raises:
        FileExistsError: If a picture exists and `overwrite` is false.
    """
    taken = {file.resolve() for file in files}
    pictures = []
    for file in files:
        for number in count(1):
            stem = file.stem if number == 1 else f"{file.stem}-{number}"
            paths = tuple(folder / f"{stem}-{kind}.png" for kind in kinds)
            resolved = {path.resolve() for path in paths}
            if not taken & resolved:
                break
        existing = next((path for path in paths if path.exists()), None)
        if existing is not None and not overwrite:
            raise FileExistsError(
                f"{existing} exists; replace it with --overwrite (overwrite=True), or give another "
                "folder"
            )
        taken |= resolved
        pictures.append(paths)
    return pictures


def _bundle(values: Tensor, stops: Tensor, label: str) -> list[Series]:
    """Return a thin line per sample, up to where it converged, and the mean."""
    columns = list(zip(values.unbind(dim=1), stops.tolist(), strict=True))
    thin = [
        Series(list(enumerate(column[:stop].tolist())), kind="thin")
        for column, stop in columns[:MAX_THIN_LINES]
    ]
    return [*thin, Series(_mean(values, stops), label)]


def _mean(values: Tensor, stops: Tensor) -> list[tuple[float, float]]:
    """Return the mean over all samples, up to the iteration at which the first converges."""
    return list(enumerate(values[: int(stops.min())].nanmean(dim=1).tolist()))
