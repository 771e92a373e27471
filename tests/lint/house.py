"""Checks names and docstrings by the rules of CONTRIBUTING.md: python tests/lint/house.py [PATH ...]

Rules, each with what it prints:

  duplicate   a public function or class of the package has a name that another module uses too
  name        a variable, parameter, field or function is called by a participle that says nothing (BANNED), or a
              variable, parameter or field of the package by any other one that is not in TERMS or FIELDS
  spelling    a name has a word in a spelling of SPELLINGS
  docstring   a docstring begins with What, As or The same, or lacks `Args:` where a public function has four
              parameters, or does not say that a public function of the package raises an error
  short       a variable, parameter, field or attribute of the package has at most two letters, outside of
              comprehensions and lambdas, and is not in SHORT
  parameters  a function has more than seven parameters
  message     a test matches more than five words of an error's sentence (`match=`), beside keys, names and numbers

Exit status 1 with anything printed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("jaxret", "tests", "bench")
BANNED = {"found", "told", "there", "asked", "given", "known", "wanted"}
# Past participles that may name a variable: terms of the field, and values that are true or false. It only shrinks.
TERMS = re.compile(
    r"centred|changed|closed|concatenated|counted|damaged|done|ended|expected|frozen|gated|hidden|judged|"
    r"keyed|named|normed|pooled|published|released|removed|repeated|required|scaled|shown|stacked|summed|"
    r"tied|trusted|unpooled|unrolled|won"
)
PARTICIPLE = re.compile(r"[a-z]{2,}ed")
NOUNS = {"embed", "feed", "need", "seed", "speed", "shed", "ragged"}
# Fields whose names are keys elsewhere.
FIELDS = {
    "Collective.overlapped": "in the JSON of `jaxret plan`",
    "Collective.sent": "in the JSON of `jaxret plan`",
    "FalseNegativeSettings.masked": "key of the config, loss.false_negatives.masked",
    "MiningAudit.scored": "in the record of `jaxret mine`",
    "MlrHead.chosen": "key of the config, head.mlr.chosen",
    "Truncation.estimated": "in the manifests of token stores",
    "Truncation.lost": "in the manifests of token stores",
    "Workload.packed": "in the JSON of `jaxret plan`",
    "Workload.padded": "in the JSON of `jaxret plan`",
}
# Names of one or two letters that a reader brings along, from mathematics, from this field or from a library. Any other
# has to be looked up wherever it is used, so it is a noun. In a comprehension or lambda its origin is on the same line.
SHORT = {
    *("a", "b", "x", "y"),  # operands and results of mathematical functions; b is also BM25's
    *("i", "j", "k", "K", "n"),  # indices, the k best passages, a count
    *("b1", "b2", "i3", "k1", "kl"),  # parameters of Adam and BM25, a family and a divergence: keys of the config
    "t",  # the statistic of a t-test, a key of comparisons
    "id",  # a key of records
    "ax",  # matplotlib's panel
    "T",  # a type variable
    *("_K", "_ON", "_TO", "_X", "_Y"),  # flags of these names
}
# Nodes that bind no variable, or one that is used in the same expression alone.
NOT_SHORT = (
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda),
    *(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.alias),
)
IRREGULAR = re.compile(
    r"begun|broken|built|caught|chosen|dealt|done|drawn|felt|frozen|gone|held|hidden|kept|laid|lost|made|meant|met|paid|said|seen|"
    r"sent|shown|sold|sought|spent|stolen|taken|taught|thought|torn|understood|won|worn|written"
)
# Words of names are spelled as in Oxford's dictionary: British, with -ize.
SPELLINGS = re.compile(
    r"(initial|normal|optim|organ|parametr|quant|random|recogn|serial|token)is(e[drs]?|ing|ations?)|"
    r"behaviors?|center(s|ed)?|colors?|judgments?|labeled|neighbors?"
)
OPENINGS = re.compile(r"\s*(What|As|The same)\b")
RAISES = re.compile(r"[Rr]ais|Error|[Rr]efuse")
BUGS = {"AssertionError", "NotImplementedError"}  # raised for a mistake in this project, which nobody catches
MOST_PARAMETERS, ARGS_FROM, MOST_WORDS = 7, 4, 5
QUOTED_OR_ESCAPED = re.compile(r"'[^']*'|\\[bnsdwSDW]|\.[*+]")
WORD = re.compile(r"(?:[a-z]{2,}|a)[,;:.?)]*")
# Names that every module of a kind has.
EVERY_CLI, EVERY_CONFIG = {"main"}, {"get_config", "stages"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function | ast.Lambda) -> list[str]:
    """The names of a function's parameters, without self and cls."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [argument.arg for argument in every if argument is not None and argument.arg not in ("self", "cls")]


