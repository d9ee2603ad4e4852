"""Invariants of the whole repository."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

import equilibria
from tests.program import output_of_python

ROOT = Path(__file__).resolve().parents[1]
# Local folders and package indexes. The pattern does not match itself.
FORBIDDEN = re.compile(
    r"(?<![\w.{}$-])/(?:work|root|home|Users|tmp|opt)/\w|py[p]i\.org|pytorch\.o[r]g/whl"
)


def tracked_texts() -> list[tuple[str, str]]:
    """Return name and text of every file that git tracks or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    texts = []
    for name in filter(None, listing.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            texts.append((name, content.decode("utf-8")))
    return texts


@pytest.mark.parametrize("heavy", ["matplotlib", "rich", "scipy", "sklearn", "typer"])
def test_importing_the_package_does_not_import_heavy_packages(
    imported_modules: set[str], heavy: str
) -> None:
    assert heavy not in imported_modules


def test_first_use_of_a_name_imports_torch() -> None:
    output = output_of_python(
        "import sys, equilibria as eq; print('torch' in sys.modules, hasattr(eq, '__wrapped__'));"
        "print('torch' in sys.modules, 'Anderson' in dir(eq), 'papers' in dir(eq));"
        "eq.Anderson; print('torch' in sys.modules)"
    )
    assert output.split() == ["False", "False", "False", "True", "True", "True"]


@pytest.fixture(scope="module")
def imported_modules() -> set[str]:
    """Modules that the public names and the digits import."""
    program = "import sys; from equilibria import *; from equilibria.data import load_digits"
    return set(output_of_python(f"{program}; load_digits(); print(*sys.modules)").split())


def test_type_checkers_see_the_public_names() -> None:
    """They read the imports under `TYPE_CHECKING`."""
    tree = ast.parse(Path(equilibria.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    modules = {name.name: str(node.module) for node in imports for name in node.names}
    for name, module in modules.items():
        defining = importlib.import_module(module)
        assert getattr(equilibria, name) is getattr(defining, name)
    rooms = {name for name, module in modules.items() if module == "equilibria"}
    existing = {module.name for module in pkgutil.iter_modules(equilibria.__path__)}
    assert rooms == existing - {"__main__", "cli"}
    assert {*modules} - rooms == {*equilibria.__all__} - {"__version__"}
    assert equilibria.cli is importlib.import_module("equilibria.cli")


def test_top_level_has_few_names() -> None:
    assert len(equilibria.__all__) <= 50
    for name in ("L1", "get_adjoint", "nothing_of_this_name"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(equilibria, name)


def packages() -> list[str]:
    """Names of all packages."""
    modules = pkgutil.walk_packages(equilibria.__path__, "equilibria.")
    return ["equilibria", *(module.name for module in modules if module.ispkg)]


@pytest.mark.parametrize("package", packages())
def test_names_in_all_exist_and_are_unique(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert not [name for name in names if not hasattr(module, name)]
    assert len(names) == len(set(names))


def test_every_module_of_the_models_is_imported() -> None:
    """Code that only tests and documents use belongs in `papers.theory`."""
    source = ROOT / "src"
    imported: set[str] = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts)
        for path in (source / "equilibria" / "models").rglob("*.py")
        if path.name != "__init__.py"
    }
    assert modules - imported == set()


def test_version_agrees_with_the_project_file() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r'^version = "(.+)"$', project, re.M)[1] == equilibria.__version__
    assert re.search(r"^version: (.+)$", citation, re.M)[1] == equilibria.__version__


def test_newest_release_in_the_changelog_is_this_version() -> None:
    """Its date is that of the citation."""
    released = re.findall(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = (ROOT / "CITATION.cff").read_text()
    date = re.search(r"^date-released: (.+)$", citation, re.M)[1]
    assert released[0] == (equilibria.__version__, date)


def test_constraints_pin_every_entry() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    pin = re.compile(r'^[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*( ; python_version >= "3\.\d+")?$')
    assert [entry for entry in entries if not pin.match(entry)] == []
    assert any(re.fullmatch(r"torch==\d+\.\d+\.\d+", entry) for entry in entries)


def test_no_file_names_local_folders_or_package_indexes() -> None:
    places = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]
    assert places == []


def test_no_file_has_merge_conflict_markers() -> None:
    files = [name for name, text in tracked_texts() if re.search(r"^(<{7}|>{7}) ", text, re.M)]
    assert files == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_examples_of_a_page_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks or page.name != "README.md"
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})
    if page.name == "README.md":
        (output,) = re.findall(r"```python\n.*?```\n\n```\n(.*?)```", page.read_text(), re.DOTALL)
        assert capsys.readouterr().out == output
        assert max(len(line) for block in blocks for line in block.splitlines()) <= 72


def test_readme_is_short_and_links_existing_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_walks_in_the_architecture_name_existing_files_and_functions() -> None:
    package = ROOT / "src" / "equilibria"
    page = (ROOT / "docs" / "architecture.md").read_text()
    walks = page[page.index("## Four walks") : page.index("### What is converted")]
    steps = [line.split("|")[2] for line in walks.splitlines() if line.count("|") == 4]
    names = [name for step in steps for name in re.findall(r"`([\w./]+)`", step)]
    assert len(names) > 50
    code = "\n".join(path.read_text() for path in package.rglob("*.py"))
    missing = [
        name
        for name in names
        if ("/" in name and not (package / name).exists())
        or ("/" not in name and not re.search(rf"(def|class) {name.split('.')[-1]}\b", code))
    ]
    assert missing == []


def test_importing_the_package_does_not_import_the_compiler(imported_modules: set[str]) -> None:
    """`torch.compiler.disable` as a decorator would double the time of `import equilibria`."""
    assert "torch._dynamo" not in imported_modules


def test_pictures_in_the_documents_are_small() -> None:
    for path in sorted((ROOT / "docs").rglob("*.[ps][nv]g")):
        assert path.stat().st_size < 160_000, path
