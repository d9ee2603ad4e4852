"""Construction, products and conversion of operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equilibria.operators import (
    AveragePool,
    Compose,
    Conv1d,
    Conv2d,
    Dense,
    Identity,
    Sparse,
    as_operator,
)


def test_initial_kernels_have_unit_gain() -> None:
    assert float(Dense(400, 300).kernel.detach().std()) == pytest.approx(400**-0.5, rel=0.05)
    assert float(Conv2d(40, 30, 3).kernel.detach().std()) == pytest.approx(360**-0.5, rel=0.05)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Dense(0, 3),
        lambda: Conv2d(2, 0, 3),
        lambda: Conv2d(2, 2, 0),
        lambda: Conv2d(2, 2, 3, stride=0),
        lambda: Conv2d(2, 2, 3, padding=-1),
        lambda: Conv1d(2, 2, 3, padding=-1),
        lambda: Conv1d(2, 2, 0),
        lambda: AveragePool(0),
        lambda: AveragePool(2, directions=3),
        lambda: Compose(),
    ],
)
def test_invalid_sizes_raise(build: object) -> None:
    with pytest.raises(ValueError, match=r"positive|negative|at least (one|1)|1 or 2"):
        build()  # type: ignore[operator]


def test_stride_must_divide_the_size() -> None:
    with pytest.raises(ValueError, match="divisible by the stride 2"):
        Conv2d(2, 3, 3, stride=2)(torch.zeros(1, 2, 6, 5))


def test_a_kernel_larger_than_the_map_raises() -> None:
    with pytest.raises(ValueError, match="at least 5, 5"):
        Conv2d(2, 3, 5, padding=0)(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"\(B, 2, T\) with T at least 5"):
        Conv1d(2, 3, 5, padding=0)(torch.zeros(1, 2, 4))


def test_the_number_of_sizes_must_match_the_directions() -> None:
    with pytest.raises(ValueError, match=r"one size, or one for each of H, W, got \(3,\)"):
        Conv2d(2, 3, (3,))
    with pytest.raises(ValueError, match=r"one size, or one for each of T, got \(1, 1\)"):
        Conv1d(2, 3, 3, padding=(1, 1))


def test_products_are_flat_and_ordered() -> None:
    a, b, c = Dense(3, 2), Dense(4, 3), Dense(5, 4)
    product = a @ (b @ c)
    assert product.factors == [a, b, c]
    assert ((a @ b) @ c).factors == [a, b, c]
    matrix = a.kernel @ b.kernel @ c.kernel
    z = torch.randn(2, 5)
    torch.testing.assert_close(product(z), z @ matrix.mT)
    with pytest.raises(ValueError, match="3 weights, got 1"):
        product(z, (a.kernel,))


def test_products_need_operators() -> None:
    with pytest.raises(TypeError, match=r"to apply an operator to a tensor, call it"):
        Dense(3, 2) @ torch.zeros(3)  # type: ignore[operator]
    with pytest.raises(TypeError, match="as_operator"):
        Compose(Dense(3, 2), nn.Linear(4, 3))  # type: ignore[arg-type]


def test_pool_transpose_is_scaled_upsampling() -> None:
    y = torch.arange(4.0).view(1, 1, 2, 2)
    expected = nn.functional.interpolate(y, scale_factor=2, mode="nearest") / 4
    torch.testing.assert_close(AveragePool(2).adjoint(y), expected)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(4, 3, bias=False), (4,)),
        (nn.Conv2d(2, 3, 3, padding=1, bias=False), (2, 6, 6)),
        (nn.Conv2d(2, 3, 3, padding="same", bias=False), (2, 6, 6)),
        (nn.Conv2d(2, 3, 3, padding="valid", bias=False), (2, 6, 6)),
        (nn.Conv2d(2, 3, (3, 5), padding=(1, 0), stride=2, bias=False), (2, 6, 6)),
        (nn.Linear(4, 3, bias=False), (5, 4)),
        (nn.Conv1d(2, 3, 3, padding=1, bias=False), (2, 6)),
        (nn.Conv1d(2, 3, 3, padding="same", bias=False), (2, 6)),
        (nn.Conv1d(2, 3, 5, padding=2, stride=3, bias=False), (2, 9)),
    ],
)
def test_modules_become_operators(
    module: nn.Linear | nn.Conv1d | nn.Conv2d, shape: tuple[int, ...]
) -> None:
    operator = as_operator(module)
    z = torch.randn(2, *shape)
    torch.testing.assert_close(operator(z), module(z))
    assert operator.kernel is module.weight


def test_tensors_become_operators() -> None:
    trainable = nn.Parameter(torch.randn(3, 4))
    assert as_operator(trainable).kernel is trainable
    for kernel, kind in ((torch.randn(3, 2, 3, 3), Conv2d), (torch.randn(3, 2, 3), Conv1d)):
        constant = as_operator(kernel)
        assert isinstance(constant, kind)
        assert not constant.kernel.requires_grad
    assert isinstance(as_operator(torch.eye(3).to_sparse()), Sparse)
    operator = Identity()
    assert as_operator(operator) is operator


def test_modules_with_a_bias_raise() -> None:
    for module in (nn.Linear(4, 3), nn.Conv1d(2, 3, 3), nn.Conv2d(2, 3, 3)):
        with pytest.raises(ValueError, match=r"Input\(U, bias=True\)"):
            as_operator(module)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"dilation": 2},
        {"padding_mode": "circular"},
        {"stride": (1, 2)},
        {"kernel_size": 2, "padding": "same"},
    ],
)
def test_unsupported_convolutions_raise(options: dict[str, object]) -> None:
    arguments = {"kernel_size": 3, **options}
    with pytest.raises(ValueError, match=r"nn\.Conv2d with .* is not supported"):
        as_operator(nn.Conv2d(2, 4, bias=False, **arguments))  # type: ignore[arg-type]
    if isinstance(arguments.get("stride", 1), int):
        with pytest.raises(ValueError, match=r"nn\.Conv1d with .* is not supported"):
            as_operator(nn.Conv1d(2, 4, bias=False, **arguments))  # type: ignore[arg-type]


def test_objects_that_are_not_linear_operators_raise() -> None:
    for obj in (torch.zeros(3), torch.zeros(1, 2, 3, 4, 5), "conv", nn.ReLU()):
        with pytest.raises(TypeError, match="pass a LinearOperator, a tensor of shape"):
            as_operator(obj)
    with pytest.raises(ValueError, match="floating-point"):
        as_operator(torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"nn\.Parameter to train it"):
        as_operator(torch.zeros(2, 2, requires_grad=True))
    with pytest.raises(ValueError, match="dimensions"):
        Dense.from_tensor(torch.zeros(2, 2, 3, 3))
    parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2, bias=False))
    with pytest.raises(ValueError, match="parametrized"):
        as_operator(parametrized)


def test_repr_shows_the_settings() -> None:
    assert repr(Dense(4, 3, norm="bound", zeta=0.9)) == "Dense(4, 3, norm='bound', zeta=0.9)"
    assert "stride=2, padding=(1, 1)" in repr(Conv2d(2, 3, 3, stride=2))
