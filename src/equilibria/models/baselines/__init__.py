"""What the papers compare with: networks without an equilibrium."""

from equilibria.models.baselines.fcn import fcn
from equilibria.models.baselines.hrnet import HRNet
from equilibria.models.baselines.neural_ode import NeuralODE
from equilibria.models.baselines.plain import Conv4, DnCNN, PlainNetwork
from equilibria.models.baselines.resnet import resnet, resnet_small
from equilibria.models.registry import register_presets

register_presets(
    __name__,
    PlainNetwork,
    fcn,
    Conv4,
    DnCNN,
    NeuralODE,
    resnet_small,
    resnet,
    HRNet,
)
