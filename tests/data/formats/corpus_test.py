"""Each source is opened once, at the function that takes its path, and its format is detected once."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.chunks import ChunkOptions
from jaxret.data.dataset_check import check_data
from jaxret.data.formats import (
    Corpus,
    DataSource,
    JudgementSource,
    Policy,
    QuerySource,
    TrainingSource,
    data_source,
    file_sample,
    stat_files,
    write_dpr_examples,
    write_run,
)
from jaxret.data.formats.build_data_set import build_data_set
from jaxret.data.formats.convert import convert_data
from jaxret.data.formats.example_writers import write_tevatron_examples, write_tevatron_id_examples
from jaxret.data.records import Query
from jaxret.experiments.chunk_data import chunk_data, open_texts
from jaxret.experiments.fuse_job import FuseJob
from jaxret.experiments.fuse_runs import fuse_runs
from jaxret.experiments.rerank_request import RerankRequest
from jaxret.experiments.rerank_run import rerank as rerank_run
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.run_search import run_search
from jaxret.experiments.searches.search_bm25 import search_bm25
from jaxret.experiments.searches.search_files import search_files
from jaxret.experiments.searches.search_job import SearchJob
from jaxret.index.encoding.encode import encode_corpus
from jaxret.mining.generate_queries import generate_queries
from jaxret.mining.generation_options import GenerationOptions
from jaxret.mining.mining_job import MiningJob, mine_negatives
from jaxret.mining.mining_settings import MiningSettings
from jaxret.mining.training_queries import open_concatenated
from jaxret.models.generation.decoding_options import DecodingOptions
from jaxret.runs.run import Run
from jaxret.search.bm25_settings import BM25Settings
from jaxret.search.searcher import Searcher
from jaxret.training.examples import load_examples
from tests.pipeline import (
    REPOSITORY,
    tiny_config,
    untrained_run,
    write_cross_encoder,
    write_data,
    write_encoder,
    write_generator,
)

INTERFACES = ("cli", "api")
# Files below the interfaces that open a corpus, and the reason why their callers cannot open it.
DOORS = {
    "experiments/rerank_request.py": "the corpus is looked for after the request is checked",
    "experiments/recipes/check_recipe.py": "the corpus of a request",
    "experiments/run_beir.py": "the sets of a folder are listed here",
    "experiments/mteb/run_mteb.py": "the tasks that are folders are found here",
    "experiments/mteb/mteb_searcher.py": "the corpus is written here",
    "experiments/reproduce/run_row.py": "the flags of a command are read here",
    "demo/demo.py": "the corpus is written here",
    "index/source.py": "corpus.json, which says what was encoded",
    "index/encoding/encode.py": "the path of a corpus, or the name of an encoded one",
    "index/encoding/run_encode.py": "the corpus is looked for after the request is checked",
    "index/encoding/ray_encode.py": "each worker is another process",
    "training/config_sources.py": "keys of a config",
}

SOURCES = (
    "DataSource",
    "QuerySource",
    "JudgementSource",
    "TrainingSource",
    "RankingSource",
    "EvaluationSource",
    "JudgedSource",
)
# Files below the interfaces that open queries, judgements, training data, rankings or sources of any role, and why.
SOURCE_DOORS = {
    "data/formats/corpus.py": "a corpus that was not opened",
    "data/formats/data_source.py": "the folder of the texts of a file of ids",
    "data/formats/rankings.py": "rankings that were not opened",
    "data/formats/sources.py": "a source that was not opened, or a run of negatives",
    "data/tokens/tokenized.py": "keys of a config",
    "demo/demo.py": "the files were written here",
    "experiments/run_beir.py": "the sets of a folder are listed here",
    "experiments/chunk_data.py": "the source is a corpus or training records",
    "experiments/build_index.py": "the queries of the options",
    "experiments/searches/evaluation_queries.py": "an evaluation opens its queries and judgements",
    "experiments/fuse_job.py": "the paths of a request",
    "experiments/fuse_runs.py": "the paths of a request",
    "experiments/mteb/run_mteb.py": "the tasks that are folders are found here",
    "experiments/recipes/check_recipe.py": "the paths of a request, or keys of a config",
    "experiments/recipes/run_recipe.py": "keys of a config",
    "experiments/report/set_texts.py": "the paths that results have",
    "experiments/report/warning_section.py": "the training data of a run",
    "experiments/reproduce/run_row.py": "the flags of a command are read here",
    "experiments/rerank_run.py": "the paths of a request",
    "experiments/rerank_request.py": "the paths of a request",
    "experiments/searches/search_job.py": "the paths of a request",
    "experiments/sweeps/run_sweep.py": "the data of the reports of diversity",
    "experiments/vector_diversity.py": "the source is a data set or training records",
    "mining/mining_job.py": "the files of pools",
    "mining/training_queries.py": "the source has examples or queries alone",
    "training/config_sources.py": "keys of a config",
}


def test_only_doors_open_a_source() -> None:
    opening = {f"{name}.open" for name in SOURCES}
    files = _files_that_call(opening)
    assert files - SOURCE_DOORS.keys() == set(), "take an open source instead of a path"
    assert SOURCE_DOORS.keys() - files == set(), "it opens no source any more: delete its line"


def _files_that_call(names: set[str]) -> set[str]:
    """Return the files below the interfaces that call one of these functions."""
    package, files = REPOSITORY / "jaxret", set()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if calls & names and path.relative_to(package).parts[0] not in INTERFACES:
            files.add(path.relative_to(package).as_posix())
    return files


def test_only_doors_open_a_corpus() -> None:
    """Every other function takes a `Corpus`."""
    files = _files_that_call({"Corpus.open"})
    assert files - DOORS.keys() == set(), "take a Corpus instead of a path"
    assert DOORS.keys() - files == set(), "it opens no corpus any more: delete its line"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_data(folder / "data")
    shutil.copyfile(folder / "data" / "corpus.jsonl", folder / "passages.jsonl")  # this name is not in any format
    return folder


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    return untrained_run(root / "run", write_encoder(root / "encoder"), root / "data")


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Map file names to the number of times that their format was detected."""
    counts: Counter[str] = Counter()
    read_sample = data_source.read_sample

    def counted(path: Path) -> Any:
        counts[path.name] += 1
        return read_sample(path)

    monkeypatch.setattr(data_source, "read_sample", counted)
    return counts


