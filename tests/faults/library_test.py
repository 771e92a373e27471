"""The library in a user's program: threads that share an index, files that change under it, forked children, and
arguments of any type."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import jaxret
from jaxret.experiments.build_index import index_corpus
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.shards import ShardError
from jaxret.runs.workdir import Workdir
from jaxret.search.approximate.faiss_index import MappedCorpus, open_faiss_index
from jaxret.search.backends.select import select_backend
from jaxret.search.search_options import IndexOptions
from jaxret.search.vectors.exact import search
from jaxret.types import Ragged
from tests.fault_table import Trials
from tests.pipeline import REPOSITORY, environment, untrained_run, write_data, write_encoder
from tests.search.approximate.faiss_index_test import built, vectors, written
from tests.search.changed_files_test import CHANGES, TEXTS, write
from tests.search.vectors.exact_test import assert_same_bits, blocks, brute_force, gaussian, record_depths

TRIALS, THREADS = 50, 32
COLOURS = ("red", "blue", "green")
QUESTIONS = ["river stone music", "silver garden", "winter", "meadow of copper", "old castle"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 300 passages in three colours, and two approximate indexes of them."""
    root = tmp_path_factory.mktemp("library")
    write_encoder(root / "encoder")
    write_data(root / "data")
    untrained_run(root / "run", root / "encoder", root / "data", head__token="mean", normalize=True)
    words = random.Random(1)
    vocabulary = ["river", "stone", "music", "silver", "garden", "winter", "meadow", "copper", "castle", "old"]
    rows = [
        {
            "_id": f"p{number}",
            "text": " ".join(words.choices(vocabulary, k=6)),
            "metadata": {"colour": COLOURS[number % 3]},
        }
        for number in range(300)
    ]
    (root / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    retriever = jaxret.Retriever.open(root / "run")
    jaxret.Index.build(retriever, root / "corpus.jsonl", "c", jaxret.EncodeOptions(shard_rows=90), progress=False)
    for factory in ("IVF16,Flat", "HNSW8"):
        index_corpus(Workdir(root / "run"), IndexOptions(factory, sample=30))
    return root / "run"


@pytest.mark.faults(32)
def test_threads_that_share_indexes(run: Path, trials: Trials) -> None:
    """Every thread searches several indexes with several k; every result is that of a single thread."""
    retriever = jaxret.Retriever.open(run)

    def opened(**options: Any) -> jaxret.Index:
        return jaxret.Index.open(retriever, "c", jaxret.SearchOptions(**options))

    exhaustive = opened(backend="xla")
    indexes = [
        exhaustive,
        opened(backend="faiss-cpu"),
        exhaustive.filtered("colour:red"),
        opened(backend="faiss-cpu", filters=("colour:blue", "colour:green")),
        *(opened(index="IVF16,Flat", index_parameters=f"nprobe={lists}") for lists in (1, 4, 16)),
        *(opened(index="HNSW8", index_parameters=f"efSearch={width}") for width in (4, 64)),
    ]
    searches = [
        (index, questions, k)
        for index in indexes
        for questions in (QUESTIONS[:1], QUESTIONS[1:3], QUESTIONS)
        for k in (1, 7, 100)
    ]

    def ranking(one: tuple[jaxret.Index, list[str], int]) -> list[list[tuple[str, float]]]:
        index, questions, k = one
        return [[(hit.id, hit.score) for hit in hits] for hits in index.search(questions, k, texts=False)]

    alone = {number: ranking(one) for number, one in enumerate(searches)}
    assert len({json.dumps(result) for result in alone.values()}) > len(searches) // 2, "control: results differ"
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            for trial in range(TRIALS):
                order = random.Random(trial).choices(range(len(searches)), k=2 * THREADS)
                results = threads.map(lambda number: ranking(searches[number]), order)
                wrong = [number for number, result in zip(order, results, strict=True) if result != alone[number]]
                trials.count(not wrong, f"{trial}: other results of {[searches[number][2] for number in wrong]}")
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.faults(34)
def test_a_corpus_that_changes_below_an_open_index(run: Path, tmp_path: Path, trials: Trials) -> None:
    """The result has the old texts, if the file was restored; or an error names the file. It never has other texts."""
    retriever = jaxret.Retriever.open(run)
    cases = list(itertools.product(["corpus.jsonl", "corpus.jsonl.gz", "corpus.json"], CHANGES))
    for trial in range(TRIALS):
        name, change = cases[trial % len(cases)]
        path = tmp_path / str(trial) / name
        path.parent.mkdir()
        write(path)
        index = jaxret.Index.build(retriever, path, f"changed-{trial}", progress=False)
        before = index.search(QUESTIONS[:1], 5)
        assert {hit.text for hit in before[0]} <= {passage.text for passage in TEXTS}
        original = path.read_bytes()
        CHANGES[change](path)
        changed = path.read_bytes() != original
        try:
            index.search(QUESTIONS[:1], 5)
            message = "other texts" if changed else ""
        except ValueError as error:
            message = "" if str(path) in str(error) or path.name in str(error) else f"without its name: {error}"
        path.write_bytes(original)
        again = index.search(QUESTIONS[:1], 5)
        trials.count(not message and again == before, f"{name} {change}: {message}", detected=changed)


@pytest.mark.faults(34)
def test_shards_and_indexes_that_are_cut_while_they_are_mapped(tmp_path: Path, trials: Trials) -> None:
    """Reading behind the end of a mapped file would end the process."""
    queries = gaussian(5, 16, seed=1)
    whole = open_encoded(written(tmp_path / "whole" / "embeddings" / "c", vectors(1)))
    name = built(whole, "IVF8,Flat").name
    for trial in range(TRIALS):
        chosen = random.Random(trial)
        folder = tmp_path / str(trial)
        subprocess.run(["cp", "-r", tmp_path / "whole", folder], check=True)
        encoded_corpus = open_encoded(folder / "embeddings" / "c")
        index, mapped = open_faiss_index(encoded_corpus, name), MappedCorpus(encoded_corpus)
        before = index.search(queries, mapped, 10).rows
        path = chosen.choice(sorted(folder.rglob("vectors-*.npy")) + sorted(folder.rglob("index.faiss")))
        size = path.stat().st_size
        os.truncate(path, chosen.choice([0, 100, size // 2, size - 1, chosen.randrange(size)]))
        try:
            # lists that are not searched may be cut; results are compared
            outcome = (index.search(queries, mapped, 10).rows == before).all()
            trials.count(bool(outcome), f"{path.name}: other rows")
        except ShardError as error:
            trials.count(str(path) in str(error), f"{path.name}: {error}", detected=True)


FORKING = """
import atexit, os, pickle, sys
import jaxret
from jaxret.storage.temporary import TemporaryFolder
retriever = jaxret.Retriever.open(sys.argv[1])
index = jaxret.Index.open(retriever, "c")
before, pickled = index.search(["river stone"], 2), pickle.dumps(index)
WORKS = {
    "search": lambda: index.search(["river stone"]),
    "encode": lambda: retriever.encode_passages(["x"]),
    "open a run": lambda: jaxret.Retriever.open(sys.argv[1]),
    "open a corpus": lambda: jaxret.Index.open(retriever, "c"),
    "unpickle": lambda: pickle.loads(pickled),
    "build": lambda: jaxret.Index.build(retriever, ["river"], "forked"),
    "append": lambda: index.append(["river"]),
    "delete": lambda: index.delete(["p1"]),
    "nothing": lambda: None,
}
for trial in range(int(sys.argv[2])):
    name = list(WORKS)[trial % len(WORKS)]
    temporary = TemporaryFolder()
    child = os.fork()
    if not child:
        try:
            WORKS[name]()
            status = 0 if name == "nothing" else 3
        except RuntimeError as error:
            status = 0 if str(error).startswith("this process was forked from process") else 4
        except BaseException as error:
            sys.stderr.write(f"{error!r}\\n")
            status = 5
        del temporary
        atexit._run_exitfuncs()  # as sys.exit does; JAX's own end would wait for its threads for ever
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    right = index.search(["river stone"], 2) == before
    print(name.replace(" ", "-"), status, temporary.path.is_dir(), right, flush=True)
"""


@pytest.mark.faults(35)
def test_children_that_are_forked(run: Path, trials: Trials) -> None:
    """A child that computes is refused, and the parent keeps its files and its results."""
    program = [sys.executable, "-c", FORKING, str(run), str(TRIALS)]
    done = subprocess.run(program, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert len(lines) == TRIALS, done.stderr[-2000:]
    for line in lines:
        name, *outcome = line.split()
        trials.count(outcome == ["0", "True", "True"], f"{line}: {done.stderr[-500:]}", detected=name != "nothing")
    assert not (run / "embeddings" / "forked").exists()


@pytest.mark.faults(36)
def test_vectors_of_which_thousands_are_equal(monkeypatch: pytest.MonkeyPatch, trials: Trials) -> None:
    """The search needs no more or deeper passes than for random vectors, and gives the bits of a brute force."""
    depths = record_depths(monkeypatch)
    for trial in range(TRIALS):
        chosen = random.Random(trial)
        count, k = chosen.choice([1_000, 3_000, 10_000]), chosen.choice([1, 10, 100])
        backend = select_backend("xla" if trial % 2 else "faiss-cpu", precision="float32", multi_vector=trial % 4 == 1)
        passages = gaussian(count, 1, 16, seed=trial)
        equal = chosen.sample(range(count), chosen.choice([count, count // 2, count - 3]))
        passages[equal] = passages[equal[0]]
        queries = gaussian(4, 16, seed=trial)
        taken: dict[str, list[int]] = {}
        for name, each in {"equal": passages, "random": gaussian(count, 1, 16, seed=trial + 1000)}.items():
            depths.clear()
            shards = [Ragged.from_stacked(b) for b in blocks(each, 1000)] if trial % 4 == 1 else blocks(each, 1000)
            result = search(queries, shards, k, backend)
            taken[name] = list(depths)
            assert_same_bits(result, brute_force(queries, each, k))
        outcome = max(taken["equal"]) <= max(taken["random"]) and len(taken["equal"]) <= len(taken["random"])
        trials.count(outcome, f"{trial}: {count} vectors, {len(equal)} of them equal, k={k}: depths {taken}")


WRONG_TYPES = """
import inspect, json, sys
from pathlib import Path
from jaxret import EncodeOptions, Index, Passage, Retriever, SearchOptions
run, folder = sys.argv[1], Path(sys.argv[2])
retriever = Retriever.open(run)
index = Index.open(retriever, "c")
CALLS = {
    Retriever.open: {"workdir": run},
    Retriever.from_model: {"source": f"{run}/../encoder", "token": "mean"},
    Retriever.train: {"config": "mlr", "workdir": str(folder / "new")},
    retriever.encode_queries: {"queries": ["x"]},
    retriever.encode_passages: {"passages": ["x"]},
    Index.open: {"source": retriever, "corpus": "c"},
    Index.build: {"retriever": retriever, "corpus": ["x"]},
    index.search: {"queries": ["x"]},
    index.append: {"passages": ["x"]},
    index.delete: {"ids": ["p1"]},
    index.rows: {},
    SearchOptions: {},
    EncodeOptions: {},
}
VALUES = [None, True, -1, 2.5, float("nan"), 10**5000, b"x", [1], {"a": 1}, (None,), object(), "\\udc80", "\\0", ""]
VALUES += [Passage(1, None), lambda: 1, int]
def outcome_of(call, arguments):
    try:
        call(**arguments)
        return "accepted"
    except (ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"UNEXPECTED {error!r}"
for call, right in CALLS.items():
    usual = outcome_of(call, right)  # "mlr" has no data to train on, the others are accepted
    for name, parameter in inspect.signature(call).parameters.items():
        for number, value in enumerate(VALUES):
            outcome = outcome_of(call, right | {name: value})
            outcome = "accepted" if outcome == usual else outcome
            print(json.dumps([call.__qualname__, name, number, outcome]), flush=True)
"""


@pytest.mark.faults(37)
def test_arguments_of_any_type(run: Path, tmp_path: Path, trials: Trials) -> None:
    """Each argument is accepted, or refused by a ValueError (or a FileNotFoundError) of one line with its name."""
    program = [sys.executable, "-c", WRONG_TYPES, str(run), str(tmp_path)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "backslashreplace", "timeout": 300}
    done = subprocess.run(program, cwd=REPOSITORY, env=environment(), **options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]  # encoding prints further lines
    assert len(lines) > 500, "control: many calls were tried"
    for line in lines:
        call, name, number, outcome = json.loads(line)
        named = name in outcome or "has no such key" in outcome  # the second is the message for a key of a config
        clear = outcome == "accepted" or (named and "UNEXPECTED" not in outcome and "\n" not in outcome)
        trials.count(clear, f"{call}({name}=value {number}): {outcome}", detected=outcome != "accepted")
