"""Two processes train as one does: they are started once, and leave all they found in files."""

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
"""In batches of 20: the last one has a sample for the first process and none for the second."""

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
    # The tolerances bound how much the step size, one for all samples of a process, may matter.
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
    """The losses of every step, the metrics and what the model has become.

    In double precision: sums over processes are rounded otherwise than those of one, and batch
    norms that see few pixels amplify that, in single precision to 2e-3 of the loss within 20 steps.
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
    """Two training passes, and derivatives of the first and second order."""
    x = x.clone().requires_grad_()
    norm(x.detach() * 2 + 1)
    y = norm(x)
    # The loss and its weights are sums over samples: what parts give adds up.
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
    found: dict[str, Any] = {}
    for parts, sizes in PARTS.items():
        own = whole_batch(sum(sizes)).split(sizes)[group.rank]
        for name in NORMS:
            norm = fresh_norm(name)
            with synchronized_norms([norm], group):
                found[f"{parts} {name}"] = use_norm(norm, own)
    lonely = nn.BatchNorm2d(3)
    with synchronized_norms([lonely], group):
        try:
            lonely(torch.ones(1 - group.rank, 3, 1, 1))
        except ValueError as error:
            found["too few"] = str(error)
    return found


def summed_gradients(group: ProcessGroup) -> dict[str, Any]:
    """Of parameters that have a gradient in both, in one, in none, and in another type."""
    shapes_and_types = [((2, 3), 32), ((4,), 32), ((1,), 32), ((), 64)]
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=torch.float32 if bits == 32 else torch.float64))
        for shape, bits in shapes_and_types
    ]
    own = group.rank + 1.0
    for place in (0, 1, 3) if group.leads else (0, 3):
        parameters[place].grad = torch.full_like(parameters[place], own)
    parameters[0].grad = torch.arange(6.0).view(3, 2).T * own
    group.sum_gradients(parameters)
    return {str(place): parameter.grad for place, parameter in enumerate(parameters)}


def work(place: Place, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with joined_group(place, torch.device("cpu")) as group:
        world = weakref.ref(distributed.group.WORLD)
        found["norms"] = norms_of_parts(group)
        found["gradients"] = summed_gradients(group)
        found["total"] = group.total(torch.tensor([group.rank, 5]))
        for family, (name, options) in FAMILIES.items():
            found[family] = train_model(name, options, group)
        for family, (name, options) in COUPLED.items():
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                result = train_model(name, options, group, epochs=2)
            of_shares = [w for w in told if w.category is SharedBatchWarning]
            found[f"coupled {family}"] = {**result, "warnings": len(of_shares)}
    found["left"] = world() is None
    torch.save(found, folder / f"{place.rank}.pt")


def start(rank: int, folder: Path) -> None:
    work(Place(rank, 2, rank, 2, folder / "meeting-point"), folder)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("together")
    torch.multiprocessing.spawn(start, args=(folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_as_one_does(together: list[dict[str, Any]], family: str) -> None:
    name, options = FAMILIES[family]
    alone = train_model(name, options, ALONE)
    first, second = (found[family] for found in together)
    assert len(first["losses"]) == 3 * EPOCHS
    assert second["losses"] == []  # only the first one reports
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    for mine, others in zip(alone["metrics"], first["metrics"], strict=True):
        assert others["accuracy"] == mine["accuracy"]
        assert others["validation_accuracy"] == mine["validation_accuracy"]
        assert others["validation_loss"] == pytest.approx(mine["validation_loss"], rel=1e-6)
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key]), key
    assert first["state"].keys() == alone["state"].keys()
    assert first["norms"] == alone["norms"]


@pytest.mark.parametrize("family", COUPLED)
def test_what_cannot_be_shared_is_told(together: list[dict[str, Any]], family: str) -> None:
    """Batch norm inside a cell, regularizers of a batch: no solve waits for another process."""
    first, second = (found[f"coupled {family}"] for found in together)
    assert (first["warnings"], second["warnings"]) == (1, 1)
    assert len(first["losses"]) == 6
    for key, value in first["state"].items():
        assert value.isfinite().all(), key
        assert torch.equal(value, second["state"][key]), key


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", NORMS)
def test_norm_is_that_of_the_whole_batch(
    together: list[dict[str, Any]], name: str, parts: str
) -> None:
    whole = use_norm(fresh_norm(name), whole_batch(sum(PARTS[parts])))
    found = [process["norms"][f"{parts} {name}"] for process in together]

    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    for key in ("output", "gradient", "second"):
        close(torch.cat([part[key] for part in found]), whole[key])
    for place, expected in enumerate(whole["of parameters"]):
        close(sum(part["of parameters"][place] for part in found), expected)
    for part in found:
        assert part["state"].keys() == whole["state"].keys()
        for key, expected in whole["state"].items():
            close(part["state"][key], expected)
    if name != "no statistics":
        close(torch.cat([part["evaluation"] for part in found]), whole["evaluation"])


def test_norm_of_one_value_is_refused(together: list[dict[str, Any]]) -> None:
    for process in together:
        assert "more than one value a channel" in process["norms"]["too few"]


def test_sums_over_processes(together: list[dict[str, Any]]) -> None:
    for process in together:
        assert process["total"].tolist() == [1, 10]
        gradients = process["gradients"]
        torch.testing.assert_close(gradients["0"], torch.arange(6.0).view(3, 2).T * 3)
        assert gradients["1"].tolist() == [1, 1, 1, 1]
        assert gradients["2"] is None
        assert gradients["3"].item() == 3
        assert gradients["3"].dtype == torch.float64


def test_nothing_is_left_of_the_group(together: list[dict[str, Any]]) -> None:
    """Threads of a group that was kept ran into the interpreter's end, which aborted now and then
    with "terminate called without an active exception".
    """
    assert [process["left"] for process in together] == [True, True]


def test_place_in_the_environment() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    place = Place.from_environment({**variables, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert place == Place(rank=3, count=4, local_rank=1, local_count=2)
    assert place.threads() >= 1
    assert place.device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="cpu or cuda"):
        place.device("mps")
    assert Place.from_environment({"RANK": "3"}) is None
    assert Place.from_environment({**variables, "RANK": "0", "WORLD_SIZE": "1"}) is None


def test_a_batch_too_small_to_share_is_refused() -> None:
    class Three(Processes):
        count = 3

    data = load_digits().train.subset(torch.arange(4))
    with pytest.raises(ValueError, match="3 processes share a batch of 2"):
        fit(
            nn.Linear(1, 1),
            Classification(),
            data,
            TrainingSettings(epochs=1, batch_size=2),
            processes=Three(),
        )
