"""Measurements of runs by name: the functions that measure, and the format in tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import islice
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor, nn

from equilibria.analysis.generation import generate
from equilibria.data import Batches
from equilibria.energies import HSIC, Decorrelation
from equilibria.equilibrium import solving
from equilibria.inputs import (
    AttackResult,
    AttackSettings,
    InputResult,
    find_latents,
    measure_attack,
)
from equilibria.inputs.attack_settings import AttackMethod
from equilibria.inputs.engines.base import Engine
from equilibria.inputs.engines.official import PAPER_SETTINGS
from equilibria.inputs.latents import generator_of, is_generator, squared_error, zero_latents
from equilibria.models import EquilibriumClassifier
from equilibria.models.generators.autoencoders import Autoencoder
from equilibria.papers.branch_measures import (
    attack_iterations,
    branch_relations,
    perturbations,
    solve_trace,
)
from equilibria.papers.image_measures import corruptions, saliency, unseen
from equilibria.papers.memory import peak_bytes
from equilibria.restoration import Damage, Denoising, Inpainting, restore
from equilibria.tasks import AdversarialClassification, FewShot, ImageRestoration, Reconstruction
from equilibria.tasks.few_shot import EpisodeBatch
from equilibria.tasks.image_quality import picture_psnr
from equilibria.training.experiment import Experiment
from equilibria.training.processes import now

T = TypeVar("T")
Result = dict[str, float | None]
"""Numbers by name; None where a model has no such number."""


@dataclass(frozen=True)
class Measure:
    """Title and format of a number that is measured in runs.

    Attributes:
        title: Title with unit.
        scale: Factor from the recorded number to the number in tables.
        digits: Format of the number.
        log: Whether values that differ by a large factor are drawn on a logarithmic axis.
    """

    title: str
    scale: float = 1.0
    digits: str = ".2f"
    log: bool = False

    def show(self, values: Sequence[float]) -> str:
        """Format values as mean ± standard deviation; a single value has no deviation."""
        shown = [self.scale * value for value in values]
        mean = f"{statistics.fmean(shown):{self.digits}}"
        return mean if len(shown) < 2 else f"{mean} ± {deviation(shown):{self.digits}}"


TABLES = resources.files("equilibria.papers") / "tables"
MEASURES = {
    name: Measure(**given)
    for name, given in yaml.safe_load((TABLES / "measures.yaml").read_text("utf-8")).items()
}
"""Measures by the names that columns use; a result contains some of them."""


def measure_of(name: str) -> Measure:
    """Return the measure with a name.

    Args:
        name: The name. "residual@10" is the value at position 10 of the series "residual".
    """
    return MEASURES[name.partition("@")[0]]


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def collect(results: Sequence[Result], measure: str) -> list[float]:
    """Return the values of a measure in the results that have it."""
    values = (result.get(measure) for result in results)
    return [value for value in values if value is not None]


# --- Time and memory ----------------------------------------------------------------------------

REPEATS = 7
WARM_UP = 2


def timed(device: torch.device, run: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that a call took, and its result."""
    begin = now(device)
    result = run()
    return now(device) - begin, result


