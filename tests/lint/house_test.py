"""The rules of house.py: each on a source that breaks it, and on one that does not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.lint import house

ARGS = 'def f(a, b, x, y):\n    """Return the sum.\n\n    Args:\n    {}\n    """'
RAISE = 'def check(a):\n    """Return it{}"""\n    raise {}("no")\n'
CATCH = 'def check(a):\n    """Return it."""\n    try:\n        raise {1}\n    except {0}:\n        pass\n'
MATCH = 'with pytest.raises(ValueError, match="{}"):\n    pass\n'


def violations(folder: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write sources by path, and return their violations as if they were the project's."""
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(house, "ROOT", folder)
    return house.violations([folder])


@pytest.mark.parametrize(
    ("bad", "good", "violation"),
    [
        ("given = 1", "value = 1", "name jaxret/m.py: given"),
        ("def f(told): ...", "def f(text): ...", "name jaxret/m.py f: told"),
        ("def _parsed(): ...", "def _parse(): ...", "name jaxret/m.py _parsed: _parsed"),
        ("def f(where): ...", "def f(location): ...", "name jaxret/m.py f: where"),
        ("def f(encoded): ...", "def f(vectors): ...", "name jaxret/m.py f: encoded"),
        ("def f():\n    written = 1", "def f():\n    hidden = 1", "name jaxret/m.py f: written"),
        ("def f():\n    return lambda sorted: 1", "def f():\n    return lambda seed: 1", "name jaxret/m.py f: sorted"),
        ("x = lambda read, *chosen: 1", "x = lambda read, *items: 1", "name jaxret/m.py: chosen"),
        ("@f(lambda taken: 1)\ndef g(): ...", "@f(lambda item: 1)\ndef g(): ...", "name jaxret/m.py: taken"),
        ("def g(x=lambda taken: 1): ...", "def g(x=lambda item: 1): ...", "name jaxret/m.py: taken"),
        (
            "try:\n    f()\nexcept OSError as raised:\n    pass",
            "try:\n    f()\nexcept OSError as error:\n    pass",
            "name jaxret/m.py: raised",
        ),
        ("for _encoded in x: ...", "for _ in x: ...", "name jaxret/m.py: _encoded"),
        ("class A:\n    sent: int = 0", "class A:\n    seed: int = 0", "name jaxret/m.py A: sent"),
        ("class A:\n    class B:\n        sent: int", "class MlrHead:\n    chosen: int", "name jaxret/m.py A.B: sent"),
        (
            "class A:\n    def f(self):\n        self._sent = 1",
            "class A:\n    def f(self):\n        self._sent_bytes = x.sent = 1",
            "name jaxret/m.py A: _sent",
        ),
        ("class A:\n    chosen: int", "class A:\n    choice: int", "name jaxret/m.py A: chosen"),
        ("c = 1", "x = 1", "short jaxret/m.py: c"),
        ("def f(at): ...", "def f(k): ...", "short jaxret/m.py f: at"),
        ("def f():\n    for e in x: ...", "def f():\n    return [e for e in x]", "short jaxret/m.py f: e"),
        ("def f():\n    with x as g: ...", "def f():\n    return lambda g: 1", "short jaxret/m.py f: g"),
        ("class A:\n    op: int", "class A:\n    id: int", "short jaxret/m.py A: op"),
        ("def f(x):\n    x._at = 1", "def f(x):\n    x._to_x = 1", "short jaxret/m.py f: _at"),
        ("_TI = 1", "def of(): ...", "short jaxret/m.py: _TI"),
        ("def normalise_text(): ...", "def normalize_text(): ...", "spelling jaxret/m.py: normalise_text"),
        ("class TextTokeniser: ...", "class TextTokenizer: ...", "spelling jaxret/m.py: TextTokeniser"),
        ("COLORS = 1", "COLOURS = 1", "spelling jaxret/m.py: COLORS"),
        (
            'def f():\n    """Whether it is."""',
            '@property\ndef f():\n    """Whether it is."""',
            "docstring jaxret/m.py f: begins with Whether, which is no verb",
        ),
        (
            'def f():\n    """Returns it."""',
            'def f():\n    """Return: it."""',
            "docstring jaxret/m.py f: begins with Returns, which is no verb",
        ),
        (
            ARGS.format("    a: First."),
            ARGS.format("    a: Hugging Face's."),
            "docstring jaxret/m.py f: irregular entry 'a: First.'",
        ),
        (
            ARGS.format("    a: of a key."),
            ARGS.format("    a: offset of a key."),
            "docstring jaxret/m.py f: irregular entry 'a: of a key.'",
        ),
        ("def f(whole): ...", "def f(whole_set): ...", "name jaxret/m.py f: whole"),
        (
            ARGS.format("  a: first."),
            ARGS.format("    a: first.\n          First of all."),
            "docstring jaxret/m.py f: irregular entry 'a: first.'",
        ),
        (
            '"""`gone` is there."""\nx: list[str]',
            '"""`x` is there; `f(x)`, `list`, `jax.lax.erf`, ``gone`` and `m.py` too."""\ndef f(x): ...',
            "backticks jaxret/m.py: gone",
        ),
        (
            "class A:\n    size: int\nx = 1  # as `A.length`",
            'class A:\n    size: int\nx = {"key": 1}  # as `A.size`, of `key`',
            "backticks jaxret/m.py: A.length",
        ),
        ('"""What it is."""', '"""Whatever it is."""', "docstring jaxret/m.py: begins with What"),
        (
            'def f(a, b, x, y):\n    """Return the sum."""',
            ARGS.format("    a: first."),
            "docstring jaxret/m.py f: 4 parameters and no Args:",
        ),
        (
            RAISE.format(".", "ValueError"),
            RAISE.format("; raises ValueError.", "ValueError"),
            "docstring jaxret/m.py check: raises ValueError",
        ),
        (
            RAISE.format("; raises an Error.", "m.FormatError"),
            RAISE.format("; raises what reading raises.", "m.FormatError"),
            "docstring jaxret/m.py check: raises FormatError",
        ),
        (
            RAISE.format("; refuses nothing.", "path.error"),
            RAISE.format(".\n\n    Raises:\n        DataError: always.\n    ", "path.error"),
            "docstring jaxret/m.py check: raises DataError",
        ),
        (
            CATCH.format("KeyError", "TypeError"),
            CATCH.format("TypeError", "TypeError"),
            "docstring jaxret/m.py check: raises TypeError",
        ),
        (
            RAISE.format(".", "KeyError"),
            RAISE.format(".", "AssertionError"),
            "docstring jaxret/m.py check: raises KeyError",
        ),
        (
            "def _f(a, b, i, j, k, n, x, y): ...",
            "def _f(a, b, i, j, k, n, x): ...",
            "parameters jaxret/m.py _f: 8",
        ),
        (
            "def f(a, b, x, y): ...",
            "def _f(a, b, x, y): ...\nclass A:\n    def f(self, a, b, x, y): ...",
            "docstring jaxret/m.py f: 4 parameters and no Args:",
        ),
        (
            "def f(index, precision): ...",
            "def f(index, options): ...",
            "parameters jaxret/m.py f: index and precision are fields of SearchOptions",
        ),
        (
            "x = jax.custom_vjp(y)",
            "x = jax.custom_vjp(y)  # takes half the time (python bench/f.py)",
            "measured jaxret/m.py: custom_vjp",
        ),
        ("def f():" + 60 * "\n    x = 1", "def f():" + 59 * "\n    x = 1", "length jaxret/m.py f: 61 lines"),
        ("def f():" + 60 * "\n    x = 1", "def get_config():" + 60 * "\n    x = 1", "length jaxret/m.py f: 61 lines"),
    ],
)
def test_each_rule(bad: str, good: str, violation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert violation in violations(tmp_path / "bad", {"jaxret/m.py": bad}, monkeypatch)
    assert violations(tmp_path / "good", {"jaxret/m.py": good}, monkeypatch) == []


def test_a_pattern_has_few_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = MATCH.format("one of them must have its own"), MATCH.format("k is -1; .* at least 1")
    (line,) = violations(tmp_path, {"tests/bad_test.py": bad, "tests/good_test.py": good}, monkeypatch)
    assert line.startswith("message tests/bad_test.py:1: 7 words")


def test_a_file_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a/page", "b/c/page", "cli/encode", "index/encode", "configs/mlr", "heads/mlr", "a/__init__", "b/__init__")
    (line,) = violations(tmp_path, {f"jaxret/{name}.py": "" for name in names}, monkeypatch)
    assert line == "file page.py: jaxret/a/page.py, jaxret/b/c/page.py"


def test_a_public_name_has_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"jaxret/a.py": "def f(): ...\ndef _g(): ...", "jaxret/b.py": "class f: ...\ndef _g(): ..."}
    verbs = {f"jaxret/cli/{name}.py": "def main(): ..." for name in "cd"}
    assert violations(tmp_path, sources | verbs, monkeypatch) == ["duplicate f: jaxret/a.py, jaxret/b.py"]
    constants = {f"jaxret/{name}.py": f"ROWS = {name!r}\n_PAUSE = 1\nKEYS = ()\nrows: int = 2" for name in "cd"}
    assert violations(tmp_path / "constants", constants, monkeypatch) == ["duplicate ROWS: jaxret/c.py, jaxret/d.py"]
    types = {"jaxret/e.py": "Hits = list[int]", "jaxret/f.py": "class Hits: ..."}
    assert violations(tmp_path / "types", types, monkeypatch) == ["duplicate Hits: jaxret/e.py, jaxret/f.py"]


