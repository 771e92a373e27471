"""Check names and docstrings by the rules of CONTRIBUTING.md: python tests/lint/house.py [PATH ...]

Rules, each with what it prints:

  duplicate   a public function, class, type or constant of the package has a name that another module uses too
  file        two files of the package have the same name, except those of verbs and configs (`cli`, `configs`), which
              are named after an operation, a method or an encoder
  name        a variable, parameter, field, attribute or function is called by a participle in BANNED; or one of the
              package by another participle that is not in TERMS, FIELDS or FUNCTIONS, or by a word in VAGUE, which is
              no noun
  spelling    a name has a word in a spelling of SPELLINGS
  docstring   a docstring begins with What, As or The same. In the package: a function's docstring does not begin with a
              verb of VERBS (properties may begin with a noun); a public function of four or more parameters has no
              `Args:`, or, outside of classes, no docstring; an entry of `Args:`, `Attributes:` or `Raises:` is not
              indented by four, or its text begins with a capital letter or a preposition; or a public function raises
              an error X without saying "Raises X"
  backticks   a docstring or comment of the package has a name in backticks that its module does not use and the package
              does not define
  short       a variable, parameter, field or attribute of the package has at most two letters, outside of
              comprehensions and lambdas, and is not in SHORT
  parameters  a function has more than seven parameters, or one of the package takes two of OPTIONS
  measured    a module of the package has its own gradients, kernels or barriers (OWN_RULES), and names no script,
              test or page that measures them or shows the error that they avoid (MEASURES)
  length      a function of the package has more than 60 lines, except the keys of a config (`get_config`)
  mirror      a module of the package above 250 lines has no test file of its name, and is not in TESTED_ELSEWHERE
  message     a test matches more than five words of an error's sentence (`match=`), apart from keys, names and numbers

The exit status is 1 if a violation is printed.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("jaxret", "tests", "bench")
BANNED = {"found", "told", "there", "asked", "given", "known", "wanted"}
# Words that say nothing without another word.
VAGUE = re.compile(
    "absent|again|alone|before|both|each|elsewhere|every|everywhere|here|how|late|more|most|near|now|one|others?|ours|own|"
    "perhaps|rest|same|some|theirs|then|together|twice|what|when|where|which|whole|why|wrong"
)
# Past participles that may name a variable: terms of the field, and values that are true or false. Remove entries; add
# none.
TERMS = re.compile(
    r"centred|changed|closed|concatenated|counted|damaged|done|ended|expected|frozen|gated|hidden|judged|"
    r"keyed|named|normed|pooled|published|released|removed|repeated|required|scaled|shown|stacked|summed|"
    r"tied|trusted|unpooled|unrolled|won"
)
PARTICIPLE = re.compile(r"[a-z]{2,}ed")
NOUNS = {"embed", "feed", "need", "seed", "speed", "shed", "ragged"}
# Fields with these names are keys elsewhere.
FIELDS = {
    "ColbertHead.late": "key of the config, head.colbert.late",
    "Collective.overlapped": "in the JSON of `jaxret plan`",
    "Collective.sent": "in the JSON of `jaxret plan`",
    "FalseNegativeSettings.masked": "key of the config, loss.false_negatives.masked",
    "MiningAudit.scored": "in the record of `jaxret mine`",
    "MlrHead.chosen": "key of the config, head.mlr.chosen",
    "PaperData.each": "key of the papers' tables (.toml)",
    "PaperRow.each": "key of the papers' tables (.toml)",
    "PretrainingMethod.late": "key of the config, pretraining.late",
    "Truncation.estimated": "in the manifests of token stores",
    "Truncation.what": "in the manifests of token stores",
    "Truncation.lost": "in the manifests of token stores",
    "Workload.packed": "in the JSON of `jaxret plan`",
    "Workload.padded": "in the JSON of `jaxret plan`",
}
FUNCTIONS = {
    "Index.filtered": "part of the Python API",
    "Program.__init__.traced": "JAX names compiled programs by it",
    "Ragged.padded": "returns a padded copy",
    "SparseRows.padded": "returns a padded copy",
}
# Names of one or two letters that readers know from mathematics, from this field or from a library. Any other short
# name would have to be looked up. In a comprehension or lambda, its origin is on the same line.
SHORT = {
    *("a", "b", "x", "y"),  # operands and results of mathematical functions; b is also BM25's
    *("i", "j", "k", "n"),  # indices, the k best passages, a count
    *("b1", "b2", "i3", "k1", "kl"),  # parameters of Adam and BM25, a family and a divergence: keys of the config
    "t",  # the statistic of a t-test, a key of comparisons
    "id",  # a key of records
    "ax",  # matplotlib's panel
    "T",  # a type variable
    *("_K", "_ON", "_TO"),  # flags of these names
}
# Nodes that bind no variable, or only one that is used in the same expression.
NOT_SHORT = (
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda),
    *(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.alias),
)
IRREGULAR = re.compile(
    r"begun|broken|built|caught|chosen|dealt|done|drawn|felt|frozen|gone|held|hidden|kept|laid|lost|made|meant|met|paid|said|seen|"
    r"sent|shown|sold|sought|spent|stolen|taken|taught|thought|torn|understood|won|worn|written"
)
# Names are spelled as in the Oxford dictionary: British, with -ize.
SPELLINGS = re.compile(
    r"(initial|normal|optim|organ|parametr|quant|random|recogn|serial|token)is(e[drs]?|ing|ations?)|"
    r"behaviors?|center(s|ed)?|colors?|judgments?|labeled|neighbors?"
)
OPENINGS = re.compile(r"(What|As|The same)\b")
# The first words of docstrings of functions, in the imperative.
VERBS = re.compile(
    r"Add|Answer|Audit|Await|Build|Call|Change|Check|Choose|Claim|Commit|Compare|Compile|Compute|"
    r"Connect|Copy|Count|Create|Cut|Define|Delete|Describe|Detect|Discard|Do|Double|Draw|Drop|Emit|"
    r"Encode|End|Estimate|Evaluate|Exchange|Exit|Export|Feed|Fetch|Fill|Find|Finish|Flush|Forget|Format|"
    r"Fuse|Generate|Give|Hold|Import|Index|Join|Keep|Let|Listen|Load|Log|Make|Map|Mark|Measure|Merge|"
    r"Mine|Move|Multiply|Name|Normalize|Note|Open|Order|Pack|Parse|Pickle|Pre-train|Prepare|Print|Probe|"
    r"Put|Raise|Rank|Read|Record|Refuse|Release|Remove|Rename|Replace|Report|Require|Reshape|Restart|Return|Run|"
    r"Save|Scan|Score|Search|Send|Serve|Set|Show|Silence|Slice|Sort|Split|Stack|Start|Stop|Store|"
    r"Stream|Sum|Take|Time|Tokenize|Trace|Train|Translate|Trim|Try|Turn|Undo|Update|Upload|Use|Validate|"
    r"Verify|Wait|Withdraw|Write|Yield"
)
SECTION = re.compile(r"(Args|Attributes|Raises):")
# An entry of a section that begins with a capital letter, except values and proper names.
CAPITAL = re.compile(r" {4}([\w*, ]+): (?!None|False|True|Hugging)([A-Z][a-z]+|A)\b")
# An entry without a noun: "key: of dropout."
PREPOSITION = re.compile(
    r" {4}([\w*, ]+): (about|after|as|at|before|by|for|from|if|in|is|its|of|on|so|that|their|those|to|where|with)\b"
)
RAISES_LIKE = re.compile(r"[Rr]aises? (what|as|the same)\b")  # the errors of another function
# A name in backticks, or a call of it. A module need not use the names of these libraries.
LIBRARIES = {"jax"}
BACKTICKS = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\([^`]*\))?`(?!`)")
BUGS = {"AssertionError", "NotImplementedError"}  # raised for mistakes in this project, and never caught
OPTIONS = {"backend", "candidates", "index", "precision"}  # fields of SearchOptions, which are passed in it
MOST_PARAMETERS, ARGS_FROM, MOST_WORDS, MOST_LINES = 7, 4, 5, 60
OWN_RULES = {"custom_jvp", "custom_vjp", "optimization_barrier", "pallas_call"}
MEASURES = re.compile(r"bench/\w+\.py|tests/plan/\w+\.py|docs/upstream\.md")
QUOTED_OR_ESCAPED = re.compile(r"'[^']*'|\\[bnsdwSDW]|\.[*+]")
WORD = re.compile(r"(?:[a-z]{2,}|a)[,;:.?)]*")
# Long modules whose tests are in files of another name. Remove entries; add none.
TESTED_ELSEWHERE = {
    "jaxret/api/index.py",
    "jaxret/configs/base.py",
    "jaxret/data/formats/source_layout.py",
    "jaxret/data/formats/sources.py",
    "jaxret/data/formats/trec.py",
    "jaxret/data/lines.py",
    "jaxret/experiments/searches/evaluate_search.py",
    "jaxret/experiments/pictures/run_pictures.py",
    "jaxret/experiments/probe/probe_report.py",
    "jaxret/experiments/recipes/check_recipe.py",
    "jaxret/experiments/report/quality_sections.py",
    "jaxret/experiments/report/run_sections.py",
    "jaxret/experiments/reproduce/commands.py",
    "jaxret/export/targets/stock_modules.py",
    "jaxret/index/passages.py",
    "jaxret/models/pretraining.py",
    "jaxret/plan/estimates.py",
    "jaxret/storage/buckets/bucket_folder.py",
    "jaxret/storage/buckets/copy_folder.py",
    "jaxret/storage/buckets/working_copy.py",
    "jaxret/training/tasks/retrieval.py",
    "jaxret/types.py",
}
MOST_WITHOUT_TESTS = 250  # lines of a module
# Names that every module of a kind has.
EVERY_CLI, EVERY_CONFIG = {"main"}, {"get_config", "stages", "CHECKPOINTS", "FAMILIES"}
# Folders whose files are named after something that has a file elsewhere.
NAMED_AFTER = {"cli", "configs"}
# Constants that each module of a kind has; formats have their keys.
TABLES = re.compile(
    "ARCHITECTURE|ARGUMENTS|FORMATS|KEYS|NEGATIVES|OPENS_ADDRESSES|POSITIVES|QUERY|QUERY_ID|SUFFIXES|T|WRITES"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function | ast.Lambda) -> list[str]:
    """Return the names of a function's parameters, without self and cls."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [argument.arg for argument in every if argument is not None and argument.arg not in ("self", "cls")]


