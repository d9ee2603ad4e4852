"""Convert the JSON of a run to Markdown.

python -m benchmarks.markdown FILE.json                            # print it
python -m benchmarks.markdown FILE.json --into docs/benchmarks.md  # write it between the markers
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import sheets, verdict
from benchmarks.results import from_json

BEGIN = "<!-- results: begin (python -m benchmarks.markdown) -->"
END = "<!-- results: end -->"


def to_markdown(run: Mapping[str, Any]) -> str:
    """Return a paragraph about the run and one table per topic."""
    results = [from_json(row) for row in run["rows"]]
    pieces = [_about(run)]
    for sheet in sheets(results):
        lines = [sheet.columns, ["---"] * len(sheet.columns), *sheet.rows]
        table = "\n".join("| " + " | ".join(map(_escape, line)) + " |" for line in lines)
        pieces.append(f"### {sheet.title}\n\n{table}")
    pieces.append("\n".join(f"- {line}" for line in verdict(results)))
    return "\n\n".join(filter(None, pieces)) + "\n"


def inserted(text: str, markdown: str) -> str:
    """Replace the text between the markers."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise ValueError(
            f"the page has no lines {BEGIN!r} and {END!r}; add them where the results belong"
        )
    return f"{text[: begin + len(BEGIN)]}\n\n{markdown}\n{text[end:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.markdown", description="Convert the JSON of a run to Markdown."
    )
    parser.add_argument("file", type=Path, help="output of `python -m benchmarks --json FILE`")
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="write it between the markers of PAGE"
    )
    options = parser.parse_args(arguments)
    markdown = to_markdown(json.loads(options.file.read_text(encoding="utf-8")))
    if options.into is None:
        print(markdown, end="")
    else:
        page = inserted(options.into.read_text(encoding="utf-8"), markdown)
        options.into.write_text(page, encoding="utf-8")
    return 0


def _about(run: Mapping[str, Any]) -> str:
    machine, versions = run["machine"], run["versions"]
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']} GiB"
    commit = "" if versions["commit"] is None else f" ({versions['commit']})"
    used = machine.get("instructions")
    memory += "" if used is None else f", {used}"
    return (
        f"{run['date'][:10]}, `{run['command']}`: {machine['processor']}, {machine['cores']} cores"
        f"{memory}, {machine['system']}; {run['threads']} threads, medians of up to "
        f"{run['repeats']} rounds. Equilibria {versions['equilibria']}{commit}, TorchDEQ "
        f"{versions['torchdeq']}, PyTorch {versions['torch']}, Python {versions['python']}."
    )


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
