"""What an equilibrium cannot be put through, each said in one sentence with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from equilibria.context.context import is_exporting
from equilibria.gradients import GradientRule, Implicit
from equilibria.operators.norm_control import has_tangent, is_wrapped


def refuse_recording(recorder: str | None = None) -> None:
    """A recording of a solve would hold the iterations that one example needed.

    recorder: who records, if that is known; else it is asked whether anyone does.
    """
    if recorder is None and torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        recorder = "torch.jit.trace"
    if recorder is None and is_exporting():
        recorder = "torch.export"
    if recorder is not None:
        raise NotImplementedError(
            f"{recorder} cannot record an equilibrium layer, whose number of iterations depends on "
            "the input: run the model itself, as it is or through torch.compile(model), or write "
            "it as a graph with a loop, by eq.export(model, FILE, images=images)"
        )


def refuse_transforms(
    rule: GradientRule | None,
    inputs: Sequence[Tensor],
    parameters: Callable[[], Iterable[Tensor]],
) -> None:
    """Refuse what `torch.func` and forward-mode differentiation would make of a forward pass.

    Args:
        rule: Rule that differentiates the equilibrium; None where nothing does.
        inputs: Inputs of the layer.
        parameters: Returns the parameters of the layer. It is called only inside a transform,
            because walking through all modules takes longer than a small solve's other checks.

    Raises:
        NotImplementedError: If such a transform runs and the layer does not support it.
    """
    collected = [*inputs, *parameters()] if _may_transform() else list(inputs)
    wrapped = [tensor for tensor in collected if is_wrapped(tensor)]
    if any(map(_is_batched, wrapped)):
        raise NotImplementedError(
            "torch.func.vmap cannot run an equilibrium layer, whose samples stop on their own: "
            "pass the whole batch, which it solves sample by sample anyway"
        )
    iterates = rule is None or rule.from_zero
    if not iterates and (any(map(has_tangent, collected)) or any(map(_hides_tangent, wrapped))):
        raise NotImplementedError(
            f"{type(rule).__name__} has no forward-mode derivative: use reverse mode "
            "(torch.autograd.grad, or torch.autograd.functional.jvp), or differentiate the "
            "iterations (gradient='unrolled')"
        )
    if wrapped and isinstance(rule, Implicit):
        raise NotImplementedError(
            "Implicit solves its backward pass by torch.autograd, which torch.func does not reach: "
            "use torch.autograd.grad (or torch.autograd.functional), or a rule that is recorded "
            "(gradient='phantom', 'one_step' or 'unrolled')"
        )


def _may_transform() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation may run around the call.

    True where this version of PyTorch does not say.
    """
    functorch = getattr(torch._C, "_functorch", None)
    innermost = getattr(functorch, "peek_interpreter_stack", None)
    level = getattr(forward_ad, "_current_level", None)
    if innermost is None or level is None:
        return True
    return innermost() is not None or bool(level >= 0)


def refuse_half_on_cpu(tensors: Iterable[Tensor]) -> None:
    """Refuse float16 on a CPU, whose convolutions take a hundred times as long as in float32.

    Its precision of 1e-3 is also below the usual tolerances.
    """
    for tensor in tensors:
        if tensor.dtype is torch.float16 and tensor.device.type == "cpu":
            raise NotImplementedError(
                "an equilibrium layer does not compute in float16 on a CPU, where that takes about "
                "a hundred times as long as float32: use model.float(), or model.bfloat16() with a "
                "tolerance of 0.05 or more"
            )


@torch.no_grad()
def _hides_tangent(tensor: Tensor) -> bool:
    """Whether forward mode runs below another transform: it refuses functions with `out`."""
    try:
        torch.neg(tensor, out=torch.empty_like(tensor))
    except NotImplementedError:
        return True
    return False


def _is_batched(tensor: Tensor) -> bool:
    """Whether vmap has taken a dimension away: a number of such a tensor has no one value."""
    try:
        bool(tensor.detach().flatten()[:1].isnan().any())
    except RuntimeError:
        return True
    return False
