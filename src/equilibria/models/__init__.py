"""The models of the papers, each a short file that reads like its paper."""

from equilibria.models import presets as _presets  # noqa: F401  (registers the named models)
from equilibria.models import presets_few_shot as _few_shot  # noqa: F401
from equilibria.models import presets_generative as _generative  # noqa: F401
from equilibria.models import presets_inverse as _inverse  # noqa: F401
from equilibria.models.autoencoders import Autoencoder, convolutional_autoencoder
from equilibria.models.branches import BranchCell
from equilibria.models.classifier import EquilibriumClassifier
from equilibria.models.decoder import EquilibriumDecoder, mdeq_decoder, opteq_decoder
from equilibria.models.deep_opteq import DeepOptEqCell, DeepOptEqObjective, UnitLayer, deep_opteq
from equilibria.models.description import ModelDescription, describe_model
from equilibria.models.fcn import (
    FCN,
    FCNHead,
    fcn,
)
from equilibria.models.geq import GEQCell, geq
from equilibria.models.hrnet import HRNet, hrnet
from equilibria.models.mdeq import MDEQCell, mdeq
from equilibria.models.mondeq import MonDEQCell, mondeq
from equilibria.models.mopteq import heritage_diversity_loss, mopteq, perturbed_logits
from equilibria.models.mopteq_cell import MOptEqCell, reconstructed_perturbations
from equilibria.models.mopteq_feature_space import MOptEqFeatureCell
from equilibria.models.neural_ode import NeuralODE, neural_ode
from equilibria.models.opteq import OptEqCell, opteq, opteq_cell
from equilibria.models.opteq_imagenet import opteq_imagenet, resnet_extractor_classifier
from equilibria.models.plain_network import PlainNetwork, plain_network
from equilibria.models.popteq import POptEqCell, popteq
from equilibria.models.registry import (
    ModelCard,
    create_model,
    list_models,
    model_card,
    model_options,
    model_outline,
    parameter_count,
    register_model,
)
from equilibria.models.resnet import ResNet, resnet, resnet_extractor, resnet_of_size, resnet_small
from equilibria.models.segmentation import (
    EquilibriumSegmenter,
    deep_opteq_segmentation,
    equilibrium_segmenter,
)
from equilibria.models.table1 import AffineOptEqCell, MultivariateOptEqCell, psd_factor
from equilibria.models.theory import (
    ProximalReport,
    deep_opteq_of_network,
    is_proximal,
    universal_hidden_units,
)

__all__ = [
    "FCN",
    "AffineOptEqCell",
    "Autoencoder",
    "BranchCell",
    "DeepOptEqCell",
    "DeepOptEqObjective",
    "EquilibriumClassifier",
    "EquilibriumDecoder",
    "EquilibriumSegmenter",
    "FCNHead",
    "GEQCell",
    "HRNet",
    "MDEQCell",
    "MOptEqCell",
    "MOptEqFeatureCell",
    "ModelCard",
    "ModelDescription",
    "MonDEQCell",
    "MultivariateOptEqCell",
    "NeuralODE",
    "OptEqCell",
    "POptEqCell",
    "PlainNetwork",
    "ProximalReport",
    "ResNet",
    "SegmentationStem",
    "UnitLayer",
    "convolutional_autoencoder",
    "create_model",
    "deep_opteq",
    "deep_opteq_of_network",
    "deep_opteq_segmentation",
    "describe_model",
    "equilibrium_segmenter",
    "fcn",
    "geq",
    "heritage_diversity_loss",
    "hrnet",
    "is_proximal",
    "list_models",
    "mdeq",
    "mdeq_decoder",
    "model_card",
    "model_options",
    "model_outline",
    "mondeq",
    "mopteq",
    "neural_ode",
    "opteq",
    "opteq_cell",
    "opteq_decoder",
    "opteq_imagenet",
    "parameter_count",
    "perturbed_logits",
    "plain_network",
    "popteq",
    "psd_factor",
    "reconstructed_perturbations",
    "register_model",
    "resnet",
    "resnet_extractor",
    "resnet_extractor_classifier",
    "resnet_of_size",
    "resnet_small",
    "universal_hidden_units",
]
