"""Generated pages of the site: documents of the repository, and one reference page per package."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Documents in the root of the repository, and their pages on the site."""

ROOMS = {
    "energies": "Energies",
    "equilibrium": "Layers",
    "solvers": "Solvers",
    "gradients": "Gradients",
    "operators": "Operators",
    "activations": "Activations",
    "models": "Models",
    "certificates": "Certificates",
    "inputs": "Searches over inputs",
    "restoration": "Restoration",
    "tasks": "Tasks",
    "data": "Data",
    "training": "Training",
    "inference": "Inference",
    "compiled": "Compiled solves",
    "exports": "Exports",
    "analysis": "Analysis",
    "report": "Reports",
    "serving": "Serving",
    "papers": "Papers' tables",
    "papers.theory": "Papers' theory",
    "context": "States and contexts",
    "registry": "Registries",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add one navigation entry per package to the reference."""
    for entry in config.nav or []:
        if "Reference" in entry:
            rooms = [{title: f"api/{room}.md"} for room, title in ROOMS.items()]
            entry["Reference"] = ["api/index.md", *rooms]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = from_root((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    for room, title in ROOMS.items():
        files.append(File.generated(config, f"api/{room}.md", content=reference(room, title)))
    return files


def from_root(text: str) -> str:
    """Adapt the links of a document in the repository's root to its page in docs/."""
    text = re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", text)
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return re.sub(r"\[([^\]]+)\]\((CITATION\.cff|LICENSE|examples/README\.md)\)", r"\1", text)


def reference(room: str, title: str) -> str:
    """Return the reference page of a package.

    Public objects with the name of their module are listed separately, because the reader of the
    sources confuses them with the module.
    """
    module = import_module(f"equilibria.{room}")
    named = {name: getattr(module, name) for name in getattr(module, "__all__", [])}
    text = f"# {title}\n\n`equilibria.{room}`\n\n::: equilibria.{room}\n"
    for name, thing in named.items():
        if name in str(getattr(thing, "__module__", "")).split("."):
            text += SHADOWED.format(path=f"{thing.__module__}.{name}")
    registries = [name for name, thing in named.items() if hasattr(thing, "__self__")]
    if registries:
        listed = ", ".join(f"`{name}`" for name in registries)
        text += f"\n## By name\n\n{listed} are methods of a [registry](registry.md).\n"
    return text


SHADOWED = """
::: {path}
    options: {{show_root_heading: true, show_root_toc_entry: true, show_root_full_path: false}}
"""


def on_page_markdown(markdown: str, **_: object) -> str:
    """Adapt links that leave docs/: to pages of the site, or to plain text for source files."""
    for source, page in PAGES.items():
        markdown = re.sub(rf"\]\(\.\./((?:\.\./)*){re.escape(source)}", rf"](\g<1>{page}", markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+src/[^)]+\)", r"\1", markdown)
