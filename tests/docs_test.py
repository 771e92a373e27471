"""The documentation: generated pages cover the code, and the examples print what the pages show."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxret.cli.verbs import VERBS
from jaxret.configs import load_config
from jaxret.data.formats.detect import FORMATS
from tests.pipeline import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """Return docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def key_paths(group: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key below a group of a config, in order."""
    for name, value in group.items():
        if hasattr(value, "items"):
            yield from key_paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_the_page_of_config_keys_has_every_key(generate: ModuleType) -> None:
    keys = [key.path for key in generate.read_keys() if key.default is not None]
    assert sorted(keys) == sorted(key_paths(load_config("base")))


def test_the_table_of_formats_is_that_of_the_code(generate: ModuleType) -> None:
    """If this fails, run python docs/generate.py, and commit docs/data.md."""
    page = (DOCS / "data.md").read_text(encoding="utf-8")
    assert generate.with_format_table(page) == page
    for one in FORMATS:
        assert f" | `{one.name}` | " in page
    assert "| `tevatron.corpus` | JSON records with `docid`, `text`, and perhaps `title` | passages |" in page


def test_the_tables_of_the_papers_are_those_of_the_code(generate: ModuleType) -> None:
    """If this fails, run python docs/generate.py, and commit docs/reproduce.md."""
    page = (DOCS / "reproduce.md").read_text(encoding="utf-8")
    assert generate.with_paper_tables(page) == page


def test_a_key_has_the_comments_above_it_and_behind_it(generate: ModuleType) -> None:
    keys = {key.path: key for key in generate.read_keys()}
    assert keys["optimizer.warmup_fraction"].default == "0.05"
    assert keys["optimizer.warmup_fraction"].comment == "part of all steps"
    assert keys["optimizer.head_parameters"].default == 'r"^(\\w+_)?head/(?!vocabulary)"'
    assert keys["head"].default is None
    assert keys["head"].comment


def test_markdown_is_escaped_outside_of_code(generate: ModuleType) -> None:
    assert generate.escape("a_b `c_d` [CLS]") == r"a\_b `c_d` \[CLS\]"


def test_names_in_the_description_of_a_verb_keep_their_capital_letters(generate: ModuleType) -> None:
    assert generate.sentence("search a corpus by BM25") == "Search a corpus by BM25."


@pytest.mark.slow
def test_the_page_of_modules_has_every_module(generate: ModuleType) -> None:
    page = generate.modules()
    modules = [path for path in (REPOSITORY / "jaxret").rglob("*.py") if path.name != "__init__.py"]
    assert [path for path in modules if f"`{path.name}`" not in page] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    text = (DOCS / "index.md").read_text()
    listed = set(re.findall(r"^[\w/-]+$", text, re.MULTILINE))
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} <= listed
    assert re.findall(r":caption: (.*)", text) == ["Start", "Guides", "Concepts", "Reference", "Project"]


def test_the_architecture_page_has_every_folder() -> None:
    package, page = REPOSITORY / "jaxret", (DOCS / "architecture.md").read_text()
    table = page.partition("| folder | responsibility |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([\w.]+)/?`", " ".join(cells))) == sorted([*folders(package), "types.py"])
    assert {path.name for path in package.glob("*.py")} == {"__init__.py", "__main__.py", "types.py", "version.py"}


def test_the_picture_of_the_architecture_has_the_layers_that_are_checked() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"\w+", layer) for layer in contracts[0]["layers"]]
    rows = re.findall(r'font-weight="bold"[^>]*>([^<]*)<', (DOCS / "floors.svg").read_text())
    assert [re.findall(r"(\w+)(?:/|\.py)", row) for row in rows] == layers[1:]  # the first is __main__
    names = {name for layer in layers for name in layer}
    assert names == {*folders(REPOSITORY / "jaxret"), "__main__", "types", "version"}


def folders(package: Path) -> list[str]:
    """Return the names of the folders of modules."""
    return [path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"]


PAGES = [*DOCS.glob("*.md"), DOCS / "reference" / "api.md", REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]


def test_every_file_that_a_page_names_exists() -> None:
    paths = {
        (page.name, path)
        for page in PAGES
        for path in re.findall(r"`((?:jaxret|tests|bench|launch|configs|docs)/[\w./-]+)`", page.read_text())
        if "NAME" not in path
    }
    assert len(paths) > 30
    assert [(page, path) for page, path in sorted(paths) if not (REPOSITORY / path).exists()] == []


def test_every_verb_that_a_page_names_exists() -> None:
    verbs = {verb.split()[0] for verb in VERBS}
    commands = {
        (page.name, verb) for page in PAGES for verb in re.findall(r"`jaxret ([a-z][a-z0-9]*)", page.read_text())
    }
    assert len(commands) > 30
    assert [(page, verb) for page, verb in sorted(commands) if verb not in verbs] == []


def test_every_module_that_a_page_names_exists() -> None:
    names = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"\bjaxret(?:\.(?!json)[a-z_]\w*)+\b(?!\.)", page.read_text())
    }
    assert [(page, name) for page, name in sorted(names) if not resolves(name)] == []


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    parent, _, attribute = name.rpartition(".")
    module = importlib.import_module(parent)
    return hasattr(module, attribute) or (hasattr(module, "__path__") and importlib.util.find_spec(name) is not None)


def test_examples_of_docstrings_run() -> None:
    paths = [path for path in (REPOSITORY / "jaxret").rglob("*.py") if ">>> " in path.read_text()]
    assert len(paths) >= 5
    for path in paths:
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        results = doctest.testmod(importlib.import_module(name))
        assert results.attempted, path
        assert not results.failed, path


@pytest.mark.exhaustive
def test_the_example_of_the_readme_prints_what_it_shows(minilm_dir: Path) -> None:
    code = (REPOSITORY / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    output = re.findall(r"^# (.*)$", code, re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().splitlines() == output


@pytest.mark.exhaustive
def test_the_example_of_the_quickstart_runs(minilm_dir: Path) -> None:
    results = doctest.testfile(str(DOCS / "quickstart.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert results.attempted == 4
    assert results.failed == 0


def without_numbers(text: str) -> str:
    """Return text with every number replaced, because the last digits of a result depend on the machine."""
    return re.sub(r"[-+]?\d[\d,.]*(e-\d+)?%?", "#", re.sub(r" +", " ", text))


# More cells: assertions that must hold at the end, and an object that Jupyter displays.
LAST_CELLS = {
    "first_retriever": ["assert after > before", "index.search(['How do I join two paths?'], k=3)[0]"],
    "which_layers": [
        "assert list(vectors.values()) == [1, 2, 1]; assert sum(diversity.wins) == diversity.pairs",
        "evaluations['layer 3']",
    ],
    "a_better_model": [
        "assert Path('exported/modules.json').exists(); assert min(x.mean['nDCG@10'] for x in (before, after)) > 0.7",
        "after",
    ],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(DOCS.glob("tutorials/*.ipynb")), ids=lambda path: path.stem)
def test_a_tutorial_prints_what_it_shows_in_jupyter(path: Path, minilm_dir: Path, tmp_path: Path) -> None:
    python = os.environ.get("JAXRET_CLIENTS_PYTHON", sys.executable)
    variables = {
        **os.environ,
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{sysconfig.get_paths()['purelib']}",
    }
    check = [python, "-c", "import nbclient, ipykernel, sys; print(sys.version_info[:2])"]
    seen = subprocess.run(check, capture_output=True, text=True, check=False)
    if seen.returncode or seen.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("nbclient is missing for this Python: requirements-clients.txt says how to install it")
    command = [python, str(REPOSITORY / "tests" / "execute_notebook.py"), str(path), str(tmp_path / "executed.ipynb")]
    done = subprocess.run(
        [*command, *LAST_CELLS[path.stem]], env=variables, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    executed = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    for shown, cell in zip(json.loads(path.read_text())["cells"], executed, strict=False):
        # The scores of a model that is trained in the notebook may differ.
        if cell["cell_type"] == "code" and not printed_text(shown).startswith("0."):
            assert without_numbers(printed_text(cell)) == without_numbers(printed_text(shown))
    (displayed,) = executed[-1]["outputs"]
    assert "<table" in "".join(displayed["data"]["text/html"])


def printed_text(cell: dict[str, Any]) -> str:
    """Return the text that a cell printed on stdout."""
    outputs = [output for output in cell["outputs"] if output.get("name") == "stdout"]
    return "".join(line for output in outputs for line in output["text"])
