"""Effective weights that are stored between calls follow the parameters, however these change."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import equilibria as eq
from equilibria.context.twin import twin

SIZE = 6
INPUT = torch.linspace(-1, 1, 3 * SIZE, dtype=torch.float64).reshape(3, SIZE)


def layer_of(seed: int = 0) -> eq.EquilibriumLayer:
    """Return a layer with a norm-controlled weight, in evaluation mode."""
    torch.manual_seed(seed)
    W = eq.Dense(SIZE, SIZE, norm="bound", zeta=0.6)
    energy = eq.Input(eq.Dense(SIZE, SIZE)) + eq.Quadratic(W)
    return eq.EquilibriumLayer(energy, activation="tanh", tolerance=1e-12).double().eval()


def kernel_of(layer: nn.Module) -> nn.Parameter:
    return layer.cell.energy["quadratic"].W.kernel  # type: ignore[no-any-return, union-attr, operator, index]


def exact(kernel: Tensor, layer: nn.Module) -> Tensor:
    """Solve y = tanh(Ux + b + WWᵀy), with W of norm 0.6 at most, without the library."""
    W = kernel.detach().double()
    W = W * min(1.0, 0.6 / float(torch.linalg.matrix_norm(W, 2)))
    term = layer.cell.energy["input"]  # type: ignore[operator, union-attr, index]
    injected = INPUT @ term.U.kernel.detach().double().T + term.bias.detach().double()
    y = torch.zeros_like(injected)
    for _ in range(200):
        y = torch.tanh(injected + y @ W @ W.T)
    return y


@torch.no_grad()
def check(layer: nn.Module, kernel: Tensor | None = None, tolerance: float = 1e-9) -> None:
    """Compare the output of a layer, twice, with the exact solution for its kernel."""
    expected = exact(kernel_of(layer) if kernel is None else kernel, layer)
    for _ in range(2):
        output = layer(INPUT.to(kernel_of(layer).dtype)).double()
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def optimizer_step(layer: eq.EquilibriumLayer) -> nn.Module:
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(INPUT).square().sum().backward()
    optimizer.step()
    return layer


def load_state_dict(layer: eq.EquilibriumLayer) -> nn.Module:
    layer.load_state_dict(layer_of(1).state_dict())
    return layer


def assign_state_dict(layer: eq.EquilibriumLayer) -> nn.Module:
    layer.load_state_dict(layer_of(1).state_dict(), assign=True)
    return layer


def edit_data(layer: eq.EquilibriumLayer) -> nn.Module:
    kernel_of(layer).data.mul_(torch.linspace(-1, 1, SIZE))
    return layer


def replace_parameter(layer: eq.EquilibriumLayer) -> nn.Module:
    layer.cell.energy["quadratic"].W.kernel = nn.Parameter(kernel_of(layer_of(1)).detach())  # type: ignore[union-attr, operator, index]
    return layer


def copy_and_edit(layer: eq.EquilibriumLayer) -> nn.Module:
    other = edit_data(copy.deepcopy(layer))  # type: ignore[arg-type]
    check(layer)
    return other


def pickle_and_edit(layer: eq.EquilibriumLayer) -> nn.Module:
    content = io.BytesIO()
    torch.save(layer, content)
    content.seek(0)
    other: eq.EquilibriumLayer = torch.load(content, weights_only=False)
    check(other)
    return edit_data(other)


def twin_with_other_tensors(layer: eq.EquilibriumLayer) -> nn.Module:
    other = twin(layer, lambda tensor: tensor.detach() * -0.5)
    check(layer)
    return other


def add_parametrization(layer: eq.EquilibriumLayer) -> nn.Module:
    class Halved(nn.Module):
        def forward(self, kernel: Tensor) -> Tensor:
            return kernel / 2

    parametrize.register_parametrization(layer.cell.energy["quadratic"].W, "kernel", Halved())  # type: ignore[union-attr, operator, index, arg-type]
    return layer


WAYS: list[Callable[[eq.EquilibriumLayer], nn.Module]] = [
    optimizer_step,
    load_state_dict,
    assign_state_dict,
    edit_data,
    replace_parameter,
    copy_and_edit,
    pickle_and_edit,
    twin_with_other_tensors,
    add_parametrization,
]


@pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__)
def test_outputs_follow_changed_parameters(
    change: Callable[[eq.EquilibriumLayer], nn.Module],
) -> None:
    layer = layer_of()
    check(layer)
    before = kernel_of(layer).detach().clone()
    changed = change(layer)
    assert not torch.equal(kernel_of(changed), before)
    check(changed)


def test_functional_calls_do_not_change_stored_weights() -> None:
    layer = layer_of()
    check(layer)
    kernels = {name: -0.3 * value.detach() for name, value in layer.named_parameters()}
    with torch.no_grad():
        output = functional_call(layer, kernels, (INPUT,))
    other = layer_of()
    other.load_state_dict(kernels)
    torch.testing.assert_close(output, exact(kernel_of(other), other), atol=1e-9, rtol=1e-9)
    check(layer)


def test_weights_stored_in_inference_mode_can_be_trained() -> None:
    layer = layer_of()
    with torch.inference_mode():
        layer(INPUT)
    layer(INPUT).square().sum().backward()
    gradient = kernel_of(layer).grad
    other = layer_of()
    other(INPUT).square().sum().backward()
    torch.testing.assert_close(gradient, kernel_of(other).grad)
    check(optimizer_step(layer))


def test_stored_weights_follow_the_type_and_are_exact_after_autocast() -> None:
    layer = layer_of().float()
    layer.solving = layer.solving.changed(tolerance=1e-6)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.no_grad(), autocast, eq.solving(layer, tolerance=0.05):
        layer(INPUT.float())
    check(layer, tolerance=1e-5)
    check(layer.double(), tolerance=1e-5)


def test_threads_that_change_and_read_parameters_get_consistent_weights() -> None:
    layer, failures = layer_of(), list[BaseException]()
    kernels = [kernel_of(layer_of(seed)).detach() for seed in range(2)]
    answers = [exact(kernel, layer) for kernel in kernels]

    def read() -> None:
        try:
            for _ in range(30):
                with torch.no_grad():
                    output = layer(INPUT)
                assert min(float((output - y).abs().max()) for y in answers) < 1e-9
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(30):
        replacement = nn.Parameter(kernels[turn % 2])
        layer.cell.energy["quadratic"].W.kernel = replacement  # type: ignore[union-attr, operator, index]
    for thread in threads:
        thread.join()
    assert not failures


def test_solutions_have_no_graph_in_any_mode() -> None:
    layer = layer_of()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            solution = layer.solve(INPUT)
        assert not any(tensor.requires_grad for tensor in solution.context.tensors())
        assert not solution.state.requires_grad
