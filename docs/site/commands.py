"""Run the commands of the program and write docs/commands.md.

    python docs/site/commands.py [NAME ...]

Runs all commands, or those with the given names, in an empty folder and a terminal of 100 columns.
Some commands use the runs of others: `compare` and `report` need `demo` and `train`.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "commands.md"
COLUMNS = 100


class Line(NamedTuple):
    """A command with the number of first and last lines of its output to show."""

    text: str
    first: int = 30
    last: int = 30


class Section(NamedTuple):
    summary: str
    lines: tuple[Line, ...]


PREPARED = """\
import equilibria as eq
from sklearn.datasets import load_sample_image
from PIL import Image

eq.data.image_from_tensor(eq.data.load_digits().test.images[1]).save("digit.png")
photo = Image.fromarray(load_sample_image("china.jpg")).crop((240, 120, 400, 240))
photo.save("photo.png")
"""
SERVER = "equilibria serve --model digits-opteq --port 8765"

SECTIONS = {
    "demo": Section(
        "Trains a small classifier of digits, and writes a report.",
        (Line("equilibria demo --epochs 4 --output runs/demo", 14, 12),),
    ),
    "models": Section(
        "Lists the registered and the trained models, and their options.",
        (Line("equilibria models --pretrained"), Line("equilibria models opteq-small", 24, 4)),
    ),
    "train": Section(
        "Trains a model by a recipe with changes. `photos/` or `labels.csv` instead of a recipe "
        "trains on your images ([training](training.md)).",
        (Line("equilibria train digits-opteq training.epochs=4 --output runs/opteq", 12, 12),),
    ),
    "evaluate": Section(
        "Measures the accuracy of a model on test images.",
        (Line("equilibria evaluate --model digits-opteq"), Line("equilibria evaluate runs/opteq")),
    ),
    "predict": Section(
        "Classifies image files.",
        (
            Line("equilibria predict --model digits-opteq digit.png --top 3"),
            Line("equilibria predict --model digits-opteq digit.png --json"),
        ),
    ),
    "certify": Section(
        "Certifies predictions ([certificates](certificates.md)).",
        (
            Line("equilibria certify --model digits-certified --samples 100", 20, 20),
            Line("equilibria certify --model digits-certified digit.png", 20, 20),
        ),
    ),
    "explain": Section(
        "Shows how terms of the hidden objective contribute to a class ([reports](reports.md)).",
        (Line("equilibria explain --model digits-opteq digit.png --output why.html", 16, 8),),
    ),
    "attack": Section(
        "Measures the accuracy on adversarial images ([attacks](attacks.md)).",
        (
            Line(
                "equilibria attack --model digits-opteq --eps 0.5 --method all --samples 50", 16, 8
            ),
        ),
    ),
    "generate": Section(
        "Draws new images from a generator ([generators](generative.md)).",
        (Line("equilibria generate --model mnist-generator --output samples.png"),),
    ),
    "restore": Section(
        "Restores photographs with the photo prior ([restoration](restoration.md)).",
        (Line("equilibria restore photo.png --simulate --noise 0.1 --output clean"),),
    ),
    "restore-run": Section(
        "Restores damaged pictures with a trained model ([restoration](restoration.md)).",
        (
            Line(
                "equilibria restore-run mnist-generator digit.png --task inpaint --ridge 0.05 "
                "--simulate --resize --output whole"
            ),
        ),
    ),
    "recipes": Section(
        "Lists the recipes for `train`.",
        (Line("equilibria recipes", 10, 3), Line("equilibria recipes digits-opteq")),
    ),
    "runs": Section("Lists the runs in a folder.", (Line("equilibria runs runs"),)),
    "report": Section(
        "Writes a report page for one or more runs ([reports](reports.md)).",
        (Line("equilibria report runs/opteq runs/demo --quick --output both.html"),),
    ),
    "compare": Section(
        "Compares runs and their recipes.",
        (Line("equilibria compare runs/opteq runs/demo"),),
    ),
    "reproduce": Section(
        "Reproduces tables and figures of the papers, and runs studies ([results](results.md)).",
        (
            Line("equilibria reproduce", 10, 3),
            Line("equilibria reproduce jiio-t5 --settings", 14, 3),
        ),
    ),
    "tune": Section(
        "Finds the fastest setting with accurate gradients. Times depend on the machine and its "
        "load.",
        (
            Line(
                "equilibria tune opteq-small --size 8 --channels 1 --solvers auto,picard "
                "--tolerances 1e-2,1e-3",
                20,
                8,
            ),
        ),
    ),
    "export": Section(
        "Exports a model to one file for other programs ([export](export.md)).",
        (Line("equilibria export --model digits-opteq --format onnx", 20, 8),),
    ),
    "explore": Section(
        "Serves an interactive page on this machine until Ctrl-C ([explorer](explorer.md)).",
        (Line("equilibria explore --port 8764"),),
    ),
    "serve": Section(
        "Serves predictions over HTTP until Ctrl-C ([serving](serving.md)).",
        (Line(SERVER), Line("curl --data-binary @digit.png http://127.0.0.1:8765/predict")),
    ),
    "bench": Section(
        "Runs benchmarks against TorchDEQ; needs a clone of the repository "
        "([benchmarks](benchmarks.md)).",
        (Line("equilibria bench --list", 10, 3),),
    ),
    "datasets": Section(
        "Lists and downloads data sets ([data](data.md)).",
        (Line("equilibria datasets", 10, 4), Line("equilibria datasets get digits")),
    ),
}

HEAD = f"""\
# Commands and their output

