"""Norm control W = K · min(1, ζ/b): values, derivatives, caches and the state_dict."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equilibria.operators import Conv1d, Conv2d, Dense, Sparse, conv_symbol, spectral
from equilibria.operators.norm_control import KernelOperator
from tests.operators.bank import true_norm

Build = Callable[[nn.Parameter, str, float], KernelOperator]

CONTROLLED: dict[str, tuple[Build, tuple[int, ...], tuple[int, ...]]] = {
    "dense": (lambda k, norm, zeta: Dense.from_tensor(k, norm, zeta), (4, 3), (3,)),
    "conv-symbol": (
        lambda k, norm, zeta: Conv2d.from_tensor(k, norm=norm, zeta=zeta),
        (3, 2, 3, 3),
        (2, 12, 12),
    ),
    "conv-matrix": (
        lambda k, norm, zeta: Conv2d.from_tensor(k, norm=norm, zeta=zeta),
        (3, 2, 3, 3),
        (2, 3, 3),
    ),
    "conv-stride": (
        lambda k, norm, zeta: Conv2d.from_tensor(k, stride=2, norm=norm, zeta=zeta),
        (3, 2, 3, 3),
        (2, 12, 14),
    ),
    "conv1d-symbol": (
        lambda k, norm, zeta: Conv1d.from_tensor(k, stride=2, norm=norm, zeta=zeta),
        (3, 2, 5),
        (2, 140),
    ),
    "sparse-matrix": (lambda k, norm, zeta: sparse(k, 6, norm, zeta), (11,), (5,)),
    "sparse-perron": (lambda k, norm, zeta: sparse(k, 300, norm, zeta), (23,), (5,)),
}


def sparse(entries: nn.Parameter, rows: int, norm: str, zeta: float) -> Sparse:
    """Return a matrix with these entries in five columns, spread over the rows."""
    count = len(entries)
    indices = torch.stack([torch.arange(count) * rows // count, torch.arange(count) % 5])
    pattern = torch.sparse_coo_tensor(indices, torch.ones(count), (rows, 5), check_invariants=True)
    operator = Sparse(pattern.to(entries), norm=norm, zeta=zeta)
    operator.kernel = entries
    return operator


@pytest.fixture(params=CONTROLLED)
def controlled(request: pytest.FixtureRequest) -> tuple[Build, tuple[int, ...], tuple[int, ...]]:
    return CONTROLLED[request.param]


Controlled = tuple[Build, tuple[int, ...], tuple[int, ...]]


def weight_function(build: Build, shape: tuple[int, ...], norm: str) -> Callable[[Tensor], Tensor]:
    """Return K ↦ W as a function of a tensor, for derivative checks."""

    def weight(kernel: Tensor) -> Tensor:
        operator = build(nn.Parameter(kernel.detach().clone()), norm, 0.5).eval()
        return torch.func.functional_call(_Weights(operator, shape), {"operator.kernel": kernel})

    return weight


class _Weights(nn.Module):
    def __init__(self, operator: KernelOperator, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.operator, self.shape = operator, shape

    def forward(self) -> Tensor:
        return self.operator.weights(self.shape)[0]


@pytest.mark.parametrize("scale", [1.0, 0.01], ids=["above", "below"])
def test_derivatives_of_the_bounded_weight(controlled: Controlled, scale: float) -> None:
    build, kernel_shape, shape = controlled
    kernel = (scale * torch.randn(kernel_shape).double()).requires_grad_()
    weight = weight_function(build, shape, "bound")
    assert torch.autograd.gradcheck(weight, kernel)
    assert torch.autograd.gradgradcheck(lambda k: weight(k).pow(3).sum(), kernel)


def test_derivatives_of_the_norm_bound(controlled: Controlled) -> None:
    build, kernel_shape, shape = controlled

    def bound(kernel: Tensor) -> Tensor:
        operator = build(nn.Parameter(kernel.detach().clone()), "bound", 100.0)
        return _functional_bound(operator, kernel, shape)

    kernel = torch.randn(kernel_shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(bound, kernel)
    assert torch.autograd.gradgradcheck(bound, kernel)


def _functional_bound(operator: KernelOperator, kernel: Tensor, shape: tuple[int, ...]) -> Tensor:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator = operator

        def forward(self) -> Tensor:
            return self.operator.norm_bound(shape)

    return torch.func.functional_call(Bound(), {"operator.kernel": kernel})


def test_the_bound_is_part_of_the_graph(controlled: Controlled) -> None:
    build, kernel_shape, shape = controlled
    kernel = nn.Parameter(torch.randn(kernel_shape).double())
    operator, target = build(kernel, "bound", 0.5), torch.randn(kernel_shape).double()
    weight = operator.weights(shape)[0]
    (gradient,) = torch.autograd.grad((weight * target).sum(), kernel)
    scale = (weight / kernel).detach().flatten()[0]
    detached = scale * target
    assert (gradient - detached).norm() > 0.05 * detached.norm()
    # W does not change if K is scaled, so the gradient has no component along K.
    assert abs(float((gradient * kernel.detach()).sum())) < 1e-10


def test_estimated_gradient_is_exact_for_the_vector_in_use(controlled: Controlled) -> None:
    build, kernel_shape, shape = controlled
    operator = build(nn.Parameter(torch.randn(kernel_shape).double()), "estimate", 0.5)
    operator.weights(shape)
    operator.eval()
    kernel = operator.kernel.detach().clone().requires_grad_()
    module = _Weights(operator, shape)
    assert torch.autograd.gradcheck(
        lambda k: torch.func.functional_call(module, {"operator.kernel": k}), kernel
    )


def test_converged_estimate_agrees_with_the_exact_norm() -> None:
    """The envelope theorem: value and gradient of ‖Kv‖ are those of ‖K‖ for converged v."""
    kernel, target = nn.Parameter(torch.randn(6, 4).double()), torch.randn(6, 4).double()
    exact = Dense.from_tensor(kernel, "bound", 0.5)
    estimated = Dense.from_tensor(kernel, "estimate", 0.5)
    for _ in range(40):  # as after 40 updates
        estimated._memo = type(estimated._memo)()
        estimated.weights()
    for operator in (exact, estimated):
        operator.gradient = torch.autograd.grad((operator.weight * target).sum(), kernel)[0]
    torch.testing.assert_close(estimated.weight, exact.weight, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(estimated.gradient, exact.gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("zeta", [0.3, 0.95])
def test_norm_is_at_most_zeta(controlled: Controlled, zeta: float, device: torch.device) -> None:
    build, kernel_shape, shape = controlled
    operator = build(nn.Parameter(5 * torch.randn(kernel_shape, device=device)), "bound", zeta)
    assert true_norm(operator, shape) <= zeta * (1 + 1e-5)
    assert float(operator.norm_bound(shape).detach()) == pytest.approx(zeta)
    operator = build(operator.kernel, "estimate", zeta)
    assert true_norm(operator, shape) <= 1.05 * zeta
    bound = float(operator.norm_bound(shape).detach())
    assert bound >= true_norm(operator, shape) * (1 - 1e-5)


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_kernels_below_zeta_are_not_changed(controlled: Controlled, norm: str) -> None:
    build, kernel_shape, shape = controlled
    kernel = nn.Parameter(0.01 * torch.randn(kernel_shape))
    operator = build(kernel, norm, 0.95)
    assert operator.weights(shape)[0].equal(kernel)
    raw = build(kernel, norm, 100.0)
    torch.testing.assert_close(operator.norm_bound(shape), raw.norm_bound(shape), rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_zero_kernel(controlled: Controlled, norm: str) -> None:
    build, kernel_shape, shape = controlled
    kernel = nn.Parameter(torch.zeros(kernel_shape))
    operator = build(kernel, norm, 0.95)
    weight = operator.weights(shape)[0]
    total = (weight + 1).pow(3).sum() + operator.norm_bound(shape)
    total = total + operator.norm_estimate(shape)
    (first,) = torch.autograd.grad(total, kernel, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), kernel)
    assert not weight.any()
    assert float(operator.norm_bound(shape).detach()) == 0
    torch.testing.assert_close(first, torch.full_like(kernel, 3.0))
    torch.testing.assert_close(second, torch.full_like(kernel, 6.0))


@pytest.mark.parametrize("norm", ["bound", "estimate"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_propagated_and_not_cached(
    controlled: Controlled, norm: str, bad: float
) -> None:
    build, kernel_shape, shape = controlled
    kernel = nn.Parameter(torch.randn(kernel_shape))
    operator = build(kernel, norm, 0.5)
    good = kernel.detach().clone()
    kernel.data[0] = bad
    assert not operator.weights(shape)[0].isfinite().all()
    kernel.data.copy_(good)
    assert operator.weights(shape)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_half_precision_kernels(controlled: Controlled, norm: str, dtype: torch.dtype) -> None:
    build, kernel_shape, shape = controlled
    kernel = nn.Parameter(torch.randn(kernel_shape).to(dtype))
    weight = build(kernel, norm, 0.5).weights(shape)[0]
    exact = build(nn.Parameter(kernel.detach().float()), norm, 0.5).weights(shape)[0]
    assert weight.dtype == dtype
    torch.testing.assert_close(weight.float(), exact, rtol=0.02, atol=1e-3)
    weight.float().square().sum().backward()
    assert kernel.grad is not None
    assert kernel.grad.isfinite().all()


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_autocast_does_not_change_the_weight(controlled: Controlled, norm: str) -> None:
    build, kernel_shape, shape = controlled
    kernel = nn.Parameter(torch.randn(kernel_shape))
    expected = build(kernel, norm, 0.5).weights(shape)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = build(kernel, norm, 0.5).weights(shape)[0]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="norm must be one of bound, estimate, None"):
        Dense(2, 3, norm="spectral")
    for zeta in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="zeta must be positive"):
            Conv2d(2, 3, 3, norm="bound", zeta=zeta)
    with pytest.raises(ValueError, match="depends on the size of the input"):
        Conv2d(2, 3, 3, norm="bound").weights()
    assert Conv2d(2, 3, 3).weights()[0].shape == (3, 2, 3, 3)


# Caches


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record of the searches for a frequency and of the eigendecompositions."""
    calls: list[str] = []

    def record(module: object, name: str) -> None:
        original = getattr(module, name)

        def recorded(*args: object) -> object:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(module, name, recorded)

    record(conv_symbol, "maximizing_frequency")
    record(spectral, "top_singular")
    return calls


