"""What can go wrong in a command: one sentence and an exit code; `--debug` shows the traceback."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from traceback import format_exc
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

MISTAKES = (ImportError, OSError, TypeError, ValueError)
"""What was asked for cannot be done: exit code 2."""
FAILURES = (MemoryError, RuntimeError)
"""What was begun could not be finished: exit code 1."""
ALLOCATOR = "DefaultCPUAllocator: "
"""In the message of PyTorch where memory is exhausted."""
DEFECT = 70
"""A fault of the program itself; sysexits.h calls it EX_SOFTWARE."""
INTERRUPTED = 130
NAMED_FILES = 5
"""In a sentence on many of them."""

WRITE = "name a place that can be written, or change its rights"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EIO: "the disk may be failing",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), WRITE),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR), "name another place"),
}
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EIO}

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What moves a cursor, changes colors or the direction of text, or cannot be encoded."""

debug = False
"""Whether tracebacks are shown; set anew for every command."""


class FaultError(Exception):
    """A sentence, and the exit code of the program."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def printable(text: str) -> str:
    """The text with control characters, of file names for instance, made visible as in JSON."""
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the program with one line that says what is wrong and what to do."""
    line = Text.assemble(("Error:", "bold red"), " ", printable(message))
    Console(stderr=True, soft_wrap=True).print(line)
    raise typer.Exit(code)


def warn(message: Warning | str, *_: object, **__: object) -> None:
    """In the place of `warnings.showwarning`: where in our code it arose helps nobody."""
    line = Text.assemble(("Warning:", "bold yellow"), " ", printable(str(message)))
    Console(stderr=True, soft_wrap=True).print(line)


def sentence(error: BaseException) -> str:
    """What went wrong, and what to do about it."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror is not None:
        place = f"{error.filename}: " if error.filename is not None else ""
        remedy = f": {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
        return f"{place}{error.strerror.lower()}{remedy}"
    if isinstance(error, MemoryError) or ALLOCATOR in str(error):
        return "there is not enough memory: take smaller batches, images or models"
    return str(error) or type(error).__name__


def code_of(error: BaseException) -> int:
    """Return the exit code of the program for an error."""
    if isinstance(error, FaultError):
        return error.code
    is_mistake = isinstance(error, MISTAKES) and getattr(error, "errno", None) not in EXHAUSTED
    return 2 if is_mistake else 1


@contextmanager
def told() -> Iterator[None]:
    """Faults, and Ctrl-C, end the program with a sentence; unknown ones are ours to mend."""
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
            raise  # A mistake in the command line, of click's or typer's own, which tell it.
        show_traceback()
        what = f"{type(error).__name__}: {error}"
        fail(f"a defect of the program ({what}); --debug shows where, for a report of it", DEFECT)


def show_traceback() -> None:
    """Of the error that is handled, if `--debug` asks for it."""
    if debug:
        Console(stderr=True, soft_wrap=True).print(printable(format_exc()), markup=False)


def complain(*sentences: str) -> None:
    """End the program, after what was found has been printed, if something is to be said of it."""
    said = [sentence for sentence in sentences if sentence]
    if said:
        raise FaultError("\n".join(said))


def unreadable(problems: Sequence[Exception], count: int) -> str:
    """Of the images, `count` of them, that could not be read; empty if all could."""
    lines = "\n".join(sentence(problem) for problem in problems)
    return lines and f"{len(problems)} of {count} images were left out:\n{lines}"


def unanswered(count: float | None, total: int, of: str = "images") -> str:
    """Of the images for which a model has no answer; empty if it has one for all."""
    if not count:
        return ""
    return (
        f"the model has no answer for {count:.0f} of {total} {of}, which counts as wrong: its "
        "outputs are NaN or infinite. Look for NaN in its weights and in the images; train it "
        "again with a lower learning rate, or take the weights that validated best (--best)"
    )


def writable_file(path: Path | None) -> Path | None:
    """A callback of options: work of hours must not be lost to a slip in the path of its output."""
    if path is not None:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: name a file in it")
        if not path.parent.is_dir():
            raise NotADirectoryError(f"there is no folder {path.parent}: create it for {path.name}")
        _try_to_write(path.parent)
    return path


def writable_folder(path: Path | None) -> Path | None:
    """The same for a folder, which is made when there is something to put into it."""
    if path is not None:
        there = next((place for place in (path, *path.parents) if place.exists()), Path())
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is a file: name a folder, not {path}")
        _try_to_write(there)
    return path


def check_new(*paths: Path | None, overwrite: bool) -> None:
    """Nobody's file is replaced unasked."""
    there = next((path for path in paths if path is not None and path.exists()), None)
    if there is not None and not overwrite:
        raise FileExistsError(f"{there} exists: --overwrite replaces it, or name another place")


STANDARD_OUTPUT = Path("-")


def check_table(table: Path | None, *, as_json: bool, overwrite: bool) -> None:
    """`--csv` before the work starts: a place that can be written, or the standard output alone."""
    if as_json and table == STANDARD_OUTPUT:
        raise ValueError("--json and --csv - both take the standard output: choose one")
    if table is not None and table != STANDARD_OUTPUT:
        check_new(writable_file(table), overwrite=overwrite)


def note_frames(files: Iterable[Path]) -> None:
    """Say which of the files hold more than the one picture that is looked at."""
    from equilibria.data.image_files import has_several_frames

    several = [str(file) for file in files if has_several_frames(file)]
    if several:
        named = ", ".join(several[:NAMED_FILES]) + ", …" * (len(several) > NAMED_FILES)
        warn(f"of several frames or pages the first counts: {named}")


def _try_to_write(folder: Path) -> None:
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise OSError(error.errno, what, str(folder)) from None
