"""The papers' tables; importing this package makes them known, paper by paper."""

# isort: off
from equilibria.papers.tables import opteq, opteq_imagenet, opteq_segmentation
from equilibria.papers.tables import mopteqs, mopteqs_imagenet
from equilibria.papers.tables import geq
from equilibria.papers.tables import jiio_images, jiio_adversarial, jiio_few_shot
# isort: on

__all__ = [
    "geq",
    "jiio_adversarial",
    "jiio_few_shot",
    "jiio_images",
    "mopteqs",
    "mopteqs_imagenet",
    "opteq",
    "opteq_imagenet",
    "opteq_segmentation",
]
