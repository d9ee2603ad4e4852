"""The named models that the papers compare with, all without an equilibrium."""

from __future__ import annotations

from equilibria.models.baselines.fcn import fcn
from equilibria.models.baselines.hrnet import HRNet
from equilibria.models.baselines.neural_ode import NeuralODE
from equilibria.models.baselines.plain import Conv4, DnCNN, PlainNetwork
from equilibria.models.baselines.resnet import resnet, resnet_extractor_classifier, resnet_small
from equilibria.models.registry import ModelCard, register_models

IMAGENET = dict(num_classes=1000)

register_models(
    PlainNetwork,
    {
        "dnn-small": ModelCard(
            "Plain network without shared weights, the counterpart of deep-opteq-small",
            "OptEq Eq. 1",
        ),
        # Table 3's widths with 3×3 kernels between them have 285 k parameters; these have its
        # 199 k.
        "dnn-199k": ModelCard(
            "Plain network without shared weights (CIFAR-10)",
            "OptEq T3",
            "199 k",
            dict(channels=48, widths=(16, 32, 64, 96, 96), stem_depth=2, pool=1, bias=False),
        ),
    },
)
register_models(
    fcn,
    {
        "fcn-segmentation": ModelCard(
            "FCN of the size of deep-opteq-segmentation",
            "OptEq T10",
            options=dict(num_classes=11, parameters=45_403),
        ),
    },
)
register_models(
    Conv4,
    {
        "conv4": ModelCard("four strided convolutions, the network of MAML (Omniglot)", "JIIO T6"),
    },
)
register_models(
    DnCNN,
    {
        "dncnn": ModelCard(
            "Restores images: a plain network that predicts the noise", "Zhang et al., 2017"
        ),
    },
)
register_models(
    NeuralODE,
    {
        "node-small": ModelCard("Neural ODE, images of 8×8 to 32×32", "Chen et al., 2018"),
        "anode-small": ModelCard(
            "Augmented Neural ODE, images of 8×8 to 32×32",
            "Dupont et al., 2019",
            options=dict(augment=5),
        ),
        "node-172k": ModelCard(
            "Neural ODE (CIFAR-10)",
            "OptEq T4; MOptEqs T1a",
            "172 k",
            dict(filters=125, pool=32, time_dependent=False),
        ),
        "anode-172k": ModelCard(
            "Augmented Neural ODE (CIFAR-10)",
            "OptEq T4; MOptEqs T1a",
            "172 k",
            dict(filters=64, augment=10, pool=32, time_dependent=False),
        ),
    },
)
register_models(
    resnet_small,
    {
        "resnet-small": ModelCard(
            "Residual network of three stages, images of 8×8 to 32×32", "He et al., 2016"
        ),
    },
)
CIFAR_RESNETS = {18: ("GEQ T1; MOptEqs T1b", "10 M"), 50: ("GEQ T1", "23 M")}
IMAGENET_RESNETS = {
    18: ("OptEq T7; GEQ T2", "13 M"),
    34: ("OptEq T7", "21 M"),
    50: ("OptEq T7; GEQ T2", "26 M"),
    101: ("OptEq T7", "52 M"),
}
register_models(
    resnet,
    {
        f"resnet-{depth}": ModelCard(
            f"ResNet-{depth} in the form for CIFAR", paper, reported, dict(depth=depth)
        )
        for depth, (paper, reported) in CIFAR_RESNETS.items()
    }
    | {
        f"resnet-{depth}-imagenet": ModelCard(
            f"ResNet-{depth} in the form for ImageNet",
            paper,
            reported,
            dict(depth=depth, form="imagenet", **IMAGENET),
        )
        for depth, (paper, reported) in IMAGENET_RESNETS.items()
    }
    | {
        "wide-resnet-50-imagenet": ModelCard(
            "Wide-ResNet-50-2",
            "OptEq T7",
            "69 M",
            dict(depth=50, widening=2, form="imagenet", **IMAGENET),
        ),
    },
)
register_models(
    resnet_extractor_classifier,
    {
        "resnet-50-extractor-imagenet": ModelCard(
            "Two stages of ResNet-50 and the classifier of deep-opteq-imagenet-small",
            "OptEq T7",
            "11 M",
            IMAGENET,
        ),
        "wide-resnet-50-extractor-imagenet": ModelCard(
            "Two stages of Wide-ResNet-50 and the classifier of deep-opteq-imagenet-mid",
            "OptEq T7",
            "27 M",
            dict(widening=2, **IMAGENET),
        ),
    },
)
register_models(HRNet, {"hrnet-w18-imagenet": ModelCard("HRNet-W18", "OptEq T7", "21 M", IMAGENET)})
