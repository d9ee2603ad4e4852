"""The context and the packing of states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.context import Context
from equilibria.context.state import Packing, map_state, sum_per_sample

shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3)


@given(shapes=shapes, batch=st.integers(0, 4), single=st.booleans(), coupled=st.booleans())
def test_packing_round_trip(
    shapes: list[list[int]], batch: int, single: bool, coupled: bool
) -> None:
    tensors = tuple(torch.randn(batch, *shape) for shape in shapes)
    state = tensors[0] if single else tensors
    packing = Packing.of(state, couples_batch=coupled)
    flat = packing.pack(state)
    assert flat.shape[0] == (min(batch, 1) if coupled else batch)
    unpacked = packing.unpack(flat)
    assert isinstance(unpacked, torch.Tensor) == single
    map_state(torch.testing.assert_close, unpacked, state) if single else [
        torch.testing.assert_close(a, b) for a, b in zip(unpacked, state, strict=True)
    ]


def test_packing_one_tensor_copies_nothing() -> None:
    state = torch.randn(3, 2, 4, 4)
    flat = Packing.of(state).pack(state)
    assert flat.data_ptr() == state.data_ptr()
    assert Packing.of(state).unpack(flat).data_ptr() == state.data_ptr()


def test_packing_follows_channels_last() -> None:
    image = torch.randn(3, 2, 4, 5).contiguous(memory_format=torch.channels_last)
    vector = torch.randn(3, 7)
    packing = Packing.of(image)
    flat = packing.pack(image)
    assert flat.shape == (3, 40)
    assert flat.data_ptr() == image.data_ptr()
    unpacked_image = packing.unpack(flat)
    assert torch.equal(unpacked_image, image)
    assert unpacked_image.is_contiguous(memory_format=torch.channels_last)
    both = Packing.of((image, vector))
    unpacked = both.unpack(both.pack((image, vector)))
    assert torch.equal(unpacked[0], image)
    assert torch.equal(unpacked[1], vector)
    # A tensor in another format is packed in the order of the packing.
    assert torch.equal(packing.pack(image.contiguous()), flat)


def nested() -> Context:
    return Context(
        sample={"a": torch.randn(3, 2), "pair": (torch.randn(3), torch.randn(3, 1))},
        shared={"W": (torch.randn(2, 2),), "scale": torch.tensor(2.0)},
        parts={"first": Context(sample={"b": torch.randn(3, 4)}), "empty": Context()},
    )


def test_keep_indexes_per_sample_tensors_only() -> None:
    context = nested()
    kept = context.keep(torch.tensor([2, 0]))
    assert torch.equal(kept["a"], context["a"][[2, 0]])
    assert torch.equal(kept.parts["first"]["b"], context.parts["first"]["b"][[2, 0]])
    assert kept["scale"] is context["scale"]
    assert kept.weights("W")[0] is context.weights("W")[0]


def test_replace_restores_the_structure() -> None:
    context = nested()
    doubled = context.replace([2 * tensor for tensor in context.tensors()])
    assert torch.equal(doubled.parts["first"]["b"], 2 * context.parts["first"]["b"])
    assert torch.equal(doubled["scale"], 2 * context["scale"])
    assert [t.shape for t in doubled.tensors()] == [t.shape for t in context.tensors()]
    skeleton = context.skeleton()
    assert all(t.numel() == 0 for t in skeleton.tensors())
    assert torch.equal(skeleton.replace(context.tensors())["a"], context["a"])


def test_the_error_for_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no tensor 'c'; it has \['W', 'a', 'pair', 'scale'\]"):
        nested()["c"]


def test_sums_are_in_at_least_float32() -> None:
    values = torch.full((2, 4096), 1.0, dtype=torch.bfloat16)
    assert torch.equal(sum_per_sample(values), torch.full((2,), 4096.0))
    assert sum_per_sample(values.double()).dtype == torch.float64
