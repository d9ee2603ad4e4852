"""Searches for counterexamples to what models claim, for every preset and option.

Claims are the bound on the contraction factor, uniqueness, the objective and its gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.context import Context, State
from equilibria.context.state import Packing, state_tensors
from equilibria.equilibrium import NoObjectiveError, Objective
from equilibria.equilibrium.capabilities import closed_form, formula, guarantee
from equilibria.models import EquilibriumModel
from equilibria.models.mopteq.cells import LiftedObjective
from equilibria.models.opteq.cells import DeepOptEqObjective
from equilibria.models.registry import model_outline
from tests.models.small import SHRUNK

pytestmark = pytest.mark.filterwarnings(
    "ignore::equilibria.ConvergenceWarning", "ignore::equilibria.equilibrium.BatchCouplingWarning"
)

REGULARIZERS = ["l1", "l2", "incay", "decorrelation", "hsic"]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "opteq-small": [
        *({"space": space, "alpha": alpha} for space in "yz" for alpha in (1.0, 0.4)),
        *({"activation": name} for name in ("tanh", "softplus", "leaky_relu", "sigmoid")),
        {"mu": 2.0, "zeta": 1.3},
        {"norm": "estimate"},
        {"norm": None, "init_scale": 3.0},
    ],
    "deep-opteq-small": [
        *({"widths": widths} for widths in ((4,), (4, 3), (4, 3, 2))),
        {"widths": (4,), "alpha": 1.0},
        {"learnable_alpha": True},
        {"norm": None, "init_scale": 3.0},
        *(
            {"regularizer": name, "gamma": 0.05, "placement": placement, "widths": widths}
            for name in REGULARIZERS
            for placement in ("exact", "paper")
            for widths in ((4,), (4, 3), (4, 3, 2))
        ),
    ],
    "popteq-small": [{}, {"alpha": 0.5}, {"scales": (1, 2, 2)}],
    "mopteq-small": [
        *(
            {"sign": sign, "space": space, "heritage": heritage, "diversity": diversity}
            for sign in ("smooth", "freeze", "hard")
            for space in "yz"
            for heritage in (True, False)
            for diversity in (0.0, 0.05)
        ),
        {"scales": (1, 2, 1), "sign": "freeze"},
        *({"pe": "always", "space": space, "diversity": 0.0} for space in "yz"),
        *({"kernel": kernel, "diversity": 0.0} for kernel in ("polynomial", "sigmoid")),
    ],
    "geq-small": [
        *({"gamma": gamma} for gamma in ("running", "per-sample", "paper", 0.05, 50.0)),
        {"hidden": None},
        {"hidden": None, "patch": None},
        {"damping": 0.5},
        {"zeta": 1.3, "damping": 0.3},
        {"norm": None, "init_scale": 3.0},
        *({"kernel": "polynomial", "degree": degree} for degree in (1, 2, 3)),
        *({"kernel": kernel, "form": "printed"} for kernel in ("polynomial", "sigmoid")),
        {"kernel": "sigmoid"},
    ],
    "mondeq-small": [
        {},
        {"splitting": "forward-backward"},
        {"step_size": 0.3},
        {"activation": "soft_threshold"},
    ],
    "mondeq-multi-small": [{}, {"splitting": "forward-backward"}],
    "mdeq-small": [{}],
    "opteq-decoder": [{}],
    "few-shot-opteq": [{}],
    "deq-restorer": [{}, {"weight": 20.0}, {"factor": 2}],
}
PRESETS = [
    name
    for name in eq.list_models()
    if name not in OPTIONS
    and "imagenet" not in name
    and isinstance(model_outline(name), EquilibriumModel)
]
CASES = [
    *((name, options) for name, several in OPTIONS.items() for options in several),
    *((name, {}) for name in PRESETS),
]
cases = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=["-".join([n, *map(str, o.values())]) for n, o in CASES]
)


def small_model(name: str, options: dict[str, Any]) -> tuple[EquilibriumModel, tuple[Tensor, ...]]:
    """Build a small model in double precision and training mode, and inputs of its layer."""
    preset = eq.models.model_options(name)
    defaults = {key: value for key, value in preset.items() if value is not None}
    shrunk = {key: SHRUNK[key](value) for key, value in defaults.items() if key in SHRUNK}
    if name.startswith("reflection"):
        shrunk = {"units": (5,), "zeta": 2.0} | ({"filters": (5,)} if preset.get("filters") else {})
        if "stages" in preset:
            shrunk = {"units": (5,), "weight": 2.0, "stages": [(4, 5, 1) for _ in preset["stages"]]}
    shrunk |= {key: 2 for key in ("head_channels", "final_channels") if key in preset}
    if "kernel" in options and name.startswith("geq"):
        del shrunk["channel_split"], shrunk["hidden"]  # options of the Gaussian kernel only
    if "init_scale" in preset:
        shrunk["init_scale"] = 1.5
    if name == "few-shot-opteq":
        shrunk |= {"num_classes": 3, "task_size": 6, "stem_depth": 1}
    if name == "photo-denoiser":
        shrunk |= {"kernel_size": 7, "steepness": 10.0}
    torch.manual_seed(0)
    limits = {"tolerance": 1e-12, "max_iterations": 300}
    model = eq.create_model(name, **{**shrunk, **limits, **options}).double()
    assert isinstance(model, EquilibriumModel)
    size = preset.get("image_size") or 8
    shape = (model.latent_dim,) if "decoder" in name else (preset["in_channels"], size, size)
    inputs = model.injected(torch.randn(3, *shape, dtype=torch.float64))
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    return model, tuple(tensor.detach() for tensor in inputs)


class Map:
    """Map of a solved layer on packed states: one row per sample, or one for a coupled batch."""

    def __init__(self, model: EquilibriumModel, inputs: tuple[Tensor, ...]) -> None:
        self.cell = model.layer.cell
        # The jitter of orthonormal rows limits the precision of closed forms.
        self.solver = None if closed_form(self.cell) is None else "picard"
        self.solution = model.layer.solve(inputs, solver=self.solver)
        self.context: Context = self.solution.context
        self.packing = Packing.of(self.solution.state, self.cell.couples_batch)
        self.equilibrium = self.packing.pack(self.solution.state)
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        return self.packing.pack(self.cell.step(self.packing.unpack(rows), self.context))

    def random(self, scale: float) -> Tensor:
        like = self.equilibrium
        return scale * torch.randn(like.shape, generator=self.generator, dtype=like.dtype)

    def expansion(self, a: Tensor, change: Tensor) -> Tensor:
        """Return ‖T(a + change) − T(a)‖ / ‖change‖ per row."""
        return (self(a + change) - self(a)).norm(dim=1) / change.norm(dim=1)

    def largest_expansion(self, steps: int) -> Tensor:
        """Maximize the expansion by a random search from states of several sizes.

        Each step tries one of three proposals in turn: the image of the direction (the power method
        if the Jacobian is symmetric), another state, or a perturbed direction. The step size of
        states grows after a success and shrinks after a failure.
        """
        best = torch.zeros_like(self.equilibrium[:, 0])
        for size in (0.1, 1.0, 10.0):
            a, change = self.equilibrium + self.random(size), with_norm(self.random(1.0))
            largest, step_size = self.expansion(a, change), torch.full_like(best, size)
            for step in range(steps):
                state, direction = a, change
                if step % 3 == 0:
                    direction = with_norm(self(a + change) - self(a))
                elif step % 3 == 1:
                    state = a + step_size[:, None] * with_norm(self.random(1.0), 1.0)
                else:
                    direction = with_norm(change + with_norm(self.random(1.0)))
                proposed = self.expansion(state, direction)
                better = proposed > largest
                a = state.where(better[:, None], a)
                change = direction.where(better[:, None], change)
                largest = torch.where(better, proposed, largest)
                if step % 3 == 1:
                    step_size = torch.where(better, 1.5 * step_size, 0.9 * step_size)
            best = torch.maximum(best, largest)
        return best


def with_norm(rows: Tensor, length: float = 1e-4) -> Tensor:
    return length * rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)


@cases
@pytest.mark.parametrize("steps", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_no_pair_of_states_violates_the_contraction_bound(
    name: str, options: dict[str, Any], steps: int
) -> None:
    model, inputs = small_model(name, options)
    bound, limit = model.layer.contraction_bound(inputs), model.layer.cell.limits.contraction
    if bound is None:
        assert limit is None
        return
    expansion = Map(model, inputs).largest_expansion(steps)
    assert (expansion <= bound * (1 + 1e-9) + 1e-9).all(), f"{expansion} > {bound}"
    assert limit is None or (bound <= limit * (1 + 1e-9) + 1e-9).all()


@cases
def test_unique_equilibria_do_not_depend_on_the_start(name: str, options: dict[str, Any]) -> None:
    model, inputs = small_model(name, options)
    if "unique" not in (guarantee(model.layer.cell) or ""):
        return
    step = Map(model, inputs)
    assert step.solution.converged.all()
    for size in (1.0, 30.0):
        start = step.packing.unpack(step.random(size))
        other = step.packing.pack(model.layer.solve(inputs, start, solver=step.solver).state)
        torch.testing.assert_close(other, step.equilibrium, rtol=1e-8, atol=1e-8)


def points(objective: Objective, state: State) -> tuple[Tensor, ...]:
    """Return the variables of `objective.gradient` as functions of the state."""
    if isinstance(objective, DeepOptEqObjective):
        return tuple(block.z for block in objective.blocks(state))
    if isinstance(objective, LiftedObjective):
        return objective.cell.lift(state, objective.context)
    return state_tensors(objective._in_domain(state))  # type: ignore[attr-defined]


@cases
def test_gradient_is_the_derivative_of_the_value(name: str, options: dict[str, Any]) -> None:
    """Compare at an image of the map with autograd, and with a difference (for detached parts)."""
    model, inputs = small_model(name, options)
    try:
        objective = model.layer.objective(inputs)
    except NoObjectiveError:
        assert formula(model.layer.cell) is None
        return
    if not objective.is_minimized:
        text = formula(model.layer.cell)
        assert text is None or "∈" in text
        return
    assert formula(model.layer.cell) is not None
    step = Map(model, inputs)
    rows = step(step.equilibrium + step.random(0.3)).requires_grad_()
    state = step.packing.unpack(rows)
    (slope,) = torch.autograd.grad(objective.value(state).sum(), rows)
    gradients = state_tensors(objective.gradient(state))
    pairs = zip(points(objective, state), gradients, strict=True)
    inner = sum((point * gradient.detach()).sum() for point, gradient in pairs)
    assert isinstance(inner, Tensor)
    (expected,) = torch.autograd.grad(inner, rows)
    # At a kink of the penalty `gradient` is the subgradient of least norm. Objectives of lifted
    # states have no kinks.
    smooth = isinstance(objective, DeepOptEqObjective | LiftedObjective)
    inside = (rows.detach() != 0) | smooth
    torch.testing.assert_close(slope[inside], expected[inside], rtol=1e-6, atol=1e-8)
    rows = rows.detach()
    far = (rows.abs() > 1e-5) | smooth  # from the boundary of the penalty's domain
    direction = torch.where(far, with_norm(step.random(1.0), 1.0), 0.0)
    up, down = (
        objective.value(step.packing.unpack(rows + h * direction)).sum() for h in (1e-6, -1e-6)
    )
    # Units that cross a kink contribute to the difference.
    allowed = 1e-3 * expected.norm() * direction.norm() + 1e-8 * (1 + up.abs())
    assert ((up - down) / 2e-6 - (expected * direction).sum()).abs() < allowed


@cases
def test_equilibrium_is_stationary_and_has_the_least_value_if_unique(
    name: str, options: dict[str, Any]
) -> None:
    model, inputs = small_model(name, options)
    step = Map(model, inputs)
    try:
        objective = model.layer.objective(inputs)
    except NoObjectiveError:
        return
    if not (objective.is_minimized and step.solution.converged.all()):
        return
    state = step.solution.state
    assert (objective.residual(state) < 1e-8).all()
    assert all((part.abs() < 1e-7).all() for part in state_tensors(objective.gradient(state)))
    if "unique" not in (guarantee(model.layer.cell) or ""):
        return
    minimum = objective.value(state)
    for size in (1e-3, 0.03, 1.0, 30.0):
        for _ in range(5):
            other = step.packing.unpack(step(step.equilibrium + step.random(size)))
            assert (objective.value(other) >= minimum - 1e-9 * (1 + minimum.abs())).all()
