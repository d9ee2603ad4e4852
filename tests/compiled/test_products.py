"""Matrix products and convolutions of compiled graphs agree with PyTorch's."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.nn import functional as F

import equilibria as eq
from equilibria.compiled import products
from equilibria.compiled.tracing import compile_graph, trace

pytestmark = [
    pytest.mark.skipif(not pick_vec_isa(), reason="PyTorch has no vector types on this processor"),
    pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("clang++") is None,
        reason="no C++ compiler is installed",
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # internals of PyTorch
]


def close_to_exact(function, inputs: list[Tensor], kernels: int) -> None:  # type: ignore[no-untyped-def]
    """Compare a compiled function with its results in float64, and count its kernels."""
    graph = trace(function, *inputs)
    products.use_kernels(graph)
    operators = products.operators()
    targets = [node.target for node in graph.graph.nodes]
    assert sum(t in (operators.product, operators.convolution) for t in targets) == kernels
    compiled, _ = compile_graph(graph, inputs)
    with torch.no_grad():
        exact = function(*[tensor.double() for tensor in inputs])
        for results in (graph(*inputs), compiled(*inputs)):
            for result, expected in zip(results, exact, strict=True):
                assert result.shape == expected.shape
                torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=2e-5)


def test_products_of_all_numbers_of_rows_and_columns() -> None:
    def function(W: Tensor, V: Tensor, bias: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        transposed = [x @ W.T for x in xs]
        return *transposed, *[torch.addmm(bias, y, W) for y in transposed], xs[-1] @ V

    generator = torch.Generator().manual_seed(0)
    rows = (1, 2, 3, 5, 6, 8, 13, 70)
    shapes = [(176, 48), (48, 15), (48,), *((r, 48) for r in rows)]
    inputs = [0.2 * torch.randn(*shape, generator=generator) for shape in shapes]
    # Products with 15 columns do not fit.
    close_to_exact(function, inputs, 2 * len(rows))


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_and_their_transposes(channels_last: bool) -> None:
    def function(x: Tensor, W: Tensor, V: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, W, bias, padding=(1, 2))
        return y, F.conv_transpose2d(y, V, padding=(1, 0)), F.conv2d(x, W, padding=1, stride=2)

    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 7, 9), (48, 3, 3, 5), (48, 16, 3, 2), (48,))
    inputs = [0.2 * torch.randn(*shape, generator=generator) for shape in shapes]
    if channels_last:
        inputs[0] = inputs[0].contiguous(memory_format=torch.channels_last)
    close_to_exact(function, inputs, 2)  # the convolution with a stride does not fit


def test_products_in_double_precision_are_left_to_pytorch() -> None:
    a = torch.ones(16, 16, dtype=torch.float64)
    close_to_exact(lambda a, b: (a @ b,), [a, a], 0)


class Map(nn.Module):
    """A convolution and a product, whose weights are used in both directions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = nn.Parameter(0.03 * torch.randn(16, 16, 3, 3))
        self.W = nn.Parameter(0.1 * torch.randn(32, 16))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = F.conv_transpose2d(F.conv2d(z, self.kernel, padding=1), self.kernel, padding=1)
        features = y.mean(dim=(2, 3)) @ self.W.T @ self.W
        return torch.tanh(y + 0.1 * features[:, :, None, None] + x)


def test_a_compiled_solve_follows_changed_weights() -> None:
    layer = eq.EquilibriumLayer(Map(), tolerance=1e-6).eval()
    fast = eq.compile(layer)
    x = torch.randn(2, 16, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x), rtol=1e-4, atol=1e-4)
        for parameter in layer.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(fast(x), layer(x), rtol=1e-4, atol=1e-4)
    assert [c.kind for c in fast.compilations] == ["model"]
