"""Jacobian of a map at a state: regularization penalty and spectral radius."""

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
    """Estimate the squared Frobenius norm of the map's Jacobian, divided by the state size.

    One number per sample (Bai et al., 2021). J = ∂T/∂y at `state`, and ‖J‖²_F is the mean of ‖Jᵀv‖²
    over v ~ N(0, I) (Hutchinson). Added to a loss, the penalty makes the map contract faster. It is
    differentiable in the input (through `context`) and the parameters; the state is a constant.

    Args:
        cell: Cell with the map T.
        state: The equilibrium, or a `random_iterate`.
        context: Result of `cell.inject` for the input.
        vectors: Number of random vectors v.
        generator: Source of randomness; None uses PyTorch's default generator.

    Returns:
        Shape (B,), or (1,) if the cell couples the batch.

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
            products = torch.autograd.grad(
                image, point, probe, create_graph=True, materialize_grads=True
            )
            flat = packing.pack(products[0] if packing.single else products)
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
    """Return an iterate y_k of the iteration y ← T(y; x) with random k, and its context.

    A `jacobian_penalty` at this state makes the map contract along the whole trajectory, not only
    at the equilibrium. The paper uses two Hutchinson vectors:

        state, context = random_iterate(cell, x, max_iterations=12)
        loss = loss + weight * jacobian_penalty(cell, state, context, vectors=2).mean()

    JIIO's Eq. 27 draws from the trajectory of its search over x instead; see `visit` of
    `optimize_input`.

    Args:
        cell: Cell with the map T.
        *inputs: Inputs of the cell.
        max_iterations: k is uniform on 1 … max_iterations, and the same for the whole batch.
        start: State to start from; by default the cell's initial state.
        generator: Source of randomness; None uses PyTorch's default generator.

    Returns:
        The state, detached, and the tensors that the map reads besides it (the context), in the
        graph of the input and the parameters. For cells with a `refresh` method, which recomputes
        such tensors during a solve, they are those after the last step.

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
    for step in range(steps):
        with torch.no_grad():
            state = cell.step(state, context)
        if step < capabilities.refresh_until(cell):
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
    """Estimate the spectral radius of the map's Jacobian J = ∂T/∂y at a state y.

    Below 1, the iteration contracts locally. The estimate is the mean growth rate over the second
    half of a power iteration with Jᵀ, which converges for real and complex leading eigenvalues.

    Args:
        cell: Cell with the map T.
        state: State y at which J is evaluated, usually the equilibrium.
        context: Result of `cell.inject` for the input.
        iterations: Number of power iterations, at least 2.
        generator: Source of randomness; None uses PyTorch's default generator.

    Returns:
        Shape (B,), or (1,) if the cell couples the batch.

    Examples:
        >>> cell = eq.equilibrium.FunctionCell(lambda z, x: z / 2 + x)
        >>> x = torch.ones(1, 4)
        >>> eq.equilibrium.spectral_radius(cell, x, cell.inject(x)).round(decimals=3)
        tensor([0.5000])
    """
    if iterations < 2:
        raise ValueError(f"iterations must be at least 2, got {iterations}")
    packing = Packing.of(state, cell.couples_batch)
    with torch.enable_grad():
        point, image = _evaluate(cell, state, context)
    flat = packing.pack(map_state(lambda tensor: _normal(tensor, generator), state))
    growth = torch.zeros(flat.shape[0], dtype=flat.dtype, device=flat.device)
    skipped = iterations // 2
    for iteration in range(iterations):
        probe = list(state_tensors(packing.unpack(flat)))
        products = torch.autograd.grad(
            image, point, probe, retain_graph=True, materialize_grads=True
        )
        flat = packing.pack(products[0] if packing.single else products)
        norm = torch.linalg.vector_norm(flat, dim=1)
        if iteration >= skipped:
            growth += norm.log()
        flat = flat / norm.clamp_min(torch.finfo(flat.dtype).tiny)[:, None]
    return (growth / (iterations - skipped)).exp()


def _evaluate(
    cell: Cell, state: State, context: Context
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return leaf tensors of the state, and their image in the graph of context and parameters."""
    leaves = map_state(lambda tensor: tensor.detach().requires_grad_(), state)
    return state_tensors(leaves), state_tensors(cell.step(leaves, context))


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)
    return noise.to(like.device)
