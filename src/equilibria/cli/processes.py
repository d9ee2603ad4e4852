"""Training in several processes: start them, and end all of them if one fails."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import typer

import equilibria as eq
from equilibria import plugins
from equilibria.cli import faults
from equilibria.cli.faults import INTERRUPTED, MISTAKES, fail, sentence

if TYPE_CHECKING:
    import torch

    Work: TypeAlias = Callable[[torch.device, eq.training.processes.Processes], None]

LOST_PROCESS_SECONDS = 10.0
"""Time for which a process that lost the others waits to be ended with them."""


def work_in_group(place: eq.training.distributed.Place, device_name: str, work: Work) -> None:
    """Join the process group of a distributed training, and call `work` on this process's device.

    Args:
        place: Rank of this process, and how the processes connect.
        device_name: Name of the device, such as "cpu" or "cuda"; each process gets its own GPU.
        work: Function of the device and the process group.
    """
    import torch

    if place.rank > 0:
        warnings.simplefilter("ignore")  # The first process prints the same warnings.
    try:
        device = place.device(device_name)
    except ValueError as error:
        if place.rank > 0:
            raise typer.Exit(2) from None
        fail(str(error))
    torch.set_num_threads(place.threads())  # A recipe can override this.
    with eq.training.distributed.joined_group(place, device) as processes:
        work(device, processes)


def launch(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(place, *arguments)` in `count` processes; end all of them if one fails.

    `work` must be a function of a module, and prints its own errors. The processes find each other
    through a file and communicate over the loopback device: nothing listens on the network.

    Raises:
        typer.Exit: If a process fails, with its exit code.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from equilibria.training.sizes import current_limit

    logging.disable(
        logging.CRITICAL
    )  # `work` prints its errors; the launcher would log them again.
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
            meeting_point = Path(folder) / "meeting-point"
            sources = [parts.source for parts in plugins.imported()]
            elastic_launch(config, _process)(
                meeting_point, faults.debug, sources, current_limit(), work, arguments
            )
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
        except SignalException as error:
            fail(
                f"ended by {error.sigval.name}; continue from the last checkpoint with --resume",
                130,
            )
        else:
            return
    if failure.exitcode < 0:
        fail(
            f"process {rank + 1} of {count} was ended by {signal.Signals(-failure.exitcode).name} "
            "(is there enough memory?); continue from the last checkpoint with --resume",
            code=1,
        )
    raise typer.Exit(failure.exitcode)


def _process(
    meeting_point: Path,
    debug: bool,
    sources: Sequence[str],
    gigabytes: float,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    from equilibria.data.workers import end_with_parent

    end_with_parent()
    faults.debug = debug
    warnings.showwarning = faults.warn
    place = eq.training.distributed.Place.from_environment(meeting_point=meeting_point)
    assert place is not None
    try:
        with faults.reported_errors(), eq.training.size_limit(gigabytes):
            try:
                plugins.import_parts(sources)
                work(place, *arguments)
            except eq.training.ProcessLostError:
                # The process that failed prints the error; this one waits to be ended.
                time.sleep(LOST_PROCESS_SECONDS)
                raise
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None  # The launcher prints the message.
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def agreed(processes: eq.training.processes.Processes) -> Iterator[None]:
    """End all processes of a training if this block fails in one; otherwise all continue."""
    message: str | None = None
    try:
        yield
    except MISTAKES as error:
        faults.show_traceback()
        message = sentence(error)
    message = processes.first_message(message)
    if message is not None:
        fail_together(message, processes)


def fail_together(
    message: str, processes: eq.training.processes.Processes, code: int = 2
) -> NoReturn:
    """End every process with an exit code; the first one prints the message before they end."""
    try:
        if processes.leads:
            fail(message, code)
    finally:
        processes.first_message(None)
    raise typer.Exit(code)
