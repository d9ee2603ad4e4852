"""OptEq and Deep OptEq (Xie et al., TPAMI 2022): cells, networks, theory, named models."""

from equilibria.models.opteq.models import (
    deep_opteq,
    deep_opteq_segmentation,
    opteq,
    opteq_imagenet,
)
from equilibria.models.registry import register_presets

register_presets(__name__, opteq, deep_opteq, opteq_imagenet, deep_opteq_segmentation)
