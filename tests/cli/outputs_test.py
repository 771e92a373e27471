"""No verb overwrites a file that it reads; a new verb with an output needs a case here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxret.cli.verbs import VERBS
from jaxret.data.chunks import ChunkOptions
from jaxret.data.formats import Corpus, DataSource, JudgementSource, TrainingSource, write_run
from jaxret.data.formats.convert import convert_data
from jaxret.data.split_judgements import write_judgement_sets
from jaxret.experiments.chunk_data import chunk_data, open_texts
from jaxret.experiments.fuse_job import FuseJob
from jaxret.experiments.fuse_runs import fuse_runs
from jaxret.experiments.report.write_report import write_report
from jaxret.experiments.rerank_request import RerankRequest
from jaxret.experiments.rerank_run import rerank_run
from jaxret.experiments.score_examples import score_examples
from jaxret.experiments.teachers import RetrieverTeacher
from jaxret.mining.generate_queries import generate_queries
from jaxret.mining.keywords import write_keywords
from jaxret.mining.mining_job import MiningJob, mine_negatives
from jaxret.mining.training_queries import open_concatenated
from jaxret.runs.reranker import Reranker
from jaxret.storage.atomic import with_digest, write_json
from tests.pipeline import REPOSITORY, contents, write_data

FOLDER = (  # files in the folder that `root` writes
    "data/corpus.jsonl",
    "data/queries.jsonl",
    "data/answers.jsonl",
    "data/qrels/train.tsv",
    "data/qrels/dev.tsv",
)
# Outputs are checked before a model is used.
RERANKER = object.__new__(Reranker)
TEACHER = RetrieverTeacher("none", "")


class Case(NamedTuple):
    """A call of a verb, and the files that are its sources."""

    verb: str
    write: Callable[[str], object]  # the argument is the output; the current folder is `root`
    sources: tuple[str, ...]


def _fuse(**options: Any) -> Callable[[str], object]:
    return lambda out: fuse_runs(FuseJob(("one.trec", "two.trec"), out, **options))


def _rerank_request(out: str, run: str, **values: Any) -> RerankRequest:
    sources = {"queries": "data", "corpus": "data"} | values
    return RerankRequest(out=out, model="model", run=run, **sources)


def _rerank(out: str) -> None:
    rerank_run(RERANKER, _rerank_request(out, "one.trec", corpus="texts.jsonl", qrels="qrels.tsv"), progress=False)


def _mine(out: str) -> None:
    data, pools, corpus = TrainingSource.open("data", "train"), ("one.trec", "bm25"), Corpus.open("texts.jsonl")
    follow = open_concatenated("more.jsonl")
    mine_negatives(MiningJob(data, pools, out, corpus, teacher="two.trec", concat=(follow,)))


def _split(qrels: str, folder: str) -> None:
    write_judgement_sets(JudgementSource.open("data", "train"), JudgementSource.open(qrels, "test"), folder)


def _score(out: str) -> None:
    score_examples(TEACHER, TrainingSource.open("data", "train", "one.trec"), out)


def _systems(out: str) -> None:
    fuse_runs(FuseJob(("words", "again"), out, queries="queries.tsv"))


CASES = (
    Case("data chunk", lambda out: chunk_data(open_texts("data"), out, ChunkOptions(words=2)), FOLDER),
    Case("data chunk", lambda out: chunk_data(open_texts("more.jsonl"), out, ChunkOptions(words=2)), ("more.jsonl",)),
    Case("data convert", lambda out: convert_data(DataSource.open("data"), out, "msmarco.texts"), FOLDER),
    Case(
        "data convert", lambda out: convert_data(DataSource.open("texts.jsonl"), out, "msmarco.texts"), ("texts.jsonl",)
    ),
    Case(
        "data convert",
        lambda out: convert_data(DataSource.open("ids/triples.tsv"), out, "tevatron.examples"),
        ("ids/corpus.tsv",),
    ),
    Case(
        "data split",
        lambda out: _split("qrels.set1.tsv", str(Path(out).parent)),
        ("qrels.set1.tsv",),
    ),
    Case("fuse", _fuse(), ("one.trec", "two.trec", "link.trec")),
    Case("fuse", _fuse(queries="data", qrels="data"), FOLDER),
    Case("fuse", _fuse(queries="queries.tsv", qrels="qrels.tsv"), ("queries.tsv", "qrels.tsv")),
    Case("fuse", _fuse(tune_runs=("a.trec", "b.trec"), tune_qrels="qrels.tsv"), ("a.trec", "b.trec", "qrels.tsv")),
    Case("fuse", _systems, ("texts.jsonl",)),
    Case("generate", lambda out: generate_queries("data", Corpus.open(out), "out"), ("out/expanded/corpus.jsonl",)),
    Case("keywords", lambda out: write_keywords(Corpus.open("data"), out), FOLDER),
    Case("mine", _mine, ("one.trec", "two.trec", "texts.jsonl", "more.jsonl", *FOLDER)),
    Case("report", lambda out: write_report(["run"], out), ("run/config.json", "run/eval/data.json")),
    Case("compare", lambda out: write_report(["other=run"], out, flag="--report"), ("run/config.json",)),
    Case("rerank", _rerank, ("one.trec", "texts.jsonl", "qrels.tsv", *FOLDER)),
    Case("rerank", _score, ("one.trec", *FOLDER)),
)
# Verbs whose output cannot be a source file.
OTHERS = {
    "data build": "an existing version is not overwritten",
    "demo": "its data are its own",
    "export": "the folder must be new",
    "mteb": "the folder has files of mteb alone",
    "open": "the folder must be that of a run",
    "plot": "pictures are no source",
    "probe": "the folder must be that of a run",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data", train=4, dev=2)
    for name in ("one", "two", "a", "b"):
        write_run(tmp_path / f"{name}.trec", {"q0": [("p0", 2.0), ("n0", 1.0)]}, tag=name)
    (tmp_path / "link.trec").symlink_to("one.trec")
    passage = {"docid": "p0", "title": "", "text": "one two three"}
    example = {
        "query_id": "q",
        "query": "x",
        "answers": ["one"],
        "positive_passages": [passage],
        "negative_passages": [],
    }
    files = {
        "texts.jsonl": (tmp_path / "data" / "corpus.jsonl").read_text(),
        "more.jsonl": json.dumps(example) + "\n",
        "queries.tsv": "q0\tone\n",
        "qrels.tsv": "q0 0 p0 1\nq4 0 p4 1\n",
        "qrels.set1.tsv": "q0 0 p0 1\n",
        "ids/corpus.tsv": "1\tone two\n2000\tthree\n",
        "ids/queries.train.tsv": "7\twhat\n",
        "ids/triples.tsv": "7\t1\t2000\n",
        "out/expanded/corpus.jsonl": '{"_id": "p0", "title": "", "text": "one"}\n',
        "run/config.json": "{}",
        "run/eval/data.json": "{}",
        "words/bm25/texts/manifest.json": "{}",
        "again/bm25/texts/manifest.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_json(tmp_path / "words/bm25/texts/corpus.json", with_digest({"path": str(tmp_path / "texts.jsonl")}))
    return tmp_path


def _name(value: object) -> str:
    return value.verb if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("case", "source"), [(case, source) for case in CASES for source in case.sources], ids=_name)
def test_a_file_of_a_source_is_not_replaced(case: Case, source: str, root: Path) -> None:
    before = contents(root)
    with pytest.raises(ValueError, match=rf"{re.escape(Path(source).name)} is a file of .*lost"):
        case.write(source)
    assert contents(root) == before


def _mine_pool(pool: str) -> None:
    mine_negatives(MiningJob(TrainingSource.open("data", "train"), (pool,), "x.jsonl", Corpus.open("texts.jsonl")))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.trec.eval.json", lambda source: fuse_runs(FuseJob(("one.trec", source), "x.trec"))),
        (
            "x.trec.eval.json",
            lambda source: rerank_run(RERANKER, _rerank_request("x.trec", source)),
        ),
        ("x.jsonl.parents.json", _mine_pool),
    ],
    ids=["fuse", "rerank", "mine"],
)
def test_a_file_next_to_the_output_replaces_no_source(name: str, write: Callable[[str], object], root: Path) -> None:
    Path(name).write_bytes(Path("one.trec").read_bytes())
    before = contents(root)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is a file of .*lost"):
        write(name)
    assert contents(root) == before


@pytest.mark.parametrize("out", ["run/eval/data.json", "run/checkpoints/3/x", "run/new.trec", "words/bm25/texts/x"])
def test_a_file_of_a_run_is_not_replaced(out: str, root: Path) -> None:
    (root / "run" / "contract.json").write_text("{}")
    before = contents(root)
    with pytest.raises(ValueError, match=rf"{re.escape(out)} is among the files of .*/runs"):
        _fuse()(out)
    assert contents(root) == before
    _fuse()(f"{Path(out).parts[0]}/runs/both.trec")  # the place for rankings


def test_every_verb_with_an_output_has_a_case() -> None:
    pattern = r'^WRITES = \(|shared_flags\.out_|DEFINE_string\(\s*"out'
    files = {verb: (REPOSITORY / f"jaxret/cli/{verb.replace(' ', '_')}.py").read_text() for verb in VERBS}
    verbs = {verb for verb, text in files.items() if re.search(pattern, text, re.MULTILINE)}
    assert verbs == {case.verb for case in CASES} | OTHERS.keys()
    described = {verb for verb, text in files.items() if re.search(r'"[^"]*\b(to|file) write\b|file for a ', text)}
    assert described <= verbs, "an output with another name: add it to WRITES"


def test_other_files_of_a_folder_are_replaced(root: Path) -> None:
    """A command can be repeated: a file that it wrote into the folder of its source is not a source."""
    for _ in range(2):
        assert write_keywords(Corpus.open("data"), "data/pseudo.jsonl")[0]
        _split("qrels.tsv", "data")
