"""A corpus searched by the workers of a Ray cluster on loopback: the results equal those of one process, although hosts
die and join."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.formats import Corpus, QuerySource, TrainingSource
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.mining.mining_job import MiningJob, mine_negatives, require_run_pool
from jaxret.mining.mining_settings import MiningSettings
from jaxret.runs.ray_cluster import RETRIES, EngineOptions, ray_workers
from jaxret.runs.run import open_run
from jaxret.search.ray_search import open_searcher
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.search.vectors.process_group import SeparateRange
from jaxret.storage.atomic import read_json
from tests.pipeline import command, contents, environment, run_script, untrained_run, write_data, write_encoder
from tests.runs.ray_hosts import add_host, ray_cluster, stop_second_worker
from tests.search.vectors.process_group_test import CASES, KINDS, encoded_run, root  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ and run/, which has encoded it."""
    folder = tmp_path_factory.mktemp("ray")
    data = write_data(folder / "data", train=150)
    run = untrained_run(folder / "run", write_encoder(folder / "encoder"), data, head__token="mean", normalize=True)
    encode_corpus(run, Corpus.open(data), options=EncodeOptions(shard_rows=10), progress=False)
    return folder


def test_hosts_that_die_and_come_leave_the_same_results(cluster: Any, one: Path, tmp_path: Path) -> None:
    """Two of three workers fit on the hosts; one host dies while it searches, and another host joins."""
    flags = [f"--queries={one / 'data'}", f"--qrels={one / 'data'}", "--k=9", "--dpr_results"]
    for name in ("alone", "ours"):
        shutil.copytree(one / "run", tmp_path / name / "run")
    alone = run_script("search.py", f"--workdir={tmp_path / 'alone' / 'run'}", "--latency=0", *flags)
    assert alone.returncode == 0, alone.stderr

    hosts = [add_host(cluster, 3), add_host(cluster, 4)]
    ours = command("search.py", f"--workdir={tmp_path / 'ours' / 'run'}", *flags, "--engine=ray", "--workers=3")
    job = subprocess.Popen(ours, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        dying, worker = stop_second_worker(hosts)
        assert job.poll() is None
        hosts.remove(dying)
        cluster.remove_node(dying, allow_graceful=False)
        os.kill(worker, signal.SIGKILL)
        hosts.append(add_host(cluster, 5))
        output, _ = job.communicate(timeout=240)
    finally:
        job.kill()
        for host in hosts:
            cluster.remove_node(host, allow_graceful=False)
    assert job.returncode == 0, output
    assert "3 workers of Ray, each with CPU:1" in output
    assert ", in each of 3 workers" in output
    results = contents(tmp_path / "alone" / "run" / "runs")
    assert len(results) == 2
    assert contents(tmp_path / "ours" / "run" / "runs") == results
    evaluations = [read_json(tmp_path / name / "run" / "eval" / "data.test.json") for name in ("alone", "ours")]
    for evaluation in evaluations:
        del evaluation["provenance"]
    assert evaluations[0] == evaluations[1]


def test_workers_mine_what_one_process_does(cluster: Any, one: Path, tmp_path: Path) -> None:
    settings = MiningSettings(depth=9, keep=3, answers=False)
    host = add_host(cluster, 6)
    job = MiningJob(
        TrainingSource.open(one / "data", "train"),
        (str(one / "run"),),
        str(tmp_path / "alone.jsonl"),
        settings=settings,
    )
    mine_negatives(job)
    with ray_workers(EngineOptions("ray", workers=2)) as two:
        mine_negatives(replace(job, out=str(tmp_path / "ours.jsonl"), workers=two))
    cluster.remove_node(host, allow_graceful=False)
    assert (tmp_path / "ours.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert (tmp_path / "ours.jsonl").read_bytes().count(b'"negative_passages": [{') > 100
    with pytest.raises(ValueError, match=r"\(bm25\): remove --engine"):
        require_run_pool(replace(job, pools=("bm25",)))


def note(state: dict[str, Any], folder: str, name: str, deaths: int) -> tuple[str, int]:
    """Die this many times; then return the name, and the number of calls that this worker has completed."""
    path = Path(folder) / name
    with open(path, "a") as file:
        file.write("called\n")
    if len(path.read_text().splitlines()) <= deaths:
        os._exit(1)
    if name == "bad":
        raise FileNotFoundError("bad: no such file")
    state["calls"] = state.get("calls", 0) + 1
    return name, state["calls"]


def test_a_call_whose_worker_died_is_done_again_and_no_other(cluster: Any, tmp_path: Path) -> None:
    host = add_host(cluster, 7, processors=3)
    with ray_workers(EngineOptions("ray", workers=3)) as workers:
        assert workers
        calls = [(str(tmp_path), name, 2 if name == "b" else 0) for name in "abcd"]
        assert [name for name, _ in workers.run(note, calls)] == list("abcd")
        counts = {path.name: path.read_text().count("called") for path in tmp_path.iterdir()}
        assert counts == {"a": 1, "b": 3, "c": 1, "d": 1}
        again = workers.run(note, [(str(tmp_path), name, 0) for name in "efg"])
        assert max(count for _, count in again) > 1, "a worker keeps its state between calls"
        with pytest.raises(FileNotFoundError, match="bad: no such file"):
            workers.run(note, [(str(tmp_path), "bad", 0)])
        assert (tmp_path / "bad").read_text().count("called") == 1, "an error is not retried"
    with ray_workers(EngineOptions("ray")) as workers:
        assert workers
        with pytest.raises(RuntimeError, match=rf"worker .*Ray .*{RETRIES + 1}"):
            workers.run(note, [(str(tmp_path), "fatal", 99)])
    cluster.remove_node(host, allow_graceful=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_workers_search_what_one_process_does(
    kind: str,
    root: Path,  # noqa: F811
    cluster: Any,
) -> None:
    """Every kind of vectors in every way; each passage of the first part has a copy in another range, which ties with
    it."""
    run, queries = open_run(encoded_run(root, kind)), QuerySource.open(root / "data").read()[:9]
    folder = corpus_folder(run.workdir)
    plain = {name: CASES[name] for name in ("auto", "filter", "documents")}
    cases = {"one": CASES, "late": plain | {"int8": CASES["int8"]}}.get(kind, plain)
    host = add_host(cluster, 8, processors=2)
    with ray_workers(EngineOptions("ray", workers=4)) as four:
        for name, (k, options) in cases.items():
            alone = Searcher(run, folder, SearchOptions(**options))
            together = open_searcher(run, folder, SearchOptions(**options, workers=four))
            expected, outcome = (searcher.search(queries, k) for searcher in (alone, together))
            assert outcome.rankings == expected.rankings, name
            assert outcome.result.backend == f"{expected.result.backend}, in each of 4 workers"
            rows = expected.result.rows[:, ::2].tolist()
            assert together.scores(outcome.vectors, rows) == alone.scores(expected.vectors, rows)
            ties = [
                first[1] == second[1] for ranking in expected.rankings.values() for first, second in pairwise(ranking)
            ]
            assert any(ties) or name not in ("auto", "all"), "control: some rankings have ties"
    cluster.remove_node(host, allow_graceful=False)


def test_a_worker_that_sees_another_corpus_says_so(one: Path) -> None:
    """The hosts do not share a disk."""
    run = open_run(one / "run")
    folder = corpus_folder(run.workdir)
    settings = Searcher(run, folder).settings
    Searcher(run, folder, group=SeparateRange(1, 2, settings))
    with pytest.raises(ValueError, match=r"other settings: .*\['.*, but 'x'"):
        Searcher(run, folder, group=SeparateRange(1, 2, {**settings, "the corpus": "x"}))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--query=a", "--index=x"], "several processes search exactly: remove candidates and index, or"),
        (["--query=a", "--coordinator=h:1"], "--engine and --coordinator are two ways to search by several processes"),
        (["--interactive"], "--interactive answers in one process: remove --engine"),
        (["--queries=q", "--latency=9"], "--latency and --latency_passages time one process: remove them, or --engine"),
    ],
)
def test_what_one_process_alone_does(flags: list[str], message: str) -> None:
    done = run_script("search.py", "--workdir=w", "--engine=ray", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {message}")
