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
from equilibria.report.figures import attack_png
from equilibria.report.generation import generate, generate_without_data
from equilibria.report.page import (
    ClassifierReport,
    Example,
    Formula,
    choose_examples,
    classifier_report,
    model_formula,
)
from equilibria.report.restoration import TEST_IMAGES, RestoredTestImages, Restorer, chosen_damage
from equilibria.report.restored_files import FileRestoration, RestoredImage
from equilibria.report.saliency import grad_cam
from equilibria.report.segmentation import PixelPrediction, predict_pixels, segmentation_png
from equilibria.report.sheets import class_titles

__all__ = [
    "TEST_IMAGES",
    "AttackedFile",
    "ClassifierReport",
    "ComparedRun",
    "Convergence",
    "Example",
    "FileRestoration",
    "Formula",
    "PixelPrediction",
    "RestoredImage",
    "RestoredTestImages",
    "Restorer",
    "attack_files",
    "attack_png",
    "choose_examples",
    "chosen_damage",
    "class_titles",
    "classifier_report",
    "comparison_png",
    "differing_settings",
    "follow_solve",
    "generate",
    "generate_without_data",
    "grad_cam",
    "model_formula",
    "predict_pixels",
    "read_runs",
    "score_name",
    "segmentation_png",
    "store_evaluation",
]
