"""Everything that is measured of a run, by name: how a table prints it, and what measures it."""

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
from equilibria.report.generation import generate
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
    """A number of a run.

    scale: from the number as it is kept to the one that is shown.
    log: values far apart are drawn on a logarithmic axis.
    """

    title: str
    scale: float = 1.0
    digits: str = ".2f"
    log: bool = False

    def show(self, values: Sequence[float]) -> str:
        """Mean ± standard deviation; one value alone has none."""
        shown = [self.scale * value for value in values]
        mean = f"{statistics.fmean(shown):{self.digits}}"
        return mean if len(shown) < 2 else f"{mean} ± {deviation(shown):{self.digits}}"


TABLES = resources.files("equilibria.papers") / "tables"
MEASURES = {
    name: Measure(**given)
    for name, given in yaml.safe_load((TABLES / "measures.yaml").read_text("utf-8")).items()
}
"""By the names that columns use; a result holds some of them."""


def measure_of(name: str) -> Measure:
    """By its name; "residual@10" is a value of the series "residual"."""
    return MEASURES[name.partition("@")[0]]


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of the sample; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def collect(results: Sequence[Result], measure: str) -> list[float]:
    """The values that are there."""
    found = (result.get(measure) for result in results)
    return [value for value in found if value is not None]


# --- Time and memory ----------------------------------------------------------------------------

REPEATS = 7
WARM_UP = 2


def timed(device: torch.device, run: Callable[[], T]) -> tuple[float, T]:
    """How many seconds a call took, and its result."""
    begin = now(device)
    result = run()
    return now(device) - begin, result


def efficiency(experiment: Experiment, device: torch.device) -> Result:
    """Seconds of a batch forwards and backwards, and memory of a step.

    Of one training batch, the median of several repeats; processor time on a CPU. The tolerance is
    that of the evaluation for the forward pass without gradients, and that of the last epoch for
    the training step.
    """
    model, settings = experiment.model, experiment.recipe.training
    images, targets = next(iter(Batches(experiment.training, settings.batch_size)))
    images, targets = images.to(device), targets.to(device)

    @torch.no_grad()
    def inference() -> float:
        return timed(device, lambda: model(images))[0]

    def step() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        there, outcome = timed(
            device, lambda: experiment.task.training_step(model, images, targets)
        )
        return there, timed(device, outcome.loss.backward)[0]

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
    total = statistics.median(there + back for there, back in steps)
    return {
        "inference_seconds": statistics.median(forwards),
        "backward_seconds": statistics.median(back for _, back in steps),
        "images_per_second": len(images) / total,
        "peak_bytes": float(peak),
    }


# --- Features -----------------------------------------------------------------------------------


PAIRS = {
    "feature_correlation": Decorrelation(scale="batch", epsilon=0.0),
    "feature_dependence": HSIC(scale="batch", epsilon=0.0),
}
"""Sums over pairs of channels."""


