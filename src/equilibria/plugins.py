"""Parts of users' own, such as models and data sets: code that registers them when it is imported.

A user names it (`--import`, `import_parts`), or an installed package does, in the entry-point group
`equilibria.plugins`. A run remembers what was imported by name, and never imports anything itself.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

__all__ = ["Parts", "PartsError", "PluginWarning", "import_parts", "imported", "require"]

GROUP = "equilibria.plugins"


class PartsError(ImportError):
    """Code of a user's own that cannot be imported, or was not."""


class PluginWarning(UserWarning):
    """A plugin was left out, or is not what it was."""


@dataclass(frozen=True)
class Parts:
    """What was imported: as the user named it, and the checksum of its code.

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
    """What users have imported into this process by name, in that order.

    Examples:
        >>> all(isinstance(parts, eq.plugins.Parts) for parts in eq.plugins.imported())
        True
    """
    return list(_imported.values())


def import_parts(sources: str | Path | Iterable[str | Path]) -> None:
    """Import code that registers parts of a user's own; again is the same as once.

    sources: a file (`parts.py`), a folder with an `__init__.py` (`./parts`), a module by its dotted
        name (`my_package.parts`), or several of them.

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
            raise PartsError(f"{name} has changed since it was imported: start Python anew")
        _imported[parts.module] = parts


def require(needed: Iterable[Parts], whose: str) -> None:
    """Refuse to go on without code that was not imported; warn where it has changed since.

    Examples:
        >>> eq.plugins.require(eq.plugins.imported(), "runs/mine")  # all of it is here
    """
    missing = []
    for parts in needed:
        module = sys.modules.get(parts.module)
        if module is None:
            missing.append(parts.source)
        elif _checksum(module) != parts.sha256:
            warnings.warn(
                f"{parts.source} is not as {whose} was trained with: it has changed since",
                PluginWarning,
                stacklevel=3,
            )
    if missing:
        options = " ".join(f"--import {shlex.quote(source)}" for source in missing)
        raise PartsError(
            f"{whose} needs {', '.join(missing)}: add {options}, if you trust that code "
            f"(in Python: equilibria.plugins.import_parts({missing!r}))"
        )


_installed_loaded = False
_loading = threading.RLock()


def load_installed() -> None:
    """Import the plugins of installed packages, once; a broken one is left out with a warning.

    Registries call this when they do not know a name, and before they list those they know, as the
    check of a recipe does: importing Equilibria runs no code of other packages.
    """
    global _installed_loaded
    with _loading:
        if _installed_loaded:
            return
        _installed_loaded = True  # Before: a plugin may look for a name itself.
        for point in metadata.entry_points(group=GROUP):
            try:
                found = point.load()
                if callable(found):
                    found()
            except Exception as error:
                said = " ".join(str(error).split())
                warnings.warn(
                    f"the plugin {point.name!r} ({point.value}) is left out: "
                    f"{type(error).__name__}: {said}",
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
        raise FileNotFoundError(f"there is no file {file} to import")
    present = sys.modules.get(name)
    if present is not None and _is_file_of(getattr(present, "__file__", None), file):
        return present
    other = None if name == "__main__" else importlib.util.find_spec(name)
    if present is not None or (other is not None and not _is_file_of(other.origin, file)):
        raise PartsError(f"{path} has the name of another module, {name!r}: rename it")
    places = [str(path.resolve())] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise PartsError(f"{file} is not a Python file: its name must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _told_where(str(path), file.parent if path.is_dir() else file):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    with _told_where(name, None):
        try:
            spec = importlib.util.find_spec(name)
        except (ModuleNotFoundError, ValueError):
            spec = None
    if spec is None:
        raise PartsError(
            f"there is no module {name!r} to import; a file is named with its ending, {name}.py, "
            f"and a folder with a slash, ./{name}"
        )
    place = None if spec.origin is None else Path(spec.origin)
    with _told_where(name, place.parent if place and spec.submodule_search_locations else place):
        return importlib.import_module(name)


def _is_file_of(origin: str | None, file: Path) -> bool:
    return origin is not None and Path(origin).resolve() == file.resolve()


@contextmanager
def _told_where(name: str, place: Path | None) -> Iterator[None]:
    """Around an import: an error in the user's code is told with its line there."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [
            (frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
        ]
        said = str(error)
        if isinstance(error, SyntaxError):
            lines.append((error.filename or "", error.lineno))
            said = error.msg
        where = name
        for file, line in lines:
            if place is not None and Path(file).resolve().is_relative_to(place.resolve()):
                where = f"{name if _is_file_of(file, place) else file}, line {line}"
        raise PartsError(f"{where}: {type(error).__name__}: {' '.join(said.split())}") from error


def _checksum(module: ModuleType) -> str:
    """Of the code of a module: its file, or all files of a package."""
    origin = getattr(module, "__file__", None)
    if origin is None:
        return ""
    file = Path(origin)
    files = sorted(file.parent.rglob("*.py")) if hasattr(module, "__path__") else [file]
    found = hashlib.sha256()
    for part in files:
        name = part.relative_to(file.parent).as_posix()
        found.update(f"{name}\0".encode() + hashlib.sha256(part.read_bytes()).digest())
    return found.hexdigest()