def efficiency(experiment: Experiment, device: torch.device) -> Result:
    """Measure the time of inference and training, and the memory of a training step.

    All numbers are for one training batch; times are medians of several repeats, in processor
    seconds on a CPU. Inference uses the tolerance of the evaluation, the training step that of the
    last epoch.
    """
    model, settings = experiment.model, experiment.recipe.training
    images, targets = next(iter(Batches(experiment.training, settings.batch_size)))
    images, targets = images.to(device), targets.to(device)

    @torch.no_grad()
    def inference() -> float:
        return timed(device, lambda: model(images))[0]

    def step() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        forward, outcome = timed(
            device, lambda: experiment.task.training_step(model, images, targets)
        )
        return forward, timed(device, outcome.loss.backward)[0]

    was_training = model.training
    try:
        model.eval()
        tolerance, rule = settings.evaluation_tolerance, settings.gradient
        with solving(model, tolerance=tolerance, gradient=rule):
            forwards = [inference() for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        model.train()
        tolerance = settings.tolerance_in(settings.epochs)
        with solving(model, tolerance=tolerance, gradient=rule):
            steps = [step() for _ in range(WARM_UP + REPEATS)][WARM_UP:]
            model.zero_grad(set_to_none=True)
            peak = peak_bytes(step, device)
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
    total = statistics.median(forward + backward for forward, backward in steps)
    return {
        "inference_seconds": statistics.median(forwards),
        "backward_seconds": statistics.median(backward for _, backward in steps),
        "images_per_second": len(images) / total,
        "peak_bytes": float(peak),
    }


# --- Features -----------------------------------------------------------------------------------


PAIRS = {
    "feature_correlation": Decorrelation(scale="batch", epsilon=0.0),
    "feature_dependence": HSIC(scale="batch", epsilon=0.0),
}
"""Regularizers that sum over pairs of channels."""


@torch.no_grad()
def features(experiment: Experiment, device: torch.device) -> Result:
    """Measure the means of |z| and z² over the feature tensor z (OptEq, Table 3).

    Also measures the means of cos² and HSIC over pairs of channels, per batch as in training.
    """
    model = experiment.model
    names = ("feature_size", "feature_energy", *PAIRS)
    if not isinstance(model, EquilibriumClassifier):
        return dict.fromkeys(names)
    model.eval()
    count, sums = 0, dict.fromkeys(names, 0.0)
    for images, _ in Batches(experiment.test, experiment.recipe.training.batch_size):
        z = model.features(images.to(device)).double()
        channels = z.shape[1]
        count += z.numel()
        sums["feature_size"] += float(z.abs().sum())
        sums["feature_energy"] += float(z.square().sum())
        for name, regularizer in PAIRS.items():
            pairs = max(channels * (channels - 1) / 2, 1)
            sums[name] += z.numel() * float(regularizer.value(z)) / pairs
    return {name: total / count for name, total in sums.items()}


# --- Attacks ------------------------------------------------------------------------------------

MAX_ATTACKED_IMAGES = 500
"""Largest number of test images to attack in a quick setting; otherwise all."""
PAPER_STEPS = 80
TIMED_ATTACKS = 32
PAPER_TIMED = 200
"""Number of images that JIIO times, one by one (Section 4.1). A quick setting times one batch."""
ATTACK_BATCH = 100
PGD_STEPS = 20


def robustness(experiment: Experiment, device: torch.device) -> Result:
    """Measure the accuracy under PGD and under JIIO, with the budget of the training.

    On a whole data set JIIO uses the algorithm of the paper, otherwise that of this library.
    """
    data = experiment.recipe.data
    is_full = is_whole(experiment) and data.name in PAPER_SETTINGS
    count = len(experiment.test) if is_full else MAX_ATTACKED_IMAGES
    images, labels = (tensor.to(device) for tensor in experiment.some_test_images(count))
    joint = {"steps": PAPER_STEPS, "joint_options": official(data.name)} if is_full else {}
    measured: Result = {}
    for name in ("pgd", "jiio"):
        settings = _attack(experiment, name, **(joint if name == "jiio" else {}))
        result = measure_attack(experiment.model, images, labels, settings, ATTACK_BATCH)
        measured[f"{name}_accuracy"] = result.robust_accuracy
    return measured


def attack_times(experiment: Experiment, device: torch.device) -> Result:
    """Measure seconds per image and final loss of PGD, cold and warm started, and of JIIO."""
    measured: Result = {}
    count, at_once = timed_images(experiment, TIMED_ATTACKS)
    for name, search in _attacks(experiment, device, count, at_once).items():
        seconds, result = timed(device, search)
        measured[f"{name}_seconds"] = seconds / len(result.labels)
        measured[f"{name}_loss"] = float(result.loss.double().mean())
        measured[f"{name}_evaluations"] = float(result.evaluations)
    return measured


def _attacks(
    experiment: Experiment, device: torch.device, count: int, at_once: int
) -> dict[str, Callable[[], AttackResult]]:
    """Return attacks on `count` test images, ready to run, by the names of their measures."""
    images, labels = (tensor.to(device) for tensor in experiment.some_test_images(count))
    name = experiment.recipe.data.name
    paper = official(name if name in PAPER_SETTINGS else "mnist")
    attacks = {
        "pgd": _attack(experiment, "pgd"),
        "warm_pgd": _attack(experiment, "pgd", warm_start=True),
        "jiio": _attack(experiment, "jiio"),
        "official": _attack(experiment, "jiio", steps=PAPER_STEPS, joint_options=paper),
    }
    run = partial(measure_attack, experiment.model, images, labels, batch_size=at_once)
    # The first call includes one-time setup of torch, so it is not timed.
    measure_attack(experiment.model, images[:at_once], labels[:at_once], attacks["pgd"], at_once)
    return {name: partial(run, settings) for name, settings in attacks.items()}


def is_whole(experiment: Experiment) -> bool:
    """Whether a run uses its whole data set. Quick settings train on a part."""
    return not any(name.endswith("_samples") for name in experiment.recipe.data.options)


def timed_images(experiment: Experiment, quick: int) -> tuple[int, int]:
    """Return the number of images to time, and the batch size."""
    return (PAPER_TIMED, 1) if is_whole(experiment) else (quick, quick)


def official(task: str) -> dict[str, Any]:
    """Return the options of `optimize_input` for the JIIO algorithm of the paper."""
    return {"engine": {"name": "official", "task": task}}


def _attack(experiment: Experiment, method: AttackMethod, **options: Any) -> AttackSettings:
    task = experiment.task
    if not isinstance(task, AdversarialClassification):
        raise TypeError(
            f"robustness needs a run of the task 'adversarial', got {type(task).__name__}"
        )
    steps = PGD_STEPS if method == "pgd" else None
    chosen: dict[str, Any] = {"eps": task.eps, "norm": task.norm, "steps": steps, **options}
    return AttackSettings(method=method, **chosen)


# --- Searches for latents and task vectors ------------------------------------------------------

SEARCHED_IMAGES = 32
EPISODES = 16
ADAM_STEPS = 40
UNROLLED_STEP = 1e-3
LATENT_SEARCHES = {
    "adam": ("adam", ADAM_STEPS),
    "warm_adam": ("adam-warm", ADAM_STEPS),
    "jiio_40": (Reconstruction.engine, 40),
    "jiio_100": (Reconstruction.engine, 100),
    "official": ("official", 40),
    "official_100": ("official", 100),
}
"""Engine and number of iterations, by the name of the measure (JIIO, Table 3)."""


def timed_searches(
    experiment: Experiment,
    device: torch.device,
    images: int,
    searches: Sequence[tuple[str | Engine, int]],
    *,
    at_once: int | None = None,
) -> list[tuple[float, float]]:
    """Measure searches for the latents of test images.

    Args:
        experiment: A trained autoencoder or generator.
        device: Device of the model.
        images: Number of test images.
        searches: Engines with their numbers of iterations.
        at_once: Number of images per search; by default all.

    Returns:
        For each search, the seconds per image and the mean final loss.
    """
    decoder, originals = _decoder_and_images(experiment, device, images)
    parts = [
        _latent_search(experiment, decoder, part)
        for part in torch.split(originals, at_once or len(originals))
    ]

    def losses(engine: str | Engine, iterations: int) -> Tensor:
        return torch.cat([search(engine=engine, iterations=iterations).loss for search in parts])

    # The first call includes one-time setup of torch, so it is not timed.
    parts[0](engine=searches[0][0], iterations=2)
    measured = []
    for engine, iterations in searches:
        seconds, final = timed(device, partial(losses, engine, iterations))
        measured.append((seconds / len(originals), float(final.mean())))
    return measured


def _decoder_and_images(
    experiment: Experiment, device: torch.device, count: int
) -> tuple[nn.Module, Tensor]:
    decoder = generator_of(experiment.model, explicit=False).eval()
    return decoder, next(iter(Batches(experiment.test, count)))[0].to(device)


def _latent_search(
    experiment: Experiment, decoder: nn.Module, images: Tensor
) -> Callable[..., InputResult]:
    """Return a search for latents with the run's settings; engine and iterations are open."""
    task = experiment.task
    ridge = task.ridge if isinstance(task, Reconstruction) else 0.0
    return partial(find_latents, decoder, images, ridge=ridge)


def latent_times(experiment: Experiment, device: torch.device) -> Result:
    """Measure seconds per image and final loss of searches for latents."""
    count, at_once = timed_images(experiment, SEARCHED_IMAGES)
    searches = [*LATENT_SEARCHES.values()]
    times = timed_searches(experiment, device, count, searches, at_once=at_once)
    measured: Result = {}
    for name, time_and_loss in zip(LATENT_SEARCHES, times, strict=True):
        measured[f"{name}_seconds"], measured[f"{name}_loss"] = time_and_loss
    return measured


def inner_loop_times(experiment: Experiment, device: torch.device) -> Result:
    """Measure seconds per episode of a search for the task vector, and the loss of its support."""
    task = experiment.task
    if not isinstance(task, FewShot):
        return {}
    model = experiment.model.eval()
    images, labels = next(iter(Batches(experiment.test, EPISODES)))
    episodes = EpisodeBatch.of(images.to(device), labels.to(device))
    measured: Result = {}
    task.adapt(model, episodes, iterations=2)  # untimed, as in `timed_searches`
    searches: dict[str, tuple[dict[str, Any], int]] = {
        "adam": ({"engine": "adam"}, 20),
        "jiio": ({"engine": FewShot.engine}, 40),
        "official": (official("few-shot"), 100),
    }
    for name, (options, iterations) in searches.items():
        search = replace(task, step_size=None, **options)
        seconds, result = timed(
            device, partial(search.adapt, model, episodes, iterations=iterations)
        )
        measured[f"{name}_seconds"] = seconds / len(images)
        measured[f"{name}_loss"] = float(result.loss.mean())
    return measured


def search_memory(experiment: Experiment, device: torch.device) -> Result:
    """Measure memory and time of searches for inputs, for one batch of the training's size.

    The memory is that of all tensors that a search creates, without the weights.
    """
    count = experiment.recipe.training.batch_size
    searches: dict[str, Callable[[], object]]
    if isinstance(experiment.task, AdversarialClassification):
        searches = {**_attacks(experiment, device, count, count)}
    else:
        decoder, images = _decoder_and_images(experiment, device, count)
        find = _latent_search(experiment, decoder, images)
        find(iterations=2)  # untimed, as in `timed_searches`
        searches = {
            name: partial(find, engine=engine, iterations=iterations)
            for name, (engine, iterations) in LATENT_SEARCHES.items()
            if iterations == ADAM_STEPS
        }
        if not is_whole(experiment):  # too large for the paper's model: 40 graphs
            searches["unrolled"] = partial(unrolled_search, decoder, images)
    measured: Result = {}
    for name, search in searches.items():
        measured[f"{name}_seconds"] = timed(device, search)[0] / count
        measured[f"{name}_bytes"] = float(peak_bytes(search, device))
    return measured


def unrolled_search(decoder: nn.Module, images: Tensor, iterations: int = ADAM_STEPS) -> Tensor:
    """Search for latents by gradient steps that keep their graph, as unrolled training needs."""
    latents = zero_latents(decoder, images).requires_grad_()
    for _ in range(iterations):
        loss = squared_error(decoder(latents), images).sum()
        (gradient,) = torch.autograd.grad(loss, latents, create_graph=True)
        latents = latents - UNROLLED_STEP * gradient
    return latents


# --- Generators ---------------------------------------------------------------------------------

FITTED_LATENTS = 1000
GENERATED_IMAGES = 300
RESTORED_IMAGES = 64
"""Number of images to restore in a quick setting; otherwise all (`is_whole`)."""
SEARCH_STEPS = 100
DAMAGE_SEED = 0
RIDGE = 0.01
"""Ridge penalty on latents that Adam searches for in a quick setting; 0 in the paper (Eq. 21)."""
HIDDEN_SIDE = 20 / 64
"""Side of the hidden window, as a share of the side of the image."""
DAMAGES: dict[str, Damage] = {
    "inpaint": Inpainting(window=HIDDEN_SIDE),
    "denoise_02": Denoising(noise=0.2),
    "denoise_04": Denoising(noise=0.4),
}


def generation(experiment: Experiment, device: torch.device) -> Result:
    """Measure FID of samples, and FID and PSNR of reconstructions by the encoder and by JIIO."""
    is_full = is_whole(experiment)
    latents = len(experiment.training) if is_full else FITTED_LATENTS
    images = len(experiment.test) if is_full else GENERATED_IMAGES
    # The paper's algorithm with the iterations of its tests, also for an MDEQ-VAE.
    of_paper = Reconstruction(engine="official", ridge=0.0, evaluation_iterations=SEARCH_STEPS)
    search = of_paper if is_full else None
    quality, *_ = generate(experiment, device, latents=latents, images=images, search=search)
    by_method = {item.latents_by: item for item in quality.reconstructions}
    # A decoder without an encoder uses JIIO.
    usual = by_method.get("encoder", by_method.get("JIIO"))
    searched = by_method.get("JIIO")
    return {
        "sample_fid": quality.sample_fid,
        "reconstruction_fid": None if usual is None else usual.fid,
        "reconstruction_psnr": None if usual is None else usual.psnr,
        "jiio_reconstruction_fid": None if searched is None else searched.fid,
        "jiio_reconstruction_psnr": None if searched is None else searched.psnr,
    }


def unsupervised_psnr(experiment: Experiment, device: torch.device) -> Result:
    """Measure the median PSNR of damaged test images that a generator restores (JIIO Eq. 22)."""
    model = experiment.model
    if isinstance(experiment.task, ImageRestoration):
        return {}
    if not (is_generator(model) or isinstance(model, Autoencoder)):
        return {}
    task = experiment.task
    ridge = 0.0 if is_whole(experiment) else RIDGE
    # The paper searches for the latents of autoencoders with Adam.
    search: dict[str, Any] = (
        {"engine": "adam", "iterations": ADAM_STEPS, "ridge": ridge}
        if isinstance(model, Autoencoder) or not isinstance(task, Reconstruction)
        else {"engine": task.engine, "iterations": SEARCH_STEPS, "ridge": task.ridge}
    )
    measured: Result = {}
    for name, damage in DAMAGES.items():
        generator = torch.Generator().manual_seed(DAMAGE_SEED)
        ratios, converged = [], []
        for images, _ in islice(
            Batches(experiment.test, RESTORED_IMAGES), None if is_whole(experiment) else 1
        ):
            originals = images.to(device)
            damaged = damage.corrupt(originals, generator)
            restored = restore(model, damaged.measured, damaged.measurement, **search)
            ratios.append(picture_psnr(restored.images, originals))
            converged.append(restored.converged)
        measured[f"{name}_psnr"] = float(torch.cat(ratios).median())
        measured[f"{name}_converged"] = float(torch.cat(converged).double().mean())
    return measured


EXTRAS: dict[str, Callable[[Experiment, torch.device], Result]] = {
    "efficiency": efficiency,
    "features": features,
    "robustness": robustness,
    "attack_times": attack_times,
    "latent_times": latent_times,
    "inner_loop_times": inner_loop_times,
    "search_memory": search_memory,
    "unsupervised_psnr": unsupervised_psnr,
    "generation": generation,
    "branch_relations": branch_relations,
    "solve_trace": solve_trace,
    "perturbations": perturbations,
    "attack_iterations": attack_iterations,
    "unseen": unseen,
    "corruptions": corruptions,
    "saliency": saliency,
}
"""Measurements besides the evaluation, by the names that tables use."""
