"""Tasks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equilibria.registry import Registry
from equilibria.tasks.base import Task

_tasks: Registry[Task] = Registry("task")


def register_task(name: str, factory: Callable[..., Task], *, replace: bool = False) -> None:
    """Make a task available by name; `factory` takes the task's options as keywords."""
    _tasks.register(name, factory, replace=replace)


def list_tasks() -> list[str]:
    return _tasks.names()


def create_task(name: str, **options: Any) -> Task:
    """The task called by a name, with options."""
    return _tasks.create(name, **options)
