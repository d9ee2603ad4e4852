"""Draw the figure of README.md: a photograph with noise, restored by `equilibria restore`.

    python docs/site/photograph.py

The photograph is a part of scikit-image's astronaut (`pip install 'equilibria[bench]'`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from skimage.data import astronaut

from equilibria.cli import app

FIGURE = Path(__file__).parents[1] / "images" / "restored-photograph.jpg"
ROWS, COLUMNS = slice(0, 220), slice(100, 356)
OPTIONS = ("--simulate", "--noise", "0.12", "--compare")


def main() -> None:
    with TemporaryDirectory() as folder:
        photograph = Path(folder) / "astronaut.png"
        Image.fromarray(astronaut()[ROWS, COLUMNS]).save(photograph)
        drawn = Path(folder) / "restored"
        app(
            ["restore", str(photograph), *OPTIONS, "--output", str(drawn)],
            standalone_mode=False,
        )
        with Image.open(drawn / "astronaut-sheet.png") as sheet:
            sheet.convert("RGB").save(FIGURE, quality=92)
    print(f"Drawn: {FIGURE}", file=sys.stderr)


if __name__ == "__main__":
    main()
