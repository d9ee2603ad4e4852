"""Operators with trainable kernels and a differentiable parametrization that keeps the norm ≤ ζ."""

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

NORMS: tuple[str | None, ...] = ("bound", "estimate", None)

FIRST_ITERATIONS = 50
"""Number of power steps without a previous vector."""

REFINING_ITERATIONS = 3
"""Number of power steps after a parameter update, which hardly changes the vector."""

MEMO_ENTRIES = 16
"""Largest number of stored values, so that images of many sizes do not fill the memory."""


class KernelOperator(LinearOperator):
    """Base class of operators with a trainable `kernel` K and an optional limit ζ on the norm.

        W = K · min(1, ζ/b),        b the norm of the operator with kernel K

    - norm="bound": b is a rigorous upper bound (exact for matrices), which guarantees ‖W‖ ≤ ζ;
    - norm="estimate": b comes from power iteration, which is cheaper for many channels but a lower
      bound: ‖W‖ may exceed ζ by a few percent;
    - norm=None: W = K.

    An operator with several kernels, whose product is K, lists them in `kernel_names` in the order
    of `weights`. Only the first one is scaled.

    b is part of the graph: if b > ζ, the gradient in K has no component along K, which a detached b
    would add. Quantities without a gradient, such as the maximizing frequency of the bound and the
    vector of the power iteration, are computed once per parameter update and input shape.

    Args:
        kernels: The kernels, in the order of `kernel_names`.
        norm: "bound", "estimate" or None.
        zeta: Limit ζ on the norm.
    """

    kernel_names: tuple[str, ...] = ("kernel",)
    norms = NORMS
    """Kinds of norm control that the operator supports."""
    norm_vector: Tensor

    def __init__(self, *kernels: nn.Parameter, norm: str | None, zeta: float) -> None:
        super().__init__()
        for name, kernel in zip(self.kernel_names, kernels, strict=True):
            self.register_parameter(name, kernel)
        self.weight_count = len(kernels)
        self._anchor = kernels[0].detach().new_empty(0)
        self._memo = TensorMemo()
        check_choice(self.norms, norm=norm)
        check_positive(zeta=zeta)
        self.norm = norm
        self.zeta = zeta
        if norm == "estimate":
            # Part of the state_dict, so that a reloaded model gives exactly the same outputs.
            # Empty until an input shape is known.
            empty = at_least_float32(kernels[0].detach()).new_empty(0)
            self.register_buffer("norm_vector", empty)

    @property
    def kernels(self) -> Weights:
        """Raw kernels, before norm control."""
        return tuple(getattr(self, name) for name in self.kernel_names)

    @abstractmethod
    def _search(self, kernels: Weights, input_shape: Shape) -> Any:
        """Return data for `_bound_at` that needs no gradient, or None if the product K is zero.

        Every kernel is finite, not zero, and scaled to unit size.
        """

    @abstractmethod
    def _bound_at(self, kernels: Weights, input_shape: Shape, data: Any) -> Tensor:
        """Return the differentiable bound on the norm of K, from the result of `_search`."""

    def _control_shape(self, input_shape: Shape | None) -> Shape:
        """Return the input shape on which the norm depends; () if it does not."""
        if input_shape is None:
            raise ValueError(
                f"{self}: the norm depends on the size of the input; call weights(input_shape)"
            )
        return tuple(input_shape)

    @property
    def norm_depends_on_size(self) -> bool:
        """Whether the norm, and so the effective weights, depend on the size of the input."""
        return type(self)._control_shape is KernelOperator._control_shape

    def weights(self, input_shape: Shape | None = None) -> Weights:
        """Return the effective kernels, after norm control, in the autograd graph.

        Without gradients they are cached.

        Args:
            input_shape: Shape of one sample; needed if `norm_depends_on_size`.
        """
        first, *others = self.kernels
        if self.norm is None or first.is_meta:
            return (first, *others)
        return (self._controlled(self._control_shape(input_shape)), *others)

    @property
    def norm_limit(self) -> float | None:
        """The limit `zeta` on the operator norm if norm="bound" guarantees it, otherwise None."""
        return self.zeta if self.norm == "bound" else None

    def norm_bound(self, input_shape: Shape) -> Tensor:
        """Return a rigorous upper bound on the operator norm; at most `zeta` with norm="bound".

        Args:
            input_shape: Shape of one sample.
        """
        self.output_shape(input_shape)
        shape = self._control_shape(tuple(input_shape))
        bound = self._bound(shape)
        if self.norm is None:
            return bound
        if self.norm == "bound":
            return bound.clamp(max=self.zeta)
        scale = self._scale(self._estimate(shape))
        return bound if scale is None else bound * scale

    # The cache and the choice of a frequency depend on the data, so they cannot be compiled.
    @run_eagerly
    def _controlled(self, shape: Shape) -> Tensor:
        """Return the first kernel, scaled."""
        kernels = self.kernels
        in_graph = torch.is_grad_enabled() and any(kernel.requires_grad for kernel in kernels)
        if in_graph or any(map(has_tangent, kernels)):
            return self._effective(shape)
        values = self._memo.of(*kernels)
        key = ("weight", shape, self.norm, self.zeta)
        if self.norm != "estimate" and key in values:
            return values[key][1]  # type: ignore[no-any-return]
        with graph_free(kernels[0]):
            vector = self._vector(shape) if self.norm == "estimate" else None
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
        """Return ζ/b, or None if b ≤ ζ: b is then not part of the graph, and K = 0 is safe."""
        return None if bool(norm.detach() <= self.zeta) else self.zeta / norm

    def _bound(self, shape: Shape) -> Tensor:
        """Return the rigorous bound for the raw kernels."""
        kernels = self._precise_kernels()
        with graph_free(kernels[0]):
            values = self._memo.of(*self.kernels)
            key = ("search", shape)
            if key not in values:
                # Scaled to unit size, because squares of extreme kernels overflow or underflow.
                sizes = torch.stack([kernel.detach().abs().amax() for kernel in kernels])
                usable = bool(((sizes > 0) & (sizes < torch.inf)).all())
                data = self._search(_divided(kernels, sizes), shape) if usable else None
                values[key] = sizes, data
            sizes, data = values[key]
        with full_precision(kernels[0]):
            if data is None:  # zero with zero derivatives for K = 0, NaN where K is not finite
                return torch.stack([(kernel * 0).sum() for kernel in kernels]).sum()
            bound = self._bound_at(_divided(kernels, sizes), shape, data)
            for size in sizes:  # one at a time, because their product may overflow
                bound = bound * size
            return bound

    def _estimate(self, shape: Shape) -> Tensor:
        """Return the estimated norm of the raw kernels: ‖K v‖ with constant v."""
        kernels = self._precise_kernels()
        vector = self._vector(shape).to(kernels[0])
        with full_precision(kernels[0]):
            unit = vector / torch.linalg.vector_norm(vector)  # may have been rounded by `.half()`
            return norm_along(lambda z: self._map(z, kernels), unit[None])

    def _vector(self, shape: Shape) -> Tensor:
        """Return v: refined once per parameter update in training, unchanged in evaluation."""
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
            # Evaluation does not change the buffer: results must not depend on earlier inputs.
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
            # The vector has the shape of earlier inputs, which a new operator does not know.
            self.norm_vector = torch.empty_like(stored, device=self.norm_vector.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def on_twin(self) -> None:
        self._memo = copy.deepcopy(self._memo)

    def _control_repr(self) -> str:
        return "" if self.norm is None else f", norm={self.norm!r}, zeta={self.zeta}"


def _divided(kernels: Weights, sizes: Tensor) -> Weights:
    return tuple(kernel / size for kernel, size in zip(kernels, sizes, strict=True))


def has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor takes part in forward-mode differentiation, even under no_grad."""
    return unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call, unused-ignore]


def random_kernel(*shape: int) -> nn.Parameter:
    """Draw a kernel from a normal distribution with standard deviation 1/√fan_in."""
    kernel = nn.Parameter(torch.empty(shape))
    with torch.no_grad():
        kernel.normal_(std=kernel[0].numel() ** -0.5)
    return kernel


def as_kernel(tensor: Tensor, dimensions: int) -> nn.Parameter:
    """Return a tensor as a kernel: an nn.Parameter is shared, any other tensor is a constant."""
    if tensor.dim() != dimensions:
        raise ValueError(
            f"expected a tensor with {dimensions} dimensions, got shape {tuple(tensor.shape)}"
        )
    if not tensor.is_floating_point():
        raise ValueError(f"expected a tensor of real floating-point numbers, got {tensor.dtype}")
    if isinstance(tensor, nn.Parameter):
        return tensor
    if tensor.requires_grad:
        raise ValueError(
            "the tensor is part of an autograd graph, to which the operator would not be "
            "connected: pass an nn.Parameter to train it, or tensor.detach() for a constant"
        )
    return nn.Parameter(tensor, requires_grad=False)


def is_wrapped(*tensors: Tensor) -> bool:
    """Return whether a tensor is wrapped by a `torch.func` transform, whose results expire."""
    try:
        for tensor in tensors:
            tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


class TensorMemo:
    """Cache of values that are valid for the current content of one or more tensors.

    Compares the content, because `_version` does not change with edits through `.data`, which
    optimizers, weight averaging and DDP make. The values have no graph and are not part of the
    state_dict. `deepcopy` copies them; a change of device or dtype clears them.
    """

    def __init__(self) -> None:
        # One attribute, so that content and values change together for other threads.
        self._cached: tuple[tuple[Tensor, ...], dict[object, Any]] = ((), {})

    def of(self, *tensors: Tensor) -> dict[object, Any]:
        """Return the values for these tensors; empty if their content has changed."""
        if is_wrapped(*tensors):
            return {}
        content, values = self._cached
        same = len(content) == len(tensors) and all(map(_same, content, tensors))
        if not same or len(values) > MEMO_ENTRIES:
            if not same:
                with graph_free(tensors[0]):
                    content = tuple(tensor.detach().clone() for tensor in tensors)
            values = {}
            self._cached = content, values
        return values

    def __deepcopy__(self, memo: object) -> TensorMemo:
        """Copy the dictionary but not its values, which are never changed."""
        other = TensorMemo()
        content, values = self._cached
        other._cached = content, values.copy()
        return other


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
