"""Making networks understood: convergence, figures, and the HTML report."""

from equilibria.report.attacked_files import AttackedFile, attack_files
from equilibria.report.compare import (
    ComparedRun,
    comparison_png,
    differing_settings,
    read_runs,
    score_name,
    store_evaluation,
)
from equilibria.report.convergence import Convergence, follow_solve
from equilibria.report.explanation import Explanation, explain
from equilibria.report.figures import attack_png, convergence_charts, robustness_charts, themed
from equilibria.report.formulas import model_formula
from equilibria.report.generation import generate, generate_without_data
from equilibria.report.html import report_page
from equilibria.report.labels import (
    FIGURES,
    certificate_reasons,
    certificate_rows,
    figure_rows,
    nearest_rival,
)
from equilibria.report.page import RunReport, choose_examples, run_report, with_certified
from equilibria.report.restoration import photo_sheet
from equilibria.report.saliency import grad_cam
from equilibria.report.segmentation import PixelPrediction, predict_pixels, segmentation_png
from equilibria.report.sheets import class_titles
from equilibria.report.stored import report_of, store_robustness, write_report

__all__ = [
    "FIGURES",
    "AttackedFile",
    "ComparedRun",
    "Convergence",
    "Explanation",
    "PixelPrediction",
    "RunReport",
    "attack_files",
    "attack_png",
    "certificate_reasons",
    "certificate_rows",
    "choose_examples",
    "class_titles",
    "comparison_png",
    "convergence_charts",
    "differing_settings",
    "explain",
    "figure_rows",
    "follow_solve",
    "generate",
    "generate_without_data",
    "grad_cam",
    "model_formula",
    "nearest_rival",
    "photo_sheet",
    "predict_pixels",
    "read_runs",
    "report_of",
    "report_page",
    "robustness_charts",
    "run_report",
    "score_name",
    "segmentation_png",
    "store_evaluation",
    "store_robustness",
    "themed",
    "with_certified",
    "write_report",
]
