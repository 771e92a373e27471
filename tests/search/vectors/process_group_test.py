"""Processes that search together: each holds a part of the vectors, and the result is that of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import append_corpus, delete_passages
from jaxret.index.shards import ShardWriter
from jaxret.search.backends.select import select_backend
from jaxret.search.passage_vectors import PassageVectors
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.process_group import merge_results
from jaxret.storage.atomic import read_json
from jaxret.types import Ragged
from tests.pipeline import ONE_DEVICE, REPOSITORY, environment, free_address, untrained_run, write_data, write_encoder
from tests.storage.buckets.servers import finish as finish_one
from tests.storage.buckets.servers import gcs_server
from tests.storage.buckets.servers import start as start_client

ROWS = 10  # rows of a shard
# Name -> k and options. Each passage of the first part has a copy in the second one, which ties with it.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "auto": (7, {}),
    "all": (500, {"backend": "xla"}),
    "bfloat16": (7, {"backend": "xla", "precision": "bfloat16"}),
    "int8": (3, {"backend": "xla", "precision": "int8"}),
    "filter": (7, {"filters": ("colour:red",)}),
    "cut": (7, {"dimension": 4}),
    "documents": (7, {"max_passage": True}),
}
KINDS: dict[str, dict[str, Any]] = {
    "one": {"head__token": "mean", "normalize": True},
    "mvr": {"head__name": "mvr", "head__mvr__count": 3},
    "me_bert": {"head__name": "me_bert", "head__me_bert__count": 3},
    "late": {"head__name": "colbert", "head__colbert__late": True, "head__colbert__projection": 6},
    "splade": {"head__name": "splade", "head__splade__special_ids": (0, 2, 3)},
}
# A process NUMBER of COUNT that searches in all these ways; it writes NAME.trec, and what it held to NUMBER.json.
SEARCHES = """
import json, sys
from pathlib import Path
opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
from jaxret.data.formats import QuerySource, write_run
from jaxret.parallel.processes import agreement, initialize_distributed
from jaxret.runs.run import open_run
from jaxret.search.search_options import SearchOptions
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.search.searcher import Searcher
address, count, number, workdir, data, out, cases = sys.argv[1:]
if int(count) > 1:
    initialize_distributed(address, int(count), int(number))
out = Path(out)
out.mkdir(exist_ok=True)

def search_all():
    run, queries, held = open_run(workdir), QuerySource.open(data).read()[:9], {}
    for name, (k, options) in json.loads(cases).items():
        searcher = Searcher(run, corpus_folder(run.workdir), SearchOptions(**options, all_processes=True))
        outcome = searcher.search(queries, k)
        held[name] = [searcher.vectors.first_row, sum(len(shard) for _, shard in searcher.vectors.loaded_corpus)]
        if searcher.group.leads:
            write_run(out / f"{name}.trec", outcome.rankings, tag="t")
        else:
            assert outcome.rankings == {}
    return held

with agreement():
    held = search_all()
files = sorted(path.split("embeddings/")[1] for path in opened if path.endswith(".npy") and "vectors-" in path)
(out / f"{number}.json").write_text(json.dumps({"held": held, "files": files}))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, and a corpus with colours: two files with the same texts under different ids."""
    folder = tmp_path_factory.mktemp("together")
    write_encoder(folder / "encoder")
    corpus = write_data(folder / "data") / "corpus.jsonl"
    passages = [json.loads(line) for line in corpus.read_text().splitlines()]
    for name in ("corpus", "again"):
        lines = [
            {**passage, "_id": f"{name[0]}{i // 2}#{i % 2}", "metadata": {"colour": "red" if i % 3 else "blue"}}
            for i, passage in enumerate(passages)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "gone.txt").write_text("c1#1\nc20#0\na3#1\n")
    return folder


def encoded_run(root: Path, kind: str) -> Path:
    """A run of a kind. Its corpus has two parts, from which some passages are deleted."""
    run = untrained_run(root / kind, root / "encoder", root / "data", **KINDS[kind])
    options = EncodeOptions(shard_rows=ROWS)
    folder = encode_corpus(run, Corpus.open(root / "corpus.jsonl"), options=options, progress=False).folder
    append_corpus(run, Corpus.open(root / "again.jsonl"), folder, options, progress=False)
    delete_passages(folder, root / "gone.txt")
    return run.workdir.path


def start(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment() | ONE_DEVICE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(jobs: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for processes to end; return exit status, output and errors of each."""
    try:
        outputs = [job.communicate(timeout=240) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, *output) for job, output in zip(jobs, outputs, strict=True)]


def search_all(root: Path, kind: str, count: int, cases: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, bytes]:
    """Search with several processes; check the parts that they held; return the run files."""
    out, address = root / f"{kind}-{count}", free_address()
    fixed = [str(root / kind), str(root / "data"), str(out), json.dumps(cases)]
    done = finish([start("-c", SEARCHES, address, str(count), str(number), *fixed) for number in range(count)])
    assert [status for status, _, _ in done] == [0] * count, done
    parts = [json.loads((out / f"{number}.json").read_text()) for number in range(count)]
    for name in cases:
        held = [part["held"][name] for part in parts]
        assert [first for first, _ in held] == [sum(rows for _, rows in held[:i]) for i in range(count)]
        assert max(rows for _, rows in held) <= sum(rows for _, rows in held) / count + ROWS
    files = [set(part["files"]) for part in parts]
    assert sum(map(len, files)) == len(set().union(*files)), "no file of vectors is opened in two processes"
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.trec"))}


