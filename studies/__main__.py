"""Decides claims of the papers, each by one small study with paired seeds.

    python -m studies                  # the studies, by name
    python -m studies hhd pe           # carries out two of them
    python -m studies all --seeds 8    # all, with eight seeds
    python -m studies hhd --full       # many more images, of 16×16

Models of one size are trained on small images of Fashion-MNIST until their validation curves are
flat, and compared seed by seed (docs/studies.md says how). Every run is kept in OUTPUT/runs as soon
as it is done: the same command goes on where it was interrupted, more seeds add to those there are,
and studies share runs. At the end of a study OUTPUT/NAME.json and NAME.md are written, and
claims.md, a table of all that OUTPUT holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from equilibria.data import DataFileError, MissingDataError, load_dataset
from equilibria.training import write_atomically
from studies._carry_out import carry_out, claims_table, planned_runs, write
from studies._claims import STUDIES
from studies._protocol import FULL, QUICK, Runs
from studies._training import Display, machine

SEEDS = 6


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*STUDIES, "all"]
    parser.add_argument("studies", nargs="*", choices=[*names, []], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/studies"), help="a folder")
    parser.add_argument("--full", action="store_true", help="20,000 training images, many hours")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("an interval needs at least two seeds: raise --seeds")
    return parser, options


def main(arguments: Sequence[str] | None = None) -> int:
    parser, options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    if not options.studies:
        for study in STUDIES.values():
            console.print(f"{study.name:20s} {study.title} ({study.paper})")
        return 0
    torch.set_num_threads(1)
    chosen = STUDIES if "all" in options.studies else dict.fromkeys(options.studies)
    protocol = FULL if options.full else QUICK
    folder = options.output / "full" if options.full else options.output
    try:
        runs = Runs(folder / "runs", load_dataset(protocol.data), protocol)
    except (MissingDataError, DataFileError, OSError, ValueError) as error:
        parser.error(str(error))
    console.print(machine())
    seeds = range(options.seeds)
    for name in chosen:
        study = STUDIES[name]
        display = Display(console, planned_runs(study, seeds))
        with display.running():
            results = carry_out(study, seeds, runs, display)
        command = f"python -m studies {name} --seeds {options.seeds}"
        text, _ = write(study, results, runs, command + " --full" * options.full, folder)
        console.print(text, markup=False)
        write_atomically(folder / "claims.md", claims_table(folder, STUDIES.values()).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
