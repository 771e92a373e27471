"""Write what follows from other files: pages of commands, config keys and modules, tutorials from their notebooks, the
table of formats in docs/data.md, and the papers' tables in docs/reproduce.md.

`make docs` runs it before Sphinx. The pages are in docs/reference/ and docs/tutorials/, and in no commit.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
PACKAGE = ROOT / "jaxret"
FORMAT_MARKS = "<!-- formats: docs/generate.py writes them -->", "<!-- end of formats -->"
PAPER_MARKS = "<!-- tables: docs/generate.py writes them -->", "<!-- end of tables -->"
sys.path.insert(0, str(ROOT))

from jaxret.cli.verbs import VERBS  # noqa: E402  (the path comes first)
from jaxret.data.formats.detect import FORMATS  # noqa: E402
from jaxret.evaluation.text_table import markdown_table  # noqa: E402
from jaxret.experiments.config_values import flag_text  # noqa: E402
from jaxret.experiments.reproduce.listing import row_numbers  # noqa: E402
from jaxret.experiments.reproduce.papers import PAPERS, PaperRow, datasets, paper_rows, paper_title  # noqa: E402


class Key(NamedTuple):
    """A key or a group of keys of configs/base.py: its path, its default as written (None for a group), its comment."""

    path: str
    default: str | None
    comment: str


def escape(text: str) -> str:
    """Return text with the characters that Markdown would interpret escaped, outside of `code`."""
    return re.sub(r"([\\*_<>\[\]|#~])(?=(?:[^`]*`[^`]*`)*[^`]*$)", r"\\\1", text)


def commands() -> str:
    """Return the page of commands: the help of each verb, its flags as a list."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}

    def read_help(verb: str) -> str:
        command = [sys.executable, "-m", "jaxret", *verb.split(), "-h"]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        helps = dict(zip(VERBS, pool.map(read_help, VERBS), strict=True))
    lines = ["# Commands", "", "`jaxret VERB -h` prints the same.", ""]
    for verb, text in helps.items():
        lines += [f"## jaxret {verb}", "", escape(sentence(VERBS[verb])), "", *_help(text), ""]
    return "\n".join(lines)


def sentence(text: str) -> str:
    """Return a text with a capital letter at its start and a full stop; other letters are unchanged."""
    return f"{text[:1].upper()}{text[1:]}."


def _help(text: str) -> Iterator[str]:
    """Yield the lines of one verb's help: its text as it is, its arguments and flags as definitions."""
    about, _, flags = text.partition("\nFlags:\n")
    about, _, arguments = about.partition("\nArguments:\n")
    yield from ("```text", about.strip(), "```", "")
    for line in f"{arguments}\n{flags}".splitlines():
        if match := re.match(r"  (--\S+|\S+) {1,}(.*)$", line):
            yield from (f"`{match[1]}`", f": {escape(match[2])}", "")
        elif line.strip():
            yield from (f"  {escape(line.strip())}", "")


def read_keys() -> list[Key]:
    """Return the keys of configs/base.py in their order, each with the comments above it and behind it."""
    source = (PACKAGE / "configs" / "base.py").read_text()
    keys: list[Key] = []
    above: list[str] = []
    for line in source[source.index("def get_config") :].splitlines():
        text = line.strip()
        if text.startswith("#"):
            above.append(text.lstrip("# "))
        elif match := re.match(r"config\.([\w.]+) = (.*)$", text):
            value, behind = _split_comment(match[2])
            group = value == "ConfigDict()"
            keys.append(Key(match[1], None if group else value, " ".join([*above, behind]).strip()))
            above = []
        elif not text:
            above = []
    return keys


def _split_comment(text: str) -> tuple[str, str]:
    """Return the value and the comment of the right side of an assignment."""
    for match in re.finditer(r"  # ", text):
        try:
            ast.parse(text[: match.start()])
        except SyntaxError:
            continue
        return text[: match.start()].strip(), text[match.end() :].strip()
    return text.strip(), ""


def config_keys() -> str:
    """Return the page of config keys."""
    lines = [
        "# Config keys",
        "",
        "Every key of `configs/base.py`, with its default. Set a key on the command line",
        "(`--config.optimizer.learning_rate=1e-5`), in a config file, or in the `changes` of `jaxret.Retriever.train`.",
        "An unknown key is an error.",
        "",
    ]
    for key in read_keys():
        if key.default is None:
            level = "#" * (2 + key.path.count("."))
            lines += [f"{level} {key.path}", "", escape(key.comment), ""]
        else:
            comment = escape(key.comment[:1].upper() + key.comment[1:]).rstrip(".")
            lines += [f"`{key.path}`", f": {comment and comment + '. '}Default: `{key.default}`.", ""]
    return "\n".join(lines)