@pytest.mark.parametrize("count", [2, 5, 20])
def test_the_results_of_all_ranges_are_those_of_the_corpus(count: int, tmp_path: Path) -> None:
    """Many passages of different ranges tie. Of 20 ranges, most have no shard."""
    random = np.random.default_rng(0)
    passages, questions = (random.integers(-1, 2, (size, 1, 6)).astype(np.float32) for size in (90, 7))
    writer = ShardWriter(tmp_path, len(passages), ROWS, {})
    for shard in writer.pending():
        rows = range(shard.start, shard.stop)
        writer.write(shard, passages[shard.start : shard.stop], [f"p{row}" for row in rows])
    writer.finish()
    corpus, queries, backend = open_encoded(tmp_path), Ragged.from_stacked(questions), select_backend("faiss-cpu")
    results = []
    for number in range(count):
        first_row, part = corpus.in_range(number, count)
        results.append(PassageVectors(part, part, first_row, backend).search(queries, 25))
    whole, merged = search(queries, corpus, 25, backend), merge_results(results, 25, "in each range")
    np.testing.assert_array_equal(merged.rows, whole.rows)
    np.testing.assert_array_equal(merged.scores, whole.scores)
    assert len(np.unique(whole.scores[0])) < 10, "control: passages tie"


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(root: Path) -> None:
    encoded_run(root, "one")
    alone = search_all(root, "one", 1, CASES)
    assert search_all(root, "one", 2, CASES) == alone
    assert alone.keys() == {f"{name}.trec" for name in CASES}
    assert alone["bfloat16.trec"] == alone["auto.trec"]
    assert len(set(alone.values())) == len(CASES) - 1
    ids = [line.split()[2] for line in alone["all.trec"].decode().splitlines()]
    twins = [(first, second) for first, second in pairwise(ids) if first[1:] == second[1:]]
    assert len(twins) > 900, "many ties between passages in different ranges"
    assert {first[0] for first, _ in twins} == {"c"}, "the lower row comes first"


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_four_processes_give_the_result_of_one(kind: str, root: Path) -> None:
    if not (root / kind).exists():
        encoded_run(root, kind)
    plain = {name: CASES[name] for name in ("auto", "filter", "documents")} | {
        "few": (2, {"filters": ("colour:blue",)})
    }
    cases = {"one": CASES, "late": plain | {"int8": CASES["int8"]}}.get(kind, plain)
    alone = search_all(root, kind, 1, cases)
    assert search_all(root, kind, 4, cases) == search_all(root, kind, 2, cases) == alone


@pytest.fixture(scope="module")
def one(root: Path) -> Path:
    return root / "one" if (root / "one").exists() else encoded_run(root, "one")


def search_together(*flags_of: list[str], cwd: Sequence[Path] = (REPOSITORY, REPOSITORY)) -> list[tuple[int, str, str]]:
    """Run search.py in one process per list of flags, until all end."""
    address, script = free_address(), str(REPOSITORY / "search.py")
    job = [f"--coordinator={address}", f"--num_processes={len(flags_of)}"] if len(flags_of) > 1 else []
    numbers = [[f"--process_id={number}"] if job else [] for number in range(len(flags_of))]
    return finish([start(script, *job, *own, *flags, cwd=at) for own, flags, at in zip(numbers, flags_of, cwd)])


def errors_of(done: list[tuple[int, str, str]]) -> list[str]:
    """Check that all processes failed; return the one line of errors of each."""
    assert [(status, output) for status, output, _ in done] == [(1, "")] * len(done), done
    return ["".join(errors.splitlines(keepends=True)).rstrip("\n") for _, _, errors in done]


@pytest.mark.exhaustive
def test_only_the_first_process_writes_and_prints(one: Path, root: Path) -> None:
    results, data = [], root / "data"
    for count, more in ((1, ["--latency=0"]), (2, [])):
        flags = [f"--workdir={one}", f"--queries={data}", f"--qrels={data}", "--k=100", "--dpr_results", *more]
        done = search_together(*[flags] * count)
        assert [status for status, _, _ in done] == [0] * count, done
        assert [other[1:] for other in done[1:]] == [("", "")] * (count - 1)
        evaluation = read_json(one / "eval" / "data.test.json")
        run_files = [path.read_bytes() for path in sorted((one / "runs").glob("data.test.*"))]
        results.append((run_files, {key: evaluation[key] for key in evaluation if key != "provenance"}))
        assert evaluation["provenance"]["search"]["backend"].endswith(", in each of 2 processes") == (count == 2)
    assert results[0] == results[1]
    assert len(results[0][0]) == 2


