"""Reflections with orthonormal rows, whose equilibrium has a closed form, on vectors and patches.

If QQᵀ = I, the minimizer of ½‖z − u‖² + ½ω‖σ(Qz + b)‖² with σ = ReLU is

    z = u − ω/(1 + ω) Qᵀσ(Qu + b)

(docs/mathematics.md). Its reflection 2z − u mirrors u at each of the half spaces ⟨q_i, z⟩ + b_i > 0
that contain it, with the factor (1 − ω)/(1 + ω), which tends to −1 for large ω.

On maps, Q acts on patches: vectors of the numbers in non-overlapping squares. Shifting the maps
between two layers lets the next squares overlap the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.energies import Input
from equilibria.energies.convex_potential import ConvexPotential
from equilibria.equilibrium import EnergyCell, EquilibriumLayer, Solving
from equilibria.models.reflection.cell import ReflectionCell
from equilibria.models.reflection.model import Isometry, ReflectionNetwork, UnitHead
from equilibria.operators import Dense, Identity
from equilibria.registry import check_at_least_one, check_positive


class OrthonormalReflectionCell(ReflectionCell):
    """Reflection 2z − u with z = u − ωQᵀσ(Qz + b) and orthonormal rows Q, in closed form.

    The step is damped by 1/(1 + ω), which makes its first image of u the equilibrium.

    Args:
        features: Length of u.
        rows: Number of rows of Q, at most `features`.
        bias: The bias b, or whether there is a trainable one.
        weight: Weight ω of the potential ½‖σ(Qz + b)‖². The larger it is, the more completely a
            half space is mirrored.

    Examples:
        >>> from equilibria.models.reflection.orthonormal import OrthonormalReflectionCell
        >>> layer = eq.EquilibriumLayer(cell=OrthonormalReflectionCell(4, 2))
        >>> layer(torch.ones(1, 4)).norm() <= 2  # norms are preserved up to the bias
        tensor(True)
    """

    def __init__(
        self, features: int, rows: int, *, bias: bool | Tensor = True, weight: float = 100.0
    ) -> None:
        check_positive(weight=weight)
        rotation = Dense(features, rows, norm="orthonormal", zeta=1.0)
        nn.init.orthogonal_(rotation.kernel)
        potential = ConvexPotential(rotation, bias, "relu")
        energy = Input(Identity(), bias=False) + weight * potential
        EnergyCell.__init__(self, energy, "identity", damping=1 / (1 + weight))
        self.weight = weight

    def closed_form(self, context: Context) -> State:
        """Return the equilibrium u − ω/(1 + ω) Qᵀσ(Qu + b).

        Args:
            context: Result of `inject`, which contains u.
        """
        u, part = context.parts["input"]["c"], context.parts["convex_potential"]
        ridge = self.ridge
        active = ridge.activation(ridge.lifted(u, part))
        pull = ridge.W.adjoint(active, part.weights("W"))
        return torch.sub(u, pull, alpha=self.weight / (1 + self.weight))

    @property
    def ridge(self) -> ConvexPotential:
        """The potential 1ᵀS(Qz + b), before it is multiplied by ω."""
        scaled = self.energy["convex_potential"]  # type: ignore[index]
        term = scaled.term
        assert isinstance(term, ConvexPotential)
        return term


class Patches(nn.Module):
    """Rearrangement of maps as one vector per square, after a cyclic shift; an isometry.

    Args:
        side: Side of the squares.
        shift: Number of pixels by which the maps are moved up and to the left first.
    """

    def __init__(self, side: int, shift: int = 0) -> None:
        super().__init__()
        check_at_least_one(side=side)
        self.side = side
        self.shift = shift

    def forward(self, maps: Tensor) -> Tensor:
        batch, channels, height, width = maps.shape
        k = self.side
        pixels = maps.permute(0, 2, 3, 1)  # channels last: whole runs of numbers are moved
        if self.shift:
            pixels = torch.roll(pixels, (-self.shift, -self.shift), (1, 2))
        split = pixels.reshape(batch, height // k, k, width // k, k, channels)
        return split.transpose(2, 3).reshape(batch, -1, k * k * channels)

    def extra_repr(self) -> str:
        return f"side={self.side}, shift={self.shift}"


class Maps(nn.Module):
    """Inverse of `Patches` without a shift.

    Args:
        side: Side of the squares.
        height, width: Size of the maps.
    """

    def __init__(self, side: int, height: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.height = height
        self.width = width

    def forward(self, patches: Tensor) -> Tensor:
        k, rows, columns = self.side, self.height // self.side, self.width // self.side
        batch = patches.shape[0]
        split = patches.reshape(batch, rows, columns, k, k, -1).transpose(2, 3)
        return split.reshape(batch, self.height, self.width, -1).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"side={self.side}, height={self.height}, width={self.width}"


def orthonormal_network(
    *,
    image_size: int = 28,
    stages: Sequence[tuple[int, int, int]] = (),
    units: Sequence[int] = (256,),
    center: float = 0.0,
    weight: float = 100.0,
    num_classes: int = 10,
    in_channels: int = 3,
    solving: Solving | None = None,
) -> ReflectionNetwork:
    """Build a 1-Lipschitz classifier of orthonormal reflections of patches, then of vectors.

    Each stage turns squares of 2×2 pixels into channels and applies reflections of patches. From
    one to the next the maps are shifted by half a patch.

    Args:
        image_size: Side of the images.
        stages: Side of the patches, rows per reflection, and number of reflections of every stage.
        units: Rows of each reflection of the whole image.
        center: Number subtracted from every pixel, such as the mean of all pixels.
        weight: Weight ω of the potentials (see `OrthonormalReflectionCell`).
        num_classes: Number of classes.
        in_channels: Channels of the images.
        solving: How the layers solve, if they do not use the closed form.

    Raises:
        ValueError: If sizes do not fit each other, or there is no reflection.

    Examples:
        >>> from equilibria.models.reflection.orthonormal import orthonormal_network
        >>> model = orthonormal_network(image_size=8, stages=[(2, 8, 2)], units=(16,))
        >>> model(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 10])
    """
    check_at_least_one(image_size=image_size)
    if not stages and not units:
        raise ValueError("stages and units are both empty; a reflection network needs one of them")

    def reflection(features: int, rows: int) -> EquilibriumLayer:
        cell = OrthonormalReflectionCell(features, rows, weight=weight)
        return EquilibriumLayer(cell, solving=solving)

    layers: list[nn.Module] = [
        Isometry(in_channels, None, 2 if stages else 1, flatten=not stages, center=center)
    ]
    channels, side = in_channels, image_size
    for index, (patch, rows, count) in enumerate(stages):
        channels, side = 4 * channels, side // 2
        if image_size % 2 ** (index + 1) or side % patch:
            raise ValueError(
                f"image_size must be divisible by {2 ** (index + 1) * patch} for stage {index + 1} "
                f"with patches of side {patch}, got {image_size}"
            )
        if index:
            layers.append(nn.PixelUnshuffle(2))
        for place in range(count):
            shift = patch // 2 if place else 0
            layers += [
                Patches(patch, shift),
                reflection(channels * patch**2, rows),
                Maps(patch, side, side),
            ]
    features = channels * side**2
    if stages and units:
        layers.append(nn.Flatten())
    layers += [reflection(features, count) for count in units]
    if not units:  # the network ends with a reflection
        layers.pop()
    *first, last = layers
    assert isinstance(last, EquilibriumLayer)
    return ReflectionNetwork(nn.Sequential(*first), last, UnitHead(features, num_classes))
