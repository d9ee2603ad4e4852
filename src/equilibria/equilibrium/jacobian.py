"""The Jacobian of a map at a state: a penalty to train with, and its spectral radius."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import Packing, map_state, state_tensors
from equilibria.equilibrium import capabilities
from equilibria.equilibrium.cell import Cell
from equilibria.registry import check_at_least_one


def jacobian_penalty(
    cell: Cell,
    state: State,
    context: Context,
    *,
    vectors: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """‖J‖²_F ÷ size of each sample, estimated with random vectors (Bai et al., 2021).

    J = ∂T/∂y at `state`: the equilibrium, or a `random_iterate`. The mean of ‖Jᵀv‖² over
    v ~ N(0, I) is ‖J‖²_F (Hutchinson); it is differentiable in the context and the parameters, and
    added to a loss it makes the map contract faster. The state itself is taken as a constant.

    Examples:
        >>> cell = eq.equilibrium.FunctionCell(lambda z, x: z / 2 + x)
        >>> x = torch.ones(1, 4)
        >>> eq.equilibrium.jacobian_penalty(cell, x, cell.inject(x), vectors=9).shape  # near ¼
        torch.Size([1])
    """
    check_at_least_one(vectors=vectors)
    with torch.enable_grad():
        point, image = _evaluate(cell, state, context)
        packing = Packing.of(state, cell.couples_batch)
        total: Tensor | None = None
        for _ in range(vectors):
            probe = [_normal(tensor, generator) for tensor in image]
            pulled = torch.autograd.grad(
                image, point, probe, create_graph=True, materialize_grads=True
            )
            flat = packing.pack(pulled[0] if packing.single else pulled)
            square = flat.square().sum(dim=1)
            total = square if total is None else total + square
    assert total is not None
    return total / (vectors * flat.shape[1])


def random_iterate(
    cell: Cell,
    *inputs: Tensor,
    max_iterations: int,
    start: State | None = None,
    generator: torch.Generator | None = None,
) -> tuple[State, Context]:
    """An iterate y_k of y ← T(y; x), k uniform on 1 … `max_iterations`, and its context.

    A penalty there makes the map contract all along the way, not at the equilibrium alone. (JIIO's
    Eq. 27 draws from the trajectory of its search instead, where x moves too: `visit` of
    `optimize_input`.) The paper takes two Hutchinson vectors:

        state, context = random_iterate(cell, x, max_iterations=12)
        loss = loss + weight * jacobian_penalty(cell, state, context, vectors=2).mean()

    k is one for the batch. The state is a constant; the context is in the graph of the input and
    the parameters, and is renewed as a solve would for cells with a `refresh`.

    Examples:
        >>> cell = eq.equilibrium.FunctionCell(lambda z, x: z / 2 + x)
        >>> from equilibria.equilibrium.jacobian import random_iterate
        >>> state, context = random_iterate(cell, torch.ones(1, 1), max_iterations=1)
        >>> state
        tensor([[1.]])
    """
    check_at_least_one(max_iterations=max_iterations)
    context = cell.inject(*inputs)
    state = cell.initial_state(*inputs, context) if start is None else start
    state = map_state(lambda tensor: tensor.detach(), state)
    device = None if generator is None else generator.device
    steps = int(torch.randint(1, max_iterations + 1, (), generator=generator, device=device))
    for taken in range(steps):
        with torch.no_grad():
            state = cell.step(state, context)
        if taken < capabilities.refresh_until(cell):
            context = capabilities.refresh(cell, state, context)
    return state, context


def spectral_radius(
    cell: Cell,
    state: State,
    context: Context,
    *,
    iterations: int = 100,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The spectral radius of J at `state`, per problem: below 1 the iteration contracts locally.

    By power iteration with Jᵀ: the mean growth over the later half of the iterations, which
    tends to the radius whether the leading eigenvalues are real or a complex pair.

    Examples:
        >>> cell = eq.equilibrium.FunctionCell(lambda z, x: z / 2 + x)
        >>> x = torch.ones(1, 4)
        >>> eq.equilibrium.spectral_radius(cell, x, cell.inject(x)).round(decimals=3)
        tensor([0.5000])
    """
    if iterations < 2:
        raise ValueError(f"iterations must be at least 2, not {iterations}")
    packing = Packing.of(state, cell.couples_batch)
    with torch.enable_grad():
        point, image = _evaluate(cell, state, context)
    flat = packing.pack(map_state(lambda tensor: _normal(tensor, generator), state))
    growth = torch.zeros(flat.shape[0], dtype=flat.dtype, device=flat.device)
    skipped = iterations // 2
    for iteration in range(iterations):
        probe = list(state_tensors(packing.unpack(flat)))
        pulled = torch.autograd.grad(image, point, probe, retain_graph=True, materialize_grads=True)
        flat = packing.pack(pulled[0] if packing.single else pulled)
        norm = torch.linalg.vector_norm(flat, dim=1)
        if iteration >= skipped:
            growth += norm.log()
        flat = flat / norm.clamp_min(torch.finfo(flat.dtype).tiny)[:, None]
    return (growth / (iterations - skipped)).exp()


def _evaluate(
    cell: Cell, state: State, context: Context
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """A leaf state and its image, in the graph of context and parameters."""
    leaves = map_state(lambda tensor: tensor.detach().requires_grad_(), state)
    return state_tensors(leaves), state_tensors(cell.step(leaves, context))


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)
    return noise.to(like.device)