def test_one_search_per_parameter_update(controlled: Controlled, searches: list[str]) -> None:
    build, kernel_shape, shape = controlled
    operator = build(nn.Parameter(torch.randn(kernel_shape)), "bound", 0.5)
    # The bound of large sparse matrices is a formula and needs no search.
    per_update = 0 if kernel_shape == (23,) else 1 if shape in {(3,), (5,), (2, 3, 3)} else 2
    optimizer = torch.optim.SGD(operator.parameters(), lr=0.1)
    for step in range(1, 3):
        for _ in range(3):
            loss = operator.weights(shape)[0].pow(3).sum()
            operator.norm_bound(shape)
            with torch.no_grad():
                operator.weights(shape)
        assert len(searches) == step * per_update
        loss.backward()
        optimizer.step()


def test_one_search_per_input_shape(searches: list[str]) -> None:
    operator = Conv2d(3, 2, 3, norm="bound", zeta=0.1)
    weights = [operator.weights((3, n, n))[0] for n in (12, 16, 12, 16)]
    assert searches.count("maximizing_frequency") == 2
    torch.testing.assert_close(weights[0], weights[2], rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["bound", "estimate"])
@pytest.mark.parametrize("grad", [True, False])
def test_an_edit_through_data_invalidates_the_cache(
    controlled: Controlled, norm: str, grad: bool
) -> None:
    """Edits through `.data` do not change `_version`, so the cache cannot rely on it."""
    build, kernel_shape, shape = controlled
    operator = build(nn.Parameter(torch.randn(kernel_shape)), norm, 0.5)
    with torch.set_grad_enabled(grad):
        operator.weights(shape)
        operator.kernel.data.copy_(torch.randn(kernel_shape))
        fresh = build(nn.Parameter(operator.kernel.detach().clone()), norm, 0.5)
        expected = fresh.weights(shape)[0]
        atol = 1e-6 if norm == "bound" else 0.05  # the estimates have different histories
        torch.testing.assert_close(operator.weights(shape)[0], expected, rtol=0, atol=atol)