@torch.no_grad()
def features(experiment: Experiment, device: torch.device) -> Result:
    """The means of |z| and z² over the whole feature tensor, as OptEq's Table 3 takes them.

    Also those of cos² and HSIC over pairs of channels, batch by batch as in training.
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

ATTACKED = 500
"""Test images that are attacked in a quick setting, at most; otherwise all are."""
PAPER_STEPS = 80
TIMED_ATTACKS = 32
PAPER_TIMED = 200
"""JIIO times so many images, one at a time (Section 4.1); a quick setting times some at once."""
ATTACK_BATCH = 100
PGD_STEPS = 20


def robustness(experiment: Experiment, device: torch.device) -> Result:
    """The accuracy under PGD and under JIIO, within the budget that the run was trained for.

    On all of a data set with the paper's algorithm; on a part of one with this library's.
    """
    data = experiment.recipe.data
    whole = is_whole(experiment) and data.name in PAPER_SETTINGS
    count = len(experiment.test) if whole else ATTACKED
    images, labels = (some.to(device) for some in experiment.some_test_images(count))
    joint = {"steps": PAPER_STEPS, "joint_options": official(data.name)} if whole else {}
    found: Result = {}
    for name in ("pgd", "jiio"):
        settings = _attack(experiment, name, **(joint if name == "jiio" else {}))
        result = measure_attack(experiment.model, images, labels, settings, ATTACK_BATCH)
        found[f"{name}_accuracy"] = result.robust_accuracy
    return found


def attack_times(experiment: Experiment, device: torch.device) -> Result:
    """Seconds an image of PGD with cold and warm solves and of JIIO, with the losses they reach."""
    found: Result = {}
    count, at_once = timed_images(experiment, TIMED_ATTACKS)
    for name, search in _attacks(experiment, device, count, at_once).items():
        seconds, result = timed(device, search)
        found[f"{name}_seconds"] = seconds / len(result.labels)
        found[f"{name}_loss"] = float(result.loss.double().mean())
        found[f"{name}_evaluations"] = float(result.evaluations)
    return found


def _attacks(
    experiment: Experiment, device: torch.device, count: int, at_once: int
) -> dict[str, Callable[[], AttackResult]]:
    """Attacks on so many test images, ready to run, by the names of their measures."""
    images, labels = (some.to(device) for some in experiment.some_test_images(count))
    name = experiment.recipe.data.name
    paper = official(name if name in PAPER_SETTINGS else "mnist")
    ways = {
        "pgd": _attack(experiment, "pgd"),
        "warm_pgd": _attack(experiment, "pgd", warm_start=True),
        "jiio": _attack(experiment, "jiio"),
        "official": _attack(experiment, "jiio", steps=PAPER_STEPS, joint_options=paper),
    }
    run = partial(measure_attack, experiment.model, images, labels, batch_size=at_once)
    # Whoever comes first pays for what torch sets up once: not one of those that are compared.
    measure_attack(experiment.model, images[:at_once], labels[:at_once], ways["pgd"], at_once)
    return {name: partial(run, settings) for name, settings in ways.items()}


def is_whole(experiment: Experiment) -> bool:
    """Whether a run has all of its data set: the quick settings train on parts of one."""
    return not any(name.endswith("_samples") for name in experiment.recipe.data.options)


def timed_images(experiment: Experiment, quick: int) -> tuple[int, int]:
    """How many images are timed, and how many at once."""
    return (PAPER_TIMED, 1) if is_whole(experiment) else (quick, quick)


def official(task: str) -> dict[str, Any]:
    """JIIO as the paper does it: options of `optimize_input`."""
    return {"engine": {"name": "official", "task": task}}


def _attack(experiment: Experiment, method: AttackMethod, **options: Any) -> AttackSettings:
    task = experiment.task
    if not isinstance(task, AdversarialClassification):
        raise TypeError("robustness is measured of runs of the task 'adversarial'")
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
"""By the name of the measure: the engine and its iterations (JIIO, Table 3)."""


def timed_searches(
    experiment: Experiment,
    device: torch.device,
    images: int,
    searches: Sequence[tuple[str | Engine, int]],
    *,
    at_once: int | None = None,
) -> list[tuple[float, float]]:
    """For each engine with its iterations: seconds an image of a search for latents, and the loss.

    Of so many test images `at_once`; None: all of them.
    """
    decoder, shown = _decoder_and_images(experiment, device, images)
    parts = [
        _latent_search(experiment, decoder, some)
        for some in torch.split(shown, at_once or len(shown))
    ]

    def losses(engine: str | Engine, iterations: int) -> Tensor:
        return torch.cat([search(engine=engine, iterations=iterations).loss for search in parts])

    # Whoever comes first pays for what torch sets up once: not one of those that are compared.
    parts[0](engine=searches[0][0], iterations=2)
    found = []
    for engine, iterations in searches:
        seconds, reached = timed(device, partial(losses, engine, iterations))
        found.append((seconds / len(shown), float(reached.mean())))
    return found


def _decoder_and_images(
    experiment: Experiment, device: torch.device, count: int
) -> tuple[nn.Module, Tensor]:
    decoder = generator_of(experiment.model, explicit=False).eval()
    return decoder, next(iter(Batches(experiment.test, count)))[0].to(device)


def _latent_search(
    experiment: Experiment, decoder: nn.Module, images: Tensor
) -> Callable[..., InputResult]:
    """A search for the latents of images as those of the run are, but for engine and iterations."""
    task = experiment.task
    ridge = task.ridge if isinstance(task, Reconstruction) else 0.0
    return partial(find_latents, decoder, images, ridge=ridge)


def latent_times(experiment: Experiment, device: torch.device) -> Result:
    """Seconds an image of the searches for latents, and the losses that they reach."""
    count, at_once = timed_images(experiment, SEARCHED_IMAGES)
    searches = [*LATENT_SEARCHES.values()]
    times = timed_searches(experiment, device, count, searches, at_once=at_once)
    found: Result = {}
    for name, time_and_loss in zip(LATENT_SEARCHES, times, strict=True):
        found[f"{name}_seconds"], found[f"{name}_loss"] = time_and_loss
    return found


def inner_loop_times(experiment: Experiment, device: torch.device) -> Result:
    """Seconds an episode until its task vector is found, and the loss of its support there."""
    task = experiment.task
    if not isinstance(task, FewShot):
        return {}
    model = experiment.model.eval()
    images, labels = next(iter(Batches(experiment.test, EPISODES)))
    episodes = EpisodeBatch.of(images.to(device), labels.to(device))
    found: Result = {}
    task.adapt(model, episodes, iterations=2)  # untimed, as in `timed_searches`
    ways: dict[str, tuple[dict[str, Any], int]] = {
        "adam": ({"engine": "adam"}, 20),
        "jiio": ({"engine": FewShot.engine}, 40),
        "official": (official("few-shot"), 100),
    }
    for name, (options, iterations) in ways.items():
        search = replace(task, step_size=None, **options)
        seconds, result = timed(
            device, partial(search.adapt, model, episodes, iterations=iterations)
        )
        found[f"{name}_seconds"] = seconds / len(images)
        found[f"{name}_loss"] = float(result.loss.mean())
    return found


def search_memory(experiment: Experiment, device: torch.device) -> Result:
    """Bytes and seconds of searches for inputs, with as many images as a batch of the training.

    The memory is that of all tensors that a search makes, the weights not among them.
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
        if not is_whole(experiment):  # not in the paper, and 40 graphs of its large model
            searches["unrolled"] = partial(unrolled_search, decoder, images)
    found: Result = {}
    for name, search in searches.items():
        found[f"{name}_seconds"] = timed(device, search)[0] / count
        found[f"{name}_bytes"] = float(peak_bytes(search, device))
    return found


