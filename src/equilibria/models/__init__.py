"""The models of the papers: one folder per family, with its named models in `presets.yaml`.

This package exports what users and other packages need. Import everything else, such as the
classes of `baselines`, from the file that defines it. The theorems of the papers that no model
needs are in `equilibria.papers.theory`.
"""

from equilibria.images import ImageSpec, images_of
from equilibria.models.base import EquilibriumClassifier, EquilibriumModel, image_classifier
from equilibria.models.baselines.fcn import fcn
from equilibria.models.baselines.hrnet import HRNet
from equilibria.models.baselines.inception import Inception
from equilibria.models.baselines.neural_ode import NeuralODE
from equilibria.models.baselines.plain import Conv4, DnCNN, PlainNetwork
from equilibria.models.baselines.resnet import resnet, resnet_small
from equilibria.models.contributions import (
    Contributions,
    NoContributionsError,
    contributions,
)
from equilibria.models.few_shot import few_shot_mdeq, few_shot_opteq
from equilibria.models.generators.autoencoders import convolutional_autoencoder, mdeq_autoencoder
from equilibria.models.generators.decoders import mdeq_decoder, opteq_decoder
from equilibria.models.geq.model import GEQCell
from equilibria.models.geq.model import geq as build_geq
from equilibria.models.mdeq.cell import MDEQCell
from equilibria.models.mdeq.model import mdeq as build_mdeq
from equilibria.models.mondeq.model import MonDEQCell
from equilibria.models.mondeq.model import mondeq as build_mondeq
from equilibria.models.mopteq.branches import POptEqCell
from equilibria.models.mopteq.cells import MOptEqCell
from equilibria.models.mopteq.models import heritage_diversity_loss, popteq
from equilibria.models.mopteq.models import mopteq as build_mopteq
from equilibria.models.non_finite import (
    NonFiniteInputError,
    NonFiniteWeightsWarning,
    finite_samples,
)
from equilibria.models.opteq.cells import DeepOptEqCell, OptEqCell, UnitLayer
from equilibria.models.opteq.models import deep_opteq, deep_opteq_segmentation, opteq_imagenet
from equilibria.models.opteq.models import opteq as build_opteq
from equilibria.models.pretrained import PretrainedCard, pretrained_cards
from equilibria.models.reasoner.model import conv_reasoner
from equilibria.models.reflection.cell import ReflectionCell
from equilibria.models.reflection.model import reflection_network
from equilibria.models.reflection.orthonormal import orthonormal_network
from equilibria.models.registry import (
    ModelDescription,
    create_model,
    describe_model,
    list_models,
    model_options,
    register_model,
    register_presets,
)
from equilibria.models.restorers.model import deq_restorer
from equilibria.models.restorers.photo import photo_denoiser, photo_prior

__all__ = [
    "Contributions",
    "DeepOptEqCell",
    "EquilibriumClassifier",
    "EquilibriumModel",
    "GEQCell",
    "ImageSpec",
    "MDEQCell",
    "MOptEqCell",
    "ModelDescription",
    "MonDEQCell",
    "NoContributionsError",
    "NonFiniteInputError",
    "NonFiniteWeightsWarning",
    "OptEqCell",
    "POptEqCell",
    "PretrainedCard",
    "ReflectionCell",
    "UnitLayer",
    "contributions",
    "create_model",
    "describe_model",
    "finite_samples",
    "heritage_diversity_loss",
    "image_classifier",
    "images_of",
    "list_models",
    "model_options",
    "photo_prior",
    "pretrained_cards",
    "register_model",
]

for _family, _factories in {
    "baselines": (
        PlainNetwork,
        fcn,
        Conv4,
        DnCNN,
        NeuralODE,
        resnet_small,
        resnet,
        HRNet,
        Inception,
    ),
    "generators": (mdeq_decoder, opteq_decoder, mdeq_autoencoder, convolutional_autoencoder),
    "geq": (build_geq,),
    "mdeq": (build_mdeq, few_shot_mdeq),
    "mondeq": (build_mondeq,),
    "mopteq": (popteq, build_mopteq),
    "opteq": (build_opteq, deep_opteq, opteq_imagenet, deep_opteq_segmentation, few_shot_opteq),
    "reasoner": (conv_reasoner,),
    "reflection": (reflection_network, orthonormal_network),
    "restorers": (deq_restorer, photo_denoiser),
}.items():
    register_presets(_family, *_factories)
