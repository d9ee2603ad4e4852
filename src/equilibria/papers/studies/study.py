"""Studies: their settings, the function that carries one out, and the files that record it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equilibria.papers.report import provenance
from equilibria.registry import nearest
from equilibria.training.files import write_atomically
from equilibria.training.recipe import validation_messages, with_overrides

LEFT_OUT = ("root", "workers")
"""Settings that change no number."""
Say = Callable[[str], None]
OnProgress = Callable[[float, int, str], None]
"""Called with the number of finished runs (with a fraction), the number of all, and a title."""


@dataclass(frozen=True)
class Work:
    """Where a study keeps its runs, and how it reports progress. A study itself never prints.

    Args:
        output: Folder for the files and the runs.
        say: Called with a line of text for each finished run.
        on_progress: Called with the number of finished runs, of all runs, and a title.

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.papers.studies.study import Work
        >>> work = Work(Path("studies"), say=print)
    """

    output: Path
    say: Say = lambda text: None
    on_progress: OnProgress = lambda done, runs, title: None


@dataclass(frozen=True)
class Found:
    """The result of a study."""

    data: Mapping[str, Any]
    """The numbers, for the JSON file."""
    text: str
    """Markdown tables."""
    about: str = ""
    """Sentences above the tables: the setting and how to read the numbers."""
    picture: bytes | None = None
    """A PNG file."""
    is_complete: bool = True
    """False if a run failed."""


@dataclass(frozen=True)
class Study:
    """An experiment that `equilibria reproduce ID` carries out besides the papers' tables.

    Args:
        id: Name of the study on the command line and of its files.
        paper: Statement of a paper that it examines; "" if there is none.
        title: What it measures, as a heading.
        settings: Frozen dataclass of the settings. Every field has a default or is required.
        run: Function of the settings and a `Work`.

    Examples:
        >>> from pathlib import Path
        >>> (study,) = [s for s in eq.papers.list_studies() if s.id == "theorem6"]
        >>> settings = study.configure(["widths=12", "steps=4"])
        >>> study.command(settings)
        "equilibria reproduce theorem6 'widths=[12]' steps=4"
        >>> from equilibria.papers.studies.study import Work
        >>> sorted(f.name for f in study.carry_out(settings, Work(Path("t6"))).files)
        ['theorem6.json', 'theorem6.md', 'theorem6.png']
    """

    id: str
    paper: str
    title: str
    settings: type[Any]
    run: Callable[[Any, Work], Found]

    def configure(self, overrides: Sequence[str] = (), **options: Any) -> Any:
        """Return the settings with `key=value` overrides.

        Args:
            overrides: Changes as "key=value", the value in YAML.
            **options: Values from options of the command line; None or False counts as not given.

        Raises:
            ValueError: If the study has no setting of that name, or a value has the wrong type.

        Examples:
            >>> (study,) = [s for s in eq.papers.list_studies() if s.id == "theorem6"]
            >>> study.configure(["widths=[16, 64]"]).widths
            (16, 64)
        """
        from pydantic import TypeAdapter, ValidationError

        given = {key: value for key, value in options.items() if value not in (None, False)}
        hints = typing.get_type_hints(self.settings)
        for key in given:
            if key not in hints:
                raise ValueError(f"the study {self.id} has no --{key}: leave it out")
        given = with_overrides(given, overrides)
        for key, value in given.items():
            if key not in hints:
                raise ValueError(
                    f"the study {self.id} has no setting {key!r}{nearest(key, hints)} "
                    f"Known: {', '.join(hints)}."
                )
            if typing.get_origin(hints[key]) is tuple and not isinstance(value, list | tuple):
                given[key] = (value,)
        try:
            return TypeAdapter(self.settings).validate_python(given)
        except ValidationError as error:
            raise ValueError(f"the study {self.id}: {validation_messages(error)}") from None

    def defaults(self) -> list[tuple[str, str]]:
        """Return the name and the default of every setting, as text."""
        rows = []
        for one in dataclasses.fields(self.settings):
            default = one.default
            if default is dataclasses.MISSING:
                default = "" if one.default_factory is not dataclasses.MISSING else "required"
            rows.append((one.name, "" if default in (None, ()) else _as_yaml(default)))
        return rows

    def file_name(self, settings: Any) -> str:
        """Return the name of its files without the ending: ID, or ID-quick for a quick setting."""
        return f"{self.id}-quick" if getattr(settings, "quick", False) else self.id

    def command(self, settings: Any) -> str:
        """Return the command that gives the same numbers."""
        words = ["equilibria", "reproduce", self.id]
        for one in dataclasses.fields(settings):
            value = getattr(settings, one.name)
            if value == one.default or not (value or one.default) or one.name in LEFT_OUT:
                continue
            if one.name == "quick":
                words.append("--quick")
            elif one.name == "seeds":
                words += ["--seeds", str(value)]
            elif isinstance(value, Mapping):
                words += [f"{one.name}.{key}={_as_yaml(held)}" for key, held in value.items()]
            else:
                words.append(f"{one.name}={_as_yaml(value)}")
        return shlex.join(words)

    def carry_out(self, settings: Any, work: Work) -> StudyResult:
        """Run the study and write ID.md, ID.json and, where there is a picture, ID.png.

        Args:
            settings: What `configure` returned.
            work: The folder, and functions that receive the progress.
        """
        found = self.run(settings, work)
        facts = provenance()
        record = {
            "study": self.id,
            "command": self.command(settings),
            **facts,
            **found.data,
        }
        head = f"{facts['date']}, commit {facts['commit']}; {facts['machine']}."
        about = " ".join(
            part for part in (f"{self.paper}." if self.paper else "", head, found.about) if part
        )
        name = self.file_name(settings)
        picture = [] if found.picture is None else [f"![{self.title}]({name}.png)", ""]
        lines = [f"# {self.title}", "", f"    {record['command']}", "", about, "", *picture]
        text = "\n".join([*lines, found.text.rstrip("\n")]) + "\n"
        contents = {
            "md": text.encode(),
            "json": (json.dumps(record, indent=1) + "\n").encode(),
            "png": found.picture,
        }
        work.output.mkdir(parents=True, exist_ok=True)
        files = []
        for ending, content in contents.items():
            if content is not None:
                files.append(work.output / f"{name}.{ending}")
                write_atomically(files[-1], content)
        return StudyResult(record, text, tuple(files), found.is_complete)


@dataclass(frozen=True)
class StudyResult:
    """The record of a study, as it was written.

    Args:
        record: Content of the JSON file.
        text: Content of the Markdown file.
        files: The files.
        is_complete: False if a run failed.

    Examples:
        >>> eq.papers.StudyResult({"study": "digits"}, "# Digits").is_complete
        True
    """

    record: Mapping[str, Any]
    text: str
    files: tuple[Path, ...] = field(default=())
    is_complete: bool = True


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table whose first row is the heading; numbers stand right."""
    bars = "|" + "|".join(["---", *["---:"] * (len(rows[0]) - 1)]) + "|"
    first, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return [first, bars, *rest]


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_as_yaml, value))}]"
    text = str(value)
    return json.dumps(text) if isinstance(value, str) and ("," in text or ":" in text) else text
