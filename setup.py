"""Set the long description of the package: README.md without links into the repository."""

import re
from pathlib import Path

from setuptools import setup

CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
PICTURE = r"<picture>.*?</picture>|<img\b[^>]*>|!\[[^\]]*\]\((?!https?:)[^)]*\)"
CAPTION = r"\*(?!\*).*?\*(?=\n\n|\Z)"
FIGURE = re.compile(rf"(?:{PICTURE})\s*(?:{CAPTION}\s*)?", re.DOTALL)
"""A picture in the repository and its caption, the paragraph in italics below it."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)")
"""A link to a file in the repository."""


def long_description(text: str) -> str:
    """Remove figures and links that point into the repository, except in code blocks."""
    parts = CODE.split(text)
    parts[::2] = [LINK.sub(r"\1", FIGURE.sub("", part)) for part in parts[::2]]
    return "".join(parts)


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=long_description(readme),
    long_description_content_type="text/markdown",
)
