"""The names and docstrings of Python's standard library, without running it.

Python sources are parsed (`ast`), and names are followed through imports and aliases in the syntax tree. Only compiled
modules, which have no source, are imported for their `__doc__`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Not documentation a programmer searches: tests, applications and jokes that happen to be shipped; internals under a
# public name; code for another platform; and what one Python 3.11 has and another lacks (distutils and lib2to3 are
# going, tkinter and turtle depend on how Python was packaged).
EXCLUDED = frozenset(
    {
        *("antigravity", "distutils", "encodings", "ensurepip", "genericpath", "idlelib", "lib2to3", "msilib", "nt"),
        *("ntpath", "nturl2path", "posix", "pydoc_data", "sre_compile", "sre_constants", "sre_parse", "this"),
        *("tkinter", "turtle", "turtledemo", "asyncio.windows_events", "asyncio.windows_utils", "ctypes.macholib"),
        "multiprocessing.popen_spawn_win32",
    }
)
TEST_PACKAGES = frozenset({"test", "tests"})
# Compiled modules are imported, because a name reaches us only as a public module of the standard library or from the
# import statement of one, and their initialisers do nothing but create objects; these are the exceptions. Importing
# readline takes over the terminal (and may print an escape code), _tkinter loads a graphical toolkit.
NEVER_IMPORTED = frozenset({"readline", "_tkinter"})
# Modules that users know by another name.
PUBLIC_NAMES = {"posixpath": "os.path", "_collections_abc": "collections.abc"}
# Modules that build some of their names when they run, where a parser cannot see them (`hashlib.sha256`, `re.Pattern`,
# `types.GeneratorType`). This file or every Python process imports them anyway.
BUILT_AT_RUN_TIME = ("hashlib", "re", "types")
# A module whose functions are the methods of one hidden instance: module -> (module, class) of that instance.
METHODS_AS_FUNCTIONS = {"multiprocessing": ("multiprocessing.context", "BaseContext")}
WINDOWS_TEST = re.compile(r"platform == 'win32'|name == 'nt'|name != 'posix'|^_?mswindows$")
MAX_ALIAS_DEPTH = 20  # more hops than any real alias takes: a cycle


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Imported:
    """`from module import name`, or `import module` where `name` is empty."""

    module: str
    name: str
    star: bool = False


@dataclass(frozen=True)
class Source:
    """A class or function in the source of `module`."""

    module: str
    node: Definition


@dataclass(frozen=True)
class Live:
    """An object of a compiled module, or that module."""

    value: object


@dataclass
class SourceModule:
    """What the top level of a module binds: for each name the bindings, the one that holds at run time first."""

    name: str
    docstring: str | None
    path: Path
    exported: set[str] = field(default_factory=set)  # the strings of __all__
    bindings: dict[str, list[Definition | Imported | ast.expr]] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    def bind(self, name: str, value: Definition | Imported | ast.expr, fallback: bool) -> None:
        bindings = self.bindings.setdefault(name, [])
        bindings.insert(len(bindings) if fallback else 0, value)


Entity = Source | Live | SourceModule


def is_private(dotted_name: str) -> bool:
    return any(part.startswith("_") for part in dotted_name.split("."))


def is_documented(value: object) -> bool:
    """Whether a docstring of `value` is about `value`; a constant only has that of its type."""
    return isinstance(value, type) or inspect.isroutine(value)


def strings(node: ast.AST) -> set[str]:
    """The string constants in a piece of syntax."""
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


class Library:
    """Follows names through the sources of the standard library without running them."""

    def __init__(self) -> None:
        self.root = Path(sysconfig.get_path("stdlib"))
        self.modules: dict[str, SourceModule | Live | None] = {}

    def load(self, name: str) -> SourceModule | Live | None:
        """The module called `name`, parsed if it has a source and imported if it is compiled; None if it is absent."""
        if name not in self.modules:
            stem = self.root.joinpath(*name.split("."))
            path = next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)
            if path is not None:
                tree = ast.parse(path.read_bytes(), filename=str(path))
                module = self.modules[name] = SourceModule(name, ast.get_docstring(tree), path)
                self._collect(module, tree.body)
                for method in self._methods_as_functions(name):
                    module.bind(method.name, method, fallback=True)
            else:
                self.modules[name] = self._import_compiled(name)
        return self.modules[name]

    def documents(self, name: str) -> Iterator[tuple[str, str]]:
        """(public name, raw docstring) of a module and everything it offers."""
        module = self.load(name)
        prefix = PUBLIC_NAMES.get(name, name)
        if isinstance(module, SourceModule):
            if module.docstring:
                yield prefix, module.docstring
            for member, entities in self._public_members(module).items():
                yield from self._describe(f"{prefix}.{member}", entities)
        elif isinstance(module, Live):
            if name != "builtins":
                yield from self._describe(prefix, [module])
            for member in self._star_names(module):
                dotted = member if name == "builtins" else f"{prefix}.{member}"
                yield from self._describe(dotted, self._member(module, member))

    def submodules(self, name: str) -> Iterator[str]:
        """`name` and the public modules below it."""
        yield name
        directory = self.root.joinpath(*name.split("."))
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            child = f"{name}.{path.stem}"
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            if is_module and not is_private(child) and path.stem not in TEST_PACKAGES and child not in EXCLUDED:
                yield from self.submodules(child)

    # Reading a module: from statements to bindings.

    def _import_compiled(self, name: str) -> Live | None:
        if name not in sys.stdlib_module_names or name in NEVER_IMPORTED:
            return None
        spec = importlib.util.find_spec(name)
        extension = spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
        if spec is None or not (extension or spec.origin == "built-in"):
            return None
        try:
            return Live(importlib.import_module(name))
        except ImportError:  # built without the library it wraps: this Python does not have the module
            return None

    def _methods_as_functions(self, name: str) -> list[ast.FunctionDef]:
        module_name, class_name = METHODS_AS_FUNCTIONS.get(name, ("", ""))
        module = self.load(module_name) if module_name else None
        bindings = module.bindings[class_name] if isinstance(module, SourceModule) else []
        bodies = [node.body for node in bindings if isinstance(node, ast.ClassDef)]
        return [n for body in bodies for n in body if isinstance(n, ast.FunctionDef) and not is_private(n.name)]

    def _collect(self, module: SourceModule, body: Sequence[ast.stmt], fallback: bool = False) -> None:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    # A setter, deleter or overload without a docstring must not hide the one before it.
                    module.bind(node.name, node, fallback or (ast.get_docstring(node) is None))
                case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.AugAssign(target=ast.Name(id="__all__")):
                    module.exported |= strings(node)
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="__all__")))):  # .append, .extend
                    module.exported |= strings(node)
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        if isinstance(target, ast.Name):
                            module.bind(target.id, value, fallback)
                case ast.Import(names=names):
                    for alias in names:
                        target_module = alias.name if alias.asname else alias.name.partition(".")[0]
                        module.bind(alias.asname or target_module, Imported(target_module, ""), fallback)
                case ast.ImportFrom():
                    self._collect_import(module, node, fallback)
                case ast.If(test=test, body=then, orelse=otherwise):
                    windows = WINDOWS_TEST.search(ast.unparse(test)) is not None
                    if "__name__" not in ast.unparse(test) and not windows:
                        self._collect(module, then, fallback)
                    self._collect(module, otherwise, fallback or not windows)
                case ast.Try(body=attempt, handlers=handlers, orelse=otherwise, finalbody=finally_):
                    self._collect(module, [*attempt, *otherwise, *finally_], fallback)
                    for handler in handlers:
                        self._collect(module, handler.body, fallback=True)

    def _collect_import(self, module: SourceModule, node: ast.ImportFrom, fallback: bool) -> None:
        origin = node.module or ""
        if node.level:
            package = module.package.split(".")
            origin = ".".join([*package[: len(package) - node.level + 1], *filter(None, [origin])])
        for alias in node.names:
            if alias.name != "*":
                module.bind(alias.asname or alias.name, Imported(origin, alias.name), fallback)
            else:
                for name in self._star_names(self.load(origin)):
                    module.bind(name, Imported(origin, name, star=True), fallback)

    def _star_names(self, module: SourceModule | Live | None) -> list[str]:
        """What `from module import *` binds."""
        if isinstance(module, SourceModule):
            return sorted(n for n in module.exported or module.bindings if not is_private(n))
        names = (name for name in vars(module.value) if not is_private(name)) if module else ()
        return sorted(name for name in names if is_documented(getattr(self._lookup(module, name)[0], "value", None)))

    # Following names: from bindings to the objects they stand for, best first.

    def _lookup(self, module: SourceModule | Live | None, name: str, depth: int = 0) -> list[Entity]:
        if isinstance(module, Live):
            # sys keeps the originals of its hooks, which test runners and debuggers replace, as __excepthook__ etc.
            original = f"__{name}__" if module.value is sys and hasattr(sys, f"__{name}__") else name
            return [Live(getattr(module.value, original))] if hasattr(module.value, original) else []
        if module is None or depth > MAX_ALIAS_DEPTH:
            return []
        found: list[Entity] = []
        for binding in module.bindings.get(name, []):
            if isinstance(binding, Imported):
                found += self._follow(binding, depth)
            elif isinstance(binding, Definition):
                found.append(Source(module.name, binding))
            elif not isinstance(binding, ast.Call):  # a call gives an instance, which has no docstring of its own
                found += self._evaluate(module, binding, depth)
        return found

    def _follow(self, binding: Imported, depth: int) -> list[Entity]:
        module = self.load(binding.module)
        if not binding.name:
            return [module] if module else []
        found = self._lookup(module, binding.name, depth + 1)
        submodule = None if found else self.load(f"{binding.module}.{binding.name}")
        return [submodule] if submodule else found

    def _evaluate(self, module: SourceModule | Live | None, expression: ast.expr, depth: int) -> list[Entity]:
        """What a name or dotted name in `module` refers to; a name bound to `f()` also stands for the class f."""
        if not isinstance(module, SourceModule):
            return []
        match expression:
            case ast.Name(id=name):
                call = [b for b in module.bindings.get(name, []) if isinstance(b, ast.Call)]
                instances = [e for b in call for e in self._evaluate(module, b.func, depth + 1)]
                return self._lookup(module, name, depth + 1) + instances
            case ast.Attribute(value=owner, attr=name):
                owners = self._evaluate(module, owner, depth + 1)
                return [found for entity in owners for found in self._member(entity, name, depth + 1)]
        return []

    def _member(self, owner: Entity, name: str, depth: int = 0) -> list[Entity]:
        if isinstance(owner, Source):
            return self._members(owner, inherited=True).get(name, [])
        return self._lookup(owner, name, depth)

    def _members(self, owner: Entity, inherited: bool = False) -> dict[str, list[Entity]]:
        """The public members of a class: its own and those of its private bases, or with `inherited` of all bases."""
        members: dict[str, list[Entity]] = {}
        if isinstance(owner, Live) and isinstance(owner.value, type):
            for name, value in vars(owner.value).items():
                is_method = isinstance(value, classmethod | staticmethod | property) or inspect.isroutine(value)
                if not is_private(name) and (is_method or inspect.isdatadescriptor(value)):
                    members[name] = [Live(value)]
        elif isinstance(owner, Source) and isinstance(owner.node, ast.ClassDef):
            for node in owner.node.body:
                if isinstance(node, Definition) and not is_private(node.name):
                    members.setdefault(node.name, []).append(Source(owner.module, node))
            bases = [e for base in owner.node.bases for e in self._evaluate(self.load(owner.module), base, 0)]
            private = [base for base in bases if inherited or is_private(self._qualified_name(base))]
            elsewhere = {name for base in bases if base not in private for name in self._members(base, inherited=True)}
            for base in private:
                for name, found in self._members(base, inherited).items():
                    if name not in elsewhere:
                        members.setdefault(name, []).extend(found)
        return members

    def _qualified_name(self, entity: Entity) -> str:
        """The dotted name of a class or function, by the public package that offers it if its module is private."""
        match entity:
            case Source(module=module, node=node):
                package = self.load(module.partition("._")[0])
                if isinstance(package, SourceModule) and node.name in package.bindings:
                    module = package.name
                return f"{PUBLIC_NAMES.get(module, module)}.{node.name}"
            case Live(value=type(__module__=module, __qualname__=name)):
                return f"{module}.{name}"
        return ""

    # Reading documentation.

    def _public_members(self, module: SourceModule) -> dict[str, list[Entity]]:
        members: dict[str, list[Entity]] = {}
        for name, bindings in sorted(module.bindings.items()):
            if not is_private(name) and (
                name in module.exported or any(self._is_own(module, binding) for binding in bindings)
            ):
                found = self._lookup(module, name)
                members[name] = found if found and not self._is_foreign(module, found[0]) else []
        if module.path.stem == "__init__":  # names that a package imports when they are first used
            siblings = [self.load(child) for child in self.submodules(module.name) if child != module.name]
            for name in sorted(module.exported - module.bindings.keys()):
                members[name] = [entity for sibling in siblings for entity in self._lookup(sibling, name)]
        if module.name in BUILT_AT_RUN_TIME:
            live = importlib.import_module(module.name)
            for name in live.__all__:
                if not members.get(name) and is_documented(getattr(live, name)):
                    members[name] = [Live(getattr(live, name))]
        return members

    def _is_own(self, module: SourceModule, binding: Definition | Imported | ast.expr) -> bool:
        """Whether a module offers a name as its own, rather than having imported it for its own use."""
        if not isinstance(binding, Imported):
            return True
        below = module.path.stem == "__init__" and f"{binding.module}.".startswith(f"{module.name}.")
        hidden = is_private(binding.module) or binding.module in EXCLUDED
        return bool(binding.name) and (below or (hidden and (binding.star or not module.exported)))

    def _is_foreign(self, module: SourceModule, entity: Entity) -> bool:
        """Whether something has a public home elsewhere, as `datetime.date` has, which sqlite3 calls `Date`."""
        home = self._qualified_name(entity).partition(".")[0]
        hidden = not home or is_private(home) or home in EXCLUDED
        return not hidden and home != PUBLIC_NAMES.get(module.name, module.name).partition(".")[0]

    def _describe(self, name: str, entities: list[Entity]) -> Iterator[tuple[str, str]]:
        docstrings = (self._docstring(entity) for entity in entities)
        if docstring := next(filter(None, docstrings), None):
            yield name, docstring
        members: dict[str, list[Entity]] = {}
        for entity in entities:
            for member, found in self._members(entity).items():
                members.setdefault(member, []).extend(found)
        if entities and isinstance(entities[0], Live):  # the Python version of a compiled class only lends docstrings
            members = {member: found for member, found in members.items() if member in self._members(entities[0])}
        for member, found in members.items():
            yield from self._describe(f"{name}.{member}", found)

    def _docstring(self, entity: Entity) -> str | None:
        match entity:
            case Live(value=value):
                docstring = getattr(value, "__doc__", None)
                return docstring if isinstance(docstring, str) else None
            case Source(module=name, node=node):
                if docstring := ast.get_docstring(node):
                    return docstring
                if isinstance(node, ast.ClassDef):  # documented by its constructor, if at all
                    constructors = (n for n in node.body if isinstance(n, Definition) and n.name == "__init__")
                    return next(filter(None, map(ast.get_docstring, constructors)), None)
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("wraps"):
                        wrapped = self._evaluate(self.load(name), decorator.args[0], 0)
                        return next(filter(None, map(self._docstring, wrapped)), None)
        return None
