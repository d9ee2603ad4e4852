"""Errors of commands: one sentence and an exit code; `--debug` shows the traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from traceback import format_exc
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from equilibria.registry import printable

MISTAKES = (ImportError, OSError, TypeError, ValueError)
"""Errors in arguments and inputs: exit code 2."""
FAILURES = (MemoryError, RuntimeError)
"""Failures during the computation: exit code 1."""
ALLOCATOR = "DefaultCPUAllocator: "
"""Part of the message of PyTorch when memory is exhausted."""
DEFECT = 70
"""Exit code for a bug of the program, EX_SOFTWARE of sysexits.h."""
INTERRUPTED = 130
MAX_NAMED_FILES = 5
"""Largest number of files that a warning names."""

WRITE = "give a writable path, or change its permissions"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EIO: "the disk may be failing",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), WRITE),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR), "give another path"),
}
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EIO}

debug = False
"""Whether tracebacks are shown; set for every command."""


class FaultError(Exception):
    """Error with a message for the user and the exit code of the program."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error message and end the program."""
    line = Text.assemble(("Error:", "bold red"), " ", printable(message))
    Console(stderr=True, soft_wrap=True).print(line)
    raise typer.Exit(code)


def warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning without its place in the code, as `warnings.showwarning`."""
    line = Text.assemble(("Warning:", "bold yellow"), " ", printable(str(message)))
    Console(stderr=True, soft_wrap=True).print(line)


def sentence(error: BaseException) -> str:
    """Return the message of an error, with a remedy if one is known."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror is not None:
        prefix = f"{error.filename}: " if error.filename is not None else ""
        remedy = f"; {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
        return f"{prefix}{error.strerror.lower()}{remedy}"
    if isinstance(error, MemoryError) or ALLOCATOR in str(error):
        return "out of memory; use smaller batches, images or models"
    return str(error) or type(error).__name__


def code_of(error: BaseException) -> int:
    """Return the exit code of the program for an error."""
    if isinstance(error, FaultError):
        return error.code
    is_mistake = isinstance(error, MISTAKES) and getattr(error, "errno", None) not in EXHAUSTED
    return 2 if is_mistake else 1


@contextmanager
def reported_errors() -> Iterator[None]:
    """End the program with a message on errors and Ctrl-C; unexpected errors are bugs."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    except (FaultError, *MISTAKES, *FAILURES) as error:
        show_traceback()
        fail(sentence(error), code_of(error))
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):
            raise  # Click and typer print errors in the command line themselves.
        show_traceback()
        bug = f"{type(error).__name__}: {error}"
        fail(f"this is a bug in the program ({bug}); please report it with --debug output", DEFECT)


def show_traceback() -> None:
    """Print the traceback of the current error if `--debug` is set."""
    if debug:
        Console(stderr=True, soft_wrap=True).print(printable(format_exc()), markup=False)


def complain(*sentences: str) -> None:
    """Raise an error that joins the sentences that are not empty, if there are any.

    Commands call it after they have printed their results.
    """
    problems = [sentence for sentence in sentences if sentence]
    if problems:
        raise FaultError("\n".join(problems))


def unreadable(problems: Sequence[Exception], count: int) -> str:
    """Describe the images, of `count`, that could not be used; empty if there are none."""
    lines = "\n".join(sentence(problem) for problem in problems)
    return lines and f"{len(problems)} of {count} images were skipped:\n{lines}"


def unanswered(count: float | None, total: int, unit: str = "images") -> str:
    """Describe the images for which the model's outputs are not finite; empty if there are none."""
    if not count:
        return ""
    return (
        f"the outputs of the model are NaN or infinite for {count:.0f} of {total} {unit}, which "
        "count as wrong. Check the weights and the images for NaN; train again with a lower "
        "learning rate, or use the weights with the best validation score (--best)"
    )


def writable_file(path: Path | None) -> Path | None:
    """Check that a file can be written, before hours of work are lost; a callback of options."""
    if path is not None:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; give a file in it")
        if not path.parent.is_dir():
            raise NotADirectoryError(
                f"there is no folder {path.parent}; create it before writing {path.name}"
            )
        _try_to_write(path.parent)
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Check that a folder can be written or created; a callback of options."""
    if path is not None:
        existing = next((parent for parent in (path, *path.parents) if parent.exists()), Path())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file; {path} must be a folder")
        _try_to_write(existing)
    return path


def check_new(*paths: Path | None, overwrite: bool) -> None:
    """Raise FileExistsError if a file exists and `overwrite` is false."""
    existing = next((path for path in paths if path is not None and path.exists()), None)
    if existing is not None and not overwrite:
        raise FileExistsError(f"{existing} exists; use --overwrite, or give another path")


STANDARD_OUTPUT = Path("-")


def check_table(table: Path | None, *, as_json: bool, overwrite: bool) -> None:
    """Check the argument of `--csv` before the work starts."""
    if as_json and table == STANDARD_OUTPUT:
        raise ValueError("--json and --csv - both write to standard output; use one of them")
    if table is not None and table != STANDARD_OUTPUT:
        check_new(writable_file(table), overwrite=overwrite)


def note_frames(files: Iterable[Path]) -> None:
    """Warn about files with several frames or pages, of which only the first is used."""
    from equilibria.data.image_files import has_several_frames

    several = [str(file) for file in files if has_several_frames(file)]
    if several:
        named = ", ".join(several[:MAX_NAMED_FILES]) + ", …" * (len(several) > MAX_NAMED_FILES)
        warn(f"only the first frame or page is used of: {named}")


def _try_to_write(folder: Path) -> None:
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot be written ({error.strerror})"
        raise OSError(error.errno, message, str(folder)) from None