def encode(root: Path, run: Run, out: Path, corpus: Corpus) -> None:
    encode_corpus(run, corpus, out.name, progress=False)


def bm25(root: Path, run: Run, out: Path, corpus: Corpus) -> None:
    source, evaluation = EvaluationSource.open(root / "data"), EvaluationOptions(k=5, latency=0, dpr_results=True)
    search_bm25(str(out), corpus, source, BM25Settings(), evaluation, progress=False)


def mine(root: Path, run: Run, out: Path, corpus: Corpus) -> None:
    settings = MiningSettings(depth=9, keep=2)
    job = MiningJob(TrainingSource.open(root / "data", "train"), ("bm25",), str(out), corpus=corpus, settings=settings)
    mine_negatives(job)


def generate(root: Path, run: Run, out: Path, corpus: Corpus) -> None:
    write = "pseudo_queries", "expanded"
    options = GenerationOptions("{passage}", passage_length=24, write=write, part_rows=20)
    generate_queries(write_generator(root / "t5"), corpus, out, DecodingOptions(queries=1, query_length=4), options)


@pytest.mark.parametrize("work", [encode, bm25, mine, pytest.param(generate, marks=pytest.mark.slow)])
def test_the_format_is_detected_once(
    work: Callable[..., None], root: Path, run: Run, tmp_path: Path, openings: Counter[str]
) -> None:
    work(root, run, tmp_path / work.__name__, Corpus.open(root / "passages.jsonl"))
    assert openings["passages.jsonl"] == 1, openings


