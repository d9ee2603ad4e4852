"""Layers before and after an equilibrium layer."""

from __future__ import annotations

import torch

from equilibria.models.blocks import ImageStem


def test_recomputed_stem_has_the_same_gradients_and_running_statistics() -> None:
    torch.manual_seed(0)
    plain = ImageStem(3, 4, depth=2, strides=1).double().train()
    recomputed = ImageStem(3, 4, depth=2, strides=1, recompute=True).double().train()
    recomputed.load_state_dict(plain.state_dict())
    images = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    for stem in (plain, recomputed):
        stem(images).square().mul(torch.linspace(0, 1, 4)[:, None]).sum().backward()
    for expected, actual in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(expected.grad, actual.grad)
    for expected, actual in zip(plain.buffers(), recomputed.buffers(), strict=True):
        torch.testing.assert_close(expected, actual)
    assert int(recomputed[1].num_batches_tracked) == 1