def scopes(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every function and class below a node with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
            yield from scopes(node, f"{prefix}{node.name}.")
        else:
            yield from scopes(node, prefix)


def bound(scope: ast.AST, without: tuple[type[ast.AST], ...] = ()) -> set[str]:
    """Return the names that a module, class or function binds itself, including its parameters, except those bound in
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


def own_attribute(node: ast.AST) -> str | None:
    """Return the name of the attribute that a node sets on `self`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        return node.attr
    return None


def variables(scope: ast.Module | ast.ClassDef | Function) -> set[str]:
    """Return the variables or fields that a scope binds itself, its parameters, and those of its lambdas; of a class,
    also the attributes that its methods set on `self`."""
    names = set(parameters(scope)) if isinstance(scope, Function) else set()
    if isinstance(scope, ast.ClassDef):
        names = {attribute for node in ast.walk(scope) if (attribute := own_attribute(node))}
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
    """Return whether a name is a single past participle that is not in TERMS, ignoring underscores at its ends."""
    word = name.strip("_")
    regular = PARTICIPLE.fullmatch(word) is not None and word not in NOUNS
    return (regular or IRREGULAR.fullmatch(word) is not None) and TERMS.fullmatch(word) is None


def says_nothing(name: str) -> bool:
    """Return whether a name is a participle or a word that is no noun."""
    return is_participle(name) or VAGUE.fullmatch(name.strip("_")) is not None


def own_errors(function: Function) -> set[str]:
    """Return the classes of errors that a function raises itself and does not catch."""
    errors: set[str] = set()
    # Nodes, and the errors that are caught around them.
    todo: list[tuple[ast.AST, set[str]]] = [(node, BUGS) for node in function.body]
    while todo:
        node, caught = todo.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            name = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc).rpartition(".")[2]
            errors |= {"DataError" if name == "error" and isinstance(node.exc, ast.Call) else name} - caught
        if isinstance(node, ast.Try):
            handled = {
                name.id
                for one in node.handlers
                if one.type
                for name in ast.walk(one.type)
                if isinstance(name, ast.Name)
            }
            todo.extend((child, caught | handled) for child in node.body)
            todo.extend((child, caught) for child in [*node.handlers, *node.orelse, *node.finalbody])
        else:
            todo.extend((child, caught) for child in ast.iter_child_nodes(node))
    return {error for error in errors if error[0].isupper()}


