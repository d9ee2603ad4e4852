"""Use of trained models: load them, evaluate them, predict with them."""

from equilibria.inference.evaluation import evaluate, load
from equilibria.inference.prediction import ClassMap, Prediction, predict, predictions

__all__ = ["ClassMap", "Prediction", "evaluate", "load", "predict", "predictions"]
