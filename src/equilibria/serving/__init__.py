"""A trained model that answers over HTTP."""

from equilibria.serving.answers import Answer, Answerer
from equilibria.serving.batching import Batcher, OverloadedError
from equilibria.serving.metrics import Metrics
from equilibria.serving.server import Limits, prediction_app, run_server

__all__ = [
    "Answer",
    "Answerer",
    "Batcher",
    "Limits",
    "Metrics",
    "OverloadedError",
    "prediction_app",
    "run_server",
]
