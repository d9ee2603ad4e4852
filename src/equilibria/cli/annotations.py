"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Best = Annotated[
    bool, typer.Option("--best", help="With the weights of the epoch that validated best.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
