"""`eq.compile`: the results, gradients and statuses of eager solves, and what runs eagerly."""

from __future__ import annotations

import copy
import pickle
import shutil
import warnings

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from benchmarks.synchronization import compiled_synchronizations
from equilibria.compiled import CompileWarning

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="no C++ compiler is installed",
)


@eq.energy_term(convex=True)
def smoothness(y: Tensor, x: Tensor) -> Tensor:
    return (y[:, 1:] - y[:, :-1]).square().sum(dim=1)


def energy_layer() -> eq.EquilibriumLayer:
    torch.manual_seed(0)
    U, W = eq.Dense(4, 6), eq.Dense(5, 6, norm="bound", zeta=0.8)
    energy = eq.Input(U) + eq.Quadratic(W) + 0.1 * smoothness
    return eq.EquilibriumLayer(energy, tolerance=1e-10, max_iterations=500).double()


class Tanh(nn.Module):
    """A map without symmetry."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.A, self.B = nn.Linear(6, 6), nn.Linear(4, 6)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(0.9 * self.A(z) + self.B(x))
        return result


def map_layer() -> eq.EquilibriumLayer:
    cell = eq.equilibrium.FunctionCell(Tanh(), state_shape=(6,))
    return eq.EquilibriumLayer(cell, tolerance=1e-10, max_iterations=500).double()


def gradients(model: nn.Module, layer: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    output = model(x)
    weights = torch.linspace(-1, 1, output.shape[1], dtype=output.dtype)
    loss = (output * weights).sum(dim=1).square().sum()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return output.detach(), list(torch.autograd.grad(loss, [x, *parameters]))


@pytest.mark.parametrize("make", [energy_layer, map_layer])
def test_results_and_gradients_are_those_of_the_eager_layer(make) -> None:  # type: ignore[no-untyped-def]
    layer = make()
    fast = eq.compile(layer)
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    output, expected = gradients(layer, layer, x)
    result, computed = gradients(fast, layer, x)
    torch.testing.assert_close(result, output, rtol=1e-8, atol=1e-8)
    for mine, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-7)
    assert layer.last_backward is not None
    assert layer.last_backward.method == "compiled"
    assert layer.last_solution is not None
    assert bool(layer.last_solution.converged.all())
    assert [c.kind for c in fast.compilations] == ["forward", "backward"]

    # Parameters that change in place, as by an optimizer, are followed without a new graph.
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.9)
    output, expected = gradients(layer, layer, x)
    result, computed = gradients(fast, layer, x)
    torch.testing.assert_close(result, output, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(computed, expected, rtol=1e-7, atol=1e-7)
    assert len(fast.compilations) == 2


def test_one_graph_serves_neighboring_batch_sizes_with_equal_results() -> None:
    layer = map_layer().eval()
    fast = eq.compile(layer)
    x = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for samples in (32, 31, 29):
            torch.testing.assert_close(fast(x[:samples]), layer(x[:samples]), rtol=1e-8, atol=1e-8)
            assert layer.last_solution is not None
            assert len(layer.last_solution.status) == samples
    assert [c.kind for c in fast.compilations] == ["model"]
    assert [c.samples for c in fast.compilations] == [32]


def test_samples_that_do_not_converge_have_the_eager_status_and_warning() -> None:
    def growing(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x > 0, z + x, z / 2 + x)

    x = torch.tensor([[1.0], [-1.0]])
    layer = eq.EquilibriumLayer(growing).eval()
    with pytest.warns(eq.ConvergenceWarning, match="1 of 2 samples"):
        output = eq.compile(layer)(x)
    assert layer.last_solution is not None
    assert layer.last_solution.converged.tolist() == [False, True]
    assert float(output[1]) == pytest.approx(-2, abs=1e-2)


def test_a_map_that_reads_values_runs_eagerly_and_names_the_line() -> None:
    def branching(z: Tensor, x: Tensor) -> Tensor:
        return z / 2 + x if float(x.sum()) > 0 else z / 3 + x

    layer = eq.EquilibriumLayer(branching).eval()
    x = torch.ones(2, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = eq.compile(layer)(x)
    messages = [str(w.message) for w in caught if w.category is CompileWarning]
    assert any("z / 2 + x if float" in message for message in messages), messages
    torch.testing.assert_close(result, layer(x))


def test_a_replaced_captured_tensor_is_seen() -> None:
    weight = torch.tensor(0.5)
    layer = eq.EquilibriumLayer(lambda z, x: weight * z + x, tolerance=1e-6).eval()
    fast = eq.compile(layer)
    x = torch.ones(1, 1, requires_grad=True)  # with gradients, the layer is compiled on its own
    assert float(fast(x).detach()) == pytest.approx(2, abs=1e-4)
    for value in (0.75, 0.25, 0.5):
        weight = torch.tensor(value)
        assert float(fast(x).detach()) == pytest.approx(1 / (1 - value), abs=1e-4)


def test_a_trained_model_is_one_graph_and_keeps_its_answers() -> None:
    model = eq.load("digits-opteq")
    images = eq.data.load_digits().test.images[:8]
    fast = eq.compile(model)
    with torch.no_grad(), eq.solving(model, tolerance=1e-6):
        expected = model(images)
    with torch.no_grad():
        torch.testing.assert_close(fast(images), expected, rtol=1e-2, atol=1e-2)
        assert [c.kind for c in fast.compilations] == ["model"]
        broken = images.clone()
        broken[1] = torch.nan
        with pytest.warns(eq.ConvergenceWarning, match="1 of 8 samples"):
            output = fast(broken)
        assert bool(output[1].isnan().all())
        torch.testing.assert_close(output[2:], expected[2:], rtol=1e-2, atol=1e-2)
        # Norm-controlled weights are computed anew after a change.
        model.layer.cell.energy["quadratic"].W.kernel.mul_(1e-3)
        with eq.solving(model, tolerance=1e-6):
            changed = model(images)
        torch.testing.assert_close(fast(images), changed, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(changed, expected, atol=0.1)


def test_a_model_with_a_part_in_training_mode_is_not_one_graph() -> None:
    model = eq.models.EquilibriumModel(nn.Dropout(1.0), map_layer(), nn.Identity()).eval()
    fast = eq.compile(model)
    model.stem.train()
    x = torch.ones(2, 4, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-8, atol=1e-8)
    assert [c.kind for c in fast.compilations] == ["forward"]


def test_a_compiled_model_has_the_attributes_and_state_dict_of_the_model() -> None:
    model = eq.create_model("opteq-small", in_channels=1)
    fast = eq.compile(model)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert fast.layer is model.layer
    assert eq.compile(fast) is fast
    fast.eval()
    assert not model.training


def test_a_compiled_model_can_be_copied_and_pickled() -> None:
    fast = eq.compile(map_layer().eval())
    x = torch.ones(2, 4, dtype=torch.float64)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert other.model is not fast.model
        assert other.compilations == []
        torch.testing.assert_close(other.model(x), fast.model(x))


def test_a_compiled_call_synchronizes_once_per_iteration_and_for_its_summary() -> None:
    layer = map_layer().eval()
    fast = eq.compile(layer)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        fast(x)
        count = compiled_synchronizations(lambda: fast(x))
    assert layer.last_solution is not None
    # The conditions of two loops are read at their ends, too, and the summary has two numbers.
    assert count <= layer.last_solution.evaluations + 4


def test_what_is_not_an_equilibrium_model_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear has no equilibrium layer"):
        eq.compile(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="only with a map"):
        eq.compile(eq.EquilibriumLayer(eq.Input(torch.eye(2))), tolerance=1e-3)
