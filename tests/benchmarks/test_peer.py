"""The map that the peer gets, and its results."""

from __future__ import annotations

import pytest
import torch

from benchmarks import checks, peer, problems
from benchmarks.problems import Problem

pytestmark = pytest.mark.skipif(
    not peer.is_installed(), reason="TorchDEQ is not installed: it comes with the extra 'bench'"
)


@pytest.fixture
def problem() -> Problem:
    return problems.conv(channels=3, size=6, batch=3, norm=0.9)


@pytest.mark.parametrize("layout", peer.LAYOUTS)
def test_both_libraries_get_the_same_map(problem: Problem, layout: str) -> None:
    contestant = peer.Peer(problem, peer.Setting(layout=layout))
    function, start = contestant.map(problem.x)
    context = problem.cell.inject(problem.x)
    point = torch.randn_like(problem.x)
    given = point.permute(0, 2, 3, 1) if layout == "pixels_first" else point
    torch.testing.assert_close(
        contestant.restored(function(given)), problem.cell.step(point, context)
    )
    assert contestant.restored(start).shape == problem.x.shape
    assert not start.any()


def test_every_tuned_setting_reaches_the_tolerance(problem: Problem) -> None:
    settings = peer.tuned_settings(problem, 1e-4)
    assert len(settings) == len(peer.TUNED_OPTIONS) * len(peer.LAYOUTS)
    for setting in settings:
        contestant = peer.Peer(problem, setting)
        state = contestant.solve()
        assert checks.relative_residual(problem.cell, problem.x, state) <= 1.01e-4
        assert contestant.meter.forward > 1


def test_only_images_have_several_layouts() -> None:
    dense = problems.dense(width=4, batch=2, norm=0.5)
    assert {setting.layout for setting in peer.tuned_settings(dense, 1e-3)} == {"contiguous"}


def test_default_settings_are_those_of_the_peer(problem: Problem) -> None:
    from torchdeq import get_deq

    untouched = get_deq()
    setting = peer.default_settings(problem, 1e-3)[-1]
    assert (setting.stop, setting.backward_stop) == (untouched.f_stop_mode, untouched.b_stop_mode)
    assert setting.backward_tolerance == untouched.b_tol
    assert untouched.f_solver.__name__ == setting.solver
    assert untouched.b_solver.__name__ == setting.backward_solver
    state = peer.Peer(problem, setting).solve()
    assert checks.relative_residual(problem.cell, problem.x, state) <= 1e-3


@pytest.mark.parametrize("gradient", ["ift", "hook_ift"])
@pytest.mark.parametrize("layout", peer.LAYOUTS)
def test_gradient_of_the_peer_is_exact(problem: Problem, layout: str, gradient: str) -> None:
    """Uses the same wrapper as the timing, so that ratios compare equal results."""
    setting = peer.Setting(
        solver="anderson",
        tolerance=1e-6,
        stop="rel",
        backward_solver="anderson",
        backward_tolerance=1e-6,
        backward_stop="rel",
        tuned=True,
        layout=layout,
        gradient=gradient,
        max_iterations=100,
    )
    contestant = peer.Peer(problem, setting)
    x = problem.x.clone().requires_grad_()
    state = contestant.equilibrium(x)
    computed = torch.autograd.grad(0.5 * state.square().sum(), [x, *problem.cell.parameters()])
    reference = checks.reference_gradients(
        problem.cell, problem.x, lambda y: 0.5 * y.square().sum()
    )
    assert checks.gradient_error(computed, reference) < 1e-4
    assert contestant.meter.backward > 1
