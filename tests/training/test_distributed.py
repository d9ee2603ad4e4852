"""Training with two processes; they run once and store all results in files."""

from __future__ import annotations

import copy
import warnings
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import equilibria as eq
from equilibria.data import Split, load_digits
from equilibria.energies import Decorrelation
from equilibria.tasks import Classification, Segmentation
from equilibria.training import TrainingSettings, fit
from equilibria.training.distributed import Place, ProcessGroup, joined_group
from equilibria.training.processes import ALONE, Processes
from equilibria.training.synchronized import SharedBatchWarning, synchronized_norms

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
]

EPOCHS = 4
SAMPLES = 41
"""With batches of 20, the last batch has one sample for the first process, none for the second."""

NARROW: dict[str, Any] = {"channels": 8, "widths": (8, 12)}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "OptEq": ("opteq-small", {"channels": 8, "width": 8}),
    "Deep OptEq": ("deep-opteq-small", NARROW),
    "POptEqs": ("popteq-small", {**NARROW, "scales": (1, 2)}),
    "MOptEqs": ("mopteq-small", {**NARROW, "scales": (1, 2)}),
    "MOptEqs with PE": ("mopteq-small", {**NARROW, "scales": (1, 2), "pe": "train"}),
    "GEQ": ("geq-small", {"channels": 8}),
    "MDEQ": ("mdeq-small", {"channels": (4, 8)}),
    "monDEQ": ("mondeq-small", {"channels": 8}),
    "residual network": ("resnet-small", {}),
    # Processes choose different step sizes; tight tolerances bound the effect on the results.
    "Neural ODE": (
        "node-small",
        {"filters": 8, "activation": "softplus", "rtol": 1e-5, "atol": 1e-5},
    ),
    "segmentation": ("deep-opteq-segmentation", {**NARROW, "head_width": 8, "dropout": 0.0}),
    "FCN": ("fcn-segmentation", {"dropout": 0.0}),
}
COUPLED: dict[str, tuple[str, dict[str, Any]]] = {
    "MDEQ": ("mdeq-small", {"channels": (4, 8), "norm": "batch"}),
    "decorrelation": ("deep-opteq-small", {**NARROW, "regularizer": Decorrelation()}),
}
PARTS = {"uneven": (5, 3), "one empty": (8, 0), "one each": (1, 1)}
NORMS: dict[str, nn.Module] = {
    "plain": nn.BatchNorm2d(3),
    "without affine": nn.BatchNorm2d(3, affine=False),
    "cumulative": nn.BatchNorm2d(3, momentum=None),
    "no statistics": nn.BatchNorm2d(3, track_running_stats=False),
}


def train_model(
    name: str,
    options: dict[str, Any],
    processes: Processes,
    *,
    epochs: int = EPOCHS,
) -> dict[str, Any]:
    """Train a model; return the losses of all steps, the metrics and the weights.

    The training is in double precision. Sums over processes have other rounding errors, which batch
    norms over few pixels amplify; in single precision the loss would differ by 2e-3 after 20 steps.
    """
    torch.manual_seed(0)
    model = eq.create_model(name, in_channels=1, **options).double()
    data = load_digits().train.subset(torch.arange(SAMPLES))
    data = replace(data, images=data.images.double())
    task: Classification | Segmentation = Classification()
    if "segmentation" in name:
        data, task = with_label_maps(data), Segmentation()
    losses: list[float] = []
    history = fit(
        model,
        task,
        data,
        TrainingSettings(epochs=epochs, batch_size=20, tolerance=1e-6),
        validation=data,
        processes=processes,
        on_step=lambda step: losses.append(float(step.loss)),
    )
    return {
        "losses": losses,
        "metrics": [asdict(metrics) for metrics in history],
        "state": model.state_dict(),
        "norms": [type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__],
    }


def with_label_maps(data: Split) -> Split:
    maps = (data.images[:, 0] * 2.99).long()
    maps[:, :2, :3] = 255
    return replace(data, labels=maps)


def use_norm(norm: nn.Module, x: Tensor) -> dict[str, Any]:
    """Run two training passes; return outputs, first and second derivatives, and statistics."""
    x = x.clone().requires_grad_()
    norm(x.detach() * 2 + 1)
    y = norm(x)
    # The loss is a sum over samples, so that the results of parts can be added.
    weights = torch.arange(3.0).view(1, 3, 1, 1) + x.detach().cos()
    loss = (weights * y.sin()).sum()
    gradients = torch.autograd.grad(loss, [x, *norm.parameters()], create_graph=True)
    (second,) = torch.autograd.grad((gradients[0] * x.detach().cos()).sin().sum(), x)
    return {
        "output": y.detach(),
        "gradient": gradients[0].detach(),
        "of parameters": [gradient.detach() for gradient in gradients[1:]],
        "second": second,
        "state": dict(norm.state_dict()),
        "evaluation": norm.eval()(x).detach(),
    }


def whole_batch(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, 3, 2, 5, generator=generator, dtype=torch.float64)
    return 3 * images + torch.tensor([100.0, 0.0, -7.0]).view(3, 1, 1)


def fresh_norm(name: str) -> nn.Module:
    norm = copy.deepcopy(NORMS[name]).double()
    with torch.no_grad():
        for i, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.tensor([0.5, 1.5, -2.0]) + i)
    return norm


def norms_of_parts(group: ProcessGroup) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for parts, sizes in PARTS.items():
        own = whole_batch(sum(sizes)).split(sizes)[group.rank]
        for name in NORMS:
            norm = fresh_norm(name)
            with synchronized_norms([norm], group):
                results[f"{parts} {name}"] = use_norm(norm, own)
    single = nn.BatchNorm2d(3)
    with synchronized_norms([single], group):
        try:
            single(torch.ones(1 - group.rank, 3, 1, 1))
        except ValueError as error:
            results["too few"] = str(error)
    return results