def test_a_search_detects_the_format_once(root: Path, run: Run, openings: Counter[str]) -> None:
    """It is detected when the first text is read."""
    encode_corpus(run, Corpus.open(root / "passages.jsonl"), "whole", progress=False)
    openings.clear()
    evaluation, data = EvaluationOptions(k=5, latency=0, dpr_results=True), str(root / "data")
    search_files(run, EvaluationSource.open(data, data), evaluation, encoded_name="whole", progress=False)
    assert openings["passages.jsonl"] == 1, openings


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Map file names to the number of times that their beginning was read to detect the format."""
    counts: Counter[str] = Counter()
    begin = file_sample._read_beginning

    def counted(path: Path, limit: int) -> Any:
        counts[path.name] += 1
        return begin(path, limit)

    monkeypatch.setattr(file_sample, "_read_beginning", counted)
    return counts


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Map sources of queries to the number of times that they were parsed."""
    counts: Counter[str] = Counter()
    read = QuerySource.read

    def counted(source: QuerySource, policy: Policy | None = None) -> list[Query]:
        counts[source.source] += 1
        return read(source, policy)

    monkeypatch.setattr(QuerySource, "read", counted)
    return counts


@pytest.fixture
def rankings(root: Path, tmp_path: Path) -> str:
    """Write a run file with a passage for each judged query, and return its path."""
    judged = JudgementSource.open(root / "data", "test").read()
    write_run(tmp_path / "one.trec", {one.query_id: [(one.passage_id, 1.0)] for one in judged}, "one")
    return str(tmp_path / "one.trec")


def search(data: str, run: Run, rankings: str) -> None:
    encode_corpus(run, Corpus.open(data), "searched", progress=False)
    evaluation = EvaluationOptions(k=5, latency=0)
    job = SearchJob(str(run.workdir), queries=data, qrels=data, encoded_name="searched", evaluation=evaluation)
    run_search(job, lambda *_: None)


def fuse(data: str, run: Run, rankings: str) -> None:
    shutil.copyfile(rankings, f"{rankings}.two")
    fuse_runs(FuseJob((rankings, f"{rankings}.two"), f"{rankings}.fused", queries=data, qrels=data))


def rerank(data: str, run: Run, rankings: str) -> None:
    out, model = f"{rankings}.reranked", str(write_cross_encoder(Path(f"{rankings}.model")))
    rerank_run(RerankRequest(out=out, model=model, run=rankings, queries=data, qrels=data, corpus=data, latency=0))


@pytest.mark.parametrize("verb", [search, fuse, rerank])
def test_an_evaluation_detects_queries_and_judgements_once(
    verb: Callable[[str, Run, str], None],
    root: Path,
    run: Run,
    rankings: str,
    openings: Counter[str],
    samples: Counter[str],
    passes: Counter[str],
) -> None:
    """Queries and judgements are also parsed once."""
    openings.clear()
    samples.clear()
    passes.clear()
    verb(str(root / "data"), run, rankings)
    for counts in (openings, samples):
        assert [counts[name] for name in ("queries.jsonl", "test.tsv")] == [1, 1], counts
    assert passes == {str(root / "data"): 1}


