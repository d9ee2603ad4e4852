"""Plugins: import of user code that registers models, data sets and other parts.

Users import such code with `--import` or `import_parts`. Installed packages provide it in the
entry-point group `equilibria.plugins`. A run records what was imported by name, but never imports
anything itself.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shlex
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

__all__ = ["Parts", "PartsError", "PluginWarning", "import_parts", "imported", "require"]

GROUP = "equilibria.plugins"
Paths: TypeAlias = "str | Path | Sequence[str | Path]"
"""One or several files, folders or modules."""


class PartsError(ImportError):
    """Error for user code that cannot be imported, or that a run needs and was not imported."""


class PluginWarning(UserWarning):
    """Warning that a plugin was skipped, or that user code has changed since a training run."""


@dataclass(frozen=True)
class Parts:
    """Record of imported user code, which registers parts such as models and tasks.

    Attributes:
        source: File, folder or module, as the user wrote it.
        sha256: Checksum of the code.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("my_parts.py").write_text("answer = 42")
        >>> eq.plugins.import_parts("my_parts.py")
        >>> parts = eq.plugins.imported()[-1]
        >>> parts.source, parts.module
        ('my_parts.py', 'my_parts')
    """

    source: str
    sha256: str

    @property
    def module(self) -> str:
        """Name of the imported module."""
        return _module_name(Path(self.source)) if _is_path(self.source) else self.source


_imported: dict[str, Parts] = {}


def imported() -> list[Parts]:
    """Return records of the user code imported into this process, in the order of import.

    Examples:
        >>> all(isinstance(parts, eq.plugins.Parts) for parts in eq.plugins.imported())
        True
    """
    return list(_imported.values())


def import_parts(sources: str | Path | Iterable[str | Path]) -> None:
    """Import user code that registers parts; repeated imports have no effect.

    Args:
        sources: A file (`parts.py`), a folder with an `__init__.py` (`./parts`), a module
            (`my_package.parts`), or several of them.

    Raises:
        PartsError: If the code cannot be imported, or has changed since it was imported.
        FileNotFoundError: If a file does not exist.

    Examples:
        >>> from pathlib import Path
        >>> code = "from equilibria.solvers import Picard, register_solver as register"
        >>> _ = Path("mine.py").write_text(f"{code}; register('slow', Picard)")
        >>> eq.plugins.import_parts("mine.py")
        >>> type(eq.solvers.get_solver("slow")).__name__
        'Picard'
    """
    for source in [sources] if isinstance(sources, str | Path) else sources:
        name = f"{source}{os.sep}" if isinstance(source, Path) and source.is_dir() else str(source)
        module = _import_path(Path(name)) if _is_path(name) else _import_module(name)
        parts = Parts(name, _checksum(module))
        if _imported.get(parts.module, parts).sha256 != parts.sha256:
            raise PartsError(f"{name} has changed since it was imported: restart Python")
        _imported[parts.module] = parts


def require(needed: Iterable[Parts], whose: str) -> None:
    """Raise an error if user code was not imported; warn if it has changed.

    Args:
        needed: Records of the code, for example of a run.
        whose: Name of the run or file that needs it, for messages.

    Raises:
        PartsError: If some code was not imported.

    Examples:
        >>> eq.plugins.require(eq.plugins.imported(), "runs/example")
    """
    missing = []
    for parts in needed:
        module = sys.modules.get(parts.module)
        if module is None:
            missing.append(parts.source)
        elif _checksum(module) != parts.sha256:
            warnings.warn(
                f"{parts.source} has changed since {whose} was trained: results may differ",
                PluginWarning,
                stacklevel=3,
            )
    if missing:
        options = " ".join(f"--import {shlex.quote(source)}" for source in missing)
        raise PartsError(
            f"{whose} needs {', '.join(missing)}, which was not imported: if you trust that code, "
            f"add {options} (in Python: equilibria.plugins.import_parts({missing!r}))"
        )


_installed_loaded = False
_loading = threading.RLock()


def load_installed() -> None:
    """Import the plugins of installed packages, once; skip broken ones with a warning.

    Registries call this before they list their names, and when they do not know a name. So
    `import equilibria` runs no code of other packages.
    """
    global _installed_loaded
    with _loading:
        if _installed_loaded:
            return
        _installed_loaded = True  # set first, because a plugin may itself look up a name
        for point in metadata.entry_points(group=GROUP):
            try:
                plugin = point.load()
                if callable(plugin):
                    plugin()
            except Exception as error:
                message = " ".join(str(error).split())
                warnings.warn(
                    f"skipped the plugin {point.name!r} ({point.value}): "
                    f"{type(error).__name__}: {message}",
                    PluginWarning,
                    stacklevel=3,
                )


def _is_path(source: str) -> bool:
    return source.endswith(".py") or "/" in source or os.sep in source


def _module_name(path: Path) -> str:
    return path.resolve().name.removesuffix(".py")


def _import_path(path: Path) -> ModuleType:
    file, name = path / "__init__.py" if path.is_dir() else path, _module_name(path)
    if not file.is_file():
        raise FileNotFoundError(f"cannot import {file}: there is no such file")
    loaded = sys.modules.get(name)
    if loaded is not None and _is_file_of(getattr(loaded, "__file__", None), file):
        return loaded
    other = None if name == "__main__" else importlib.util.find_spec(name)
    if loaded is not None or (other is not None and not _is_file_of(other.origin, file)):
        raise PartsError(f"cannot import {path}: there is another module {name!r}; rename the file")
    folders = [str(path.resolve())] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise PartsError(f"cannot import {file}: the name of a Python file must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _errors_with_location(str(path), file.parent if path.is_dir() else file):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    with _errors_with_location(name, None):
        try:
            spec = importlib.util.find_spec(name)
        except (ModuleNotFoundError, ValueError):
            spec = None
    if spec is None:
        raise PartsError(
            f"cannot import {name!r}: there is no such module; write {name}.py for a file, "
            f"./{name} for a folder"
        )
    code = None if spec.origin is None else Path(spec.origin)
    if code is not None and spec.submodule_search_locations:
        code = code.parent
    with _errors_with_location(name, code):
        return importlib.import_module(name)


def _is_file_of(origin: str | None, file: Path) -> bool:
    return origin is not None and Path(origin).resolve() == file.resolve()


@contextmanager
def _errors_with_location(name: str, code: Path | None) -> Iterator[None]:
    """Convert errors of an import to a `PartsError` with the line in the file or folder `code`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [
            (frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
        ]
        message = str(error)
        if isinstance(error, SyntaxError):
            lines.append((error.filename or "", error.lineno))
            message = error.msg
        where = name
        for file, line in lines:
            if code is not None and Path(file).resolve().is_relative_to(code.resolve()):
                where = f"{name if _is_file_of(file, code) else file}, line {line}"
        raise PartsError(f"{where}: {type(error).__name__}: {' '.join(message.split())}") from error


def _checksum(module: ModuleType) -> str:
    """Return the checksum of a module's file, or of all files of a package."""
    origin = getattr(module, "__file__", None)
    if origin is None:
        return ""
    file = Path(origin)
    files = sorted(file.parent.rglob("*.py")) if hasattr(module, "__path__") else [file]
    checksum = hashlib.sha256()
    for part in files:
        name = part.relative_to(file.parent).as_posix()
        checksum.update(f"{name}\0".encode() + hashlib.sha256(part.read_bytes()).digest())
    return checksum.hexdigest()
