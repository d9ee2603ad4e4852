"""Random starts, noise on the state, and several starts per sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import equilibria as eq

SIGNS = [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]


def several_fixed_points(z: Tensor, x: Tensor) -> Tensor:
    """A map of two units with fixed points near (±1, ±1)."""
    return torch.tanh(3 * z + x)


def layer(**options: object) -> eq.EquilibriumLayer:
    options = {"solver": "picard", "tolerance": 1e-6, **options}
    return eq.EquilibriumLayer(several_fixed_points, **options).eval()  # type: ignore[arg-type]


def inputs(samples: int = 6) -> Tensor:
    torch.manual_seed(0)
    return 0.2 * torch.randn(samples, 2, dtype=torch.float64)


def test_random_starts_are_reproducible_and_independent_of_the_batch() -> None:
    run, x = layer(solving=eq.Solving(start="random")), inputs()
    whole = run.solve(x)
    torch.manual_seed(5)
    assert torch.equal(whole.state, run.solve(x).state)
    alone = torch.cat([run.solve(x[i : i + 1]).state for i in range(len(x))])
    torch.testing.assert_close(alone, whole.state, rtol=0, atol=1e-12)
    signs = {tuple(run.solve(0 * x[:1], max_iterations=60).state.sign()[0].tolist())}
    for seed in range(1, 12):
        with eq.solving(run, start={"name": "random", "seed": seed}):
            signs.add(tuple(run.solve(0 * x[:1]).state.sign()[0].tolist()))
    assert signs == set(map(tuple, SIGNS))


def test_random_starts_in_training_follow_the_global_generator() -> None:
    run, x = layer(solving=eq.Solving(start="random")).train(), torch.zeros(64, 2)
    torch.manual_seed(3)
    first = run(x)
    assert len(first.sign().unique(dim=0)) == 4, "samples have different starts"
    second = run(x)
    torch.manual_seed(3)
    assert torch.equal(run(x), first)
    assert not torch.equal(second, first)


def test_the_scale_of_random_starts() -> None:
    draw = eq.Solving(start={"name": "random", "scale": 0.1}).random_start
    assert draw is not None
    for training in (False, True):
        state = draw.draw(torch.zeros(50, 1000), training=training)
        assert abs(float(state.std()) - 0.1) < 0.005
        assert (state[0] == state[1]).all() == (not training)


def test_blocks_change_starts_and_the_innermost_decides() -> None:
    run, x = layer(), inputs()
    usual = run.solve(x).state
    with eq.solving(run, start={run: -torch.ones_like(x)}):
        below = run.solve(x).state
        assert (below < 0).all()
        with eq.solving(run, start="cell"):
            assert torch.equal(run.solve(x).state, usual)
        with eq.solving(run, start="random"):
            assert not torch.equal(run.solve(x).state, below)
    with pytest.raises(ValueError, match="unknown start 'rnadom'; did you mean 'random'"):
        eq.Solving(start="rnadom")


def test_state_noise_acts_in_training_only() -> None:
    once = eq.Solving(eq.Picard(max_iterations=1, iterate="last"), state_noise=0.1)
    run = layer(solving=once, solver=None, tolerance=None)
    x, start = torch.zeros(4000, 2), torch.full((4000, 2), 0.2)
    noise = torch.atanh(run.train()(x, start).double()) / 3 - 0.2
    assert abs(float(noise.std()) - 0.1) < 0.01
    with pytest.warns(eq.ConvergenceWarning):
        exact = run.eval()(x, start)
    torch.testing.assert_close(exact, several_fixed_points(start, x))


@pytest.mark.parametrize("pick", ["residual", "vote"])
def test_several_starts_return_one_of_the_solutions_of_each_sample(pick: str) -> None:
    run, x = layer(), inputs()
    solution = run.solve(x, starts=8, pick=pick)
    assert solution.agreement is not None
    starts = [run._problem((x,), None, _active(run)).start]
    draw = eq.Solving(start="random").random_start
    starts += [draw.draw(starts[0], training=False, index=k) for k in range(1, 8)]
    ends = torch.stack([run.solve(x, start).state for start in starts])
    distances = (ends - solution.state).norm(dim=2) / solution.state.norm(dim=1)
    torch.testing.assert_close((distances < 0.05).double().mean(dim=0), solution.agreement)
    assert (distances.amin(dim=0) < 1e-12).all()
    if pick == "vote":
        groups = (ends[:, None] - ends[None]).norm(dim=3) < 0.05
        assert torch.equal(solution.agreement, groups.double().mean(dim=1).amax(dim=0))
    else:
        residuals = torch.stack([run.solve(x, start).residual for start in starts])
        torch.testing.assert_close(solution.residual, residuals.amin(dim=0))
    assert solution.state.shape == x.shape
    assert solution.context["x"] is x or torch.equal(solution.context["x"], x)


def _active(run: eq.EquilibriumLayer) -> object:
    from equilibria.equilibrium.solving import Active

    return Active(run)


def test_several_starts_do_not_depend_on_the_batch_and_work_in_models() -> None:
    model = eq.models.EquilibriumModel(torch.nn.Identity(), layer(), torch.nn.Flatten()).eval()
    x = inputs()
    with eq.solving(model, starts=5, pick="vote", record=True) as record:
        output = model(x)
        alone = torch.cat([model(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(alone, output, rtol=0, atol=1e-12)
    solution = record.solutions[0]
    assert solution.agreement is not None
    assert solution.agreement.shape == (len(x),)
    assert len(solution.residual) == len(x)
    assert solution.sample_evaluations > 5 * len(x)
    assert solution.state.numel() == 0, "a recorded solution has no state"
    again = model.solve(x, starts=5, pick="vote", tolerance=1e-6)
    torch.testing.assert_close(model.output(again), output)
    assert model.last_solution is not None
    assert model.last_solution.agreement is not None


def test_several_starts_in_blocks_of_samples_and_with_a_trace() -> None:
    run = layer()
    x = 0.2 * torch.randn(3, 400_000)
    solution = run.solve(x, starts=2, trace="states")
    torch.testing.assert_close(run.solve(x, starts=2).state, solution.state)
    assert solution.trace is not None
    assert solution.trace.states is not None
    assert solution.trace.residual.shape[1] == 3
    torch.testing.assert_close(solution.trace.states[-1], solution.state)


def test_gradients_at_a_picked_solution() -> None:
    x = inputs().requires_grad_()
    for gradient in ("implicit", "one_step"):
        run = layer(gradient=gradient, tolerance=1e-9)
        with eq.solving(run, starts=4, pick="vote"):
            z = run(x)
        (pulled,) = torch.autograd.grad(z.sum(), x)
        slope = 1 - z.detach().square()
        expected = slope if gradient == "one_step" else slope / (1 - 3 * slope)
        torch.testing.assert_close(pulled, expected, rtol=1e-5, atol=1e-6)


def test_a_contraction_is_solved_from_one_start() -> None:
    torch.manual_seed(0)
    W = eq.Dense(4, 6, norm="bound", zeta=0.8)
    run = eq.EquilibriumLayer(eq.Input(eq.Dense(3, 6)) + eq.Quadratic(W), tolerance=1e-6).eval()
    x = torch.randn(5, 3)
    several, one = run.solve(x, starts=6), run.solve(x)
    assert several.sample_evaluations == one.sample_evaluations
    assert torch.equal(several.state, one.state)
    assert several.agreement is not None
    assert (several.agreement == 1).all()


def test_several_starts_that_make_no_sense_raise() -> None:
    with pytest.raises(ValueError, match="couples the samples"):
        layer(solver=eq.solvers.SAM(regularizer="decorrelation"), tolerance=None).train().solve(
            inputs(), starts=2
        )
    with pytest.raises(ValueError, match="starts=2 needs a gradient rule that solves"):
        layer(solving=eq.Solving(starts=2, gradient="unrolled"))(inputs())
    with pytest.raises(ValueError, match="starts must be at least 1"):
        layer().solve(inputs(), starts=0)
    with pytest.raises(ValueError, match="pick must be one of residual, vote"):
        layer().solve(inputs(), starts=2, pick="best")
    with pytest.raises(TypeError, match="solve has no option 'start_count'"):
        layer().solve(inputs(), start_count=2)
