"""Operators with kernels whose norm is kept below ζ, as a differentiable parametrization."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from equilibria.context.context import run_eagerly
from equilibria.context.state import at_least_float32
from equilibria.operators.base import LinearOperator, Shape, Weights
from equilibria.operators.spectral import full_precision, graph_free, norm_along, seeded_vector
from equilibria.registry import check_choice, check_positive

NORMS = ("bound", "estimate", None)

FIRST_ITERATIONS = 50
"""Power steps when there is no vector to start from."""

REFINING_ITERATIONS = 3
"""Power steps after a parameter update: the kernel has moved little, and so has its vector."""

MEMO_ENTRIES = 16
"""Evaluation over images of ever new sizes must not grow the memory without end."""


class KernelOperator(LinearOperator):
    """A linear map with a trainable `kernel` K and, optionally, a controlled norm.

        W = K · min(1, ζ/b),        b the norm of K's operator

    - norm="bound": b is a rigorous upper bound (exact for matrices), so that ‖W‖ ≤ ζ is certain;
    - norm="estimate": b comes from power iteration, cheaper for many channels, and a lower bound:
      ‖W‖ may exceed ζ by the few per cent that the iteration lacks;
    - norm=None: W = K.

    A map with several kernels (K is then their product) names them in `kernel_names`, in the order
    in which `weights` returns them; the first one carries the scale for all.

    b is part of the graph: with b > ζ, the gradient in K has no component along K, and a detached b
    would point elsewhere. What needs no graph (where the maximum of the bound lies, the vector of
    the iteration) is computed once a parameter update and input shape, not once a call.
    """

    kernel_names: tuple[str, ...] = ("kernel",)
    norm_vector: Tensor

    def __init__(self, *kernels: nn.Parameter, norm: str | None, zeta: float) -> None:
        super().__init__()
        for name, kernel in zip(self.kernel_names, kernels, strict=True):
            self.register_parameter(name, kernel)
        self.weight_count = len(kernels)
        self._anchor = kernels[0].detach().new_empty(0)
        self._memo = TensorMemo()
        check_choice(NORMS, norm=norm)
        check_positive(zeta=zeta)
        self.norm = norm
        self.zeta = zeta
        if norm == "estimate":
            # In the state_dict, so that a reloaded model gives the very same outputs; empty until
            # an input shape is known.
            empty = at_least_float32(kernels[0].detach()).new_empty(0)
            self.register_buffer("norm_vector", empty)

    @property
    def kernels(self) -> Weights:
        """The raw kernels."""
        return tuple(getattr(self, name) for name in self.kernel_names)

    @abstractmethod
    def _search(self, kernels: Weights, input_shape: Shape) -> Any:
        """What `_bound_at` needs and no graph has to see; None where their product K is zero.

        Every kernel is finite, not zero, and scaled to unit size.
        """

    @abstractmethod
    def _bound_at(self, kernels: Weights, input_shape: Shape, found: Any) -> Tensor:
        """The bound of K's norm, differentiable, from what `_search` found for these kernels."""

    def _control_shape(self, input_shape: Shape | None) -> Shape:
        """The input shape on which the norm depends: () where it does not."""
        if input_shape is None:
            raise ValueError(
                f"{self}: the norm depends on the size of the input; call weights(input_shape)"
            )
        return tuple(input_shape)

    @property
    def norm_depends_on_size(self) -> bool:
        """Whether the norm, and with it what controls it, differs between sizes of the input."""
        return type(self)._control_shape is KernelOperator._control_shape

    def weights(self, input_shape: Shape | None = None) -> Weights:
        """W, in the graph where the kernels are; without gradients it is remembered."""
        first, *others = self.kernels
        if self.norm is None or first.is_meta:
            return (first, *others)
        return (self._controlled(self._control_shape(input_shape)), *others)

    @property
    def norm_limit(self) -> float | None:
        """ζ under norm="bound"; nothing is certain otherwise."""
        return self.zeta if self.norm == "bound" else None

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
        """The first kernel with the scale."""
        kernels = self.kernels
        in_graph = torch.is_grad_enabled() and any(kernel.requires_grad for kernel in kernels)
        if in_graph or any(map(has_tangent, kernels)):
            return self._effective(shape)
        with graph_free(kernels[0]):
            values = self._memo.of(*kernels)
            vector = self._vector(shape) if self.norm == "estimate" else None
            key = ("weight", shape, self.norm, self.zeta)
            used, weight = values.get(key, (None, None))
            if weight is None or (vector is not None and not torch.equal(used, vector)):
                weight = self._effective(shape)
                values[key] = (vector, weight)
            return weight  # type: ignore[no-any-return]

    def _effective(self, shape: Shape) -> Tensor:
        scale = self._scale(self._bound(shape) if self.norm == "bound" else self._estimate(shape))
        first = self.kernels[0]
        return first if scale is None else first * scale.to(first.dtype)

    def _scale(self, norm: Tensor) -> Tensor | None:
        """ζ/b, or None below ζ: then b stays out of the graph and K = 0 needs no care."""
        return None if bool(norm.detach() <= self.zeta) else self.zeta / norm

    def _bound(self, shape: Shape) -> Tensor:
        """The rigorous bound of the raw kernels."""
        kernels = self._precise_kernels()
        with graph_free(kernels[0]):
            values = self._memo.of(*self.kernels)
            key = ("search", shape)
            if key not in values:
                # Scaled to unit size: squares of very small or large kernels would not fit.
                sizes = torch.stack([kernel.detach().abs().amax() for kernel in kernels])
                usable = bool(((sizes > 0) & (sizes < torch.inf)).all())
                found = self._search(_divided(kernels, sizes), shape) if usable else None
                values[key] = sizes, found
            sizes, found = values[key]
        with full_precision(kernels[0]):
            if found is None:  # zero with zero derivatives for K = 0, NaN where K is not finite
                return torch.stack([(kernel * 0).sum() for kernel in kernels]).sum()
            bound = self._bound_at(_divided(kernels, sizes), shape, found)
            for size in sizes:  # one by one: their product might not fit where the norm does
                bound = bound * size
            return bound

    def _estimate(self, shape: Shape) -> Tensor:
        """The estimated norm of the raw kernels: ‖K v‖ with v held constant."""
        kernels = self._precise_kernels()
        vector = self._vector(shape).to(kernels[0])
        with full_precision(kernels[0]):
            unit = vector / torch.linalg.vector_norm(vector)  # `.half()` may have rounded it
            return norm_along(lambda z: self._map(z, kernels), unit[None])

    def _vector(self, shape: Shape) -> Tensor:
        """v: refined once a parameter update in training, taken as it is in evaluation."""
        kernels = self.kernels
        with graph_free(kernels[0]):
            values = self._memo.of(*kernels)
            fits = tuple(self.norm_vector.shape) == shape
            if self.training:
                wrapped = is_wrapped(*kernels)
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
        kernels = tuple(kernel.detach() for kernel in self._precise_kernels())
        begin = seeded_vector(shape, kernels[0]) if start is None else start.to(kernels[0])
        iterations = FIRST_ITERATIONS if start is None else REFINING_ITERATIONS
        return self._leading_vector(kernels, begin[None], iterations)[0].contiguous()

    def _precise_kernels(self) -> Weights:
        return tuple(at_least_float32(kernel) for kernel in self.kernels)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        stored = state_dict.get(f"{prefix}norm_vector")
        if isinstance(stored, Tensor) and self.norm == "estimate":
            # Its shape is that of the inputs seen so far, which a fresh operator cannot know.
            self.norm_vector = torch.empty_like(stored, device=self.norm_vector.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def on_twin(self) -> None:
        self._memo = copy.deepcopy(self._memo)

    def _control_repr(self) -> str:
        return "" if self.norm is None else f", norm={self.norm!r}, zeta={self.zeta}"


def _divided(kernels: Weights, sizes: Tensor) -> Weights:
    return tuple(kernel / size for kernel, size in zip(kernels, sizes, strict=True))


def has_tangent(tensor: Tensor) -> bool:
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


def is_wrapped(*tensors: Tensor) -> bool:
    """Whether a `torch.func` transform runs: what is computed then must not outlive it."""
    try:
        for tensor in tensors:
            tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


class TensorMemo:
    """Values that hold for the present content of one tensor, or of several together.

    The content itself is compared: `_version` does not see an edit through `.data`, which is what
    optimizers, weight averaging and DDP do. Plain data without graphs, outside the state_dict;
    it follows `deepcopy`, and a change of device or dtype empties it.
    """

    def __init__(self) -> None:
        # Content and values change together, for other threads too.
        self._kept: tuple[tuple[Tensor, ...], dict[object, Any]] = ((), {})

    def of(self, *tensors: Tensor) -> dict[object, Any]:
        """The values remembered for these tensors: empty if their content is not the last seen."""
        if is_wrapped(*tensors):
            return {}
        content, values = self._kept
        same = len(content) == len(tensors) and all(map(_same, content, tensors))
        if not same or len(values) > MEMO_ENTRIES:
            content = content if same else tuple(tensor.detach().clone() for tensor in tensors)
            values = {}
            self._kept = content, values
        return values

    def __deepcopy__(self, memo: object) -> TensorMemo:
        """What is remembered is never changed, and may be shared; what is learned is not."""
        other = TensorMemo()
        content, values = self._kept
        other._kept = content, values.copy()
        return other


def _same(kept: Tensor, tensor: Tensor) -> bool:
    return kept.dtype == tensor.dtype and kept.device == tensor.device and torch.equal(kept, tensor)
