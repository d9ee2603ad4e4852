"""Freed memory stays with the program, unless its environment says otherwise."""

from __future__ import annotations

import ctypes

import pytest

from equilibria import cli
from equilibria.cli import allocator


def test_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not allocator.keep_freed_memory()


def test_a_system_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()


def test_the_program_keeps_it_and_the_library_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(cli, "app", lambda: calls.append("ran"))
    monkeypatch.setattr("warnings.showwarning", lambda *_: None)
    cli.main()
    assert calls == ["kept", "ran"]