def modules() -> str:
    """Return the page of modules: a section a folder, and the first sentence of each module's docstring."""
    lines = ["# Modules", "", "The first sentence of every module, folder by folder.", ""]
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for folder in folders:
        lines += [f"## {folder.relative_to(ROOT).as_posix()}/", ""]
        if text := _first_sentence(folder / "__init__.py"):
            lines += [escape(text), ""]
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                lines += [f"`{path.name}`", f": {escape(_first_sentence(path)) or '–'}", ""]
    return "\n".join(lines)


def with_format_table(page: str) -> str:
    """Return docs/data.md with a line for each format between its two marks."""
    lines = ["", "| format | name | its files | contain |", "|:--|:--|:--|:--|"]
    for one in sorted(FORMATS, key=lambda one: one.name):
        roles = ["examples"] if one.gives("examples") else one.roles()
        keys = "|".join(map(re.escape, one.keys)) or "(?!)"  # no key: what never matches
        description = re.sub(rf"(?<![\w-])({keys}|\w*_\w+)(?![\w-])", r"`\g<0>`", one.description)
        title = re.sub(r"\w*_\w+", r"`\g<0>`", one.title)
        cells = (title, f"`{one.name}`", description, ", ".join(roles))
        lines.append(f"| {' | '.join(cells)} |")
    return _between(page, FORMAT_MARKS, "\n".join([*lines, "", ""]))


def _between(page: str, marks: tuple[str, str], text: str) -> str:
    """Return a page with a text between two marks, in place of what is there."""
    before, table = page.split(marks[0])
    _, after = table.split(marks[1])
    return f"{before}{marks[0]}{text}{marks[1]}{after}"


def with_paper_tables(page: str) -> str:
    """Return docs/reproduce.md with the data sets and every row of the papers' tables between its two marks."""
    parts = ["", "## Data", _data_table()]
    for paper in PAPERS:
        title, authors = paper_title(paper)
        parts.append(f"## {paper}: {title} ({authors})")
        tables: dict[str, list[PaperRow]] = {}
        for row in paper_rows().values():
            if row.id.startswith(f"{paper}/"):
                tables.setdefault(row.id.split("/")[1], []).append(row)
        for number, members in tables.items():
            parts += [f"### {number}: {members[0].caption}", _row_table(members)]
    return _between(page, PAPER_MARKS, "\n\n".join([*parts, ""]))


def _data_table() -> str:
    """Return a table of the data sets: folder below --data, title, files with their origins."""
    lines = []
    for name, data in datasets().items():
        files = "; ".join(f"`{path}` ({origin})" for path, origin in data.files.items())
        lines.append([f"`{data.folder or name}`", data.title, files])
    return markdown_table(["folder", "data set", "files"], lines, left=3)


def _row_table(members: list[PaperRow]) -> str:
    lines = [
        [f"`{row.id.rpartition('/')[2]}`", _describe_system(row), "<br>".join(row_numbers(row))] for row in members
    ]
    return markdown_table(["row", "config", "the paper's numbers"], lines, left=3)


def _describe_system(row: PaperRow) -> str:
    """Return the config of a row with the keys that it changes, or the reason why the row is not run."""
    notes = [row.note] if row.note else []
    if row.same_as:
        return "; ".join([f"as `{row.same_as}`", *notes])
    if row.reason:
        return f"not run: {row.reason}"
    configs = [row.config] if isinstance(row.config, str) else list(dict.fromkeys(row.config.values()))
    parts = [f"`{config}`" for config in configs if config]
    parts += [f"`{key}={flag_text(value)}`" for key, value in row.set.items()]
    if row.verb == "recipe":
        parts.append(f"`jaxret recipe`, {row.stage}" + (f", after `{row.warm_up}`" if row.warm_up else ""))
    if row.chunks:
        parts.append(f"`jaxret data chunk --{row.chunks}`")
    if row.verb == "bm25":
        parts.insert(0, "`jaxret bm25`")
    if row.seeds > 1 and row.verb != "bm25":
        parts.append(f"{row.seeds} seeds")
    return "; ".join([", ".join(parts) or "`jaxret data check`", *notes])


def tutorial(notebook: Path) -> str:
    """Return the page of a notebook: its text, its code, and what the code printed when the notebook was last run."""
    lines = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        if printed := "".join(text for output in cell["outputs"] for text in output["text"]):
            lines += ["```text", printed.rstrip(), "```", ""]
    return "\n".join([*lines, f"[This page as a notebook]({notebook.name})", ""])


def _first_sentence(path: Path) -> str:
    if not path.exists():
        return ""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(paragraph.split()), maxsplit=1)[0]


def main() -> None:
    PAGES.mkdir(exist_ok=True)
    for name, page in (("commands", commands), ("config", config_keys), ("modules", modules)):
        (PAGES / f"{name}.md").write_text(page())
    for name, with_tables in (("data", with_format_table), ("reproduce", with_paper_tables)):
        path = ROOT / "docs" / f"{name}.md"
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    for notebook in (ROOT / "docs" / "tutorials").glob("*.ipynb"):
        notebook.with_suffix(".md").write_text(tutorial(notebook), encoding="utf-8")


if __name__ == "__main__":
    main()
