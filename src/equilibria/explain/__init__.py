"""Making networks understood: convergence, figures, and the HTML report."""

from equilibria.explain.convergence import (
    Convergence,
    ObjectiveChange,
    follow_solve,
    objective_change,
)
from equilibria.explain.gallery import Exhibit, choose_exhibits
from equilibria.explain.report import ClassifierReport
from equilibria.explain.segmentation import (
    segmentation_png,
)
from equilibria.explain.story import Story, tell_story
from equilibria.explain.summary import Summary

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