def test_the_weight_is_cached_without_gradients(controlled: Controlled) -> None:
    build, kernel_shape, shape = controlled
    operator = build(nn.Parameter(torch.randn(kernel_shape)), "bound", 0.5)
    with torch.no_grad():
        first, second = operator.weights(shape)[0], operator.weights(shape)[0]
        assert first is second
        assert not first.requires_grad
        operator.zeta = 0.25
        torch.testing.assert_close(operator.weights(shape)[0], first / 2)
    assert operator.weights(shape)[0].requires_grad


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_the_cache_is_valid_after_copies_and_casts(controlled: Controlled, norm: str) -> None:
    build, kernel_shape, shape = controlled
    operator = build(nn.Parameter(torch.randn(kernel_shape)), norm, 0.5)
    operator.weights(shape)[0].sum().backward()
    with torch.no_grad():
        weight = operator.weights(shape)[0]
        duplicate = copy.deepcopy(operator)
        assert duplicate.weights(shape)[0].equal(weight)
        double = copy.deepcopy(operator).double().eval()
        assert double.weights(shape)[0].dtype == torch.float64
        torch.testing.assert_close(double.weights(shape)[0].float(), weight)
        assert copy.deepcopy(operator).to("meta").weights(shape)[0].is_meta


def test_the_cache_is_bounded_and_not_in_the_state_dict() -> None:
    operator = Conv2d(2, 2, 3, norm="bound").eval()
    with torch.no_grad():
        for n in range(3, 60):
            operator.weights((2, n, 3))
    assert len(operator._memo.of(*operator.kernels)) < 40
    assert set(operator.state_dict()) == {"kernel"}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.jvp itself
