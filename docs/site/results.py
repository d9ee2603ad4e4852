"""Write the tables of docs/results.md from the claims and the records in docs/results.

    python docs/site/results.py            # writes them between the markers of the page
    python docs/site/results.py --check    # exits with 1 if the page is out of date

The claims are in docs/site/claims.yaml. The verdict of a study overrides that of a table. A quick
table decides claims about times, memory and features by the rule of the studies, over its seeds.
Accuracies after its short trainings are shown, but decide nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from equilibria.papers import Column, PaperTable, Row, find_table
from equilibria.papers.measures import MEASURES, Measure
from equilibria.papers.report import write_index
from equilibria.papers.studies.claims import CLAIM_STUDIES
from equilibria.papers.studies.comparing import claims_table
from equilibria.papers.studies.paired import Answer, Difference

HERE = Path(__file__).parent
DOCS = HERE.parent
UNDECIDED: Answer = "undecided"
ANSWERS: tuple[Answer, ...] = ("holds", "does not", UNDECIDED)
POINTS_TO: dict[Answer, str] = {
    "holds": "as claimed",
    "does not": "the reverse",
    UNDECIDED: "neither way",
}
"""Direction in which accuracies of short trainings point."""

VERDICT = 3
"""Index of the verdict among the cells of a claim."""

Record = Mapping[str, Any]


def page(docs: Path = DOCS) -> str:
    """Return the page with current tables."""
    text = (docs / "results.md").read_text(encoding="utf-8")
    records = docs / "results"
    blocks = {
        "claims": claims(docs),
        "decided": claims_table(records, CLAIM_STUDIES.values()),
        "tables": write_index(records),
    }
    for name, content in blocks.items():
        before, begin, rest = text.partition(
            f"<!-- {name}: begin (python docs/site/results.py) -->"
        )
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        if not (begin and end):
            raise ValueError(f"docs/results.md has no markers for {name!r}: add them")
        text = f"{before}{begin}\n{content}{end}{after}"
    return text


def claims(docs: Path = DOCS) -> str:
    """Return the number of claims by verdict, and a table per paper."""
    listed = yaml.safe_load((HERE / "claims.yaml").read_text(encoding="utf-8"))
    lines, verdicts = [], []
    for paper, of_paper in listed.items():
        rows = [cells(claim, docs) for claim in of_paper]
        verdicts += [row[VERDICT] for row in rows]
        lines += [
            f"### {paper}",
            "",
            "| claim | paper | ours | verdict | command |",
            "|---|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
        ]
    counts = [sum(verdict.startswith(f"*{answer}*") for verdict in verdicts) for answer in ANSWERS]
    words = f"{len(verdicts)} claims with figures: {counts[0]} hold, {counts[1]} do not, "
    words += f"{counts[2]} are undecided."
    return "\n".join([words, "", *lines[:-1]]) + "\n"


def cells(claim: Record, docs: Path) -> list[str]:
    """Return the cells of a claim: claim, paper, ours, verdict and command."""
    table = find_table(claim["table"])
    rows = [_row(table, claim[side]) for side in ("above", "below")]
    recorded = docs / "results" / f"{table.id}-quick.json"
    record = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else None
    finding = _finding(claim, docs)
    ours, verdict = ("", UNDECIDED) if record is None else _of_table(claim, table, rows, record)
    command = f"`equilibria reproduce {table.id} --quick`"
    if finding is not None:
        ours, command = _of_study(finding)
        verdict = finding["verdict"]
    elif ours:
        ours = f"[{ours}](results/{recorded.stem}.md)"
    answer = next(word for word in ANSWERS if verdict.startswith(word))
    paper = claim.get("paper") or _of_paper(claim, rows)
    parts = [claim["claim"], paper, ours or "not recorded", f"*{answer}*{verdict[len(answer) :]}"]
    return [cell.replace("|", "\\|") for cell in (*parts, command)]


def _row(table: PaperTable, label: str) -> Row:
    for row in table.rows:
        if row.label == label:
            return row
    raise ValueError(f"{table.id} has no row {label!r}: correct it in docs/site/claims.yaml")


def _of_paper(claim: Record, rows: Sequence[Row]) -> str:
    return " and ".join(row.paper.get(claim["column"], "–") for row in rows)


def _measure(claim: Record, table: PaperTable, row: Row) -> str:
    if "measure" in claim:
        return str(claim["measure"])
    column: Column = next(c for c in table.columns if c.title == claim["column"])
    return str(row.measure(column))


def _of_table(
    claim: Record, table: PaperTable, rows: Sequence[Row], record: Record
) -> tuple[str, str]:
    """Return both numbers with their deviations, and the verdict of the quick table."""
    shown, scores = [], []
    for row in rows:
        name = _measure(claim, table, row)
        measure = _of_series(name)
        recorded = [
            run for item in record["rows"] if item["label"] == row.label for run in item["runs"]
        ]
        runs = {run["seed"]: run[name] for run in recorded if run.get(name) is not None}
        if not runs:
            return "", UNDECIDED
        shown.append(measure.show(list(runs.values())))
        scores.append({seed: measure.scale * value for seed, value in runs.items()})
    unit = re.search(r"\(([^)]*)\)$", measure.title)
    text = f"{' and '.join(shown)}{'' if unit is None else f' {unit[1]}'}"
    first, second = reversed(scores) if claim.get("less") else scores
    allowed = float(claim.get("level", 0))  # allowed deficit of the first
    first = {seed: value + allowed for seed, value in first.items()}
    answer = Difference.between(first, second).answer(0.0)
    return text, answer if claim.get("decides") else f"{UNDECIDED} (quick: {POINTS_TO[answer]})"


def _of_series(name: str) -> Measure:
    """Return the measure of a name; "residual@10" is a value of the series "residual"."""
    return MEASURES[name] if name in MEASURES else MEASURES[name.partition("@")[0]]


def _finding(claim: Record, docs: Path) -> Record | None:
    """Return the recorded finding of a claim's study, or None."""
    for name, words in claim.get("study", {}).items():
        file = docs / "results" / f"{name}-quick.json"
        if file.exists():
            record: Record = json.loads(file.read_text(encoding="utf-8"))
            finding = next(item for item in record["findings"] if item["claim"] == words)
            return {**finding, "study": name, "command": record["command"]}
    return None


def _of_study(finding: Record) -> tuple[str, str]:
    """Return a difference with its interval, and the command of its study."""
    name, interval = finding["study"], f"[{finding['low']:+.2f}, {finding['high']:+.2f}]"
    text = f"{finding['difference']:+.2f}, 95 % in {interval}, {finding['seeds']} seeds"
    return f"[study: {text}](results/{name}-quick.md)", f"`{finding['command']}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it with the records; return 1 if it is out of date."""
    parser = argparse.ArgumentParser(
        prog="python docs/site/results.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the page is out of date"
    )
    options = parser.parse_args(arguments)
    file, text = DOCS / "results.md", page()
    if options.check:
        return int(file.read_text(encoding="utf-8") != text)
    file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