def test_a_long_module_has_a_test_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a/page", "a/__init__", "b/tested", "b/untested")
    sources = {f"jaxret/{name}.py": "\n" * (house.MOST_WITHOUT_TESTS + 1) for name in names}
    sources |= {
        "jaxret/short.py": "\n" * house.MOST_WITHOUT_TESTS,
        "tests/a/page_test.py": "",
        "tests/b/tested_test.py": "",
    }
    monkeypatch.setattr(house, "TESTED_ELSEWHERE", {"jaxret/a/page.py"})
    assert violations(tmp_path, sources, monkeypatch) == [
        "mirror jaxret/a/page.py: tests/a/page_test.py exists, so remove the module from TESTED_ELSEWHERE",
        "mirror jaxret/b/untested.py: 251 lines, and no tests/b/untested_test.py",
    ]


def test_names_of_tests_are_free_but_for_those_that_mean_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = violations(tmp_path, {"tests/a_test.py": "encoded = 1\nfound = 2"}, monkeypatch)
    assert lines == ["name tests/a_test.py: found"]


def test_every_exception_is_a_name_of_the_package() -> None:
    trees = [ast.parse(path.read_text()) for path in house.ROOT.glob("jaxret/**/*.py")]
    scopes = [("", tree) for tree in trees] + [pair for tree in trees for pair in house.scopes(tree)]
    classes = [(name, node) for name, node in scopes if isinstance(node, ast.ClassDef)]
    assert all((house.ROOT / name).exists() for name in house.TESTED_ELSEWHERE)
    assert set(house.FIELDS) <= {f"{name}.{word}" for name, node in classes for word in house.variables(node)}
    assert set().union(*(house.bound(node, without=house.NOT_SHORT) for _, node in scopes)) >= house.SHORT