Every command, run in a terminal of {COLUMNS} columns in a folder with two pictures. `…` marks
omitted lines. `equilibria COMMAND --help` lists all options with more examples.
`python docs/site/commands.py` writes this page.

```python
{PREPARED}```
"""


def main(*chosen: str) -> None:
    """Run the chosen commands, by default all, and write the page; other sections remain."""
    previous = (
        re.split(r"^## `([\w-]+)`\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
        if chosen
        else []
    )
    texts = dict(zip(previous[1::2], previous[2::2], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        subprocess.run([sys.executable, "-c", PREPARED], check=True)
        for name in chosen or SECTIONS:
            print(name, flush=True)
            section = SECTIONS[name]
            blocks = "\n".join(recorded(section.lines))
            texts[name] = f"\n{section.summary}\n\n```console\n{blocks}\n```\n"
    parts = [f"## `{name}`\n{texts[name].rstrip()}\n" for name in SECTIONS]
    PAGE.write_text("\n".join([HEAD, *parts]), encoding="utf-8")


def recorded(lines: tuple[Line, ...]) -> Iterator[str]:
    """Yield each command with its output; a server runs until the last command has ended."""
    server: Terminal | None = None
    for line in lines:
        yield f"$ {line.text}"
        terminal = Terminal(line.text)
        if line.text.startswith(("equilibria serve", "equilibria explore")):
            server = terminal
            yield shortened(server.until("http://"), line)
        else:
            yield shortened(terminal.all(), line)
    if server is not None:
        server.interrupt()


def shortened(text: str, line: Line) -> str:
    """Shorten an output to the lines that are shown."""
    shown = text.strip("\n").split("\n")
    if len(shown) > line.first + line.last + 1:
        shown = [*shown[: line.first], "…", *shown[len(shown) - line.last :]]
    return "\n".join(shown)


class Terminal:
    """A command in a separate pseudo terminal, without colors."""

    def __init__(self, command: str) -> None:
        words = shlex.split(command)
        if words[0] == "equilibria":
            words = [sys.executable, "-m", *words]
        self.output, inside = pty.openpty()
        ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        hidden = {"EQUILIBRIA_DATA", "COLUMNS", "LINES"}
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"TERM": "xterm", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=inside, stderr=inside, env=environment
        )
        os.close(inside)
        self.text, self.interrupted = "", False

    def all(self) -> str:
        """Return the whole output, once the command has ended."""
        while self._read():
            pass
        if self.process.wait() != 0 and not self.interrupted:
            raise SystemExit(f"{self.process.args} failed:\n{self.text}")
        return plain(self.text)

    def until(self, mark: str) -> str:
        """Return the output as soon as it contains `mark`."""
        while mark not in self.text and self._read():
            pass
        time.sleep(1)
        return plain(self.text)

    def interrupt(self) -> None:
        """Send Ctrl-C and wait for the end."""
        self.interrupted = True
        self.process.send_signal(signal.SIGINT)
        self.all()

    def _read(self) -> bool:
        try:
            data = os.read(self.output, 65536)
        except OSError:  # the command has closed its end
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def plain(text: str) -> str:
    """Return the visible text of an output with control sequences."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b"):
            if part.endswith("A"):
                row = max(0, row - int(part[2:-1] or 1))
            elif part.endswith("K"):
                rows[row] = ""
        else:
            line = rows[row].ljust(column)
            rows[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in rows))


if __name__ == "__main__":
    if shutil.which("curl") is None:
        raise SystemExit("curl is not installed: it is needed for the section `serve`")
    main(*sys.argv[1:])
