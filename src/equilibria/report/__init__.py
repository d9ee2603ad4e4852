"""Making networks understood: convergence, figures, and the HTML report."""

from equilibria.report.convergence import (
    Convergence,
    ObjectiveChange,
    follow_solve,
    objective_change,
)
from equilibria.report.gallery import Exhibit, choose_exhibits
from equilibria.report.report import ClassifierReport
from equilibria.report.segmentation import (
    segmentation_png,
)
from equilibria.report.story import Story, tell_story
from equilibria.report.summary import Summary

__all__ = [
    "ClassifierReport",
    "Convergence",
    "Exhibit",
    "ObjectiveChange",
    "Story",
    "Summary",
    "choose_exhibits",
    "follow_solve",
    "objective_change",
    "segmentation_png",
    "tell_story",
]