def scopes(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function and class below a node with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
            yield from scopes(node, f"{prefix}{node.name}.")
        else:
            yield from scopes(node, prefix)


def bound(scope: ast.AST, without: tuple[type[ast.AST], ...] = ()) -> set[str]:
    """The names that a module, class or function binds itself, those of its parameters included; without those in
    nodes of some types."""
    names: set[str] = set()
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, without):
            continue
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        todo.extend(ast.iter_child_nodes(node))
    return names


def variables(scope: ast.Module | ast.ClassDef | Function) -> set[str]:
    """The variables or fields that a scope binds itself, its parameters, and those of lambdas in it."""
    names = set(parameters(scope)) if isinstance(scope, Function) else set()
    todo: list[ast.AST] = list(scope.body)
    while todo:
        node = todo.pop()
        if isinstance(node, Function):
            defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
            todo.extend([*node.decorator_list, *defaults])
            continue
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Lambda):
            names.update(parameters(node))
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        todo.extend(ast.iter_child_nodes(node))
    return names


def is_participle(name: str) -> bool:
    """Whether a name is one past participle that is not in TERMS, whatever underscores it has at its ends."""
    word = name.strip("_")
    regular = PARTICIPLE.fullmatch(word) is not None and word not in NOUNS
    return (regular or IRREGULAR.fullmatch(word) is not None) and TERMS.fullmatch(word) is None


def own_errors(function: Function) -> set[str]:
    """The classes of the errors that a function raises itself, as it writes them."""
    errors: set[str] = set()
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            errors.add(ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc))
        todo.extend(ast.iter_child_nodes(node))
    return {error for error in errors if error[0].isupper() and error not in BUGS}


def patterns(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of every pattern that is written as `match=`; expressions in it are spaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "match":
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.value.lineno, node.value.value
            elif isinstance(node.value, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else " " for part in node.value.values)
                yield node.value.lineno, "".join(map(str, parts))


def check_file(path: Path) -> Iterator[str]:
    """Every violation of one file but duplicates, as "RULE FILE SCOPE: text"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("tests/"):
        for line, pattern in patterns(tree):
            count = sum(WORD.fullmatch(word) is not None for word in QUOTED_OR_ESCAPED.sub(" ", pattern).split())
            if count > MOST_WORDS:
                yield f"message {name}:{line}: {count} words of {pattern!r}"
    for scope, node in [("", tree), *scopes(tree)]:
        where = f"{name} {scope}".strip()
        for word in sorted(bound(node) & BANNED):
            yield f"name {where}: {word}"
        for word in sorted(bound(node)):
            if any(SPELLINGS.fullmatch(part.lower()) for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", word)):
                yield f"spelling {where}: {word}"
        if name.startswith("jaxret/") and isinstance(node, ast.Module | ast.ClassDef | Function):
            for word in sorted(filter(is_participle, variables(node))):
                if f"{scope}.{word}" not in FIELDS:
                    yield f"name {where}: {word}"
            for word in sorted(bound(node, without=NOT_SHORT) - SHORT):
                if 1 <= len(word.strip("_")) <= 2:
                    yield f"short {where}: {word}"
        document = (
            ast.get_docstring(node, clean=False) if isinstance(node, ast.Module | ast.ClassDef | Function) else None
        )
        if document and OPENINGS.match(document):
            yield f"docstring {where}: begins with {document.split()[0]}"
        if isinstance(node, Function):
            count = len(parameters(node))
            if count > MOST_PARAMETERS:
                yield f"parameters {where}: {count}"
            public = not any(part.startswith("_") for part in scope.split("."))
            if name.startswith("jaxret/") and public and count >= ARGS_FROM and document and "Args:" not in document:
                yield f"docstring {where}: {count} parameters and no Args:"
            if name.startswith("jaxret/") and public and document and not RAISES.search(document):
                yield from (f"docstring {where}: raises {error}" for error in sorted(own_errors(node)))


def duplicates() -> Iterator[str]:
    """Public functions and classes at the top of a module of the package whose name another module has too."""
    owners: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "jaxret").rglob("*.py")):
        folder = path.relative_to(ROOT / "jaxret").parts[0]
        usual = EVERY_CLI if folder == "cli" else EVERY_CONFIG if folder == "configs" else set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_") and node.name not in usual:
                owners[node.name].append(path.relative_to(ROOT).as_posix())
    for name, files in sorted(owners.items()):
        if len(files) > 1:
            yield f"duplicate {name}: {', '.join(files)}"


def violations(folders: list[Path]) -> list[str]:
    """The violations in files below some folders, sorted; duplicates of the whole package, if one of them shows."""
    files = sorted({path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py"))})
    shown = {path.relative_to(ROOT).as_posix() for path in files}
    pairs = [line for line in duplicates() if shown & set(line.partition(": ")[2].split(", "))]
    return sorted([*pairs, *(line for path in files for line in check_file(path))])


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or [ROOT / folder for folder in FOLDERS]
    lines = violations(paths)
    print("".join(f"{line}\n" for line in lines), end="")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
