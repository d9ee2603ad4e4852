"""The parts around an equilibrium."""

from __future__ import annotations

import torch

from equilibria.models.blocks import ImageStem


def test_a_recomputed_stem_learns_and_counts_as_one_that_keeps_everything() -> None:
    torch.manual_seed(0)
    kept = ImageStem(3, 4, depth=2, strides=1).double().train()
    again = ImageStem(3, 4, depth=2, strides=1, recompute=True).double().train()
    again.load_state_dict(kept.state_dict())
    images = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    for stem in (kept, again):
        stem(images).square().mul(torch.linspace(0, 1, 4)[:, None]).sum().backward()
    for one, other in zip(kept.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(kept.buffers(), again.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    assert int(again[1].num_batches_tracked) == 1
