"""Public members of cells, and members that are reset with a redefined step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.context import Context
from equilibria.context.state import Packing, state_tensors
from equilibria.equilibrium import NoObjectiveError, capabilities
from equilibria.gradients import Symmetry
from equilibria.gradients.capabilities import linearize, simplify, symmetry_weight
from equilibria.operators import Identity

WEIGHT = 0.6 * torch.eye(2, dtype=torch.float64)


def energy() -> eq.Energy:
    return eq.Input(Identity()) + eq.Quadratic(eq.Dense(2, 2, norm="bound", zeta=0.6)).double()


class Halved(eq.EnergyCell):
    """Takes half the step of its base, which changes the equilibrium."""

    def step(self, state: eq.State, context: Context) -> eq.State:
        image = super().step(state, context)
        assert isinstance(image, Tensor)
        return 0.5 * image


class Declared(Halved):
    """Declares the bounds that still hold."""

    bounds = eq.EnergyCell.bounds
    limits = eq.EnergyCell.limits


class Mixin:
    """Defines a step, but is not a cell."""

    def step(self, state: Tensor, context: Context) -> Tensor:
        return 0.25 * state + context.parts["input"]["c"]


class Mixed(Mixin, eq.EnergyCell):  # type: ignore[misc]
    pass


class Refined(Declared):
    """Inherits the step and its bounds from the same class."""


def test_public_members_of_cell() -> None:
    members = {name for name in vars(eq.Cell) if not name.startswith("_")}
    assert members == {
        "inject",
        "initial_state",
        "step",
        "output",
        "symmetry",
        "couples_batch",
        "remedy",
        "limits",
        "bounds",
        "objective",
        "forward",
    }


@pytest.mark.parametrize("kind", [Halved, Mixed])
def test_redefining_step_resets_all_members_that_describe_it(kind: type[eq.EnergyCell]) -> None:
    cell, x = kind(energy()), torch.ones(1, 2, dtype=torch.float64)
    context = cell.inject(x)
    state = cell.initial_state(x, context)
    layout = Packing.of(state).layout
    assert cell.symmetry is Symmetry.NONE
    assert cell.limits.contraction is None
    assert cell.bounds(context, layout).contraction is None
    assert cell.bounds(context, layout).input is None
    assert not capabilities.is_monotone(cell)
    assert capabilities.first_image(cell, context) is None
    assert capabilities.potential(cell) is None
    assert capabilities.energy_form(cell, state, context) is None
    assert capabilities.rounding(cell, cell, context, layout, 1e-16) is None
    assert capabilities.formula(cell) is None
    assert capabilities.guarantee(cell) is None
    assert eq.EquilibriumLayer(cell=cell).contraction_bound(x) is None
    with pytest.raises(NoObjectiveError):
        cell.objective(context)


@pytest.mark.parametrize("kind", [Halved, Mixed, Declared, Refined])
def test_gradients_are_those_of_the_redefined_step(kind: type[eq.EnergyCell]) -> None:
    cell = kind(energy())
    layer = eq.EquilibriumLayer(
        cell=cell, solver=eq.Picard(tolerance=1e-13), gradient=eq.Implicit(tolerance=1e-12)
    )
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    context = cell.inject(x)
    state = cell.initial_state(x, context)
    assert torch.equal(
        state_tensors(linearize(cell, state, context).image)[0],
        state_tensors(cell.step(state, context))[0],
    )


@pytest.mark.parametrize("kind", [Declared, Refined])
def test_declared_bounds_hold_for_the_class_and_its_subclasses(
    kind: type[eq.EnergyCell],
) -> None:
    cell = kind(energy())
    assert cell.limits.contraction == pytest.approx(0.36)
    assert capabilities.guarantee(cell) == "unique, q ≤ 0.36"


def test_subclasses_with_an_inherited_step_inherit_its_description() -> None:
    class Named(eq.EnergyCell):
        remedy = "none"

    plain, named = eq.EnergyCell(energy()), Named(energy())
    context = plain.inject(torch.ones(1, 2, dtype=torch.float64))
    assert named.symmetry is Symmetry.WEIGHTED
    assert named.limits.contraction == plain.limits.contraction == pytest.approx(0.36)
    assert capabilities.formula(named) == capabilities.formula(plain)
    assert capabilities.potential(named) is not None
    assert capabilities.first_image(named, context) is not None


def test_redefining_start_or_output_resets_first_image_or_output_form() -> None:
    class Elsewhere(eq.EnergyCell):
        def initial_state(self, x: Tensor, *others_and_context: object) -> Tensor:
            return torch.ones_like(x)

    class Doubled(eq.EnergyCell):
        def output(self, state: eq.State, context: Context) -> Tensor:
            assert isinstance(state, Tensor)
            return 2 * state

    class Linear(Doubled):
        output_form = "linear"

    context = Elsewhere(energy()).inject(torch.ones(1, 2, dtype=torch.float64))
    assert capabilities.first_image(Elsewhere(energy()), context) is None
    assert capabilities.output_form(eq.EnergyCell(energy())) == "linear"
    assert capabilities.output_form(Doubled(energy())) == "other"
    assert capabilities.output_form(Linear(energy())) == "linear"


def test_every_capability_has_a_default() -> None:
    class Halving(eq.Cell):
        def inject(self, x: Tensor) -> Context:
            return Context(sample={"x": x})

        def initial_state(self, x: Tensor, context: Context) -> Tensor:
            return torch.zeros_like(x)

        def step(self, state: eq.State, context: Context) -> eq.State:
            assert isinstance(state, Tensor)
            return state / 2 + context["x"]

    cell, x = Halving(), torch.ones(1, 2)
    context = cell.inject(x)
    assert capabilities.refresh_until(cell) == 0
    assert capabilities.refresh(cell, x, context) is context
    assert simplify(cell, context) is context
    assert linearize(cell, x, context).weight is None
    assert capabilities.output_form(cell) == "linear"
    assert not capabilities.is_monotone(cell)
    for absent in (
        capabilities.first_image(cell, context),
        capabilities.potential(cell),
        capabilities.formula(cell),
        capabilities.guarantee(cell),
        capabilities.energy_form(cell, x, context),
        capabilities.rounding(cell, cell, context, ((2,),), 1e-7),
    ):
        assert absent is None
    with pytest.raises(TypeError, match="define symmetry_weight"):
        symmetry_weight(cell, x, context)


def test_steps_replaced_on_an_instance_are_not_bypassed() -> None:
    cell, x = eq.EnergyCell(energy()), torch.ones(1, 2, dtype=torch.float64)
    context, plain = cell.inject(x), cell.step
    cell.step = lambda state, context: plain(state, context)  # type: ignore[method-assign]
    assert capabilities.first_image(cell, context) is None
    assert capabilities.potential(cell) is None
    assert linearize(cell, x, context).argument is None


def test_redefining_step_resets_symmetry_set_on_the_instance() -> None:
    class Skewed(eq.models.DeepOptEqCell):
        def step(self, state: eq.State, context: Context) -> eq.State:
            image = super().step(state, context)
            assert isinstance(image, Tensor)
            return image.flip(1)

    layers = [eq.models.UnitLayer(eq.Dense(2, 3, norm="bound"), eq.Dense(2, 3))]
    assert eq.models.DeepOptEqCell(layers).symmetry is Symmetry.PLAIN
    assert Skewed(layers).symmetry is Symmetry.NONE
    assert not capabilities.is_monotone(Skewed(layers))
