"""Reasoners: the fixed point of a learned map is the solution of a puzzle.

The map acts locally, and a larger puzzle takes more iterations. It is not a contraction: random
starts and noise in training make its fixed point independent of the start.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.context import Context
from equilibria.equilibrium import Cell, EquilibriumLayer, Solving
from equilibria.models.base import EquilibriumModel
from equilibria.models.blocks import ImageLayers
from equilibria.registry import check_at_least_one


class ConvReasonerCell(Cell):
    """Cell z = tanh(z + B·relu(A·z + U·x)) with convolutions A, B and U.

    Args:
        in_channels: Channels of the input x.
        channels: Channels of the state z.
        hidden: Channels between A and B; by default `channels`.
        kernel_size: Side of the kernels, an odd number.

    Examples:
        >>> from equilibria.models.reasoner.model import ConvReasonerCell
        >>> layer = eq.EquilibriumLayer(ConvReasonerCell(3, 8), tolerance=0.1)
        >>> layer.solve(torch.rand(1, 3, 5, 7)).state.shape
        torch.Size([1, 8, 5, 7])
    """

    remedy = (
        "raise max_iterations, which must grow with the size of the input, or train for longer "
        "with random starts"
    )

    def __init__(
        self, in_channels: int, channels: int, hidden: int | None = None, kernel_size: int = 3
    ) -> None:
        super().__init__()
        hidden = channels if hidden is None else hidden
        check_at_least_one(channels=channels, hidden=hidden)
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd and positive, got {kernel_size}")
        padding = kernel_size // 2
        self.channels = channels
        self.A = nn.Conv2d(channels, hidden, kernel_size, padding=padding)
        self.B = nn.Conv2d(hidden, channels, kernel_size, padding=padding)
        self.U = nn.Conv2d(in_channels, hidden, kernel_size, padding=padding)

    def inject(self, x: Tensor) -> Context:
        return Context(sample={"Ux": self.U(x)})

    def initial_state(self, x: Tensor, context: Context) -> Tensor:
        like = context["Ux"]
        if like.shape[1] == self.channels:
            return torch.zeros_like(like)
        return like.new_zeros(len(like), self.channels, *like.shape[2:])

    def step(self, state: Any, context: Context) -> Tensor:
        return torch.tanh(state + self.B(F.relu(self.A(state) + context["Ux"])))


def conv_reasoner(
    *,
    num_classes: int = 2,
    in_channels: int = 3,
    channels: int = 32,
    hidden: int | None = None,
    kernel_size: int = 3,
    solving: Solving | None = None,
) -> EquilibriumModel:
    """Build a convolutional reasoner: logits of every pixel, for images of any size.

    Args:
        num_classes: Number of classes of a pixel.
        in_channels: Channels of the images.
        channels: Channels of the state.
        hidden: Channels between the two convolutions of the map; by default `channels`.
        kernel_size: Side of the kernels, an odd number.
        solving: How the layer solves.

    Examples:
        >>> model = eq.create_model("conv-reasoner", tolerance=0.1).eval()
        >>> solution = model.solve(torch.rand(1, 3, 11, 11), starts=2)
        >>> model.output(solution).shape
        torch.Size([1, 2, 11, 11])
    """
    cell = ConvReasonerCell(in_channels, channels, hidden, kernel_size)
    layer = EquilibriumLayer(cell, solving=solving)
    return EquilibriumModel(ImageLayers(in_channels), layer, nn.Conv2d(channels, num_classes, 1))
