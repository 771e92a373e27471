"""The scripts as a user runs them, each as a process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from jaxret.data.formats import Corpus
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import open_run
from jaxret.storage.atomic import read_json
from tests.pipeline import (
    REPOSITORY,
    command,
    contents,
    environment,
    run_script,
    train_arguments,
    untrained_run,
    write_data,
    write_encoder,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ (BEIR) and run/, an untrained run whose shards have three passages."""
    folder = tmp_path_factory.mktemp("scripts")
    data = write_data(folder / "data")
    untrained_run(folder / "run", write_encoder(folder / "encoder"), data, encode__shard_rows=3)
    return folder


@pytest.mark.slow
@pytest.mark.exhaustive
def test_encode_killed_and_continued(root: Path) -> None:
    """After kill -9 with some shards written, the same command continues, and every byte equals that of an
    uninterrupted job."""
    arguments = (f"--workdir={root / 'run'}", f"--corpus={root / 'data'}")
    folder = root / "run" / "embeddings" / "killed"
    process = subprocess.Popen(
        command("encode.py", *arguments, "--name=killed"),
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not list(folder.glob("shard-*.json")):
        assert process.poll() is None, "encode.py ended before it wrote a shard"
        time.sleep(0.001)
    process.kill()
    process.wait()
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("vectors-*.npy")}
    assert not (folder / "manifest.json").exists(), "control: it was killed before the end"

    continued = run_script("encode.py", *arguments, "--name=killed")
    assert continued.returncode == 0, continued.stderr
    alone = run_script("encode.py", *arguments, "--name=alone")
    assert alone.returncode == 0, alone.stderr
    assert contents(folder) == contents(root / "run" / "embeddings" / "alone")
    first = sorted(done)[0]
    assert (folder / first).stat().st_mtime_ns == done[first], "a complete shard is not written again"
    assert len(read_json(folder / "manifest.json")["shards"]) > len(done)


PROGRAMS = """
import runpy, sys
from jaxret.cli.app import enable_compilation_cache
enable_compilation_cache()  # JAX reads the variables when it is imported
from jax import monitoring
count = {}
def listen(event, **_):
    count[event] = count.get(event, 0) + 1
monitoring.register_event_listener(listen)
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    names = ("compile_requests_use_cache", "cache_hits", "cache_misses")
    print(*(count.get(f"/jax/compilation_cache/{name}", 0) for name in names), file=sys.stderr)
"""


