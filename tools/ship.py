"""`python -m tools.ship RUN`: a finished run as a trained model that comes with the package.

Writes NAME.safetensors and its card, NAME.yaml, into src/equilibria/weights, with what was measured
on all test images at the end of the training. The model is called after the folder of its run, and
that after its recipe.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml

import equilibria as eq
from equilibria.certificates import Certificate, NoCertificateError, certifier
from equilibria.equilibrium import EquilibriumLayer
from equilibria.equilibrium.capabilities import guarantee
from equilibria.models.pretrained import SHIPPED
from equilibria.report.compare import read_runs
from equilibria.training import pack
from equilibria.training.experiment import Experiment, trained
from equilibria.training.packed import kept_latents

MOST_BYTES = 5 * 2**20
"""Of all trained models together."""
CERTIFIED = 1000
"""Test images that are certified, evenly spread."""
OF_THE_SOLVE = {"mean_iterations", "max_iterations", "share_converged", "max_residual"}
RADII = (0.1, 0.3, 0.5, 1.0, 1.58)


def certificate(experiment: Experiment, samples: int) -> dict[str, Any]:
    """What is proven of test images, without a look at activation patterns."""
    images, labels = experiment.some_test_images(samples)
    try:
        certify = certifier(experiment.model, tuple(images.shape[1:]))
        found = Certificate.join([certify(part, refine=False) for part in images.split(100)])
    except NoCertificateError as error:
        return {"none": str(error)}
    right = found.prediction == labels
    within = {f"{r}": round(float((right & (found.radius >= r)).double().mean()), 4) for r in RADII}
    return {
        "images": len(images),
        "class_certain": round(found.share_certified, 4),
        "median_radius": round(float(found.radius.median()), 5),
        "right_and_certain_within": {r: share for r, share in within.items() if share > 0},
    }


def proven_of_latents(generator: torch.nn.Module) -> dict[str, Any]:
    """What holds by construction, whatever the latent."""
    layer = getattr(generator, "layer", None)
    proven = guarantee(layer.cell) if isinstance(layer, EquilibriumLayer) else None
    return {"equilibrium": f"{proven}, for every latent"} if proven else {"none": "no bound"}


def ship(run: Path, summary: str, task: str, samples: int = CERTIFIED) -> Path:
    """Write the file and the card; an error where all of them would be too large."""
    experiment = trained(run)
    name, recipe = run.resolve().name, experiment.recipe
    (read,) = read_runs([run])
    if read.evaluation is None:
        raise ValueError(f"{run} was not evaluated: equilibria compare {run} --evaluate does")
    figures = {n: v for n, v in read.evaluation.items() if isinstance(v, int | float)}
    if task == "generate":
        found, _, _ = eq.report.generate(
            experiment, torch.device("cpu"), folder=run, known=kept_latents(run)
        )
        figures |= {"sample_fid": found.sample_fid} if found.sample_fid is not None else {}
    file = SHIPPED / f"{name}.safetensors"
    card = {
        "summary": summary,
        "model": recipe.model.name,
        "task": task,
        "recipe": name,
        "command": f"equilibria train {name} --output runs/{name}",
        "data": recipe.data.name,
        "seed": recipe.training.seed,
        "figures": {n: round(v, 4) for n, v in figures.items() if n not in OF_THE_SOLVE},
        "measured_by": f"equilibria evaluate --model {name}"
        + f", and equilibria generate --model {name}" * (task == "generate"),
        "certificate": proven_of_latents(experiment.model)
        if task == "generate"
        else certificate(experiment, samples),
        "use": f"equilibria {task} --model {name}" + " image.png" * (task == "predict"),
    }
    pack(experiment, file, latents=kept_latents(run))
    total = sum(path.stat().st_size for path in SHIPPED.glob("*.safetensors"))
    if total > MOST_BYTES:
        file.unlink()
        raise ValueError(f"all trained models would take {total / 2**20:.1f} MiB: 5 at most")
    text = yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=100)
    file.with_suffix(".yaml").write_text(text, encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.ship", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run, called as the model")
    parser.add_argument("--summary", required=True, help="what it is, in a few words")
    parser.add_argument("--task", default="evaluate", help="the command to try it with")
    parser.add_argument("--samples", type=int, default=CERTIFIED, help="test images to certify")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Written: {ship(asked.run, asked.summary, asked.task, asked.samples)} and its card")


if __name__ == "__main__":
    main()
