"""The long description of the package: README.md without what only works inside the repository."""

import re
from pathlib import Path

from setuptools import setup

CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
PICTURE = r"<picture>.*?</picture>|<img\b[^>]*>|!\[[^\]]*\]\((?!https?:)[^)]*\)"
CAPTION = r"\*(?!\*).*?\*(?=\n\n|\Z)"
FIGURE = re.compile(rf"(?:{PICTURE})\s*(?:{CAPTION}\s*)?", re.DOTALL)
"""A picture of the repository, and the paragraph in italics below it, which is its caption."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)")
"""A link to a file of the repository."""


def long_description(text: str) -> str:
    """Remove the figures of the repository and the links to its files; code stays as it is."""
    parts = CODE.split(text)
    parts[::2] = [LINK.sub(r"\1", FIGURE.sub("", part)) for part in parts[::2]]
    return "".join(parts)


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=long_description(readme),
    long_description_content_type="text/markdown",
)
