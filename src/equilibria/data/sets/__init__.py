"""The data sets that are known from the start: importing this registers them.

What is to be said of each is in `catalog.yaml`; how each is laid out on disk, in the files here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any

import yaml

from equilibria.data.registry import DataSetCard, Download, register_dataset
from equilibria.data.sets import arrays, folders, omniglot

READERS: dict[str, Callable[..., Any]] = {
    name: function
    for module in (arrays, folders, omniglot)
    for name, function in vars(module).items()
    if name.startswith("load_")
}


def _register_catalog() -> None:
    text = resources.files(__name__).joinpath("catalog.yaml").read_text(encoding="utf-8")
    catalog = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for name, entry in catalog.items():
        read = READERS[entry.pop("reader")]
        constants = entry.pop("constants", {})
        if "folders" in entry:
            facts = {"name": name, "kind": entry.get("kind", "classification")}
            constants = {**constants, "about": {**facts, **_frozen(entry.pop("about", {}))}}
        downloads = tuple(Download(**item) for item in entry.pop("downloads", ()))
        obtain = entry.pop("obtain", f"Get it with `equilibria datasets get {name}`.")
        card = DataSetCard(name, obtain=obtain, downloads=downloads, **_frozen(entry))
        register_dataset(card, partial(read, **constants))


def _frozen(fields: dict[str, Any]) -> dict[str, Any]:
    """With tuples for lists."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }


_register_catalog()
