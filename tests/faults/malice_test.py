"""Files of an attacker: no code in them runs, no memory is allocated as they claim, no file outside is written, and the
error is one sentence."""

from __future__ import annotations

import json
import pickle
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.data.records import Query
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import Run, open_run
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_json, write_json
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.data_test import reseal
from tests.faults.scripts import refusal, run

REFUSALS = (ValueError, OSError, ArithmeticError)


class Canary:
    """An object that creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


@pytest.fixture
def victim(tiny: Tiny, tmp_path: Path) -> Path:
    shutil.copytree(tiny.run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def lists(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose passages are lists of vectors."""
    workdir = tmp_path_factory.mktemp("lists") / "run"
    overrides = {"head__name": "colbert", "head__colbert__late": True, "train__steps": 1}
    for script, *flags in (
        ("train.py", *tiny.training(workdir, **overrides)),
        ("encode.py", f"--workdir={workdir}", f"--corpus={tiny.data}"),
    ):
        done = run(script, *flags)
        assert done.returncode == 0, done.output
    return workdir


def search(opened: Run, folder: Path) -> Any:
    return Searcher(opened, folder, SearchOptions("xla")).search([Query("q", "river stone")], 5)


def refuses(trials: Trials, what: str, act: Callable[[], object], trace: Path | None = None, names: str = "") -> None:
    """Count a trial: it must be refused soon, with little memory, and without running code."""
    begin = time.monotonic()
    tracemalloc.start()
    try:
        act()
        message = "accepted"
    except REFUSALS as error:
        message = "" if names in str(error) else f"names no {names}: {error}"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    memory = tracemalloc.get_traced_memory()[1] >> 20
    tracemalloc.stop()
    seconds = time.monotonic() - begin
    ran = trace is not None and trace.exists()
    trials.count(
        not message and not ran and memory < 200 and seconds < 30,
        f"{what}: {message[:300]} {'IT RAN' if ran else ''} {memory} MiB, {seconds:.0f} s",
        detected=True,
    )


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    """Return the beginning of an .npy file that claims more data than it has."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(64)


@pytest.mark.faults(19)
def test_pickles(victim: Path, lists: Path, tmp_path: Path, trials: Trials) -> None:
    trace = tmp_path / "trace"
    pickled = pickle.dumps(Canary(trace))
    assert not trace.exists()
    pickle.loads(pickled)
    assert trace.exists(), "control: the pickle runs code"
    trace.unlink()
    array = tmp_path / "array.npy"
    np.save(array, np.array([Canary(trace)] * 5, object), allow_pickle=True)
    for workdir, name in ((victim, "vectors-00001-of-00023.npy"), (lists, "offsets-00001-of-00023.npy")):
        opened, folder = open_run(workdir), workdir / "embeddings" / "data"
        for content in (array.read_bytes(), pickled):
            whole = shutil.copytree(folder, tmp_path / "whole", dirs_exist_ok=True)
            (folder / name).write_bytes(content)
            reseal(folder, "00001-of-00023")
            refuses(trials, f"pickle as {name}", lambda: search(opened, folder), trace, name)  # noqa: B023
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
    step = victim / "checkpoints" / str(open_run(victim).checkpoint["step"])
    for path in (victim / "encoder" / "tokenizer.json", step / "_CHECKPOINT_METADATA", step / "params" / "_METADATA"):
        content = path.read_bytes()
        path.write_bytes(pickled)
        (victim / "seal.json").rename(tmp_path / "seal.json")
        refuses(trials, f"pickle as {path.name}", lambda: open_run(victim), trace)
        (tmp_path / "seal.json").rename(victim / "seal.json")
        path.write_bytes(content)


@pytest.mark.faults(19)
def test_code_in_a_model_folder(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """A model folder that asks to run its own Python: the code must not run, whether the folder is accepted or not."""
    trace, encoder = tmp_path / "trace", tmp_path / "encoder"
    shutil.copytree(tiny.encoder, encoder)
    (encoder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nclass Evil: pass\n")
    for name, kind in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        value = read_json(encoder / name)
        value |= {"auto_map": {kind: "evil.Evil" if kind == "AutoConfig" else ["evil.Evil", "evil.Evil"]}}
        write_json(encoder / name, value | {"trust_remote_code": True})
        workdir = tmp_path / kind
        done = run("train.py", *tiny.training(workdir, encoder__checkpoint=str(encoder), train__steps=1))
        clean = done.returncode == 0 or bool(refusal(done))
        trials.count(clean and not trace.exists(), f"{name}: {done.output}", detected=done.returncode != 0)


@pytest.mark.faults(19)
def test_headers_with_huge_sizes(victim: Path, lists: Path, tmp_path: Path, trials: Trials) -> None:
    """Sizes that would need all memory, with valid digests."""
    for workdir, name, shapes in (
        (victim, "vectors", [(2**62, 1, 32), (2**40, 1, 32), (2**31, 1, 32), (-1, 1, 32)]),
        (lists, "offsets", [(2**62,), (2**40,), (2**33,), (6,)]),
    ):
        opened, folder = open_run(workdir), workdir / "embeddings" / "data"
        path = folder / f"{name}-00001-of-00023.npy"
        whole = {p: p.read_bytes() for p in folder.iterdir()}
        for shape in shapes:
            path.write_bytes(header(shape, "<f4" if name == "vectors" else "<i8"))
            reseal(folder, "00001-of-00023")
            refuses(trials, f"{name} {shape}", lambda: search(opened, folder), names=str(folder))  # noqa: B023
        for p, content in whole.items():
            p.write_bytes(content)
    opened, folder = open_run(victim), victim / "embeddings" / "data"
    manifest = folder / "manifest.json"
    whole_manifest = manifest.read_bytes()
    wrong: list[dict[str, Any]] = [
        {"total_rows": 10**12},
        {"total_rows": -5},
        {"total_rows": "115"},
        {"rows_per_shard": 10**18},
        {"rows_per_shard": 0},
        {"dimension": 10**9},
        {"vectors_per_row": 2**40},
        {"shards": []},
        {"shards": [[]] * 23},
        {"layout": ["fixed"]},
        {"dtype": "object"},
        {"fingerprint": []},
    ]
    for totals in wrong:
        reseal(folder, "00001-of-00023", **totals)
        refuses(trials, str(totals)[:60], lambda: search(opened, folder), names="manifest.json")
        manifest.write_bytes(whole_manifest)
    assert tmp_path.exists()


@pytest.mark.faults(19)
def test_json_of_another_type(victim: Path, trials: Trials) -> None:
    """Files have a list, a number, null, an empty object, deep nesting or a repeated key instead of their object."""
    opened, folder = open_run(victim), victim / "embeddings" / "data"
    (victim / "seal.json").unlink()  # otherwise, the seal would be the reason
    texts = ["[]", "7", "null", '"x"', "{}", "[" * 100_000, '{"a": 1, "a": 2}']

    def open_untyped() -> None:
        done = run("search.py", f"--workdir={victim}", "--query=river")
        raise (ValueError if refusal(done) else AssertionError)(done.stderr)

    looks: dict[Path, Callable[[], object]] = {
        victim / "config.json": lambda: open_run(victim),
        victim / "contract.json": open_untyped,  # opened in another process, which has no typeguard
        victim / "encoder" / "config.json": lambda: open_run(victim),
        victim / "encoder" / "tokenizer.json": lambda: open_run(victim),
        folder / "manifest.json": lambda: search(opened, folder),
        folder / "corpus.json": lambda: Searcher(opened, folder, SearchOptions("xla")).texts.read(["p1"]),
    }
    for path, look in looks.items():
        whole = path.read_bytes()
        for text in texts:
            path.write_text(text)
            refuses(trials, f"{path.name} is {text[:12]}", look, names=path.name.removesuffix(".json"))
        path.write_bytes(whole)


@pytest.mark.faults(19)
def test_names_that_leave_the_folder(tiny: Tiny, victim: Path, trials: Trials) -> None:
    before = sorted(p for p in victim.parent.iterdir())
    opened = open_run(victim)
    for name in ("../../escape", "/tmp/escape", "..", ".", "a/b", "a\\b", ".hidden", "a\0b"):
        refuses(trials, f"--name={name!r}", lambda: encode_corpus(opened, Corpus.open(tiny.data), name, progress=False))  # noqa: B023
    for flag in ("--name=../../escape", "--name=.."):
        done = run("encode.py", f"--workdir={victim}", f"--corpus={tiny.data}", flag)
        trials.count("name" in refusal(done), done.output, detected=True)
    done = run("search.py", f"--workdir={victim}", "--query=river", "--corpus=../../escape")
    trials.count(bool(refusal(done)), done.output, detected=True)
    trials.count(sorted(victim.parent.iterdir()) == before, "something was written outside")


@pytest.mark.faults(19)
def test_paths_that_are_not_files(tiny: Tiny, victim: Path, tmp_path: Path, trials: Trials) -> None:
    """The path is a folder, a link to nothing, or a link to itself."""
    opened, folder = open_run(victim), victim / "embeddings" / "data"
    corpus = tmp_path / "corpus.jsonl"
    for what, make in {
        "a folder": lambda path: path.mkdir(),
        "a link to nothing": lambda path: path.symlink_to(tmp_path / "nowhere"),
        "a link to itself": lambda path: path.symlink_to(path),
    }.items():
        for path, look in (
            (folder / "ids-00001-of-00023.txt", lambda: search(opened, folder)),
            (folder / "vectors-00001-of-00023.npy", lambda: search(opened, folder)),
            (folder / "manifest.json", lambda: search(opened, folder)),
            (corpus, lambda: encode_corpus(opened, Corpus.open(corpus), "link", progress=False)),
        ):
            whole = path.read_bytes() if path.exists() else None
            path.unlink(missing_ok=True)
            make(path)
            refuses(trials, f"{path.name} is {what}", look, names=path.name)
            path.rmdir() if path.is_dir() else path.unlink()
            if whole is not None:
                path.write_bytes(whole)
    assert json.loads((folder / "manifest.json").read_text())["total_rows"] == 115
