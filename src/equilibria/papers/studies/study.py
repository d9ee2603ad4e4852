"""Interface of studies: settings, the function that runs one, and the files that record it."""

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

NEUTRAL_SETTINGS = ("root", "workers")
"""Settings that do not change the results; commands omit them."""
Report = Callable[[str], None]
OnProgress = Callable[[float, int, str], None]
"""Called with the number of finished runs, which may be fractional, of all runs, and a title."""


@dataclass(frozen=True)
class Work:
    """Output folder of a study, and callbacks for its progress. A study itself never prints.

    Args:
        output: Folder for the files and the runs.
        report: Called with a line of text for each finished run.
        on_progress: Called with the number of finished runs, of all runs, and a title.

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.papers.studies.study import Work
        >>> work = Work(Path("studies"), report=print)
    """

    output: Path
    report: Report = lambda text: None
    on_progress: OnProgress = lambda done, runs, title: None


@dataclass(frozen=True)
class StudyOutcome:
    """Numbers, text and picture of a study, before they are written.

    Attributes:
        data: Numbers for the JSON file.
        text: Markdown tables.
        about: Sentences above the tables: the setting and how to read the numbers.
        picture: Content of a PNG file, or None.
        is_complete: False if a run failed.
    """

    data: Mapping[str, Any]
    text: str
    about: str = ""
    picture: bytes | None = None
    is_complete: bool = True


@dataclass(frozen=True)
class Study:
    """An experiment besides the papers' tables, run by `equilibria reproduce ID`.

    Args:
        id: Name of the study on the command line and of its files.
        paper: Statement of a paper that it examines; "" if there is none.
        title: Heading of its page.
        settings: Frozen dataclass of the settings.
        run: Function of the settings and a `Work`; returns a `StudyOutcome`.

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
    run: Callable[[Any, Work], StudyOutcome]

    def configure(self, overrides: Sequence[str] = (), **options: Any) -> Any:
        """Return the settings with `key=value` overrides.

        Args:
            overrides: Changes as "key=value", the value in YAML.
            **options: Values from options of the command line; None or False counts as not given.

        Returns:
            An instance of `settings`.

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
                raise ValueError(f"the study {self.id} has no option --{key}: omit it")
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
        for setting in dataclasses.fields(self.settings):
            default = setting.default
            if default is dataclasses.MISSING:
                default = "" if setting.default_factory is not dataclasses.MISSING else "required"
            rows.append((setting.name, "" if default in (None, ()) else _as_yaml(default)))
        return rows

    def file_name(self, settings: Any) -> str:
        """Return the name of its files without suffix: ID, or ID-quick for a quick setting.

        Args:
            settings: Result of `configure`.
        """
        return f"{self.id}-quick" if getattr(settings, "quick", False) else self.id

    def command(self, settings: Any) -> str:
        """Return the command that reproduces the numbers.

        Args:
            settings: Result of `configure`.
        """
        words = ["equilibria", "reproduce", self.id]
        for setting in dataclasses.fields(settings):
            value = getattr(settings, setting.name)
            if (
                value == setting.default
                or not (value or setting.default)
                or setting.name in NEUTRAL_SETTINGS
            ):
                continue
            if setting.name == "quick":
                words.append("--quick")
            elif setting.name == "seeds":
                words += ["--seeds", str(value)]
            elif isinstance(value, Mapping):
                words += [f"{setting.name}.{key}={_as_yaml(item)}" for key, item in value.items()]
            else:
                words.append(f"{setting.name}={_as_yaml(value)}")
        return shlex.join(words)

    def carry_out(self, settings: Any, work: Work) -> StudyResult:
        """Run the study and write ID.md, ID.json and, if there is a picture, ID.png.

        Args:
            settings: Result of `configure`.
            work: Output folder and callbacks for the progress.

        Returns:
            The record and the names of the files.
        """
        outcome = self.run(settings, work)
        facts = provenance()
        record = {
            "study": self.id,
            "command": self.command(settings),
            **facts,
            **outcome.data,
        }
        head = f"{facts['date']}, commit {facts['commit']}; {facts['machine']}."
        about = " ".join(
            part for part in (f"{self.paper}." if self.paper else "", head, outcome.about) if part
        )
        name = self.file_name(settings)
        picture = [] if outcome.picture is None else [f"![{self.title}]({name}.png)", ""]
        lines = [f"# {self.title}", "", f"    {record['command']}", "", about, "", *picture]
        text = "\n".join([*lines, outcome.text.rstrip("\n")]) + "\n"
        contents = {
            "md": text.encode(),
            "json": (json.dumps(record, indent=1) + "\n").encode(),
            "png": outcome.picture,
        }
        work.output.mkdir(parents=True, exist_ok=True)
        files = []
        for ending, content in contents.items():
            if content is not None:
                files.append(work.output / f"{name}.{ending}")
                write_atomically(files[-1], content)
        return StudyResult(record, text, tuple(files), outcome.is_complete)


@dataclass(frozen=True)
class StudyResult:
    """The written record of a study.

    Args:
        record: Content of the JSON file.
        text: Content of the Markdown file.
        files: Paths of the written files.
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
    """Return the lines of a Markdown table; the first row is the header, numbers align right."""
    bars = "|" + "|".join(["---", *["---:"] * (len(rows[0]) - 1)]) + "|"
    first, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return [first, bars, *rest]


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_as_yaml, value))}]"
    text = str(value)
    return json.dumps(text) if isinstance(value, str) and ("," in text or ":" in text) else text
