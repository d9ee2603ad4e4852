"""`--devices N`: the processes of a training on this machine, by the launcher of torchrun."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from equilibria.cli.console import fail
from equilibria.training import Place, ProcessLostError

PATIENCE = 10.0
"""Seconds that a process which lost the others waits to be ended with them."""


def launch(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(place, *arguments)` in `count` processes; if one fails, all end, and so do we.

    `work` is a function of a module, and prints what goes wrong itself. The processes meet by a
    file and talk over the loopback device: nothing listens on the network.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # The launcher logs every failure, which `work` has told.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="equilibria-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="equilibria",
            max_restarts=0,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/rendezvous",
            rdzv_configs={"store_type": "file"},
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, _process)(Path(folder) / "meeting-point", work, arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
        except SignalException as error:
            fail(f"ended by {error.sigval.name}: --resume goes on from the last checkpoint", 130)
        else:
            return
    if failure.exitcode < 0:
        fail(
            f"process {rank + 1} of {count} was ended by {signal.Signals(-failure.exitcode).name} "
            "(is there enough memory?): --resume goes on from the last checkpoint",
            code=1,
        )
    raise typer.Exit(failure.exitcode)


def _process(meeting_point: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    place = Place.from_environment(meeting_point=meeting_point)
    assert place is not None
    try:
        work(place, *arguments)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except ProcessLostError as error:
        # Ended with the others, this process leaves it to the one that failed to say why.
        time.sleep(PATIENCE)
        fail(str(error), code=1)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
