"""Transforms and recorders: unsupported ones raise with a remedy, others work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import equilibria as eq

# PyTorch scripts some functions when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

RECORDED = ["phantom", "one_step", "unrolled"]
RULES = ["implicit", *RECORDED]
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def layer(gradient: str) -> eq.EquilibriumLayer:
    torch.manual_seed(1)
    energy = eq.Input(eq.Dense(4, 4)) + eq.Quadratic(eq.Dense(4, 4, norm="bound", zeta=0.5))
    return eq.EquilibriumLayer(energy, gradient=gradient, tolerance=1e-6)


def loss_of(run: eq.EquilibriumLayer) -> Callable[[Tensor], Tensor]:
    return lambda x: run(x).square().sum()


def dual(run: eq.EquilibriumLayer) -> Tensor | None:
    with forward_ad.dual_level():
        output = run(forward_ad.make_dual(X, torch.ones_like(X)))  # type: ignore[no-untyped-call]
        tangent: Tensor | None = forward_ad.unpack_dual(output).tangent  # type: ignore[no-untyped-call]
        return tangent


def dual_parameters(run: eq.EquilibriumLayer) -> Tensor:
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(p.detach(), torch.ones_like(p))  # type: ignore[no-untyped-call]
            for name, p in run.named_parameters()
        }
        return functional_call(run, duals, (X,))  # type: ignore[no-any-return]


FORWARD_MODE: dict[str, Callable[[eq.EquilibriumLayer], object]] = {
    "dual numbers": dual,
    "dual parameters": dual_parameters,
    "jvp": lambda run: torch.func.jvp(run, (X,), (torch.ones_like(X),)),
    "jacfwd": lambda run: torch.func.jacfwd(run)(X),
    "hessian": lambda run: torch.func.hessian(loss_of(run))(X),
}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "unrolled"])
@pytest.mark.parametrize("mode", FORWARD_MODE)
def test_forward_mode_raises_except_for_unrolled_gradients(mode: str, rule: str) -> None:
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*'unrolled'"):
        FORWARD_MODE[mode](layer(rule))


def test_forward_mode_matches_reverse_mode_for_unrolled_gradients() -> None:
    run = layer("unrolled")
    _, expected = torch.autograd.functional.jvp(run, X, torch.ones_like(X))
    torch.testing.assert_close(dual(run), expected)
    torch.testing.assert_close(FORWARD_MODE["jvp"](run), (run(X), expected))  # type: ignore[call-overload]


TRANSFORMS: dict[str, Callable[[eq.EquilibriumLayer], Tensor]] = {
    "grad": lambda run: torch.func.grad(loss_of(run))(X),
    "vjp": lambda run: torch.func.vjp(loss_of(run), X)[1](torch.ones(()))[0],
    "jacrev": lambda run: torch.func.jacrev(loss_of(run))(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_raises_for_implicit_gradients(transform: str) -> None:
    with pytest.raises(NotImplementedError, match=r"use torch\.autograd\.grad"):
        TRANSFORMS[transform](layer("implicit"))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("rule", RECORDED)
def test_torch_func_works_with_other_gradient_rules(transform: str, rule: str) -> None:
    run = layer(rule)
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(run)(x), x)
    torch.testing.assert_close(TRANSFORMS[transform](run), expected)


@pytest.mark.parametrize("rule", RULES)
def test_vmap_raises(rule: str) -> None:
    run = layer(rule)
    for mapped in (lambda x: run(x[None])[0], torch.func.grad(lambda x: run(x[None]).sum())):
        with pytest.raises(NotImplementedError, match="pass the whole batch"):
            torch.func.vmap(mapped)(X)


def test_vectorized_backward_passes_raise() -> None:
    with pytest.raises(NotImplementedError, match="remove vectorize=True"):
        torch.autograd.functional.jacobian(layer("implicit"), X, vectorize=True)
    plain = torch.autograd.functional.jacobian(layer("implicit"), X)
    assert plain.shape == (3, 4, 3, 4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "model"])
def test_tracing_scripting_and_export_raise(rule: str, whole: bool) -> None:
    """A trace would silently freeze the number of iterations."""
    run: nn.Module = nn.Sequential(nn.Linear(4, 4), layer(rule)) if whole else layer(rule)
    run = run.eval()
    recorders = {
        "torch.jit.trace": lambda: torch.jit.trace(run, (X,)),
        "torch.jit.script": lambda: torch.jit.script(run),
        "torch.export": lambda: torch.export.export(run, (X,)),
    }
    for name, record in recorders.items():
        with pytest.raises(NotImplementedError, match=f"{name} cannot record"):
            record()