def says_raises(document: str, error: str) -> bool:
    """Return whether a docstring says that a function raises errors of a class, or the errors of another function."""
    text = " ".join(document.split())
    return RAISES_LIKE.search(text) is not None or re.search(rf"\b[Rr]aise[sd]?\b.*\b{error}\b", text) is not None


def is_property(function: Function) -> bool:
    """Return whether a function is a property, cached or not."""
    return any(ast.unparse(decorator).endswith("property") for decorator in function.decorator_list)


def irregular_entries(document: str) -> Iterator[str]:
    """Yield the entries of a docstring's sections that are not indented by four, or that begin with a capital letter or
    a preposition."""
    inside = False
    for line in document.split("\n"):
        if line and not line.startswith(" "):
            inside = SECTION.fullmatch(line) is not None
        if inside and (CAPITAL.match(line) or PREPOSITION.match(line) or re.match(r" {1,3}\S", line)):
            yield line.strip()


def patterns(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every `match=` pattern; expressions in it are replaced by spaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "match":
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.value.lineno, node.value.value
            elif isinstance(node.value, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else " " for part in node.value.values)
                yield node.value.lineno, "".join(map(str, parts))


def check_file(path: Path) -> Iterator[str]:
    """Yield every violation in one file except duplicates, as "RULE FILE SCOPE: text"."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("jaxret/"):
        yield from (f"backticks {name}: {word}" for word in sorted(set(unknown_names(text, tree))))
        rules = OWN_RULES & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if rules and not MEASURES.search(" ".join(text.split())):
            yield f"measured {name}: {', '.join(sorted(rules))}"
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
            for word in sorted(filter(says_nothing, variables(node))):
                if f"{scope}.{word}" not in FIELDS:
                    yield f"name {where}: {word}"
            if isinstance(node, Function) and says_nothing(node.name) and scope not in FUNCTIONS:
                yield f"name {where}: {node.name}"
            for word in sorted(bound(node, without=NOT_SHORT) - SHORT):
                if 1 <= len(word.strip("_")) <= 2:
                    yield f"short {where}: {word}"
        document = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | Function) else None
        if document and OPENINGS.match(document):
            yield f"docstring {where}: begins with {document.split()[0]}"
        if document and name.startswith("jaxret/"):
            yield from (f"docstring {where}: irregular entry {entry!r}" for entry in irregular_entries(document))
        if isinstance(node, Function):
            count = len(parameters(node))
            if count > MOST_PARAMETERS:
                yield f"parameters {where}: {count}"
            if name.startswith("jaxret/") and len(options := OPTIONS.intersection(parameters(node))) > 1:
                yield f"parameters {where}: {' and '.join(sorted(options))} are fields of SearchOptions"
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if name.startswith("jaxret/") and lines > MOST_LINES and node.name != "get_config":
                yield f"length {where}: {lines} lines"
            public = not any(part.startswith("_") for part in scope.split("."))
            lacks_args = "Args:" not in document if document else "." not in scope
            if name.startswith("jaxret/") and public and count >= ARGS_FROM and lacks_args:
                yield f"docstring {where}: {count} parameters and no Args:"
            if name.startswith("jaxret/") and document:
                first = document.split()[0].rstrip(".,:;")
                if not VERBS.fullmatch(first) and not is_property(node) and not OPENINGS.match(document):
                    yield f"docstring {where}: begins with {first}, which is no verb"
                errors = [error for error in own_errors(node) if public and not says_raises(document, error)]
                yield from (f"docstring {where}: raises {error}" for error in sorted(errors))


def used_names(tree: ast.AST) -> set[str]:
    """Return the names that a module binds, reads, imports or uses as a text, such as a key."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(node.value.split("."))
        elif isinstance(node, ast.ImportFrom | ast.alias):
            names.update(((node.module if isinstance(node, ast.ImportFrom) else node.name) or "").split("."))
        keys = ("id", "attr", "arg", "name", "asname")
        names.update(value for value in (getattr(node, key, None) for key in keys) if isinstance(value, str))
    return names


@cache
def package_names(root: Path) -> set[str]:
    """Return the names of the package's files, folders, functions, classes, constants and fields, and Python's own
    names."""
    names = {*dir(builtins), "jaxret"}
    for path in (root / "jaxret").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {path.name, path.stem, path.parent.name}
        for scope in [tree, *(node for _, node in scopes(tree))]:
            if isinstance(scope, ast.Module | ast.ClassDef):
                names |= variables(scope)
            names |= {getattr(scope, "name", "jaxret")}
    return names


def unknown_names(text: str, tree: ast.AST) -> Iterator[str]:
    """Yield the names in backticks in a module's docstrings and comments that nothing defines."""
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | Function)]
    names = used_names(tree) | package_names(ROOT)
    for part in [*comments, *(ast.get_docstring(node) or "" for node in nodes)]:
        for name in BACKTICKS.findall(part):
            parts = [name] if name.endswith(".py") else name.strip(".").split(".")
            if parts[0] not in LIBRARIES and not names.issuperset(parts):
                yield name