def test_function_transforms(controlled: Controlled) -> None:
    """torch.func gives the same derivatives, and its results are not cached."""
    build, kernel_shape, shape = controlled
    for norm in ("bound", "estimate"):
        operator = build(nn.Parameter(torch.randn(kernel_shape).double()), norm, 0.5)
        operator.weights(shape)
        module, kernel = _Weights(operator, shape), operator.kernel.detach().clone()

        def loss(kernel: Tensor, module: nn.Module = module) -> Tensor:
            return torch.func.functional_call(module, {"operator.kernel": kernel}).pow(3).sum()

        gradient = torch.func.grad(loss)(kernel)
        direction = torch.randn_like(kernel)
        _, slope = torch.func.jvp(loss, (kernel,), (direction,))
        (expected,) = torch.autograd.grad(operator.weights(shape)[0].pow(3).sum(), operator.kernel)
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(slope, (expected * direction).sum())
        copy.deepcopy(operator)


# The vector of the estimate


def estimating(shape: tuple[int, ...] = (3, 6, 6)) -> tuple[Conv2d, tuple[int, ...]]:
    return Conv2d(3, 4, 3, norm="estimate", zeta=0.5), shape


def test_the_vector_is_refined_once_per_update_in_training() -> None:
    operator, shape = estimating()
    assert operator.norm_vector.shape == (0,)
    operator.weights(shape)
    first = operator.norm_vector.clone()
    assert first.shape == shape
    operator.weights(shape)
    assert operator.norm_vector.equal(first)
    operator.kernel.data.add_(0.1 * torch.randn_like(operator.kernel))
    operator.weights(shape)
    assert not operator.norm_vector.equal(first)


def test_evaluation_does_not_change_the_vector() -> None:
    operator, shape = estimating()
    operator.eval()
    start = operator.weights(shape)[0]
    assert operator.norm_vector.shape == (0,)
    assert operator.weights(shape)[0].equal(start)
    operator.train().weights(shape)
    vector = operator.norm_vector.clone()
    operator.eval().kernel.data.mul_(1.5)
    operator.weights(shape)
    operator.weights((3, 4, 4))
    assert operator.norm_vector.equal(vector)


def test_the_first_vector_does_not_depend_on_the_global_random_state() -> None:
    operator, shape = estimating()
    duplicate = copy.deepcopy(operator)
    state = torch.get_rng_state()
    first = operator.weights(shape)[0]
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(123)
    assert duplicate.weights(shape)[0].equal(first)


def test_reloaded_model_gives_identical_outputs() -> None:
    operator, shape = estimating()
    for _ in range(3):
        operator.weights(shape)
        operator.kernel.data.add_(0.05 * torch.randn_like(operator.kernel))
    state = copy.deepcopy(operator.state_dict())
    assert set(state) == {"kernel", "norm_vector"}
    fresh, _ = estimating()
    used, _ = estimating()
    used.weights((3, 4, 4))
    for other in (fresh, used):
        other.load_state_dict(state)
        assert other.eval().weights(shape)[0].equal(operator.eval().weights(shape)[0])
    # Continued training gives the same weights.
    operator.train()
    fresh.train()
    assert fresh.weights(shape)[0].equal(operator.weights(shape)[0])


def test_a_loaded_vector_replaces_a_cached_weight() -> None:
    operator, shape = estimating()
    other, _ = estimating()
    other.load_state_dict({**other.state_dict(), "kernel": operator.kernel.detach()})
    other.weights(shape)
    operator.eval()
    with torch.no_grad():
        before = operator.weights(shape)[0]
        other.norm_vector = other.norm_vector.roll(1, 0)
        operator.load_state_dict(other.state_dict())
        assert not operator.weights(shape)[0].equal(before)


def test_estimate_follows_a_training_run() -> None:
    """Three power steps per update keep the estimate near the norm."""
    operator, shape = estimating((3, 8, 8))
    operator.double()
    target = torch.randn(4, 3, 3, 3).double()
    optimizer = torch.optim.SGD(operator.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        (operator.weights(shape)[0] - target).square().sum().backward()
        optimizer.step()
    operator.weights(shape)
    assert 0.5 <= true_norm(operator.eval(), shape) <= 0.525