def unrolled_search(decoder: nn.Module, images: Tensor, iterations: int = ADAM_STEPS) -> Tensor:
    """Latents by gradient steps that keep their graph, as a training through them would."""
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
"""Of a quick setting; of a whole data set all are taken (`is_whole`)."""
SEARCH_STEPS = 100
DAMAGE_SEED = 0
RIDGE = 0.01
"""Of latents that Adam searches for, in a quick setting; the paper has none (Eq. 21)."""
HIDDEN = 20 / 64
"""The side of the hidden window, as a share of the image's."""
DAMAGES: dict[str, Damage] = {
    "inpaint": Inpainting(window=HIDDEN),
    "denoise_02": Denoising(noise=0.2),
    "denoise_04": Denoising(noise=0.4),
}


def generation(experiment: Experiment, device: torch.device) -> Result:
    """FID of samples and of reconstructions, and PSNR, by the encoder and by JIIO."""
    whole = is_whole(experiment)
    latents = len(experiment.training) if whole else FITTED_LATENTS
    images = len(experiment.test) if whole else GENERATED_IMAGES
    # On an MDEQ-VAE too the paper's own algorithm, with the iterations of its tests.
    own = Reconstruction(engine="official", ridge=0.0, evaluation_iterations=SEARCH_STEPS)
    search = own if whole else None
    found, *_ = generate(experiment, device, latents=latents, images=images, search=search)
    ways = {some.latents_by: some for some in found.reconstructions}
    # A decoder alone has no other way than JIIO, which is then its own.
    usual = ways.get("encoder", ways.get("JIIO"))
    searched = ways.get("JIIO")
    return {
        "sample_fid": found.sample_fid,
        "reconstruction_fid": None if usual is None else usual.fid,
        "reconstruction_psnr": None if usual is None else usual.psnr,
        "jiio_reconstruction_fid": None if searched is None else searched.fid,
        "jiio_reconstruction_psnr": None if searched is None else searched.psnr,
    }


def unsupervised_psnr(experiment: Experiment, device: torch.device) -> Result:
    """The median PSNR of what a generator makes of damaged test images (Eq. 22)."""
    model = experiment.model
    if isinstance(experiment.task, ImageRestoration):
        return {}
    if not (is_generator(model) or isinstance(model, Autoencoder)):
        return {}
    task = experiment.task
    ridge = 0.0 if is_whole(experiment) else RIDGE
    # The paper searches the latents of autoencoders by Adam.
    search: dict[str, Any] = (
        {"engine": "adam", "iterations": ADAM_STEPS, "ridge": ridge}
        if isinstance(model, Autoencoder) or not isinstance(task, Reconstruction)
        else {"engine": task.engine, "iterations": SEARCH_STEPS, "ridge": task.ridge}
    )
    found: Result = {}
    for name, damage in DAMAGES.items():
        chance = torch.Generator().manual_seed(DAMAGE_SEED)
        ratios, converged = [], []
        for images, _ in islice(
            Batches(experiment.test, RESTORED_IMAGES), None if is_whole(experiment) else 1
        ):
            originals = images.to(device)
            seen = damage.corrupt(originals, chance)
            restored = restore(model, seen.measured, seen.measurement, **search)
            ratios.append(picture_psnr(restored.images, originals))
            converged.append(restored.converged)
        found[f"{name}_psnr"] = float(torch.cat(ratios).median())
        found[f"{name}_converged"] = float(torch.cat(converged).double().mean())
    return found


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
"""What is measured besides an evaluation, by the names that tables use."""
