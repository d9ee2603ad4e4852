"""The contract of all equilibrium models in the registry."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import equilibria as eq
from equilibria.context.state import state_tensors
from tests.models.small import (
    always_contracts,
    equilibrium_models,
    has_objective,
    images,
    settled,
    small_model,
    state_is_finite,
)

MODELS = equilibrium_models()
LABELS = torch.tensor([0, 2, 1])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), LABELS[: len(batch)].to(batch.device))


def gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, batch).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9
) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 32])
def test_images_of_all_channels_and_sizes(
    name: str, channels: int, size: int, device: torch.device
) -> None:
    model = small_model(name, in_channels=channels, tolerance=1e-4).float().to(device).eval()
    batch = torch.randn(2, channels, size, size, device=device)
    assert model(batch).shape == (2, 3)
    assert model(batch[:0]).shape == (0, 3)
    solution = model.solve(batch)
    assert solution.converged.all()
    if has_objective(model):
        objective = model.objective(batch)
        assert objective.value(solution.state).shape == (2,)
        assert (objective.residual(solution.state) < 1e-2).all()
    else:
        with pytest.raises(eq.equilibrium.NoObjectiveError):
            model.objective(batch)
    bound = model.contraction_bound(batch)
    assert bound is None or ((bound > 0) & (bound < 1)).all()
    assert bound is not None or not always_contracts(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_derivatives_against_finite_differences(name: str, training: bool) -> None:
    """Compare along random directions in all parameters and the image.

    Directions that cross a kink, where two step sizes give different quotients, are skipped.
    """
    model = settled(small_model(name)).train(training)
    batch = images(2, size=4)
    # Training updates running statistics, and a map may depend on them (GEQ's γ).
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    accepted = seed = 0
    while accepted < 4 and seed < 24:
        seed += 1
        generator = torch.Generator().manual_seed(seed)
        variables = [*model.parameters(), batch.requires_grad_()]
        direction = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in variables]
        restore(model, statistics)
        derivatives = torch.autograd.grad(loss_of(model, batch), variables)
        exact = sum((g * d).sum() for g, d in zip(derivatives, direction, strict=True))

        @torch.no_grad()
        def difference(
            h: float, variables: list[Tensor] = variables, direction: list[Tensor] = direction
        ) -> Tensor:
            losses = []
            for step in (h, -h):
                for v, d in zip(variables, direction, strict=True):
                    v.add_(step * d)
                restore(model, statistics)
                losses.append(loss_of(model, batch))
                for v, d in zip(variables, direction, strict=True):
                    v.sub_(step * d)
            return (losses[0] - losses[1]) / (2 * h)

        fine, coarse = difference(1e-6), difference(1e-5)
        if (fine - coarse).abs() < 3e-6 * exact.abs():
            accepted += 1
            torch.testing.assert_close(exact, coarse, rtol=1e-6, atol=1e-9)
    assert accepted == 4


def restore(model: nn.Module, statistics: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(statistics[name])


@pytest.mark.parametrize("name", MODELS)
def test_implicit_agrees_with_unrolling(name: str) -> None:
    implicit = settled(small_model(name))
    unrolled = settled(small_model(name, gradient=eq.Unrolled(steps=300)))
    unrolled.load_state_dict(implicit.state_dict())
    assert_same(gradients(implicit, images()), gradients(unrolled, images()), 1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_second_derivatives_against_finite_differences(name: str) -> None:
    # monDEQ takes only activations with a known scaled proximal operator.
    smooth = "leaky_relu" if name.startswith("mondeq") else "softplus"
    takes = "activation" in eq.models.model_options(name)
    model = settled(small_model(name, **({"activation": smooth} if takes else {})))
    batch = images().requires_grad_()
    parameter = model.stem[0].weight  # type: ignore[index]

    def penalty() -> Tensor:
        (g,) = torch.autograd.grad(loss_of(model, batch), batch, create_graph=True)
        return g.square().sum()

    (exact,) = torch.autograd.grad(penalty(), parameter)
    direction = torch.randn_like(parameter)
    step = 1e-5
    with torch.no_grad():
        parameter.add_(step * direction)
    up = penalty().detach()
    with torch.no_grad():
        parameter.sub_(2 * step * direction)
    down = penalty().detach()
    torch.testing.assert_close(
        (exact * direction).sum(), (up - down) / (2 * step), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_equal_and_independent(name: str) -> None:
    model = settled(small_model(name))
    before = model(images())
    gradients(model, images())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images()), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.3)
    assert not torch.allclose(twin(images()), before)
    assert torch.equal(model(images()), before)
    unpickled = pickle.loads(pickle.dumps(model))
    assert torch.equal(unpickled(images()), before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_saved_and_loaded_models_are_equal(name: str, norm: str, tmp_path: Path) -> None:
    if eq.models.model_options(name).get("norm") not in ("bound", "estimate"):
        pytest.skip("has no norm control")
    model = small_model(name, norm=norm)
    gradients(model, images())
    model.eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.manual_seed(5)
    other = small_model(name, norm=norm).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(images()), model(images()))


@pytest.mark.parametrize("name", MODELS)
def test_single_and_double_precision_agree(name: str) -> None:
    model = settled(small_model(name, tolerance=1e-6))
    double = model(images())
    single = copy.deepcopy(model).float()
    output = single(images().float())
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), double, rtol=1e-3, atol=1e-3)
    assert torch.equal(single.double()(images()).argmax(1), double.argmax(1))


@pytest.mark.parametrize("name", MODELS)
def test_samples_do_not_depend_on_the_batch(name: str) -> None:
    model = settled(small_model(name, tolerance=1e-5))
    batch = images(5)
    batch[3] *= 40
    together = model(batch)
    solution = model.solve(batch)
    for i in range(5):
        torch.testing.assert_close(model(batch[i : i + 1])[0], together[i], rtol=1e-9, atol=1e-9)
        assert model.solve(batch[i : i + 1]).iterations[0] == solution.iterations[i]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_image_does_not_affect_other_samples(name: str, bad: float) -> None:
    model = settled(small_model(name, tolerance=1e-6))
    clean = model(images())
    batch = images()
    batch[1, 0, 2, 3] = bad
    with pytest.warns(eq.ConvergenceWarning, match=r"1 of 3 samples .* sample 1: diverged"):
        output = model(batch)
    torch.testing.assert_close(output[[0, 2]], clean[[0, 2]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned already
        solution = model.solve(batch)
    assert solution.status.tolist() == [0, eq.Status.DIVERGED, 0]
    assert state_is_finite(solution.state)
    strict = settled(small_model(name, strict=True))
    with pytest.raises(eq.ConvergenceError, match="1 of 3 samples"):
        strict(batch)


@pytest.mark.parametrize("name", MODELS)
def test_two_backward_passes_through_one_graph(name: str) -> None:
    model = settled(small_model(name))
    once = gradients(model, images())
    model.zero_grad()
    loss = loss_of(model, images())
    loss.backward(retain_graph=True)
    loss.backward()
    twice = {n: p.grad / 2 for n, p in model.named_parameters() if p.grad is not None}
    assert_same(once, twice)


@pytest.mark.parametrize("name", MODELS)
def test_two_forward_passes_in_one_graph(name: str) -> None:
    model = settled(small_model(name))
    first, second = images()[:1], images()[1:2]
    model.zero_grad()
    (model(first)[0, 0] * model(second)[0, 1]).backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    a, b = model(first)[0, 0], model(second)[0, 1]
    parameters = dict(model.named_parameters())
    da = torch.autograd.grad(a, list(parameters.values()), allow_unused=True)
    db = torch.autograd.grad(b, list(parameters.values()), allow_unused=True)
    for key, ga, gb in zip(parameters, da, db, strict=True):
        expected = (0 if ga is None else b.detach() * ga) + (0 if gb is None else a.detach() * gb)
        torch.testing.assert_close(together[key], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_no_grad_and_inference_mode_have_the_same_outputs(name: str) -> None:
    model = settled(small_model(name))
    expected = model(images()).detach()
    with torch.no_grad():
        assert torch.equal(model(images()), expected)
    with torch.inference_mode():
        output = model(images())
        solution = model.solve(images())
        assert not output.requires_grad
    assert torch.equal(output.clone(), expected)
    assert solution.converged.all()
    assert gradients(model, images())  # a cache filled in inference mode does not break training


@pytest.mark.parametrize("name", MODELS)
def test_frozen_parameters_have_no_gradient(name: str) -> None:
    model = settled(small_model(name))
    full = gradients(model, images())
    frozen = [n for n, _ in model.named_parameters()][1::2]
    for n, parameter in model.named_parameters():
        parameter.requires_grad_(n not in frozen)
    model.zero_grad()
    part = gradients(model, images())
    assert set(part) == set(full) - set(frozen)
    assert_same(part, {n: full[n] for n in part})
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    batch = images().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, batch), batch)
    assert gradient.abs().sum() > 0
    assert not model(images()).requires_grad


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("gradient", eq.gradients.list_gradients())
@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")  # 20 unrolled steps
def test_activation_checkpointing_has_the_same_gradients(
    name: str, reentrant: bool, gradient: str
) -> None:
    model = settled(small_model(name, gradient=gradient))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Tensor) -> Tensor:
            return checkpoint(self.model, batch.requires_grad_(), use_reentrant=reentrant)  # type: ignore[no-any-return]

    plain = gradients(model, images())
    wrapped = gradients(Checkpointed(), images())
    assert_same(plain, {n.removeprefix("model."): g for n, g in wrapped.items()})


@pytest.mark.parametrize("name", MODELS)
def test_autocast_runs_both_passes_in_half_precision(name: str, device: torch.device) -> None:
    model = settled(small_model(name, tolerance=2e-2, gradient=eq.Implicit())).float().to(device)
    batch = images().float().to(device)
    full = gradients(model, batch)
    dtypes: list[torch.dtype] = []
    step = model.layer.cell.step

    def recorded_step(state: eq.State, context: eq.Context) -> eq.State:
        result = step(state, context)
        dtypes.append(state_tensors(result)[0].dtype)
        return result

    model.layer.cell.step = recorded_step  # type: ignore[method-assign]
    model.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = loss_of(model, batch)
        assert model.last_solution is not None
        assert model.last_solution.converged.all()
        assert model.last_solution.residual.dtype == torch.float32
    forward_steps = len(dtypes)
    loss.backward()  # outside of autocast, as usual
    # With a skip connection the state stays in single precision; outputs of layers do not.
    assert len(dtypes) > forward_steps
    assert len(set(dtypes)) == 1, "forward and backward pass have different dtypes"
    half = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    a = torch.cat([g.flatten() for g in full.values()])
    b = torch.cat([half[n].flatten() for n in full])
    assert b.dtype == torch.float32
    assert F.cosine_similarity(a, b, dim=0) > 0.97


# The compiler suppresses this warning, but pytest's filter "error" overrides that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "name", [MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])]
)
def test_compiled_models_have_the_same_gradients(name: str) -> None:
    model = settled(small_model(name))
    expected = gradients(model, images())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(
        expected,
        {n.removeprefix("_orig_mod."): g for n, g in gradients(compiled, images()).items()},
    )
    assert_same(expected, gradients(copy.deepcopy(model), images()))


@pytest.mark.parametrize("name", MODELS)
def test_training_reduces_the_loss(name: str) -> None:
    model = small_model(name, tolerance=1e-5, gradient=eq.Implicit()).float()
    batch = images(3).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    if always_contracts(model):
        bound = model.contraction_bound(batch)
        assert bound is not None
        assert (bound < 1).all()


@pytest.mark.parametrize("name", MODELS)
def test_invalid_images_raise(name: str) -> None:
    model = small_model(name)
    with pytest.raises(ValueError, match=r"expected images of shape \(batch, 2, height, width\)"):
        model(images()[:, :1])
    with pytest.raises(ValueError, match=r"images\[None\]"):
        model(images()[0])
    with pytest.raises(ValueError, match="floating-point images"):
        model((images() * 100).to(torch.uint8))


@pytest.mark.parametrize("name", MODELS)
def test_options_set_the_layer_and_the_head(name: str) -> None:
    with pytest.raises(TypeError, match=r"no option 'tolerence'; did you mean 'tolerance'\?"):
        eq.create_model(name, tolerence=1e-3)
    limited = eq.create_model(name, solver=eq.Picard(max_iterations=9), tolerance=1e-3)
    assert limited.layer.solver == eq.Picard(max_iterations=9, tolerance=1e-3)
    solving = eq.Solving(solver="picard", strict=True)
    assert eq.create_model(name, solving=solving).layer.solving == solving
    changed = eq.create_model(name, solving=solving, tolerance=0.25).layer.solving
    assert changed == solving.changed(tolerance=0.25)
    assert eq.create_model(name, tolerance=0.25).layer.solver.tolerance == 0.25
    assert eq.create_model(name, max_iterations=17).layer.solver.max_iterations == 17
    assert eq.create_model(name, num_classes=7, in_channels=1).head.classifier.out_features == 7
    picard = eq.create_model(name, solver=eq.Picard(tolerance=0.1), gradient="phantom")
    assert isinstance(picard.layer.solver, eq.Picard)
    assert isinstance(picard.layer.gradient, eq.Phantom)