def test_one_file_of_queries_and_judgements_is_detected_once(
    root: Path, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    write_dpr_examples(tmp_path / "dev.json", TrainingSource.open(root / "data", "train").read(targets=False))
    source = EvaluationSource.open(tmp_path / "dev.json", str(tmp_path / "dev.json"))
    assert source.read(Policy()).judgements
    assert (openings["dev.json"], samples["dev.json"]) == (1, 1)


def test_a_repeated_fusion_detects_its_runs_and_judgements_once(
    root: Path, rankings: str, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    names = ["two.trec", "tuned-1.trec", "tuned-2.trec"]
    second, *tuned = [shutil.copyfile(rankings, tmp_path / name) for name in names]
    judgements = shutil.copyfile(root / "data" / "qrels" / "test.tsv", tmp_path / "tuning.tsv")
    runs, tuning, data = (rankings, str(second)), tuple(map(str, tuned)), str(root / "data")
    for _ in range(2):  # the second call overwrites the output
        openings.clear()
        samples.clear()
        out = str(tmp_path / "fused.trec")
        fuse_runs(FuseJob(runs, out, queries=data, qrels=data, tune_runs=tuning, tune_qrels=str(judgements)))
    for counts in (openings, samples):
        assert [counts[name] for name in ("one.trec", *names, "tuning.tsv", "queries.jsonl")] == [1] * 6, counts


def test_repeated_mining_detects_its_rankings_once(
    root: Path, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    examples = TrainingSource.open(root / "data", "train").read(targets=False)
    corpus = Corpus.open(root / "data")
    ids = [passage.id for passage in corpus.read()][:20]
    for name in ("pool.trec", "teacher.trec"):
        ranking = [(key, 20.0 - rank) for rank, key in enumerate(ids)]
        write_run(tmp_path / name, {example.query.id: ranking for example in examples}, "run")
    settings = MiningSettings(depth=9, keep=2, margin=0.5)
    for _ in range(2):
        openings.clear()
        samples.clear()
        pools, out, teacher = (str(tmp_path / "pool.trec"),), str(tmp_path / "mined.jsonl"), tmp_path / "teacher.trec"
        data = TrainingSource.open(root / "data", "train")
        mine_negatives(MiningJob(data, pools, out, corpus=corpus, teacher=str(teacher), settings=settings))
    for counts in (openings, samples):
        assert (counts["pool.trec"], counts["teacher.trec"]) == (1, 1), counts


def test_training_detects_the_run_of_a_teacher_once(
    root: Path, run: Run, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    data = root / "data"
    write_tevatron_examples(tmp_path / "train.jsonl", TrainingSource.open(data, "train").read(targets=False))
    examples = TrainingSource.open(tmp_path / "train.jsonl").read(targets=False)
    scores = {
        example.query.id: [(passage.id, 1.0) for passage in (*example.positives, *example.negatives)]
        for example in examples
    }
    write_run(tmp_path / "teacher.trec", scores, "teacher")
    keys = {"data__store": str(tmp_path), "data__teacher_run": str(tmp_path / "teacher.trec"), "loss__kl__weight": 1.0}
    config = tiny_config(root / "encoder", tmp_path / "train.jsonl", **keys)
    load_examples(config, "train", run.tokenizer, False, lambda line: None)
    for counts in (openings, samples):
        assert counts["teacher.trec"] == 1, counts


def test_mining_detects_its_training_files_once(
    root: Path, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    """The file with the queries, and another file that is concatenated."""
    examples = TrainingSource.open(root / "data", "train").read(targets=False)
    write_dpr_examples(tmp_path / "train.json", examples)
    write_tevatron_examples(tmp_path / "follow.jsonl", examples[:3])
    data, follow = TrainingSource.open(tmp_path / "train.json"), open_concatenated(str(tmp_path / "follow.jsonl"))
    settings = MiningSettings(depth=9, keep=2)
    corpus, out = Corpus.open(root / "data"), str(tmp_path / "mined.jsonl")
    mine_negatives(MiningJob(data, ("bm25",), out, corpus=corpus, concat=(follow,), settings=settings))
    for counts in (openings, samples):
        assert (counts["train.json"], counts["follow.jsonl"]) == (1, 1), counts


def test_mining_of_a_folder_detects_each_file_once(
    root: Path, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    data, corpus = TrainingSource.open(root / "data", "train"), Corpus.open(root / "passages.jsonl")
    job = MiningJob(data, ("bm25",), str(tmp_path / "mined.jsonl"), corpus=corpus, settings=MiningSettings(depth=9))
    mine_negatives(job)
    for counts in (openings, samples):
        assert [counts[name] for name in ("train.tsv", "queries.jsonl", "corpus.jsonl")] == [1, 1, 1], counts


def test_training_detects_its_files_once(
    root: Path, run: Run, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    config = tiny_config(root / "encoder", root / "data", data__store=str(tmp_path))
    load_examples(config, "train", run.tokenizer, False, lambda line: None)
    for counts in (openings, samples):
        assert [counts[name] for name in ("train.tsv", "queries.jsonl", "corpus.jsonl")] == [1, 1, 1], counts


def test_chunks_of_training_records_detect_the_file_once(
    root: Path, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    write_dpr_examples(tmp_path / "train.json", TrainingSource.open(root / "data", "train").read(targets=False))
    chunk_data(open_texts(tmp_path / "train.json"), str(tmp_path / "chunks.jsonl"), ChunkOptions(words=2))
    for counts in (openings, samples):
        assert counts["train.json"] == 1, counts


def convert_to(name: str) -> Callable[[DataSource, Path], object]:
    def convert(source: DataSource, out: Path) -> None:
        out.touch() if "." in name else None  # an existing output is compared with the files of the source
        convert_data(source, out, name)

    return convert


def build(source: DataSource, out: Path) -> None:
    build_data_set(source, out, "1.0.0")


WORK: dict[str, Callable[[DataSource, Path], object]] = {
    "check": lambda source, out: check_data(source),
    "to a file": convert_to("tevatron.examples"),
    "to a folder": convert_to("msmarco"),
    "build": build,
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("kind", ["folder", "records", "ids"])
def test_a_source_of_any_roles_detects_each_file_once(
    work: str, kind: str, root: Path, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    """A folder, a file of training records, and a file of records by ids, whose texts are in the folder."""
    if work == "build":
        pytest.importorskip("tensorflow_datasets")
    path = folder = Path(shutil.copytree(root / "data", tmp_path / "data"))
    if kind == "records":
        path = tmp_path / "train.json"
        write_dpr_examples(path, TrainingSource.open(folder, "train").read(targets=False))
    elif kind == "ids":
        path = folder / "train.jsonl"
        write_tevatron_id_examples(path, TrainingSource.open(folder, "train").read(targets=False))
    openings.clear()
    samples.clear()
    WORK[work](DataSource.open(path), tmp_path / "out")
    names = {"folder": ["corpus.jsonl", "queries.jsonl", "train.tsv"], "records": ["train.json"]}
    for counts in (openings, samples):
        assert set(counts.values()) == {1}, counts
        assert counts.keys() >= set(names.get(kind, ["train.jsonl"])), counts


def test_rankings_detect_the_file_once(
    rankings: str, tmp_path: Path, openings: Counter[str], samples: Counter[str]
) -> None:
    openings.clear()
    samples.clear()
    convert_data(DataSource.open(rankings), tmp_path / "ranks.tsv", "msmarco.run")
    check_data(DataSource.open(tmp_path / "ranks.tsv"))
    for counts in (openings, samples):
        assert (counts["one.trec"], counts["ranks.tsv"]) == (1, 1), counts


def test_encoding_and_a_query_read_the_start_of_the_file_once_each(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"_id": f"p{i}", "text": f"river {i}"}) + "\n" for i in range(9)))
    calls: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    count(data_source, "read_sample")
    count(file_sample, "_read_beginning")  # the function that opens the file
    folder = encode_corpus(run, Corpus.open(path), "few", progress=False).folder
    assert calls == {"read_sample": 1, "_read_beginning": 1}
    calls.clear()
    assert Searcher(run, folder).texts.read(["p3"])["p3"].text == "river 3"
    assert calls == {"read_sample": 1, "_read_beginning": 1}


def test_an_open_corpus(root: Path) -> None:
    corpus = Corpus.open(root / "data")
    assert (corpus.file.path, corpus.name) == (root / "data" / "corpus.jsonl", "data")
    assert str(corpus) == str(root / "data")
    assert [passage.id for passage in corpus.read()] == [passage.id for _, passage in corpus.read_located()]


def test_a_forced_format_is_part_of_the_digest(tmp_path: Path) -> None:
    """The bytes are the same, but the passages differ: titles and texts are exchanged."""
    path = tmp_path / "e.tsv"
    path.write_text("1\triver\ttown house\n2\twater\tsea and land\n")
    detected, forced, same = (Corpus.open(f"{name}{path}") for name in ("", "dpr.passages:", "rocketqa.passages:"))
    assert [passage.title for passage in detected.read()] == ["river", "water"]
    assert [passage.text for passage in forced.read()] == ["river", "water"]
    scans = [corpus.scan() for corpus in (detected, forced, same)]
    assert scans[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == scans[2].sha256
    assert scans[1].sha256 != scans[0].sha256
    assert len(list(forced.read(scan=scans[1]))) == 2


def test_the_stat_of_no_files() -> None:
    assert stat_files([]) == {"bytes": 0, "modified": 0}
