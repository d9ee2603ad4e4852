"""The long description of the package: README.md without what leads into the repository."""

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(r"<picture>.*?</picture>\s*\*A trained.*?\*\n\n", "", text, flags=re.DOTALL)
text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)
setup(long_description=text, long_description_content_type="text/markdown")
