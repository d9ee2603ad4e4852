"""Operators with a kernel whose norm is kept below ζ, as a differentiable parametrisation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from equilibria.context import run_eagerly
from equilibria.operators.base import LinearOperator, Shape, Weights
from equilibria.operators.memo import TensorMemo, is_wrapped
from equilibria.operators.power_iteration import leading_vector, norm_along, seeded_vector
from equilibria.operators.precision import at_least_float32, full_precision, graph_free

NORMS = ("bound", "estimate", None)

FIRST_ITERATIONS = 50
"""Power steps when there is no vector to start from."""

REFINING_ITERATIONS = 3
"""Power steps after a parameter update: the kernel has moved little, and so has its vector."""


class KernelOperator(LinearOperator):
    """A linear map with a trainable `kernel` K and, if asked for, a controlled norm:

        W = K · min(1, ζ/b),        b the norm of K's operator

    - norm="bound": b is a rigorous upper bound (exact for matrices), so that ‖W‖ ≤ ζ is certain;
    - norm="estimate": b comes from power iteration, cheaper for many channels, and a lower bound:
      ‖W‖ may exceed ζ by the few per cent that the iteration lacks;
    - norm=None: W = K.

    b is part of the graph: with b > ζ, the gradient in K has no component along K, and a detached b
    would point elsewhere. What needs no graph (where the maximum of the bound lies, the vector of
    the iteration) is computed once a parameter update and input shape, not once a call.
    """

    weight_count = 1
    kernel: nn.Parameter
    norm_vector: Tensor

    def __init__(self, kernel: nn.Parameter, norm: str | None, zeta: float) -> None:
        super().__init__()
        self.kernel = kernel
        self._anchor = kernel.detach().new_empty(0)
        self._memo = TensorMemo()
        self.norm = norm
        self.zeta = zeta

    @property
    def norm(self) -> str | None:
        """How the norm is controlled: "bound", "estimate" or None."""
        return self._norm

    @norm.setter
    def norm(self, norm: str | None) -> None:
        if norm not in NORMS:
            choices = ", ".join(repr(choice) for choice in NORMS)
            raise ValueError(f"unknown norm {norm!r}; choose one of {choices}")
        self._norm = norm
        if norm == "estimate" and not hasattr(self, "norm_vector"):
            # In the state_dict, so that a reloaded model gives the very same outputs; empty until
            # an input shape is known.
            self.register_buffer("norm_vector", at_least_float32(self.kernel.detach()).new_empty(0))

    @property
    def zeta(self) -> float:
        """ζ, the largest norm that the effective weight may have."""
        return self._zeta

    @zeta.setter
    def zeta(self, zeta: float) -> None:
        if not zeta > 0:
            raise ValueError(f"zeta must be positive, got {zeta}")
        self._zeta = float(zeta)

    @abstractmethod
    def _search(self, kernel: Tensor, input_shape: Shape) -> Any:
        """What `_bound_at` needs and no graph has to see; `kernel` is finite, not zero, scaled."""

    @abstractmethod
    def _bound_at(self, kernel: Tensor, input_shape: Shape, found: Any) -> Tensor:
        """The bound of K's norm, differentiable in K, from what `_search` found for this K."""

    def _control_shape(self, input_shape: Shape | None) -> Shape:
        """The input shape on which the norm depends: () where it does not."""
        if input_shape is None:
            raise ValueError(
                f"{self}: the norm depends on the size of the input; call weights(input_shape)"
            )
        return tuple(input_shape)

    def weights(self, input_shape: Shape | None = None) -> Weights:
        """(W,), in the graph where the kernel is; without gradients W is remembered."""
        if self.norm is None or self.kernel.is_meta:
            return (self.kernel,)
        return (self._controlled(self._control_shape(input_shape)),)

    def norm_bound(self, input_shape: Shape) -> Tensor:
        """A rigorous bound of ‖W‖: min(b, ζ) under norm="bound", else the scaled kernel's bound."""
        self.output_shape(input_shape)
        shape = self._control_shape(tuple(input_shape))
        bound = self._bound(shape)
        if self.norm is None:
            return bound
        if self.norm == "bound":
            return bound.clamp(max=self.zeta)
        scale = self._scale(self._estimate(shape))
        return bound if scale is None else bound * scale

    # Comparing contents and choosing a frequency are no work for a compiler.
    @run_eagerly
    def _controlled(self, shape: Shape) -> Tensor:
        kernel = self.kernel
        if (torch.is_grad_enabled() and kernel.requires_grad) or _has_tangent(kernel):
            return self._effective(shape)
        with graph_free(kernel):
            values = self._memo.of(kernel)
            vector = self._vector(shape) if self.norm == "estimate" else None
            key = ("weight", shape, self.norm, self.zeta)
            used, weight = values.get(key, (None, None))
            if weight is None or (vector is not None and not torch.equal(used, vector)):
                weight = self._effective(shape)
                values[key] = (vector, weight)
            return weight  # type: ignore[no-any-return]

    def _effective(self, shape: Shape) -> Tensor:
        scale = self._scale(self._bound(shape) if self.norm == "bound" else self._estimate(shape))
        return self.kernel if scale is None else self.kernel * scale.to(self.kernel.dtype)

    def _scale(self, norm: Tensor) -> Tensor | None:
        """ζ/b, or None below ζ: then b stays out of the graph and K = 0 needs no care."""
        return None if bool(norm.detach() <= self.zeta) else self.zeta / norm

    def _bound(self, shape: Shape) -> Tensor:
        """The rigorous bound of the raw kernel."""
        kernel = at_least_float32(self.kernel)
        with graph_free(kernel):
            values = self._memo.of(self.kernel)
            key = ("search", shape)
            if key not in values:
                fixed = kernel.detach()
                # Scaled to unit size: squares of very small or large kernels would not fit.
                size = fixed.abs().amax()
                usable = bool((size > 0) & (size < torch.inf))
                values[key] = (size, self._search(fixed / size, shape)) if usable else None
            found = values[key]
        with full_precision(kernel):
            if found is None:  # zero with zero derivatives for K = 0, NaN where K is not finite
                return (kernel * 0).sum()
            size, where = found
            bound: Tensor = self._bound_at(kernel / size, shape, where) * size
            return bound

    def _estimate(self, shape: Shape) -> Tensor:
        """The estimated norm of the raw kernel: ‖K v‖ with v held constant."""
        kernel = at_least_float32(self.kernel)
        vector = self._vector(shape).to(kernel)
        with full_precision(kernel):
            unit = vector / torch.linalg.vector_norm(vector)  # `.half()` may have rounded it
            return norm_along(lambda z: self._map(z, (kernel,)), unit[None])

    def _vector(self, shape: Shape) -> Tensor:
        """v: refined once a parameter update in training, taken as it is in evaluation."""
        with graph_free(self.kernel):
            values = self._memo.of(self.kernel)
            fits = tuple(self.norm_vector.shape) == shape
            if self.training:
                wrapped = is_wrapped(self.kernel)
                if fits and (wrapped or ("refined", shape) in values):
                    return self.norm_vector
                vector = self._iterate(shape, self.norm_vector if fits else None)
                if not wrapped:
                    self.norm_vector = vector
                    values["refined", shape] = True
                return vector
            if fits:
                return self.norm_vector
            # Evaluation leaves the buffer alone: it must not depend on what was evaluated before.
            if ("vector", shape) not in values:
                values["vector", shape] = self._iterate(shape, None)
            return values["vector", shape]  # type: ignore[no-any-return]

    def _iterate(self, shape: Shape, start: Tensor | None) -> Tensor:
        kernel = at_least_float32(self.kernel.detach())
        begin = seeded_vector(shape, kernel) if start is None else start.to(kernel)
        vector = leading_vector(
            lambda z: self._map(z, (kernel,)),
            lambda y: self._map_adjoint(y, (kernel,)),
            begin[None],
            FIRST_ITERATIONS if start is None else REFINING_ITERATIONS,
        )
        return vector[0].contiguous()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        stored = state_dict.get(f"{prefix}norm_vector")
        if isinstance(stored, Tensor) and self.norm == "estimate":
            # Its shape is that of the inputs seen so far, which a fresh operator cannot know.
            self.norm_vector = torch.empty_like(stored, device=self.norm_vector.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _control_repr(self) -> str:
        return "" if self.norm is None else f", norm={self.norm!r}, zeta={self.zeta}"


def _has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation runs through the tensor; no_grad does not stop that."""
    return unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call, unused-ignore]


def drawn_kernel(*shape: int) -> nn.Parameter:
    """The default start: normal, with standard deviation 1/√fan_in."""
    kernel = nn.Parameter(torch.empty(shape))
    with torch.no_grad():
        kernel.normal_(std=kernel[0].numel() ** -0.5)
    return kernel


def given_kernel(tensor: Tensor, dimensions: int) -> nn.Parameter:
    """A kernel out of the caller's tensor: a Parameter is shared, any other becomes a constant."""
    if tensor.dim() != dimensions:
        raise ValueError(
            f"expected a tensor of {dimensions} dimensions, got shape {tuple(tensor.shape)}"
        )
    if not tensor.is_floating_point():
        raise ValueError(f"expected a tensor of real floating-point numbers, got {tensor.dtype}")
    if isinstance(tensor, nn.Parameter):
        return tensor
    if tensor.requires_grad:
        raise ValueError(
            "the tensor is part of a graph, which an operator would cut; "
            "pass an nn.Parameter to train it, or tensor.detach() for a constant"
        )
    return nn.Parameter(tensor, requires_grad=False)
