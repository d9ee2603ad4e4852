"""A trained model that answers over HTTP."""

from equilibria.serving.answers import Answer, Answerer
from equilibria.serving.server import Limits, prediction_app, run_server

__all__ = [
    "Answer",
    "Answerer",
    "Limits",
    "prediction_app",
    "run_server",
]
