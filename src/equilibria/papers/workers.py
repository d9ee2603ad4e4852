"""Runs side by side: processes of one thread each, which take one job after the other.

A pool of the standard library would do but for one thing: where a process dies (out of memory, a
kill), it does not say at which job. Here every process has its own pipe, so its job is known.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from equilibria.papers.job import Job, Result, run_job


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with a result, or with an error."""

    job: Job
    result: Result | None
    error: str = ""


def run_jobs(jobs: Sequence[Job], workers: int) -> Generator[Outcome, None, None]:
    """The outcomes of all jobs, as they end, with so many processes on the CPU.

    A job that fails or whose process dies is an outcome like others, and the rest goes on. When
    the caller stops, the processes are ended; their checkpoints stay.
    """
    waiting = list(jobs)
    crew: list[_Worker] = []
    try:
        while waiting or crew:
            while waiting and len(crew) < workers:
                crew.append(_Worker(waiting.pop(0)))
            for connection in wait([worker.connection for worker in crew]):
                worker = next(w for w in crew if w.connection is connection)
                outcome = worker.outcome()
                yield outcome
                if waiting and worker.alive:
                    worker.give(waiting.pop(0))
                else:
                    crew.remove(worker)
                    worker.end()
    finally:
        for worker in crew:
            worker.end()


class _Worker:
    """A process and the job it has."""

    def __init__(self, job: Job) -> None:
        # spawn: a fork of a process in which torch has threads may hang.
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.alive = True
        self.give(job)

    def give(self, job: Job) -> None:
        self.job = job
        self.connection.send(job)

    def outcome(self) -> Outcome:
        try:
            result, error = self.connection.recv()
        except (EOFError, OSError):
            self.alive = False
            self.process.join()
            code = self.process.exitcode
            return Outcome(self.job, None, f"its process died (exit code {code})")
        return Outcome(self.job, result, error)

    def end(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()


def _work(connection: Connection) -> None:
    """Do jobs until the other end closes."""
    # Whoever sits at the keyboard interrupts the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = connection.recv()
            connection.send(_attempt(job))
        except (EOFError, OSError):  # Nobody is at the other end any more.
            return


def _attempt(job: Job) -> tuple[Result | None, str]:
    try:
        return run_job(job, torch.device("cpu")), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
