"""Memory allocation settings of the C library."""

from __future__ import annotations

import ctypes

import pytest

from equilibria import cli
from equilibria.cli import allocator


def test_environment_variables_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not allocator.keep_freed_memory()


def test_system_without_mallopt_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()


def test_only_the_program_changes_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(cli, "app", lambda: calls.append("ran"))
    monkeypatch.setattr("warnings.showwarning", lambda *_: None)
    cli.main()
    assert calls == ["kept", "ran"]
