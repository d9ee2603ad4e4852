"""`python docs/site/commands.py [NAME…]`: runs the program's commands, and writes docs/commands.md.

All of them, or those that are named, in a fresh folder and a terminal of 100 columns, as a user
types them. Some use runs of others: `compare` and `report` those of `demo` and `train`.
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
    """A command, and how many lines of its output are shown, from the beginning and the end."""

    text: str
    first: int = 30
    last: int = 30


class Section(NamedTuple):
    says: str
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
        "What can be made by name, and what comes trained.",
        (Line("equilibria models --pretrained"), Line("equilibria models opteq-small", 24, 4)),
    ),
    "train": Section(
        "Follows a recipe, with changes; `photos/` or `labels.csv` in its place are images of "
        "your own ([training](training.md)).",
        (Line("equilibria train digits-opteq training.epochs=4 --output runs/opteq", 12, 12),),
    ),
    "evaluate": Section(
        "How good a model is on test images.",
        (Line("equilibria evaluate --model digits-opteq"), Line("equilibria evaluate runs/opteq")),
    ),
    "predict": Section(
        "What a model sees in image files.",
        (
            Line("equilibria predict --model digits-opteq digit.png --top 3"),
            Line("equilibria predict --model digits-opteq digit.png --json"),
        ),
    ),
    "certify": Section(
        "What is proven of the answers ([certificates](certificates.md)).",
        (
            Line("equilibria certify --model digits-certified --samples 100", 20, 20),
            Line("equilibria certify --model digits-certified digit.png", 20, 20),
        ),
    ),
    "explain": Section(
        "Which terms of the hidden objective pulled a decision ([reports](reports.md)).",
        (Line("equilibria explain --model digits-opteq digit.png --output why.html", 16, 8),),
    ),
    "attack": Section(
        "The accuracy on the worst images near the test images ([attacks](attacks.md)).",
        (
            Line(
                "equilibria attack --model digits-opteq --eps 0.5 --method all --samples 50", 16, 8
            ),
        ),
    ),
    "generate": Section(
        "New images of a generator ([generators](generative.md)).",
        (Line("equilibria generate --model mnist-generator --output samples.png"),),
    ),
    "restore": Section(
        "Photographs restored by the prior that comes with the program "
        "([restoration](restoration.md)).",
        (Line("equilibria restore photo.png --simulate --noise 0.1 --output clean"),),
    ),
    "restore-run": Section(
        "Damaged pictures restored by a trained model ([restoration](restoration.md)).",
        (
            Line(
                "equilibria restore-run mnist-generator digit.png --task inpaint --ridge 0.05 "
                "--simulate --resize --output whole"
            ),
        ),
    ),
    "recipes": Section(
        "What `train` knows by name.",
        (Line("equilibria recipes", 10, 3), Line("equilibria recipes digits-opteq")),
    ),
    "runs": Section("The runs in a folder.", (Line("equilibria runs runs"),)),
    "report": Section(
        "One page on a run, or on several side by side ([reports](reports.md)).",
        (Line("equilibria report runs/opteq runs/demo --quick --output both.html"),),
    ),
    "compare": Section(
        "Runs side by side, and where their recipes differ.",
        (Line("equilibria compare runs/opteq runs/demo"),),
    ),
    "reproduce": Section(
        "Tables and figures of the papers, and studies ([results](results.md)).",
        (
            Line("equilibria reproduce", 10, 3),
            Line("equilibria reproduce jiio-t5 --settings", 14, 3),
        ),
    ),
    "tune": Section(
        "The fastest setting that trains a model right. Times depend on the machine, and on what "
        "else it does.",
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
        "A model as one file for other programs ([export](export.md)).",
        (Line("equilibria export --model digits-opteq --format onnx", 20, 8),),
    ),
    "explore": Section(
        "A page on this machine, until Ctrl-C ([explorer](explorer.md)).",
        (Line("equilibria explore --port 8764"),),
    ),
    "serve": Section(
        "Answers over HTTP, until Ctrl-C ([serving](serving.md)).",
        (Line(SERVER), Line("curl --data-binary @digit.png http://127.0.0.1:8765/predict")),
    ),
    "bench": Section(
        "Against TorchDEQ in one process ([benchmarks](benchmarks.md)); from a clone of the "
        "repository.",
        (Line("equilibria bench --list", 10, 3),),
    ),
    "datasets": Section(
        "Which data sets there are, and where ([data](data.md)).",
        (Line("equilibria datasets", 10, 4), Line("equilibria datasets get digits")),
    ),
}

HEAD = f"""\
# Every command, with what it prints

Made by `python docs/site/commands.py`, which runs each of them in a terminal of {COLUMNS} columns,
in a folder with two pictures. Lines that are left out are marked `…`. `equilibria COMMAND --help`
lists all options, with more examples.

```python
{PREPARED}```
"""


def main(*chosen: str) -> None:
    kept = (
        re.split(r"^## `([\w-]+)`\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
        if chosen
        else []
    )
    texts = dict(zip(kept[1::2], kept[2::2], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        subprocess.run([sys.executable, "-c", PREPARED], check=True)
        for name in chosen or SECTIONS:
            print(name, flush=True)
            section = SECTIONS[name]
            blocks = "\n".join(recorded(section.lines))
            texts[name] = f"\n{section.says}\n\n```console\n{blocks}\n```\n"
    parts = [f"## `{name}`\n{texts[name].rstrip()}\n" for name in SECTIONS]
    PAGE.write_text("\n".join([HEAD, *parts]), encoding="utf-8")


def recorded(lines: tuple[Line, ...]) -> Iterator[str]:
    """Each command with its output; a server runs until the last of them has ended."""
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
    shown = text.strip("\n").split("\n")
    if len(shown) > line.first + line.last + 1:
        shown = [*shown[: line.first], "…", *shown[len(shown) - line.last :]]
    return "\n".join(shown)


class Terminal:
    """A command in a terminal of its own, without colors."""

    def __init__(self, command: str) -> None:
        words = shlex.split(command)
        if words[0] == "equilibria":
            words = [sys.executable, "-m", *words]
        self.seen, inside = pty.openpty()
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
        while self._read():
            pass
        if self.process.wait() != 0 and not self.interrupted:
            raise SystemExit(f"{self.process.args} failed:\n{self.text}")
        return plain(self.text)

    def until(self, mark: str) -> str:
        while mark not in self.text and self._read():
            pass
        time.sleep(1)
        return plain(self.text)

    def interrupt(self) -> None:
        self.interrupted = True
        self.process.send_signal(signal.SIGINT)
        self.all()

    def _read(self) -> bool:
        try:
            found = os.read(self.seen, 65536)
        except OSError:  # The other end was closed.
            return False
        self.text += found.decode(errors="replace")
        return bool(found)


def plain(text: str) -> str:
    """What is left on a terminal that moves up, erases lines and writes over them."""
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
        raise SystemExit("curl is missing")
    main(*sys.argv[1:])