@pytest.mark.slow
def test_other_settings_are_an_error_in_every_process(one: Path) -> None:
    first, second = errors_of(search_together(*[[f"--workdir={one}", "--query=river", f"--k={k}"] for k in (3, 4)]))
    assert first == second
    assert first.startswith(
        "error: process 1 searches with other settings: --k is '4', but '3' in process 0. Start the same"
    )


@pytest.mark.exhaustive
def test_another_corpus_is_an_error_in_every_process(one: Path, root: Path, tmp_path: Path) -> None:
    """The hosts do not share a disk."""
    shutil.copytree(one, tmp_path / "one")
    (tmp_path / "ids.txt").write_text("c2#1\n")
    delete_passages(tmp_path / "one" / "embeddings" / "corpus", tmp_path / "ids.txt")
    flags = ["--workdir=one", "--query=river"]
    first, second = errors_of(search_together(flags, flags, cwd=(root, tmp_path)))
    assert first == second
    assert first.startswith("error: process 1 searches with other settings: the corpus is ['")


@pytest.mark.exhaustive
def test_an_error_in_one_process_ends_all(one: Path, tmp_path: Path) -> None:
    shutil.copytree(one, tmp_path / "one")
    path = max((tmp_path / "one" / "embeddings" / "corpus").glob("part-*/vectors-*.npy"))
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    flags = [f"--workdir={tmp_path / 'one'}", "--query=river"]
    first, second = errors_of(search_together(flags, flags))
    assert second.startswith(f"error: {path} (rows 110 to 114): damaged (its SHA-256 differs from the one")
    assert first == second.replace("error: ", "error: process 1 of this job ended with ShardError: ")


DYING = """
import os, sys
from jaxret.cli.app import report_errors
from jaxret.data.formats import QuerySource
from jaxret.parallel.processes import agreement, initialize_distributed
from jaxret.runs.run import open_run
from jaxret.search.search_options import SearchOptions
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.search.searcher import Searcher
address, number, workdir, data = sys.argv[1:]
initialize_distributed(address, 2, int(number))
run = open_run(workdir)
searcher = Searcher(run, corpus_folder(run.workdir), SearchOptions(all_processes=True))
queries = QuerySource.open(data).read()
searcher.search(queries, 3)
if number == "1":
    os.kill(os.getpid(), 9)
with report_errors():
    with agreement():
        searcher.search(queries, 4)
"""


@pytest.mark.exhaustive
def test_a_process_that_dies_ends_the_job(one: Path, root: Path) -> None:
    address = free_address()
    jobs = [start("-c", DYING, address, str(number), str(one), str(root / "data")) for number in range(2)]
    assert jobs[1].wait(timeout=240) == -signal.SIGKILL
    killed = time.monotonic()
    (status, _, errors), _ = finish(jobs)
    assert time.monotonic() - killed < 60
    assert status == 1
    assert errors.startswith("error: another process of this job is gone; run the same command on all hosts again")


@pytest.mark.exhaustive
def test_a_corpus_in_a_bucket(one: Path, root: Path, tmp_path: Path) -> None:
    """Each process fetches only the vectors of its own range, and the first one publishes the results."""
    run, more = "gs://bucket/runs/one", [f"--queries={root / 'data'}", f"--qrels={root / 'data'}", "--k=9"]
    with gcs_server() as (_, clients):

        def finished(*arguments: str) -> str:
            return finish_one(start_client(arguments[0], clients | ONE_DEVICE, *arguments[1:]))

        finished("-m", "jaxret", "copy", str(one), run)
        finished("search.py", f"--workdir={one}", "--latency=0", *more)
        job = [f"--workdir={run}", f"--coordinator={free_address()}", "--num_processes=2", *more]
        jobs = [start_client("search.py", clients | ONE_DEVICE, *job, f"--process_id={i}") for i in range(2)]
        first, second = (finish_one(job) for job in jobs)
        assert f"run: {run}/runs/data.test.trec" in first
        assert run not in second
        finished("-m", "jaxret", "copy", run, str(tmp_path / "one"))
    assert (tmp_path / "one/runs/data.test.trec").read_bytes() == (one / "runs/data.test.trec").read_bytes()


@pytest.mark.daily("index")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(
            ["--query=a", "--index=x"], "several processes search exactly: remove candidates and index, or", id="index"
        ),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                (["--query=a", "--candidates=mean:9"], "several processes search exactly: remove candidates and"),
                (["--interactive"], "--interactive answers in one process: remove --coordinator"),
                (["--queries=q", "--latency=9"], "--latency and --latency_passages time one process: remove them, or"),
                (["--queries=q", "--latency_passages=9"], "--latency and --latency_passages time one process: remove"),
            ]
        ),
    ],
)
def test_options_for_one_process_are_refused(flags: list[str], message: str) -> None:
    """The process does not wait for the others first."""
    done = finish([start("search.py", "--workdir=w", "--coordinator=127.0.0.1:9", "--num_processes=2", *flags)])
    assert errors_of(done)[0].startswith(f"error: {message}")
