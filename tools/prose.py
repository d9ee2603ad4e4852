"""Find phrases that the style guide avoids, in prose outside docs/.

    python -m tools.prose [--most N] [PATH ...]

Checks docstrings, comments, messages, and Markdown. Code in backticks, code blocks, and doctests
are not prose. Variables with names that do not describe their content are reported as well.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = (
    *("src", "tests", "benchmarks", "tools", "examples"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
)
"""Files and folders that are checked by default."""
EXCLUDED = ("tools/prose.py", "tests/tools/test_prose.py")
"""Files that quote the phrases."""
MIN_LENGTH = 16
"""Length of the shortest string that counts as prose. Shorter ones are names and keys."""
MOST_ACCEPTED = 25
"""Largest number of entries in `ACCEPTED`."""


@dataclass(frozen=True)
class Phrase:
    """A phrase to avoid.

    Attributes:
        name: Short description of the phrase.
        pattern: Regular expression, which is matched against single lines.
        advice: What to write instead.
    """

    name: str
    pattern: str
    advice: str


@dataclass(frozen=True)
class Accepted:
    """A place that is accepted although it matches.

    Attributes:
        path: File, relative to the root of the repository.
        text: Part of the line.
        reason: Why the line is good as it is.
    """

    path: str
    text: str
    reason: str


@dataclass(frozen=True)
class Place:
    """A line that matches a phrase."""

    path: str
    line: int
    phrase: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.phrase}] {self.text[:110]}"


_COUNTED = "|".join(
    (
        *("once", "one", "times?", "seconds?", "numbers?", "rows?", "columns?", "files?"),
        *("folders?", "values?", "iterations?", "evaluations?", "process(?:es)?", "digits"),
        *("images", "tensors?", "terms?", "steps?", "lines?", "pages?", "entry", "class"),
        *("picture", "command", "vectors?", "buffer", "name", "method", "format", "recipe"),
    )
)
_UNITS = "|".join(
    (
        *("sample", "class", "family", "solve", "step", "iteration", "batch", "image"),
        *("picture", "process", "method", "command", "format", "file", "branch", "pair"),
        *("layer", "run", "row", "number", "term", "pixel", "problem", "experiment", "kind"),
        *("pass", "second", "epoch", "search", "table", "page", "day"),
    )
)

PHRASES = (
    Phrase(
        "docstring without a subject",
        r"^\s*(?:Of|By(?! (?:default|design|convention))"
        r"|That of|Those of|As of|For those|To those)\b",
        "start with the thing: 'Lipschitz constant of …'",
    ),
    Phrase(
        "'a' for 'per'",
        rf"\b(?:{_COUNTED}) an? (?:{_UNITS})\b",
        "'per sample', 'one file per command'",
    ),
    Phrase(
        "told, tells, says so",
        r"\b(?:is|are|was|be|been) told\b|\btells? (?:of|what|which|how|where|apart)\b"
        r"|\b(?:says?|said) so\b",
        "'is reported', 'the message names', 'raises'",
    ),
    Phrase(
        "archaic words",
        r"\b(?:in vain|lest|thrice|by turns|at rest|beside it|of old)\b",
        "'needlessly', 'to avoid', 'three times', 'alternately', 'converged'",
    ),
    Phrase(
        "of before, of its own",
        r"\bof before\b|\b(?:of|with) (?:its|their|your|an? user's|users') own\b",
        "'the previous …', 'separate', 'custom'",
    ),
    Phrase(
        "clause as subject",
        r"(?:^|[.;:] )(?:What|Whoever|Who|Whatever|Where) [a-z' ]{3,60}, "
        r"(?:is|are|was|were|has|have|counts?|goes|does)\b"
        r"|(?:^|[.;] )What (?:is|was|are|were|an?|the|it|they|this|users|you)\b[^?]*\.$",
        "name the thing: 'Results …', 'Inputs that …'",
    ),
    Phrase(
        "programs that ask or look",
        r"\b(?:host|loop|solver|program|it) (?:asks|asked|looks|looked)\b|\basks? for in\b"
        r"|\bis asked\b",
        "'checks', 'reads', 'the host synchronizes'",
    ),
    Phrase(
        "inverted conditions",
        r"\bbe (?:it|they)\b|\bthough (?:its|their|it) [a-z]+ be\b|\b(?:but|save) for\b",
        "'even if', 'except'",
    ),
    Phrase(
        "as … as may be",
        r"\bas \w+ as (?:it|they|one) (?:may|can|might) be\b|\bat the (?:most|least)\b",
        "'at most', 'at least'",
    ),
    Phrase(
        "nobody, somebody",
        r"\b(?:[Nn]obody|[Ss]omebody|no one|anybody)\b",
        "the passive, or 'users'",
    ),
    Phrase(
        "history",
        r"\b(?:was|were) (?:tried|taken back|looked at|chosen on"
        r"|(?:made|recorded|measured) (?:again|anew))\b"
        r"|\bnot looked into\b|\bbefore today\b|\bthis time\b",
        "today's fact; history belongs to git",
    ),
    Phrase(
        "bound of",
        r"\b(?:bounds?|limit) of (?:the|an?|its|their)"
        r" (?:error|norm|distance|gradient|map|radius|step)\b",
        "'bound on the error'",
    ),
    Phrase(
        "the very same",
        r"\bthe very\b|\bvery same\b|\bto the last (?:bit|digit)\b",
        "'bitwise equal', 'exactly'",
    ),
)

NAMES = {
    "found": "what it is: result, run, matches",
    "asked": "requested",
    "told": "message, reported",
    "seen": "measured, observed; a set of visited items may be `seen`",
    "rival": "other, baseline",
    "as_it_was": "original, previous",
}
"""Names of variables, parameters, and functions to avoid, and what to write instead."""

ACCEPTED: tuple[Accepted, ...] = (
    Accepted(
        "src/equilibria/analysis/explanation.py",
        "`rival`",
        "a public field, and a key in JSON files",
    ),
)
"""Places that match and are good as they are, at most `MOST_ACCEPTED`."""

_CONTAINERS = ("set", "dict", "list", "Counter")
_CODE = re.compile(r"``.*?``|`[^`]*`")
_PATTERNS = {phrase.name: re.compile(phrase.pattern) for phrase in PHRASES}


def places_in(path: str, source: str) -> list[Place]:
    """Return the places of a Python or Markdown file that match, in the order of its lines.

    Args:
        path: Name of the file, which decides how it is read.
        source: Content of the file.
    """
    is_markdown = path.endswith(".md")
    tree = None if is_markdown else ast.parse(source)
    lines = _markdown_lines(source) if tree is None else _python_lines(tree, source)
    places = [
        Place(path, number, name, line.strip())
        for number, line in lines
        for name, pattern in _PATTERNS.items()
        if pattern.search(_CODE.sub("`…`", line))
    ]
    if tree is not None:
        places += [Place(path, number, name, f"`{name}`") for number, name in _names(tree)]
    return sorted(places, key=lambda place: place.line)


def rejected(places: Sequence[Place], accepted: Sequence[Accepted] = ACCEPTED) -> list[Place]:
    """Return the places that no accepted entry covers."""
    return [place for place in places if not any(_covers(entry, place) for entry in accepted)]


def table_errors(places: Sequence[Place], accepted: Sequence[Accepted] = ACCEPTED) -> list[str]:
    """Return what is wrong with the table of accepted places: stale entries, missing reasons."""
    errors = []
    if len(accepted) > MOST_ACCEPTED:
        errors.append(f"{len(accepted)} accepted places; at most {MOST_ACCEPTED} are allowed")
    for entry in accepted:
        name = f"accepted place {entry.path}: {entry.text!r}"
        if not entry.reason.strip():
            errors.append(f"{name} has no reason")
        if not any(_covers(entry, place) for place in places):
            errors.append(f"{name} matches nothing; remove it")
    return errors


def files(paths: Sequence[Path]) -> list[Path]:
    """Return the Python and Markdown files at paths, or below them."""
    candidates = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return sorted(file for file in candidates if file.suffix in (".py", ".md") and file.is_file())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the places that are not accepted, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; default: all")
    parser.add_argument("--most", type=int, default=40, help="number of places to print")
    options = parser.parse_args(arguments)
    places = []
    for file in files(options.paths or [ROOT / name for name in CHECKED]):
        file = file.resolve()
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
        if name not in EXCLUDED:
            places += places_in(name, file.read_text(encoding="utf-8"))
    remaining = rejected(places)
    # A part of the repository says nothing about entries for other parts.
    errors = [] if options.paths else table_errors(places)
    advice = {phrase.name: phrase.advice for phrase in PHRASES} | NAMES
    if remaining:
        for name, count in Counter(place.phrase for place in remaining).most_common():
            print(f"{count:6d}  {name}: {advice[name]}")
        print(*remaining[: options.most], sep="\n")
    print(*errors, f"{len(remaining)} places", sep="\n")
    return int(bool(errors or remaining))


def _covers(entry: Accepted, place: Place) -> bool:
    return entry.path == place.path and entry.text in place.text


def _markdown_lines(source: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(source.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def _python_lines(tree: ast.AST, source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings, messages, and comments with their numbers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if len(text) >= MIN_LENGTH and " " in text:
                yield from _string_lines(text, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def _string_lines(text: str, first: int) -> Iterator[tuple[int, str]]:
    """Yield the lines of a string without doctests and their output."""
    is_prose = True
    for number, line in enumerate(text.splitlines(), start=first):
        if line.strip().startswith((">>>", "...")):
            is_prose = False
        elif not line.strip():
            is_prose = True
        if is_prose:
            yield number, line


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each definition that uses one of `NAMES`."""
    visited = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_empty(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            visited |= {id(target) for target in targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
            if name == "seen" and id(node) in visited:
                continue
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef):
            name = node.name
        else:
            continue
        if name in NAMES:
            yield node.lineno, name


def _is_empty(value: ast.expr | None) -> bool:
    """Whether an expression is a new, empty container: `set()`, `{}`, `[]`, `Counter()`."""
    if isinstance(value, ast.Call):
        is_container = isinstance(value.func, ast.Name) and value.func.id in _CONTAINERS
        return is_container and not value.args and not value.keywords
    return (isinstance(value, ast.List) and not value.elts) or (
        isinstance(value, ast.Dict) and not value.keys
    )


if __name__ == "__main__":
    sys.exit(main())
