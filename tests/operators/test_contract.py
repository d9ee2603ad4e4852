"""Contract of linear operators, tested for all of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from equilibria.operators import LinearOperator
from tests.operators.bank import CASES, Case, dense, true_norm


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def operator(case: Case, float64_device: torch.device) -> LinearOperator:
    return case.make().double().to(float64_device)


def sample(operator: LinearOperator, shape: tuple[int, ...], batch: int = 2) -> Tensor:
    return torch.randn(batch, *shape).to(operator._anchor)


def trainable_parameters(operator: LinearOperator) -> list[Tensor]:
    return [parameter for parameter in operator.parameters() if parameter.requires_grad]


def test_adjoint_identity(case: Case, operator: LinearOperator) -> None:
    x = sample(operator, case.shape)
    y = sample(operator, operator.output_shape(case.shape))
    weights = operator.weights(case.shape)
    forward, backward = operator(x, weights), operator.adjoint(y, weights)
    assert forward.shape == y.shape
    assert backward.shape == x.shape
    torch.testing.assert_close((forward * y).sum(), (x * backward).sum(), rtol=1e-12, atol=1e-12)


def test_linear(case: Case, operator: LinearOperator) -> None:
    x, y = sample(operator, case.shape), sample(operator, case.shape)
    expected = 2 * operator(x) - 3 * operator(y)
    torch.testing.assert_close(operator(2 * x - 3 * y), expected, rtol=0, atol=1e-12)


def test_dense_equivalent_of_map_and_transpose(case: Case, operator: LinearOperator) -> None:
    matrix = dense(operator, case.shape)
    x, shape = sample(operator, case.shape), operator.output_shape(case.shape)
    y = sample(operator, shape)
    torch.testing.assert_close(operator(x).flatten(1), x.flatten(1) @ matrix.mT)
    torch.testing.assert_close(operator.adjoint(y).flatten(1), y.flatten(1) @ matrix)
    torch.testing.assert_close(dense(operator.T, shape), matrix.mT)


def test_transpose_of_transpose_is_the_operator(operator: LinearOperator) -> None:
    assert operator.T.T is operator or operator.T.T.operator is operator.operator


def test_weights_passed_by_the_caller_are_used(case: Case, operator: LinearOperator) -> None:
    weights = operator.weights(case.shape)
    assert len(weights) == operator.weight_count
    x = sample(operator, case.shape)
    torch.testing.assert_close(operator(x, weights), operator(x), rtol=0, atol=0)
    if weights:
        zeros = tuple(torch.zeros_like(w) for w in weights)
        assert not operator(x, zeros).any()


def test_norm_bound_is_rigorous(case: Case, operator: LinearOperator) -> None:
    bound = operator.norm_bound(case.shape).detach()
    assert bound.shape == ()
    assert float(bound) >= true_norm(operator, case.shape) * (1 - 1e-12)


def test_norm_bound_has_gradients_for_all_parameters(case: Case, operator: LinearOperator) -> None:
    if getattr(operator, "norm", None) == "orthonormal":
        pytest.skip("the norm is ζ for every kernel")
    for module in operator.modules():
        if hasattr(module, "zeta"):
            module.zeta = 100.0  # at the limit ζ the norm does not depend on the kernel
    parameters = trainable_parameters(operator)
    if parameters:
        gradients = torch.autograd.grad(operator.norm_bound(case.shape), parameters)
        assert all(g.isfinite().all() and g.any() for g in gradients)


def test_norm_estimate_increases_to_the_norm(case: Case, operator: LinearOperator) -> None:
    operator.eval()
    true = true_norm(operator, case.shape)
    early = float(operator.norm_estimate(case.shape, iterations=2).detach())
    late = float(operator.norm_estimate(case.shape, iterations=300).detach())
    assert early <= late * (1 + 1e-12)
    assert late <= true * (1 + 1e-12)
    assert late == pytest.approx(true, rel=1e-4)


def test_norm_estimate_does_not_change_the_operator(case: Case, operator: LinearOperator) -> None:
    operator.eval()
    x = sample(operator, case.shape)
    before, state = operator(x), copy.deepcopy(operator.state_dict())
    operator.norm_estimate(case.shape)
    torch.testing.assert_close(operator(x), before, rtol=0, atol=0)
    torch.testing.assert_close(dict(operator.state_dict()), dict(state), rtol=0, atol=0)


def test_shapes_are_inverse(case: Case, operator: LinearOperator) -> None:
    out = operator.output_shape(case.shape)
    assert tuple(operator(sample(operator, case.shape)).shape[1:]) == out
    assert operator.input_shape(out) == case.shape


def test_empty_batch(case: Case, operator: LinearOperator) -> None:
    out = operator.output_shape(case.shape)
    assert operator(sample(operator, case.shape, 0)).shape == (0, *out)
    assert operator.adjoint(sample(operator, out, 0)).shape == (0, *case.shape)


def test_the_error_for_a_wrong_shape_names_it(case: Case, operator: LinearOperator) -> None:
    if case.wrong is None:
        pytest.skip("accepts every shape")
    actual = ", ".join(map(str, case.wrong))
    with pytest.raises(ValueError, match=rf"expected an .* of shape \(B, .*got \(B, {actual}\)"):
        operator(sample(operator, case.wrong))


def test_deepcopy(case: Case, operator: LinearOperator) -> None:
    x = sample(operator, case.shape)
    output = operator(x)
    output.sum().backward() if output.requires_grad else None
    twin = copy.deepcopy(operator)
    torch.testing.assert_close(twin(x), output, rtol=0, atol=0)
    for p in twin.parameters():
        p.data.mul_(0.1)
    torch.testing.assert_close(operator(x), output, rtol=0, atol=0)


def test_state_dict_round_trip(case: Case, operator: LinearOperator) -> None:
    x = sample(operator, case.shape)
    operator(x)
    other = case.make().to(operator._anchor)
    other.load_state_dict(operator.state_dict())
    torch.testing.assert_close(other.eval()(x), operator.eval()(x), rtol=0, atol=0)


def test_change_of_dtype(case: Case, device: torch.device) -> None:
    single = case.make().to(device).eval()
    x = torch.randn(2, *case.shape, device=device)
    with torch.no_grad():
        expected = single(x)
        assert single.norm_bound(case.shape).dtype == torch.float32
        half = single.to(torch.bfloat16)
        assert half(x.bfloat16()).dtype == torch.bfloat16
        torch.testing.assert_close(half(x.bfloat16()).float(), expected, rtol=0.1, atol=0.1)
        assert half.norm_bound(case.shape).dtype == torch.float32
        assert half.norm_estimate(case.shape).dtype == torch.float32


def test_autocast(case: Case, device: torch.device) -> None:
    if device.type == "mps":
        pytest.skip("no bfloat16 autocast")
    operator = case.make().to(device).train()
    x = torch.randn(2, *case.shape, device=device)
    expected = operator(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output = operator(x)
        bound = operator.norm_bound(case.shape)
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    assert bound.dtype == torch.float32
    torch.testing.assert_close(bound, operator.norm_bound(case.shape), rtol=0, atol=0)


def test_inference_mode_does_not_affect_training(case: Case, operator: LinearOperator) -> None:
    x = sample(operator, case.shape)
    with torch.inference_mode():
        operator(x)
        operator.norm_estimate(case.shape)
        operator.norm_bound(case.shape)
    total = operator(x).sum() + operator.norm_estimate(case.shape)
    total = total + operator.norm_bound(case.shape)
    if trainable_parameters(operator):
        total.backward()