def constants(node: ast.stmt) -> set[str]:
    """Return the names of constants and types that a statement binds, except TABLES."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
    return {name for name in names if name[0].isupper() and not TABLES.fullmatch(name)}


def duplicates() -> Iterator[str]:
    """Yield public functions, classes, types and constants of modules whose name another module has, too."""
    owners: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "jaxret").rglob("*.py")):
        folder = path.relative_to(ROOT / "jaxret").parts[0]
        usual = EVERY_CLI if folder == "cli" else EVERY_CONFIG if folder == "configs" else set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = {node.name} if isinstance(node, ast.ClassDef | Function) else constants(node)
            for name in sorted(names - usual):
                if not name.startswith("_"):
                    owners[name].append(path.relative_to(ROOT).as_posix())
    for name, files in sorted(owners.items()):
        if len(files) > 1:
            yield f"duplicate {name}: {', '.join(files)}"


def same_files() -> Iterator[str]:
    """Yield the names of the package's files that another file has, too, except in NAMED_AFTER."""
    paths: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "jaxret").rglob("[!_]*.py")):
        if path.relative_to(ROOT / "jaxret").parts[0] not in NAMED_AFTER:
            paths[path.name].append(path.relative_to(ROOT).as_posix())
    yield from (f"file {name}: {', '.join(files)}" for name, files in sorted(paths.items()) if len(files) > 1)


