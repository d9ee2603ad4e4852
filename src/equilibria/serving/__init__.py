"""HTTP server for predictions of a trained classifier, with certificates."""

from equilibria.serving.answers import Answer, Answerer
from equilibria.serving.server import Limits, prediction_app, run_server
from equilibria.serving.sockets import Listener, bind

__all__ = [
    "Answer",
    "Answerer",
    "Limits",
    "Listener",
    "bind",
    "prediction_app",
    "run_server",
]