def summed_gradients(group: ProcessGroup) -> dict[str, Any]:
    """Sum gradients that exist in both processes, in one, in none, and in another dtype."""
    shapes_and_types = [((2, 3), 32), ((4,), 32), ((1,), 32), ((), 64)]
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=torch.float32 if bits == 32 else torch.float64))
        for shape, bits in shapes_and_types
    ]
    own = group.rank + 1.0
    for index in (0, 1, 3) if group.leads else (0, 3):
        parameters[index].grad = torch.full_like(parameters[index], own)
    parameters[0].grad = torch.arange(6.0).view(3, 2).T * own
    group.sum_gradients(parameters)
    return {str(i): parameter.grad for i, parameter in enumerate(parameters)}


def work(place: Place, folder: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with joined_group(place, torch.device("cpu")) as group:
        world = weakref.ref(distributed.group.WORLD)
        results["norms"] = norms_of_parts(group)
        results["gradients"] = summed_gradients(group)
        results["total"] = group.total(torch.tensor([group.rank, 5]))
        for family, (name, options) in FAMILIES.items():
            results[family] = train_model(name, options, group)
        for family, (name, options) in COUPLED.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = train_model(name, options, group, epochs=2)
            shared = [w for w in caught if w.category is SharedBatchWarning]
            results[f"coupled {family}"] = {**result, "warnings": len(shared)}
    results["group destroyed"] = world() is None
    torch.save(results, folder / f"{place.rank}.pt")


def start(rank: int, folder: Path) -> None:
    work(Place(rank, 2, rank, 2, folder / "meeting-point"), folder)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of the two processes."""
    folder = tmp_path_factory.mktemp("together")
    torch.multiprocessing.spawn(start, args=(folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_give_the_results_of_one(together: list[dict[str, Any]], family: str) -> None:
    name, options = FAMILIES[family]
    alone = train_model(name, options, ALONE)
    first, second = (result[family] for result in together)
    assert len(first["losses"]) == 3 * EPOCHS
    assert second["losses"] == []  # Only the first process calls the callbacks.
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    for expected, metrics in zip(alone["metrics"], first["metrics"], strict=True):
        assert metrics["accuracy"] == expected["accuracy"]
        assert metrics["validation_accuracy"] == expected["validation_accuracy"]
        assert metrics["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-6)
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key]), key
    assert first["state"].keys() == alone["state"].keys()
    assert first["norms"] == alone["norms"]


@pytest.mark.parametrize("family", COUPLED)
def test_models_that_cannot_be_synchronized_warn(
    together: list[dict[str, Any]], family: str
) -> None:
    """Processes cannot synchronize inside a solve: batch norm in a cell, batch regularizers."""
    first, second = (result[f"coupled {family}"] for result in together)
    assert (first["warnings"], second["warnings"]) == (1, 1)
    assert len(first["losses"]) == 6
    for key, value in first["state"].items():
        assert value.isfinite().all(), key
        assert torch.equal(value, second["state"][key]), key


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", NORMS)
def test_synchronized_norm_equals_the_norm_of_the_whole_batch(
    together: list[dict[str, Any]], name: str, parts: str
) -> None:
    whole = use_norm(fresh_norm(name), whole_batch(sum(PARTS[parts])))
    results = [process["norms"][f"{parts} {name}"] for process in together]

    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    for key in ("output", "gradient", "second"):
        close(torch.cat([part[key] for part in results]), whole[key])
    for i, expected in enumerate(whole["of parameters"]):
        close(sum(part["of parameters"][i] for part in results), expected)
    for part in results:
        assert part["state"].keys() == whole["state"].keys()
        for key, expected in whole["state"].items():
            close(part["state"][key], expected)
    if name != "no statistics":
        close(torch.cat([part["evaluation"] for part in results]), whole["evaluation"])


def test_batch_norm_of_one_value_raises(together: list[dict[str, Any]]) -> None:
    for process in together:
        assert "more than one value per channel" in process["norms"]["too few"]


def test_sums_over_processes_keep_missing_gradients(together: list[dict[str, Any]]) -> None:
    for process in together:
        assert process["total"].tolist() == [1, 10]
        gradients = process["gradients"]
        torch.testing.assert_close(gradients["0"], torch.arange(6.0).view(3, 2).T * 3)
        assert gradients["1"].tolist() == [1, 1, 1, 1]
        assert gradients["2"] is None
        assert gradients["3"].item() == 3
        assert gradients["3"].dtype == torch.float64


def test_the_group_is_destroyed(together: list[dict[str, Any]]) -> None:
    """Threads of a remaining group can abort the process when the interpreter exits."""
    assert [process["group destroyed"] for process in together] == [True, True]


def test_the_rank_is_read_from_the_environment() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    place = Place.from_environment({**variables, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert place == Place(rank=3, count=4, local_rank=1, local_count=2)
    assert place.threads() >= 1
    assert place.device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        place.device("mps")
    assert Place.from_environment({"RANK": "3"}) is None
    assert Place.from_environment({**variables, "RANK": "0", "WORLD_SIZE": "1"}) is None


def test_the_batch_size_must_not_be_below_the_number_of_processes() -> None:
    class Three(Processes):
        count = 3

    data = load_digits().train.subset(torch.arange(4))
    with pytest.raises(
        ValueError, match="batch_size must be at least 3, the number of processes, got 2"
    ):
        fit(
            nn.Linear(1, 1),
            Classification(),
            data,
            TrainingSettings(epochs=1, batch_size=2),
            processes=Three(),
        )
