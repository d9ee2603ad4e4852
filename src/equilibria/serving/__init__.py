"""HTTP server for predictions of a trained classifier, with certificates."""

from equilibria.serving.answers import Answerer
from equilibria.serving.server import Limits, prediction_app, run_server
from equilibria.serving.sockets import bind

__all__ = [
    "Answerer",
    "Limits",
    "bind",
    "prediction_app",
    "run_server",
]
