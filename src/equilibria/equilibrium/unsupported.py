"""Errors for operations that equilibrium layers do not support, with remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from equilibria.context.context import is_exporting
from equilibria.gradients import GradientRule, Implicit
from equilibria.operators.norm_control import has_tangent, is_wrapped


def refuse_recording(recorder: str | None = None) -> None:
    """Raise an error if a tracer records the call.

    A recorded solve would contain exactly the iterations that the example input needed.

    Args:
        recorder: Name of the tracer; None detects `torch.jit.trace` and `torch.export`.

    Raises:
        NotImplementedError: If the call is recorded.
    """
    if recorder is None and torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        recorder = "torch.jit.trace"
    if recorder is None and is_exporting():
        recorder = "torch.export"
    if recorder is not None:
        raise NotImplementedError(
            f"{recorder} cannot record an equilibrium layer, because its number of iterations "
            "depends on the input; run the model directly or through torch.compile(model), or "
            "export it as a graph with a loop: eq.export(model, FILE, images=images)"
        )


def refuse_transforms(
    rule: GradientRule | None,
    inputs: Sequence[Tensor],
    parameters: Callable[[], Iterable[Tensor]],
) -> None:
    """Raise an error under unsupported `torch.func` transforms or forward-mode differentiation.

    Args:
        rule: Gradient rule of the equilibrium; None for a solve without gradients.
        inputs: Inputs of the layer.
        parameters: Returns the parameters of the layer. It is called only inside a transform,
            because traversing all modules takes longer than the other checks of a small solve.

    Raises:
        NotImplementedError: If the layer does not support the active transform.
    """
    collected = [*inputs, *parameters()] if _may_transform() else list(inputs)
    wrapped = [tensor for tensor in collected if is_wrapped(tensor)]
    if any(map(_is_batched, wrapped)):
        raise NotImplementedError(
            "torch.func.vmap cannot run an equilibrium layer, because each sample stops "
            "separately; pass the whole batch, whose samples are solved independently"
        )
    iterates = rule is None or rule.from_zero
    if not iterates and (any(map(has_tangent, collected)) or any(map(_hides_tangent, wrapped))):
        raise NotImplementedError(
            f"{type(rule).__name__} has no forward-mode derivative; use reverse mode "
            "(torch.autograd.grad or torch.autograd.functional.jvp), or differentiate the "
            "iterations (gradient='unrolled')"
        )
    if wrapped and isinstance(rule, Implicit):
        raise NotImplementedError(
            "Implicit does not support torch.func, because its backward pass uses torch.autograd; "
            "use torch.autograd.grad or torch.autograd.functional, or another gradient rule "
            "(gradient='phantom', 'one_step' or 'unrolled')"
        )


def _may_transform() -> bool:
    """Return whether a `torch.func` transform or forward-mode differentiation may be active.

    True if this version of PyTorch does not report it.
    """
    functorch = getattr(torch._C, "_functorch", None)
    innermost = getattr(functorch, "peek_interpreter_stack", None)
    level = getattr(forward_ad, "_current_level", None)
    if innermost is None or level is None:
        return True
    return innermost() is not None or bool(level >= 0)


def refuse_half_on_cpu(tensors: Iterable[Tensor]) -> None:
    """Raise an error for float16 tensors on a CPU.

    Convolutions in float16 are about 100 times slower there than in float32, and the precision of
    1e-3 is worse than the usual tolerances.
    """
    for tensor in tensors:
        if tensor.dtype is torch.float16 and tensor.device.type == "cpu":
            raise NotImplementedError(
                "equilibrium layers do not support float16 on a CPU, where it is about 100 times "
                "slower than float32; use model.float(), or model.bfloat16() with a tolerance of "
                "0.05 or more"
            )


@torch.no_grad()
def _hides_tangent(tensor: Tensor) -> bool:
    """Return whether forward mode is active below another transform.

    Forward mode does not support functions with `out`.
    """
    try:
        torch.neg(tensor, out=torch.empty_like(tensor))
    except NotImplementedError:
        return True
    return False


def _is_batched(tensor: Tensor) -> bool:
    """Return whether vmap hides a dimension; converting such a tensor to a number fails."""
    try:
        bool(tensor.detach().flatten()[:1].isnan().any())
    except RuntimeError:
        return True
    return False
