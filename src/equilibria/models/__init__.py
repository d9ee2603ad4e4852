"""The models of the papers: one folder per family, with its named models in `presets.yaml`.

This package exports what users and other packages need. Import everything else, such as the
classes of `baselines`, from the file that defines it. The theorems of the papers that no model
needs are in `equilibria.papers.theory`.
"""

from equilibria.images import ImageSpec, images_of
from equilibria.models.base import (
    EquilibriumClassifier,
    EquilibriumModel,
    image_classifier,
    predicted_classes,
)
from equilibria.models.baselines.fcn import fcn
from equilibria.models.baselines.hrnet import HRNet
from equilibria.models.baselines.inception import Inception
from equilibria.models.baselines.neural_ode import NeuralODE
from equilibria.models.baselines.plain import Conv4, DnCNN, PlainNetwork
from equilibria.models.baselines.resnet import ResNet, resnet, resnet_small
from equilibria.models.contributions import (
    Contributions,
    NoContributionsError,
    contributions,
)
from equilibria.models.few_shot import FewShotClassifier, few_shot_mdeq, few_shot_opteq
from equilibria.models.generators.autoencoders import (
    Autoencoder,
    convolutional_autoencoder,
    mdeq_autoencoder,
)
from equilibria.models.generators.decoders import EquilibriumDecoder, mdeq_decoder, opteq_decoder
from equilibria.models.geq.model import GEQCell, geq
from equilibria.models.mdeq.cell import MDEQCell
from equilibria.models.mdeq.model import mdeq
from equilibria.models.mondeq.model import MonDEQCell, mondeq
from equilibria.models.mopteq.branches import POptEqCell
from equilibria.models.mopteq.cells import MOptEqCell
from equilibria.models.mopteq.models import (
    branch_features,
    heritage_diversity_loss,
    mopteq,
    perturbed_logits,
    popteq,
)
from equilibria.models.non_finite import (
    NonFiniteInputError,
    NonFiniteWeightsWarning,
    finite_samples,
    non_finite_tensors,
)
from equilibria.models.opteq.cells import DeepOptEqCell, OptEqCell, UnitLayer
from equilibria.models.opteq.models import (
    EquilibriumSegmenter,
    deep_opteq,
    deep_opteq_segmentation,
    equilibrium_segmenter,
    opteq,
    opteq_imagenet,
)
from equilibria.models.opteq.spaces import opteq_cell
from equilibria.models.pretrained import PretrainedCard, pretrained_cards, pretrained_file
from equilibria.models.reflection.model import (
    ReflectionCell,
    ReflectionNetwork,
    reflection_network,
)
from equilibria.models.registry import (
    ModelDescription,
    create_model,
    describe_model,
    list_models,
    model_card,
    model_options,
    model_outline,
    nearest_width,
    parameter_count,
    register_model,
    register_presets,
)
from equilibria.models.restorers.model import EquilibriumRestorer, deq_restorer
from equilibria.models.restorers.photo import photo_denoiser, photo_prior

__all__ = [
    "Autoencoder",
    "Contributions",
    "DeepOptEqCell",
    "EquilibriumClassifier",
    "EquilibriumDecoder",
    "EquilibriumModel",
    "EquilibriumRestorer",
    "EquilibriumSegmenter",
    "FewShotClassifier",
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
    "ReflectionNetwork",
    "ResNet",
    "UnitLayer",
    "branch_features",
    "contributions",
    "convolutional_autoencoder",
    "create_model",
    "deep_opteq",
    "deep_opteq_segmentation",
    "deq_restorer",
    "describe_model",
    "equilibrium_segmenter",
    "few_shot_mdeq",
    "few_shot_opteq",
    "finite_samples",
    "geq",
    "heritage_diversity_loss",
    "image_classifier",
    "images_of",
    "list_models",
    "mdeq",
    "mdeq_autoencoder",
    "mdeq_decoder",
    "model_card",
    "model_options",
    "model_outline",
    "mondeq",
    "mopteq",
    "nearest_width",
    "non_finite_tensors",
    "opteq",
    "opteq_cell",
    "opteq_decoder",
    "opteq_imagenet",
    "parameter_count",
    "perturbed_logits",
    "photo_denoiser",
    "photo_prior",
    "popteq",
    "predicted_classes",
    "pretrained_cards",
    "pretrained_file",
    "reflection_network",
    "register_model",
    "resnet_small",
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
    "geq": (geq,),
    "mdeq": (mdeq, few_shot_mdeq),
    "mondeq": (mondeq,),
    "mopteq": (popteq, mopteq),
    "opteq": (opteq, deep_opteq, opteq_imagenet, deep_opteq_segmentation, few_shot_opteq),
    "reflection": (reflection_network,),
    "restorers": (deq_restorer, photo_denoiser),
}.items():
    register_presets(_family, *_factories)
