"""Data sets of ir_datasets and of Hugging Face's datasets, by name, from this machine only."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.errors import DataError
from jaxret.data.formats import (
    Corpus,
    DataSource,
    JudgementSource,
    QuerySource,
    RankingSource,
    TrainingSource,
    list_files,
    open_role,
    source_path,
)
from jaxret.data.formats.convert import convert_data
from jaxret.data.libraries.hf import offline
from jaxret.data.records import Example, Judgement, Passage, Query

DOCS = [Passage(f"d{i}", f"naïve text {i}") for i in range(4)]
QUERIES = [Query("q1", "what is it"), Query("q2", "who")]
JUDGED = [Judgement("q1", "d1", 2), Judgement("q1", "d3", 0), Judgement("q2", "d2", 1)]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    requests: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        requests.append(arguments)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return requests


@pytest.fixture
def irds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """ir_datasets with one new data set, and an empty home."""
    monkeypatch.setenv("IR_DATASETS_HOME", str(tmp_path / "home"))
    library = pytest.importorskip("ir_datasets", reason="the extra `irds` has ir_datasets")
    tsv = {"docs.tsv": [(p.id, p.text) for p in DOCS], "queries.tsv": [(q.id, q.text) for q in QUERIES]}
    for name, rows in tsv.items():
        (tmp_path / name).write_text("".join("\t".join(row) + "\n" for row in rows))
    (tmp_path / "qrels").write_text("".join(f"{j.query_id} 0 {j.passage_id} {j.relevance}\n" for j in JUDGED))
    made = library.create_dataset(
        *(str(tmp_path / name) for name in ("docs.tsv", "queries.tsv", "qrels")),
    )
    monkeypatch.setitem(library.registry._registered, "mine/dev/small", made)
    return library


def test_ir_datasets(irds: Any, tmp_path: Path, no_network: list[Any]) -> None:
    source = "irds:mine/dev/small"
    assert list(Corpus.open(source).read()) == DOCS
    assert QuerySource.open(source).read() == QUERIES
    assert JudgementSource.open(source, "whatever").read() == JUDGED
    expected = [Example(QUERIES[0], (DOCS[1],), (DOCS[3],)), Example(QUERIES[1], (DOCS[2],))]
    assert TrainingSource.open(source, "train").read() == expected
    assert {file.name for file in TrainingSource.open(source, "train").files} == {"docs.tsv", "queries.tsv", "qrels"}
    assert (
        open_role(DataSource.open(source), "passages")
        .describe()
        .startswith("documents of ir_datasets, table docs of mine/dev/small (ir_datasets")
    )
    assert DataSource.open(source).name == "mine-dev-small"
    assert list(Corpus.open(f"{source}/docs").read()) == DOCS
    done = convert_data(DataSource.open(source), tmp_path / "beir", "beir")
    assert JudgementSource.open(tmp_path / "beir", "dev").read() == JUDGED
    assert not +done.losses
    assert not no_network


def test_pairs_and_scores_of_ir_datasets(irds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pairs").write_text("q1\td1\td0\nq1\td1\td3\n")
    (tmp_path / "scored").write_text("q1 Q0 d3 1 1.5 t\nq1 Q0 d0 2 2.5 t\n")
    download = irds.util.LocalDownload
    parts = (
        irds.formats.TsvDocPairs(download(tmp_path / "pairs")),
        irds.formats.TrecScoredDocs(download(tmp_path / "scored")),
    )
    made = irds.datasets.base.Dataset(irds.load("mine/dev/small"), *parts)
    monkeypatch.setitem(irds.registry._registered, "mine/train", made)
    assert TrainingSource.open("irds:mine/train").read() == [Example(QUERIES[0], (DOCS[1],), (DOCS[0], DOCS[3]))]
    assert RankingSource.open("irds:mine/train").read() == {"q1": [("d0", 2.5), ("d3", 1.5)]}
    judged = TrainingSource.open("irds:mine/train", "train", "irds:mine/train").read()
    assert judged[0] == Example(QUERIES[0], (DOCS[1],), (DOCS[0], DOCS[3]))
    assert JudgementSource.open("irds:mine/train", "train").read() == JUDGED


def test_ir_datasets_fetches_nothing(irds: Any, no_network: list[Any]) -> None:
    with pytest.raises(DataError, match=r"irds:vaswani.*the .*'vaswani' .*machine"):
        list(Corpus.open("irds:vaswani").read())
    with pytest.raises(DataError, match=r"ir_datasets .*vaswani queries"):
        QuerySource.open("irds:vaswani").read()
    assert not no_network
    with pytest.raises(DataError, match=r"ir_datasets .*'vaswan/x'; .*vaswani"):
        QuerySource.open("irds:vaswan/x").read()
    with pytest.raises(DataError, match=r"ir_datasets has no set '%%'; ir-datasets\.com lists"):
        QuerySource.open("irds:%%").read()


def test_two_readers_of_ir_datasets_at_once(irds: Any, no_network: list[Any]) -> None:
    """The end of the first one does not allow network access to the second; the end of both restores it."""
    one, two = iter(Corpus.open("irds:mine/dev/small").read()), iter(Corpus.open("irds:mine/dev/small").read())
    assert next(one) == next(two)
    list(one)
    with pytest.raises(DataError):
        QuerySource.open("irds:vaswani").read()
    list(two)
    assert not no_network
    with pytest.raises(Exception, match=r".*"):
        next(iter(irds.load("vaswani").docs_iter()))
    assert no_network


def test_downloads_of_ir_datasets_are_restored_afterwards(irds: Any, no_network: list[Any]) -> None:
    with pytest.raises(DataError):
        list(Corpus.open("irds:vaswani").read())
    with pytest.raises(Exception, match=r".*"):
        next(iter(irds.load("vaswani").docs_iter()))
    assert no_network


@pytest.fixture
def hf() -> Any:
    return pytest.importorskip("datasets", reason="the extra `hf` has datasets")


def test_a_saved_set(hf: Any, tmp_path: Path) -> None:
    rows = [{"query": f"q {i}", "pos": [f"good {i}"], "neg": [f"bad {i}"]} for i in range(3)]
    splits = {"train": hf.Dataset.from_list(rows), "dev": hf.Dataset.from_list(rows[:1])}
    hf.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"hf:{tmp_path}/saved"
    assert TrainingSource.open(source, "train").read() == TrainingSource.open(tmp_path / "train.jsonl").read()
    assert len(TrainingSource.open(f"{source}/dev", "train").read()) == 1
    assert all(file.is_relative_to(tmp_path / "saved") for file in TrainingSource.open(source, "train").files)
    with pytest.raises(DataError, match=r"examples .*default/train, default/dev"):
        JudgementSource.open(source, "test").read()


def test_a_folder_with_configs(hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    tables: dict[str, list[dict[str, Any]]] = {
        "corpus": [{"_id": p.id, "title": p.title, "text": p.text} for p in DOCS],
        "queries": [{"_id": q.id, "text": q.text} for q in QUERIES],
        "qrels": [{"query-id": j.query_id, "corpus-id": j.passage_id, "score": float(j.relevance)} for j in JUDGED],
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = [("corpus", "corpus", "corpus"), ("queries", "queries", "queries"), ("default", "test", "qrels")]
    lines = "".join(f"- config_name: {c}\n  data_files:\n  - split: {s}\n    path: {f}.jsonl\n" for c, s, f in configs)
    (folder / "README.md").write_text(f"---\nconfigs:\n{lines}---\n")
    source = f"hf:{folder}"
    assert list(Corpus.open(source).read()) == DOCS
    assert QuerySource.open(source, "test").read() == QUERIES
    assert JudgementSource.open(source, "test").read() == JUDGED
    assert TrainingSource.open(source, "test").read()[0] == Example(QUERIES[0], (DOCS[1],), (DOCS[3],))
    assert list(Corpus.open(f"{source}/corpus").read()) == DOCS
    assert list_files(source_path(f"{source}/corpus/corpus"))
    with pytest.raises(DataError, match="has no examples of train"):
        JudgementSource.open(source, "train").read()


def test_a_set_of_the_hub_in_the_cache(
    hf: Any, no_network: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"_id": p.id, "text": p.text}) + "\n" for p in DOCS))
    with offline(hf):
        hf.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made").glob("json/*/0.0.0/*/dataset_info.json")
    kept = tmp_path / "cache" / "some___thing" / "corpus" / "0.0.0" / made.parent.name
    shutil.copytree(made.parent, kept)
    (kept / "json-train.arrow").rename(kept / "thing-train.arrow")
    info = json.loads(made.read_text()) | {"dataset_name": "thing", "config_name": "corpus"}
    info["splits"]["train"]["dataset_name"] = "thing"
    (kept / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hf.config, "HF_HUB_OFFLINE", False)  # the setting outside of tests
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert list(Corpus.open("hf:some/thing").read()) == DOCS
    assert list_files(source_path("hf:some/thing/corpus")) == (kept / "thing-train.arrow",)
    assert not no_network
    assert hf.config.HF_HUB_OFFLINE is False


def test_a_set_missing_in_the_cache(
    hf: Any, no_network: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"hf:some/thing: .*datasets .*some/thing"):
        QuerySource.open("hf:some/thing").read()
    with pytest.raises(DataError, match="neither a folder nor OWNER/NAME"):
        QuerySource.open("hf:some").read()
    assert not no_network


@pytest.mark.parametrize(
    ("library", "package"), [("irds", "ir_datasets"), ("hf", "datasets"), ("tfds", "tensorflow_datasets")]
)
def test_a_missing_library(library: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "x" / "1.0.0").mkdir(parents=True)
    (tmp_path / "x" / "1.0.0" / "dataset_info.json").write_text(
        '{"name": "x", "fileFormat": "array_record", "splits": [{"name": "train"}]}'
    )
    extra = {"irds": "irds", "hf": "hf", "tfds": "data"}[library]
    with pytest.raises(DataError, match=rf"package .*; pip install 'jaxret\[{extra}\]'"):
        QuerySource.open(f"{library}:{tmp_path}/x/default/train").read()