def mirror(path: Path) -> Iterator[str]:
    """Yield a violation if a long module has no test file of its name, or one of TESTED_ELSEWHERE has one."""
    name = path.relative_to(ROOT).as_posix()
    test = f"tests/{name.removeprefix('jaxret/').removesuffix('.py')}_test.py"
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if not name.startswith("jaxret/") or path.name == "__init__.py" or lines <= MOST_WITHOUT_TESTS:
        return
    elsewhere, exists = name in TESTED_ELSEWHERE, (ROOT / test).exists()
    if elsewhere and exists:
        yield f"mirror {name}: {test} exists, so remove the module from TESTED_ELSEWHERE"
    if not elsewhere and not exists:
        yield f"mirror {name}: {lines} lines, and no {test}"


def violations(folders: list[Path]) -> list[str]:
    """Return the sorted violations in files below some folders; duplicates and files of the same name are searched in
    the whole package, and shown if one of their files is below a folder."""
    files = sorted({path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py"))})
    shown = {path.relative_to(ROOT).as_posix() for path in files}
    pairs = [line for line in [*duplicates(), *same_files()] if shown & set(line.partition(": ")[2].split(", "))]
    return sorted([*pairs, *(line for path in files for line in [*check_file(path), *mirror(path)])])


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or [ROOT / folder for folder in FOLDERS]
    lines = violations(paths)
    print("".join(f"{line}\n" for line in lines), end="")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
