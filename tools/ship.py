"""Turn a finished run into a trained model of the package: `python -m tools.ship RUN`.

Writes NAME.safetensors and its card, NAME.yaml, into src/equilibria/weights. The card has the
results on all test images at the end of training. NAME is the name of the folder of the run, which
must be that of its recipe.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml

from equilibria.analysis.compare import read_runs
from equilibria.analysis.generation import generate
from equilibria.certificates import Certificate, NoCertificateError, certifier
from equilibria.equilibrium import EquilibriumLayer
from equilibria.equilibrium.capabilities import guarantee
from equilibria.models.pretrained import SHIPPED
from equilibria.training import pack
from equilibria.training.experiment import Experiment, trained
from equilibria.training.packed import kept_latents

MAX_TOTAL_BYTES = 16 * 2**20
"""Largest total size of all trained models."""
CERTIFIED = 1000
"""Number of certified test images, evenly spread."""
SOLVE_STATISTICS = {"mean_iterations", "max_iterations", "share_converged", "max_residual"}
RADII = (0.1, 0.3, 0.5, 1.0, 1.58)


def certificate(experiment: Experiment, samples: int) -> dict[str, Any]:
    """Return the certificate on test images, without activation patterns."""
    images, labels = experiment.some_test_images(samples)
    try:
        certify = certifier(experiment.model, tuple(images.shape[1:]))
        joined = Certificate.join([certify(part, refine=False) for part in images.split(100)])
    except NoCertificateError as error:
        return {"none": str(error)}
    correct = joined.prediction == labels
    within = {
        f"{r}": round(float((correct & (joined.radius >= r)).double().mean()), 4) for r in RADII
    }
    return {
        "images": len(images),
        "class_certain": round(joined.share_certified, 4),
        "median_radius": round(float(joined.radius.median()), 5),
        "right_and_certain_within": {r: share for r, share in within.items() if share > 0},
    }


def latent_certificate(generator: torch.nn.Module) -> dict[str, Any]:
    """Return the guarantee that holds for every latent by construction."""
    layer = getattr(generator, "layer", None)
    proven = guarantee(layer.cell) if isinstance(layer, EquilibriumLayer) else None
    return {"equilibrium": f"{proven}, for every latent"} if proven else {"none": "no bound"}


def ship(run: Path, summary: str, task: str, samples: int = CERTIFIED) -> Path:
    """Write the weights and the card of a finished run.

    Args:
        run: Folder of the run.
        summary: Short description of the model for its card.
        task: Command that the card suggests.
        samples: Number of test images to certify.

    Returns:
        The file with the weights.

    Raises:
        ValueError: If the run was not evaluated, or if all trained models together are too large.
    """
    experiment = trained(run)
    name, recipe = run.resolve().name, experiment.recipe
    (stored,) = read_runs([run])
    if stored.evaluation is None:
        raise ValueError(
            f"{run} was not evaluated: run `equilibria compare {run} --evaluate` first"
        )
    figures = {n: v for n, v in stored.evaluation.items() if isinstance(v, int | float)}
    if task == "generate":
        generated, _, _ = generate(
            experiment, torch.device("cpu"), folder=run, known=kept_latents(run)
        )
        if generated.sample_fid is not None:
            figures["sample_fid"] = generated.sample_fid
    file = SHIPPED / f"{name}.safetensors"
    card = {
        "summary": summary,
        "model": recipe.model.name,
        "task": task,
        "recipe": name,
        "command": f"equilibria train {name} --output runs/{name}",
        "data": recipe.data.name,
        "seed": recipe.training.seed,
        "figures": {n: round(v, 4) for n, v in figures.items() if n not in SOLVE_STATISTICS},
        "measured_by": f"equilibria evaluate --model {name}"
        + f", and equilibria generate --model {name}" * (task == "generate"),
        "certificate": latent_certificate(experiment.model)
        if task == "generate"
        else certificate(experiment, samples),
        "use": f"equilibria {task} --model {name}" + " image.png" * (task == "predict"),
    }
    pack(experiment, file, latents=kept_latents(run))
    total = sum(path.stat().st_size for path in SHIPPED.glob("*.safetensors"))
    if total > MAX_TOTAL_BYTES:
        file.unlink()
        raise ValueError(
            f"all trained models together take {total / 2**20:.1f} MiB; the limit is "
            f"{MAX_TOTAL_BYTES / 2**20:.0f} MiB. Ship a smaller model"
        )
    text = yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=100)
    file.with_suffix(".yaml").write_text(text, encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.ship", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run, named like the model")
    parser.add_argument("--summary", required=True, help="short description of the model")
    parser.add_argument("--task", default="evaluate", help="command that the card suggests")
    parser.add_argument(
        "--samples", type=int, default=CERTIFIED, help="number of test images to certify"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = ship(options.run, options.summary, options.task, options.samples)
    print(f"Wrote {file} and its card.")


if __name__ == "__main__":
    main()