@pytest.mark.exhaustive
def test_stdout_and_stderr_have_no_foreign_lines(root: Path, tmp_path: Path) -> None:
    """Train, encode and search print only expected lines. Compiled programs are cached in the user's folder, so the
    second search compiles nothing; a damaged cache, or one that cannot be written, changes only the time."""
    workdir, cache = tmp_path / "run", tmp_path / "cache"
    user = {k: v for k, v in environment().items() if not k.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    user["XDG_CACHE_HOME"] = str(cache)

    def run(*arguments: str, **more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=REPOSITORY, env=user | more, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        counts = lines.pop().split() if arguments[0] == "-c" else []
        # These lines are printed if a step takes over ten seconds.
        work = r"[0-9-]{10} [0-9:]{8} (train|validate|(rank|tokenize) \w+|encode( \w+)?|search): "
        assert [line for line in lines if not re.match(work, line)] == []
        lines = done.stdout.splitlines()
        return counts + [re.sub(r", \d+\.\d{3} s\)$", ")", line) for line in lines]  # removes the time of an answer

    config = train_arguments(root / "encoder", root / "data", workdir, train__steps=1, train__checkpoint_every=1)
    trained = run("train.py", *config)
    patterns = [
        r"attention: plain", r"tokens of data.train are kept in ", r"train: 48 examples from ", r"  40 queries: ",
        r"  \d+ passages: ", r"tokens of data.dev are kept in ", r"dev: \d+ examples", r"  \d+ queries: ",
        r"  \d+ passages: ", r"step 1: ", r"1 of 1 steps done; ",
    ]  # fmt: skip
    assert len(trained) == len(patterns), trained
    for line, pattern in zip(trained, patterns, strict=True):
        assert re.match(pattern, line), trained
    encoded = run("encode.py", f"--workdir={workdir}", f"--corpus={root / 'data'}")
    assert re.match(r"[\d,]+ passages are in ", encoded[-1])

    assert list((cache / "jaxret" / "compiled").iterdir())
    search = ("-c", PROGRAMS, "search.py", f"--workdir={workdir}", "--query=silver river")
    requests, _, misses, *answer = run(*search)
    assert int(misses) > 0
    assert run(*search) == [requests, requests, "0", *answer], "the second start compiles nothing"
    assert int(requests) > 0
    entries = list((cache / "jaxret" / "compiled").iterdir())
    for number, entry in enumerate(entries):
        data = entry.read_bytes()
        entry.write_bytes([b"", b"junk", data[: len(data) // 2]][number % 3])
    assert run(*search)[3:] == answer
    (tmp_path / "file").touch()
    assert run(*search, XDG_CACHE_HOME=str(tmp_path / "file"))[1:] == ["0", "0", *answer]


@pytest.mark.slow
def test_the_start_of_a_search_imports_and_traces_little(root: Path) -> None:
    """In a new process, imports of large modules and traces of the encoder take most of the time of a question; garbage
    collection took a tenth of it."""
    run = open_run(root / "run")
    encode_corpus(run, Corpus.open(root / "data"), "start", progress=False)
    program = """
import gc, runpy, sys
from jaxret.models.encoders.architectures.bert import Bert, BertLayer
from jaxret.storage import checkpoint
calls = []
def counted(owner, name):
    plain = getattr(owner, name)
    def call(*arguments, **options):
        calls.append(name)
        return plain(*arguments, **options)
    setattr(owner, name, call)
counted(BertLayer, "attention_block")
counted(checkpoint, "leaf_digests")
sys.argv = ["jaxret", "search", *sys.argv[1:]]
collections = lambda: sum(generation["collections"] for generation in gc.get_stats())
before = collections()
try:
    runpy.run_module("jaxret", run_name="__main__")
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules} | {n for n in sys.modules if "pallas." in n}))
    print(*calls)
    print(collections() - before)
"""
    arguments = (f"--workdir={root / 'run'}", "--corpus=start", "--query=silver river", "--k=1")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *answer, modules, calls, collected = done.stdout.splitlines()
    assert "silver" in "".join(answer) or "river" in "".join(answer), "the search has an answer"
    unused = {"datasets", "grain", "ir_measures", "matplotlib", "optax", "orbax", "pyarrow", "scipy"}
    unused |= {
        "regex",
        "tensorflow_datasets",
        "torch",
        "tqdm",
        "transformers",
        "jax.experimental.pallas.tpu",
        "jax.experimental.pallas.triton",
    }
    assert unused & set(modules.split()) == set()
    # The encoder's program traces its loop and its last layer; the run records its parameters. The digests are compared
    # once.
    assert Counter(calls.split()) == {"attention_block": 2, "leaf_digests": 1}
    assert int(collected) <= 20  # collections that run while flags are parsed


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_one_sentence(root: Path, tmp_path: Path) -> None:
    """The sentence is the same whatever else Orbax reads at that time. The test runs ten times, because it is a
    race."""
    shutil.copytree(root / "run", tmp_path / "run", ignore=shutil.ignore_patterns("embeddings"))
    index = tmp_path / "run" / "checkpoints" / "0" / "params" / "manifest.ocdbt"
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 4
    index.write_bytes(data)
    code = f"""
from jaxret.cli.app import silence_libraries
silence_libraries()
from jaxret.runs.run import open_run
for _ in range(10):
    try:
        open_run({str(tmp_path / "run")!r})
    except ValueError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300
    )
    folder = tmp_path / "run" / "checkpoints" / "0"
    assert [line.partition("; ")[0] for line in done.stdout.splitlines()] == [
        f"{folder} is damaged: {folder}/params cannot be read"
    ] * 10
    assert done.stderr == ""


def test_only_the_modules_of_an_extra_import_its_packages() -> None:
    """A verb that needs no extra must work without any of them."""
    program = """
import importlib, pkgutil, sys
import jaxret
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
for module in pkgutil.walk_packages(jaxret.__path__, "jaxret."):
    if not module.name.startswith("jaxret.cli.") and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError:
            print(module.name)
"""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    packages = {re.split(r"[\[<>=]", line)[0].replace("-", "_") for line in extras}
    imported = (packages - {"jax"}) | {"PIL", "faiss", "mteb", "psycopg", "zstandard", "seismic", "tensorflow_datasets"}
    done = subprocess.run(
        [sys.executable, "-c", program, *sorted(imported)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    folders = {name.rpartition(".")[0] for name in done.stdout.splitlines()}
    assert folders - {"jaxret.serving"} == {"jaxret.export.stores", "jaxret.experiments.mteb"}
