"""Formats are detected by content: real samples, and files that were written for one format each."""

from __future__ import annotations

import ast
import gzip
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.compression import zstandard_module
from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import (
    Corpus,
    DataSource,
    JudgementSource,
    QuerySource,
    RankingSource,
    TrainingSource,
    beir,
    open_role,
    parquet,
    parse_source,
    write_beir,
)
from jaxret.data.formats.detect import FORMATS, FORMATS_BY_NAME
from jaxret.data.formats.format import DataFile
from jaxret.data.lines import PathLike, write_text
from jaxret.data.records import Example, Judgement, Passage, Query


def detect(source: PathLike, role: str = "") -> DataFile:
    return DataSource.open(source).file(role)


def describe(source: PathLike, role: str, split: str | None = None) -> str:
    return open_role(DataSource.open(source), role, split).describe()


def table(*rows: str) -> str:
    return "".join(row.replace(" | ", "\t") + "\n" for row in rows)


def records(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


RANKS = [f"q1 | p{rank} | {rank}" for rank in range(1, 7)]
CONTEXT = {"title": "t", "text": "x y", "passage_id": "7"}
# The name of a format, the content of a file in it, and its description when the first of its roles is read.
SAMPLES: list[tuple[str, str, str]] = [
    ("dpr.examples", json.dumps([{"question": "a", "positive_ctxs": [CONTEXT]}]), "queries"),
    ("dpr.examples", records({"question": "a", "answers": [], "positive_ctxs": [CONTEXT]}), "examples"),
    (
        "dpr.results",
        records({"question": "a", "answers": ["x"], "ctxs": [{"id": "wiki:1", "score": "7.5"}]}),
        "rankings",
    ),
    (
        "dpr.results",
        json.dumps({"0": {"question": "a", "contexts": [{"docid": "1", "score": 2}]}}, indent=1),
        "rankings",
    ),
    ("dpr.queries", table("who is it | ['me']", "who | [\"it's me\", 'you']"), "queries"),
    ("dpr.passages", table("id | text | title", "1 | some text | a title"), "passages"),
    ("dpr.passages", table("1 | 人口约一千万人的城市 | 城市", "2 | 水在一百摄氏度时沸腾 | 水"), "passages"),
    ("dpr.passages", table("1 | some text | a title", '2 | "with ""quotes""" | t'), "passages"),
    ("trec.run", table("q1 Q0 p1 1 2.5 tag", "q1 Q0 p2 2 1.5 tag"), "rankings"),
    ("trec.qrels", table("q1 0 p1 3", "q1 Q0 p2 0"), "judgements"),
    ("trec.qrels", table("q1 | 0 | p1 | 3"), "judgements"),
    ("trec.qrels", table("query-id | corpus-id | score", "452 | 12804937 | 1"), "judgements"),
    ("trec.qrels", table("query_id | corpus_id | score", "452 | 12804937 | 1"), "judgements"),
    ("trec.qrels", table("452 | 12804937 | 1", "452 | 464511 | 1", "1 | 31715818 | 1"), "judgements"),
    ("msmarco.run", table(*RANKS), "rankings"),
    ("tevatron.run", table("q1 | p1 | 0.75", "q1 | p2 | -0.5"), "rankings"),
    ("msmarco.named", table("452 | 12804937 | 2086909", "452 | 12804937 | 5373138"), "examples"),
    ("msmarco.triples", table("a query | the good text | the bad text"), "examples"),
    ("msmarco.candidates", table("q1 | p1 | a query | a text"), "passages"),
    ("msmarco.texts", table("7 | a text, with commas", '8 | "an odd quote'), "passages"),
    ("msmarco.negatives", records({"qid": 1, "pos": [2], "neg": {"bm25": [3]}}), "examples"),
    ("beir.texts", records({"_id": "1", "text": "x", "metadata": {}}), "passages"),
    ("beir.qrels", records({"query-id": "1", "corpus-id": "2", "score": 1.0}), "judgements"),
    ("irds.docs", records({"doc_id": "1", "text": "x"}), "passages"),
    ("irds.qrels", records({"query_id": "1", "doc_id": "2", "relevance": 1, "iteration": "0"}), "judgements"),
    ("irds.pairs", records({"query_id": "1", "doc_id_a": "2", "doc_id_b": "3"}), "examples"),
    ("irds.scores", records({"query_id": "1", "doc_id": "2", "score": 1.5}), "rankings"),
    ("tevatron.examples", records({"query_id": "1", "query": "a", "positive_passages": []}), "examples"),
    ("tevatron.first", records({"query": "a", "positive_passages": [], "every_positive": False}), "examples"),
    ("tevatron.named", records({"query_id": "1", "query_text": None, "positive_document_ids": ["1"]}), "examples"),
    ("tevatron.corpus", records({"docid": "1", "title": "t", "text": "x"}), "passages"),
    ("tevatron.queries", records({"query_id": "1", "query": "a"}), "queries"),
    ("rocketqa.negatives", table("1 | 4,5,6", "2 | 7", "3 | 8,9"), "rankings"),
    ("rocketqa.passages", table("1 | a title | a text that is longer", "2 |  | another one"), "passages"),
    ("entity.questions", json.dumps([{"question": "a", "answers": ["x"]}]), "queries"),
    ("flag.examples", records({"query": "a", "pos": ["x"], "neg": ["y"]}), "examples"),
    ("pylate.scores", records({"query_id": "1", "document_ids": "['2']", "scores": "[0.5]"}), "rankings"),
    ("pylate.documents", records({"document_id": 1, "text": "x"}), "passages"),
    ("pylate.queries", records({"query_id": 1, "text": "x"}), "queries"),
    ("records.texts", records({"id": 1, "text": "x", "title": "t", "year": 2020}), "passages"),
    ("records.texts", "id,text\r\n1,x\r\n", "passages"),
    ("records.texts", records({"id": "1", "text": "x"}), "queries"),
    ("st.labels", records({"query_id": "1", "doc_ids": ["2"], "labels": [1]}), "judgements"),
    ("anserini.corpus", records({"id": "1", "contents": "x"}), "passages"),
    ("anserini.topics", records({"qid": "1", "query": "a"}), "queries"),
    ("st.tuples", records({"anchor": "a", "positive": "b"}), "examples"),
    ("st.tuples", "question,answer\r\na,b\r\n", "examples"),
    ("st.tuples", records({"sentence1": "a", "sentence2": "b", "label": 1}), "examples"),
    ("st.scored", records({"sentence1": "a", "sentence2": "b", "score": 0.25}), "rankings"),
]


def read(source: Any, role: str, policy: Policy | None = None) -> list[Any]:
    readers: dict[str, Callable[[], Any]] = {
        "passages": lambda: Corpus.open(source).read(policy),
        "queries": lambda: QuerySource.open(source).read(policy),
        "judgements": lambda: JudgementSource.open(source, None).read(policy),
        "examples": lambda: TrainingSource.open(source, None).read(policy),
        "rankings": lambda: RankingSource.open(source).read(policy).items(),
    }
    return list(readers[role]())


@pytest.mark.parametrize(("name", "text", "role"), SAMPLES)
def test_detection_ignores_the_file_name(name: str, text: str, role: str, tmp_path: Path) -> None:
    for path, data in {
        "a": text.encode(),
        "b.jsonl": b"\xef\xbb\xbf" + text.encode(),  # a byte order mark
        # Compressed, although its name lacks .gz; Windows line ends.
        "c.tsv": gzip.compress(text.replace("\n", "\r\n").encode()),
    }.items():
        (tmp_path / path).write_bytes(data)
        assert detect(tmp_path / path).format.name == name
        assert detect(tmp_path / path, role).format.name == name
        assert role in detect(tmp_path / path).format.roles()
        if name not in (
            "msmarco.named",
            "msmarco.negatives",
            "tevatron.named",
            "tevatron.examples",
            "tevatron.first",
            "irds.pairs",
        ):  # records of these formats name texts by ids, and the texts are missing here
            assert len(read(tmp_path / path, role)) >= 1
            assert read(f"{name}:{tmp_path / path}", role) == read(tmp_path / path, role)


def test_every_format_is_tested_and_names_are_unique() -> None:
    in_files = {one.name for one in FORMATS if not one.name.startswith("built.")}  # built sets are not files
    assert {name for name, _, _ in SAMPLES} == in_files
    assert {one.name for one in FORMATS} == set(FORMATS_BY_NAME)
    assert len(FORMATS) == len(FORMATS_BY_NAME)


KEYS_ONCE = (
    "beir.qrels",
    "dpr.examples",
    "dpr.results",
    "entity.questions",
    "flag.examples",
    "msmarco.negatives",
    "st.labels",
    "tevatron.examples",
    "tevatron.first",
    "tevatron.named",
    "tevatron.queries",
)


@pytest.mark.parametrize("name", KEYS_ONCE)
def test_each_key_of_a_format_is_written_once(name: str) -> None:
    """Reader, recognizer, description and writer share one declaration of each key, in the format's module. Keys of all
    queries are excluded: `texts.py` reads them."""
    folder = Path(beir.__file__).parent
    module = next(path for path in folder.glob("*.py") if has_format(path.stem, name))
    counts = Counter(
        node.value
        for path in (module, folder / "writers.py", folder / "example_writers.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    )
    keys = set(FORMATS_BY_NAME[name].keys) - {"answers", "instruction"}
    assert keys
    assert {key: counts[key] for key in keys if counts[key] > 1} == {}


def has_format(module: str, name: str) -> bool:
    formats = getattr(importlib.import_module(f"jaxret.data.formats.{module}"), "FORMATS", ())
    return module != "detect" and name in [one.name for one in formats]


def test_ambiguous_content_is_read_as_the_requested_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(table("1 | river", "2 | music"))
    assert list(Corpus.open(path).read()) == [Passage("1", "river"), Passage("2", "music")]
    path.write_text(table("1 | river"))
    assert (describe(path, "passages"), describe(path, "queries")) == (
        "MS MARCO collection, 2 columns",
        "MS MARCO queries, 2 columns",
    )
    assert str(detect(path)) == "MS MARCO collection or queries, 2 columns"


@pytest.mark.parametrize("pairs", [("q1 | p1", "q2 | p2"), ("qid | pid", "1 | 7", "2 | 9"), ("1 | doc-8",)])
def test_two_columns_of_ids_are_no_texts_without_the_name_of_the_format(pairs: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(table(*pairs))
    with pytest.raises(DataError, match=r"nearest .* MS MARCO collection .* \(msmarco\.texts:PATH"):
        list(Corpus.open(path).read())
    assert [passage.text for passage in Corpus.open(f"msmarco.texts:{path}").read()][-1] == pairs[-1].split()[-1]
    path.write_text(table("1 | Rome", "2 | Apollo 11", "3 | NGC-224"))
    assert len(list(Corpus.open(path).read())) == 3, "a few numeric names are still names"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (table("query-id | corpus-id | score", "q1 | p1 | 1", "q2 | p2 | 1"), "qrels, which holds judgements"),
        (table("q1 | p1 | 1", "q1 | p2 | 2"), "qrels, which holds judgements"),
        (table("q1 | p1 | 0.75", "q1 | p2 | 0.5"), "Tevatron ranking, which holds rankings"),
        (table(*RANKS), "MS MARCO run, which holds rankings"),
        (table("452 | 12804937 | 2086909", "452 | 12804937 | 5373138"), "MS MARCO triples of ids, which holds"),
        (table("1 | river | stone", "2 | music | light"), "MS MARCO triples of ids, which holds"),
    ],
)
def test_columns_of_ids_are_no_passages_without_a_header(text: str, title: str, tmp_path: Path) -> None:
    path = tmp_path / "test.tsv"
    path.write_text(text)
    for source in (path, tmp_path / "collection.tsv"):  # the name of the file does not help either
        source.write_text(text)
        with pytest.raises(DataError, match=rf"file .*{title}.*; .*dpr.passages:PATH"):
            list(Corpus.open(source).read())
    if "river" in text:
        named = [Passage("1", "river", "stone"), Passage("2", "music", "light")]
        assert list(Corpus.open(f"dpr.passages:{path}").read()) == named


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table("1 | a text of words | 0.5", "2 | another text | 1"), r"Tevatron ranking.* give dpr.passages:PATH"),
        (table("pid | title | contents", "1 | a | b c"), r"3 columns.*; the nearest .*:PATH"),
        (table("pid | text | title", "1 | a b | c"), r"a:1: .*header .*columns"),
    ],
)
def test_passages_with_ambiguous_columns(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(DataError, match=message):
        list(Corpus.open(tmp_path / "a").read())


@pytest.mark.parametrize(
    ("text", "role", "message"),
    [
        (
            records({"query": "a", "neg": ["b"]}),
            "examples",
            r"keys 'query', 'neg'; the nearest is FlagEmbedding .*: JSON rec",
        ),
        (
            records({"id": "a", "body": "b"}),
            "",
            r"'id', 'body'; .*nearest .*Anserini",
        ),
        (table("1 | a | b | c | d"), "", r"5 columns .*nearest is (MS MARCO candidates|qrels)"),
        (
            table("a | b | c | d | e | f | g | h"),
            "",
            r"8 columns .*tabs.*; .*docs/data.md",
        ),
        ("some words of prose, which are not data at all\n", "", r"no format is near; docs/data.md lists"),
        (records({"n": "7", "a": "a river?", "b": "a stone."}), "examples", r"query 'n', positive 'a', negatives 'b'$"),
        (table("question | answer", "a river? | a stone."), "examples", r"texts must be CSV \(commas"),
        ("q1 Q0 p1 1 2.5\n", "", r"5 .*; .*nearest .*(TREC run|qrels)"),
        (records({"body": "b"}), "", r"keys 'body'; no format is near"),
        ("\0".join("id\ttext\n"), "", r"UTF-16; convert .*UTF-8 \(iconv -f utf-16 -t utf-8\)"),
        (
            table("1 | some text"),
            "judgements",
            r"MS MARCO .*, .*judgements",
        ),
        (
            table("q1 0 p1 1"),
            "examples",
            r"judgements .*MS MARCO",
        ),
        (records({"query_id": 1, "document_ids": [2], "scores": [1]}), "examples", r"rankings and .*data\.teacher_run"),
        ("PK\x03\x04", "", "zip archive; unpack"),
        ("%PDF-1.7\n1 0 obj\n", "", r"PDF; write .*text"),
        ("<!DOCTYPE html>\n", "", r"page; download .*itself"),
        ("version https://git-lfs.github.com/spec/v1\noid x\n", "", "Git LFS pointer"),
        ("\x01\udcff\x02\x03 \x7f\udcfea\x04", "", r"binary file, .*begins"),
        (table("q1 | p1 | 1", "q1 | p2 | 0"), "passages", r"qrels, .*judgements .*passages"),
        (
            table("query-id | corpus-id | score", "q1 | p1 | 1"),
            "passages",
            r"of qrels, which .* in: DPR.* \(docs/data.md",
        ),
        ("IxFI\udc80\1\0\0\x17\0\0\0\n", "", r"binary .*begins .*b'IxFI'"),
    ],
)
def test_the_error_for_an_unknown_format_names_the_nearest(text: str, role: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        detect(tmp_path / "a", role)


@pytest.mark.parametrize("role", ["passages", "queries", "examples"])
def test_judgements_of_a_data_set_are_answered_with_its_folder(role: str, tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    judgements = tmp_path / "qrels" / "test.tsv"
    judgements.write_text(table("query-id | corpus-id | score", "q1 | p1 | 1"))
    with pytest.raises(DataError, match=rf"no {role}; {role} are in: "):
        detect(judgements, role)
    (tmp_path / "corpus.jsonl").write_text(records({"_id": "p1", "text": "river"}))
    with pytest.raises(DataError, match=rf"{role}; .*folder .*{re.escape(str(tmp_path))}"):
        detect(judgements, role)


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        (tmp_path / f"a{i}").touch()
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(DataError, match=rf"did you mean {tmp_path}/corpus\.jsonl\? {tmp_path} holds a0, "):
        detect(tmp_path / "corpus.json")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^no: .*exist; .*a0"):
        detect("no")
    with pytest.raises(DataError, match=r"^a0/corpus\.jsonl: .*exist; .*a0"):
        detect("a0/corpus.jsonl")


def test_a_broken_line_does_not_change_the_format(tmp_path: Path) -> None:
    """A broken line is counted or reported when it is read."""
    broken = '{"_id": "b", "text": "a"}'.encode("utf-16") + b"\n"
    (tmp_path / "a").write_bytes(records({"_id": "a", "text": "x"}).encode() + broken)
    assert str(detect(tmp_path / "a", "passages")).startswith("BEIR corpus")


def test_a_format_can_be_forced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(records({"premise_text": "a", "other": "b"}))
    with pytest.raises(DataError, match="not a known format"):
        TrainingSource.open(path).read()
    (forced,) = TrainingSource.open(f"st.tuples:{path}").read()  # the order of the columns decides
    assert (forced.query.text, forced.positives[0].text) == ("a", "b")
    said = "sentence-transformers tuples, as st.tuples: says"
    assert str(detect(f"st.tuples:{path}")) == f"{said}, query 'premise_text', positive 'other'"
    path.write_text(records({"bad": "a b", "good": "c d", "ask": "e f"}))
    with pytest.raises(DataError, match=r"st\.tuples:PATH .*: query 'bad', positive 'good'"):
        detect(path)
    assert str(detect(f"st.tuples:{path}")).endswith(", query 'bad', positive 'good', negatives 'ask'")
    path.write_text(records({"negative": "a b", "positive": "c d", "query": "e f"}))
    assert str(detect(f"st.tuples:{path}")) == said
    path.write_text(records({"id": "a", "body": "c d"}))
    with pytest.raises(DataError, match=r"rename the keys to these$"):
        detect(path)
    path.write_text(records({"premise_text": "a", "other": "b"}))
    assert parse_source(f"st.tuples:{path}") == ("st.tuples", path)
    assert parse_source(f"{path}:b") == ("", Path(f"{path}:b"))
    with pytest.raises(ValueError, match="format 'stt'"):
        parse_source("stt:a")
    path.write_text(table("1 | river | stone"))
    with pytest.raises(DataError, match=r":1: .*3 .*beginning '1'; 2"):
        list(Corpus.open(f"msmarco.texts:{path}").read())


def test_a_beir_folder_can_be_forced_with_its_judgements(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    assert JudgementSource.open(f"beir:{tmp_path}", "dev").read() == [Judgement("q", "a", 1)]


def test_ids_are_strings_and_rows_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(table("007 | x", "7 | y"))
    assert [p.id for p in Corpus.open(path).read()] == ["007", "7"]
    path.write_text(records({"docid": 7, "text": "x"}, {"docid": "007", "text": "y"}))
    assert [p.id for p in Corpus.open(path).read()] == ["7", "007"]
    path.write_text(records({"query": "a", "pos": ["x"]}) + "{broken\n" + records({"query": "b", "pos": ["x"]}))
    assert [q.id for q in QuerySource.open(path).read(Policy("skip"))] == ["0", "2"]


# Descriptions of formats


def test_tables_of_ms_marco_have_no_quoting(tmp_path: Path) -> None:
    path = tmp_path / "collection.tsv"
    path.write_text('0\tone "quoted\n1\t"still one line\n2\tThe cafÃ©')
    assert [p.text for p in Corpus.open(path).read()] == ['one "quoted', '"still one line', "The cafÃ©"]
    path.write_text("0\tone\ttwo\n1\tplain\n")
    with pytest.raises(DataError, match=r"collection\.tsv:1: this row has 3 columns"):
        list(Corpus.open(path).read())


def test_triples_become_one_example_for_each_query_and_positive(tmp_path: Path) -> None:
    path = tmp_path / "triples.train.small.tsv"
    path.write_text(table("a b | p1 p | n1 n", "c d | p3 p | n1 n", "a b | p1 p | n2 n", "a b | p2 p | n1 n"))
    texts = [([p.text for p in e.positives], [n.text for n in e.negatives]) for e in TrainingSource.open(path).read()]
    assert texts == [(["p1 p", "p2 p"], ["n1 n", "n2 n"]), (["p2 p", "p1 p"], ["n1 n", "n2 n"]), (["p3 p"], ["n1 n"])]
    assert [e.query for e in TrainingSource.open(path).read(targets=False)] == [Query("0", "a b"), Query("1", "c d")]
    examples = TrainingSource.open(path).read()
    assert examples[0].negatives[0] is examples[2].negatives[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """MS MARCO: a collection, queries and qrels of two splits, and triples of ids of one split."""
    files = {
        "collection.tsv": [*(f"{i} | text {i}" for i in range(8))],
        "queries.train.tsv": ["10 | first", "11 | second"],
        "queries.dev.tsv": ["20 | third"],
        "qrels.train.tsv": ["10 | 0 | 1 | 1", "11 | 0 | 2 | 1"],
        "qrels.dev.tsv": ["20 | 0 | 3 | 1", "20 | 0 | 4 | 1", "20 | 0 | 5 | 0"],
        "qidpidtriples.train.tsv": ["10 | 1 | 6", "11 | 2 | 7", "10 | 1 | 7"],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text(table(*rows))
    return tmp_path


def test_a_folder_of_ms_marco(folder: Path) -> None:
    text = {i: Passage(str(i), f"text {i}") for i in range(8)}
    assert list(Corpus.open(folder).read()) == [*text.values()]
    assert Corpus.open(folder).scan().passages == 8
    assert [q.id for q in QuerySource.open(folder).read()] == ["20", "10", "11"]
    assert QuerySource.open(folder, "dev").read() == [Query("20", "third")]
    assert JudgementSource.open(folder, "dev").read()[1] == Judgement("20", "4", 1)
    first, second = Query("10", "first"), Query("11", "second")
    trained = [Example(first, (text[1],), (text[6], text[7])), Example(second, (text[2],), (text[7],))]
    assert (
        TrainingSource.open(folder, "train").read()
        == trained
        == TrainingSource.open(folder / "qidpidtriples.train.tsv", "train").read()
    )
    third = Query("20", "third")
    judged = [Example(third, (text[3], text[4]), (text[5],)), Example(third, (text[4], text[3]), (text[5],))]
    assert TrainingSource.open(folder, "dev").read() == judged
    names = ["qidpidtriples.train.tsv", "queries.train.tsv", "collection.tsv"]
    assert [path.name for path in TrainingSource.open(folder, "train").files] == names
    assert [path.name for path in TrainingSource.open(folder, "dev").files] == [
        "qrels.dev.tsv",
        "queries.dev.tsv",
        "collection.tsv",
    ]
    (folder / "run.tsv").write_text(table(*(f"20 | {7 - i} | {i}" for i in range(1, 7))))
    negatives = TrainingSource.open(folder, "dev", folder / "run.tsv").read()[0].negatives
    assert [p.id for p in negatives] == ["6", "5", "2", "1"]


def test_an_id_in_two_files_of_a_folder(folder: Path) -> None:
    (folder / "queries.dev.tsv").write_text(table("10 | third"))
    with pytest.raises(DataError, match=r"queries\.train\.tsv: .*'10' .*before, .*queries\.dev\.tsv"):
        QuerySource.open(folder).read()
    assert [q.text for q in QuerySource.open(folder, "train").read()] == ["first", "second"]
    (folder / "qidpidtriples.train.tsv").write_text(table("10 | 1 | 99", "12 | 1 | 7"))
    with pytest.raises(DataError, match=r"qidpidtriples\.train\.tsv:1: .*passage .*'99'"):
        TrainingSource.open(folder, "train").read()
    policy = Policy("skip")
    (example,) = TrainingSource.open(folder, "train").read(policy)
    assert (example.query.id, example.negatives) == ("10", ())
    assert policy.skip_counts == {"unknown passage id": 1, "unknown query id": 1}


def test_both_tevatron_formats(tmp_path: Path) -> None:
    corpus = [{"docid": str(i), "title": "t" * (i % 2), "text": f"text {i}"} for i in range(4)]
    (tmp_path / "corpus.jsonl").write_text(records(*corpus))
    (tmp_path / "queries.jsonl").write_text(records({"query_id": "q1", "query": "a"}))
    old = {"query_id": "q1", "query": "a", "positive_passages": corpus[:1], "negative_passages": corpus[2:]}
    new = {"query_id": "q1", "positive_document_ids": ["0"], "negative_document_ids": ["2", "0", "3"]}
    (tmp_path / "old.jsonl").write_text(records(old, {**old, "query_id": "q2", "negative_passages": []}))
    (tmp_path / "train.jsonl").write_text(
        records({**new, "query_text": None}, {**new, "query_id": "q2", "query_text": "a"})
    )
    expected = Example(
        Query("q1", "a"), (Passage("0", "text 0"),), (Passage("2", "text 2"), Passage("3", "text 3", "t"))
    )
    assert (
        TrainingSource.open(tmp_path / "old.jsonl").read()[0]
        == expected
        == TrainingSource.open(tmp_path, "train").read()[0]
    )
    assert TrainingSource.open(tmp_path / "old.jsonl").read()[1].negatives == ()
    assert TrainingSource.open(tmp_path, "train").read()[1].query == Query("q2", "a")
    old["negative_passages"] = [{"docid": "0", "text": "other"}]
    (tmp_path / "old.jsonl").write_text(records(old))
    with pytest.raises(DataError, match=r"negative_passages\[0\]: passage .*'0' .*1"):
        TrainingSource.open(tmp_path / "old.jsonl").read()


def test_tevatron_with_our_scores_and_with_one_target_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = [{"docid": str(i), "text": f"text {i}", "score": 3 - i} for i in range(4)]
    record = {"query_id": "q1", "query": "a", "positive_passages": texts[:2], "negative_passages": texts[2:]}
    path.write_text(records(record))
    first, second = TrainingSource.open(path).read()
    assert (first.positive_scores, second.positive_scores) == ((3.0, 2.0), (2.0, 3.0))
    assert first.negative_scores == second.negative_scores == (1.0, 0.0)
    path.write_text(records({**record, "every_positive": False}))
    assert TrainingSource.open(path).read() == [first]
    for bad in ("high", True, float("nan")):
        texts[1]["score"] = bad
        path.write_text(records(record))
        with pytest.raises(DataError, match=r"a\.jsonl:1: .*passage's"):
            TrainingSource.open(path).read()


def test_flag_embedding_scores_belong_to_their_passages(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record = {"query": "a", "pos": ["x", "y"], "neg": ["n", "x", " ", "m"]}
    path.write_text(records({**record, "pos_scores": [3, 2], "neg_scores": [1, 9, 8, -1.5]}))
    first, second = TrainingSource.open(path, None).read(Policy("skip"))
    assert [p.text for p in (*first.positives, *first.negatives)] == ["x", "y", "n", "m"]
    assert (first.positive_scores, first.negative_scores) == ((3.0, 2.0), (1.0, -1.5))
    assert ([p.text for p in second.positives], second.positive_scores) == (["y", "x"], (2.0, 3.0))
    for scores, message in (
        ({"pos_scores": [1.0]}, "'pos_scores' has 1 scores for 2 texts"),
        ({"pos_scores": [1.0, None]}, "'pos_scores' holds None"),
    ):
        path.write_text(records({**record, **scores}))
        with pytest.raises(DataError, match=f":1: {message}"):
            TrainingSource.open(path).read()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"anchor": "a", "positive": "x"}, {"anchor": "a", "positive": "y"}], [("a", "x y", "", "", "")]),
        ([{"answer": "x", "question": "a"}], [("a", "x", "", "", "")]),  # known names of columns
        ([{"query": "a", "positive": "x", "negative_1": "n", "negative_2": "m"}], [("a", "x", "n m", "", "")]),
        ([{"query": "a", "positive": "x", "negative": "n", "scores": [2, 1]}], [("a", "x", "n", "2.0", "1.0")]),
        (
            [{"query": "a", "positive": "x", "negative": n, "score": s} for n, s in (("n", 2), ("m", -0.5))],
            [("a", "x", "n m", "0.0", "-2.0 0.5")],  # differences of scores
        ),
        (
            [{"anchor": a, "document": d, "label": n} for a, d, n in (("a", "x", 1), ("a", "n", 0), ("b", "n", 0))],
            [("a", "x", "n", "", "")],  # b has no positive
        ),
    ],
)
def test_tuples_of_sentence_transformers(rows: list[dict], expected: list[tuple[str, ...]], tmp_path: Path) -> None:
    (tmp_path / "a").write_text(records(*rows))
    results = []
    for e in TrainingSource.open(tmp_path / "a").read(targets=False):
        texts = [" ".join(p.text for p in side) for side in (e.positives, e.negatives)]
        scores = [" ".join(map(str, side)) for side in (e.positive_scores, e.negative_scores)]
        results.append((e.query.text, *texts, *scores))
    assert results == expected


def test_scores_of_rankings_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(records({"query_id": "1", "document_ids": ["2", "3"], "scores": [0.25, 0.5]}))
    assert RankingSource.open(path).read() == {"1": [("3", 0.5), ("2", 0.25)]}
    path.write_text(records(*({"sentence1": "a", "sentence2": b, "score": s} for b, s in (("x", 0.25), ("y", 0.5)))))
    ((_, ranking),) = RankingSource.open(path).read().items()
    assert [score for _, score in ranking] == [0.5, 0.25]
    texts = {p.id: p.text for p in Corpus.open(path).read()}
    assert [texts[key] for key, _ in ranking] == ["y", "x"]


def test_regular_expressions_of_answers_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(r"""who	"['the( |-)English\\ band', '(?i)a.*""b""\d']"
""")
    assert QuerySource.open(tmp_path / "a.csv").read()[0].answers == (r"the( |-)English\ band", r'(?i)a.*"b"\d')


# Other containers


def test_zstandard(tmp_path: Path) -> None:
    pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    rows = [f"{i} | text {i * i}" for i in range(1000)]
    with write_text(tmp_path / "collection.tsv.zst") as file:
        file.write(table(*rows))
    (tmp_path / "plain").write_text(table(*rows))
    data = (tmp_path / "collection.tsv.zst").read_bytes()
    assert len(data) < 10_000
    assert list(Corpus.open(tmp_path).read()) == list(Corpus.open(tmp_path / "plain").read())
    assert Corpus.open(tmp_path).scan() == Corpus.open(tmp_path / "plain").scan()
    (tmp_path / "collection.tsv.zst").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"collection\.tsv\.zst:\d+: the compressed file is damaged"):
        list(Corpus.open(tmp_path).read(Policy("skip")))


@pytest.mark.slow
def test_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install pyarrow")
    rows = [{"docid": str(i), "title": None if i % 2 else "t", "text": f"text {i}"} for i in range(3000)]
    parquet.write_parquet(tmp_path / "corpus.parquet", rows)
    (tmp_path / "plain").write_text(records(*rows))
    assert str(Corpus.open(tmp_path).file) == "Tevatron corpus, parquet"
    passages = list(Corpus.open(tmp_path).read())
    assert passages == list(Corpus.open(tmp_path / "plain").read())
    scan = Corpus.open(tmp_path).scan()
    assert list(Corpus.open(tmp_path).read(scan=scan)) == passages
    parquet.write_parquet(tmp_path / "corpus.parquet", [{**row, "text": "other"} for row in rows])
    with pytest.raises(DataError, match="the corpus changed"):
        list(Corpus.open(tmp_path).read(scan=scan))
    data = (tmp_path / "corpus.parquet").read_bytes()
    (tmp_path / "corpus.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"corpus\.parquet: pyarrow cannot read it"):
        Corpus.open(tmp_path).scan()


def test_a_parquet_file_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a: .*parquet .*package"):
        detect(tmp_path / "a")


def test_a_zstandard_file_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxret\[data\]'"):
        zstandard_module()


def test_csv_fields_with_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('query,positive,score\n"a ""b"", c","two\nlines",1\nx,y\n')
    with pytest.raises(DataError, match=r"a\.csv:4: this row has 2 columns"):
        TrainingSource.open(tmp_path / "a.csv").read()
    (example,) = TrainingSource.open(tmp_path / "a.csv", None).read(Policy("skip"))
    assert (example.query.text, example.positives[0].text) == ('a "b", c', "two\nlines")


# Real samples

REAL = {
    "beir/corpus.jsonl": ("beir.texts", "passages", 23),
    "beir/qrels/test.tsv": ("trec.qrels", "judgements", 7),
    "dpr/biencoder.json": ("dpr.examples", "examples", 3),
    "dpr/biencoder.jsonl": ("dpr.examples", "examples", 3),
    "dpr/curatedtrec-like.qa.csv": ("dpr.queries", "queries", 4),
    "dpr/psgs.tsv": ("dpr.passages", "passages", 18),
    "dpr/results.json": ("dpr.results", "rankings", 4),
    "flagembedding/train.jsonl": ("flag.examples", "examples", 7),
    "flagembedding/train_scored.jsonl": ("flag.examples", "examples", 6),
    "msmarco/collection.tsv": ("msmarco.texts", "passages", 23),
    "msmarco/collection.tsv.gz": ("msmarco.texts", "passages", 23),
    "msmarco/msmarco-hard-negatives.jsonl": ("msmarco.negatives", "examples", 7),
    "msmarco/qidpidtriples.train.tsv": ("msmarco.named", "examples", 7),
    "msmarco/qrels.dev.tsv": ("trec.qrels", "judgements", 7),
    "msmarco/queries.dev.tsv": ("msmarco.texts", "queries", 6),
    "msmarco/run.msmarco.tsv": ("msmarco.run", "rankings", 6),
    "msmarco/top1000.dev": ("msmarco.candidates", "passages", 13),
    "msmarco/triples.train.small.tsv": ("msmarco.triples", "examples", 4),
    "mteb/qrels/test.jsonl": ("beir.qrels", "judgements", 7),
    "pylate/train_strings.jsonl": ("pylate.scores", "rankings", 6),
    "pyserini/corpus.jsonl": ("anserini.corpus", "passages", 23),
    "pyserini/dpr_retrieval.json": ("dpr.results", "rankings", 4),
    "sentence-transformers/labeled_list.jsonl": ("st.labels", "judgements", 25),
    "sentence-transformers/labeled_pairs.jsonl": ("st.tuples", "examples", 6),
    "sentence-transformers/ntuples_scores.jsonl": ("st.tuples", "examples", 6),
    "sentence-transformers/pairs.csv": ("st.tuples", "examples", 7),
    "sentence-transformers/pairs.jsonl": ("st.tuples", "examples", 7),
    "sentence-transformers/scored_pairs.jsonl": ("st.scored", "rankings", 6),
    "sentence-transformers/triplets.jsonl": ("st.tuples", "examples", 4),
    "sentence-transformers/triplets_margin.jsonl": ("st.tuples", "examples", 6),
    "tevatron/rank.txt": ("tevatron.run", "rankings", 6),
    "tevatron/train_new.jsonl": ("tevatron.named", "examples", 7),
    "tevatron/train_old.jsonl": ("tevatron.examples", "examples", 7),
    "traps/beir_qrels_spelled_otherwise.tsv": ("trec.qrels", "judgements", 7),
    "traps/beir_qrels_without_header.tsv": ("trec.qrels", "judgements", 7),
    "traps/queries_with_bom.tsv": ("msmarco.texts", "queries", 6),
    "trec/qrels.graded.txt": ("trec.qrels", "judgements", 59),
    "trec/qrels.tab.txt": ("trec.qrels", "judgements", 59),
    "trec/run.trec": ("trec.run", "rankings", 6),
}


@pytest.mark.parametrize("name", REAL)
def test_real_samples(name: str, data_dir: Path) -> None:
    path, (format_name, role, count) = data_dir / "format-samples" / name, REAL[name]
    if not path.exists():
        pytest.skip(f"{path} is not there")
    assert detect(path, role).format.name == format_name
    assert len(read(path, role)) == count


def test_real_samples_of_one_data_set_agree(data_dir: Path) -> None:
    """SciFact in the formats of BEIR, MS MARCO, Tevatron and the Hugging Face hub."""
    samples = data_dir / "format-samples"
    if not samples.exists():
        pytest.skip(f"{samples} is not there")
    corpus = list(Corpus.open(samples / "beir").read())
    assert corpus == list(Corpus.open(samples / "mteb").read()) == list(Corpus.open(samples / "tevatron").read())
    assert [(p.id, p.text) for p in corpus] == [(p.id, p.text) for p in Corpus.open(samples / "msmarco").read()]
    judged = JudgementSource.open(samples / "beir", "test").read()
    assert (
        judged
        == JudgementSource.open(samples / "mteb", "test").read()
        == JudgementSource.open(samples / "msmarco", "dev").read()
    )
    named = [
        TrainingSource.open(samples / name).read(targets=False)
        for name in ("tevatron/train_old.jsonl", "tevatron/train_new.jsonl")
    ]
    assert named[0] == named[1]
    assert (
        [e.query for e in named[0]]
        == QuerySource.open(samples / "beir").read()
        == QuerySource.open(samples / "msmarco", "dev").read()
    )


def test_columns_are_those_of_the_first_record(tmp_path: Path) -> None:
    """For unknown names, their order would decide, and an id would become a question."""
    path = tmp_path / "t.jsonl"
    path.write_text(records({"query": "a b", "answer": "c"}, {"id": "row-1", "query": "d e", "answer": "f"}))
    with pytest.raises(DataError, match=r"t\.jsonl:2: .*columns 'id', 'query', 'answer'"):
        TrainingSource.open(path).read()


def test_a_label_is_0_or_1(tmp_path: Path) -> None:
    """The first records, by which a format is detected, may have only labels of 1: then 2 and 0.05 are not
    positives."""
    pair = {"sentence1": "a b", "sentence2": "c"}
    path = tmp_path / "t.jsonl"
    path.write_text(records(*[{**pair, "label": 1}] * 60, {**pair, "label": 0.05}))
    with pytest.raises(DataError, match=r"t\.jsonl:61: 'label' .*0\.05; 1 .*positive, 0"):
        TrainingSource.open(path).read()
    path.write_text(records({"premise": "a b", "hypothesis": "c", "label": 0}))  # 0 means entailment
    with pytest.raises(DataError, match=r"not a known format"):
        TrainingSource.open(path).read()


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("D{0}\thttp://example.com/{0}\ttitle\tthe words of a document\n", "passages"),  # MS MARCO's documents
        ("q{0}\tp{0}\t9\n", "examples"),  # grades
    ],
)
def test_similar_tables_have_no_format(line: str, role: str, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("".join(line.format(number) for number in range(20)))
    with pytest.raises(DataError, match=r"not a known format|holds .* and no"):
        detect(tmp_path / "t.tsv", role)


def test_json_records_in_a_table_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("a b\tc d\n")
    with pytest.raises(DataError, match=r"table without .*columns"):
        TrainingSource.open(f"st.tuples:{tmp_path / 't.tsv'}").read()


@pytest.mark.parametrize("score", ["NaN", "Infinity", "1.5"])
def test_a_grade_is_a_whole_number(score: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(f'{{"query-id": "q", "corpus-id": "p", "score": {score}}}\n')
    with pytest.raises(DataError, match=r"q\.jsonl:1: score .* is not an integer"):
        JudgementSource.open(tmp_path / "q.jsonl").read()


def test_a_repeated_id_in_an_array_is_skipped(tmp_path: Path) -> None:
    passages = [{"_id": "a", "text": "x"}, {"_id": "a", "text": "y"}, {"_id": "b", "text": "z"}]
    (tmp_path / "c.json").write_text(json.dumps(passages))
    scan = Corpus.open(tmp_path / "c.json").scan(Policy("skip"))
    assert [passage.text for passage in Corpus.open(tmp_path / "c.json").read(Policy("skip"), scan)] == ["x", "z"]


def test_a_parquet_file_has_the_keys_of_all_records(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    parquet.write_parquet(tmp_path / "t.parquet", [{"query": "a"}, {"query": "b", "score": 1.0}])
    assert list(parquet.read_parquet(tmp_path / "t.parquet")) == [
        {"query": "a", "score": None},
        {"query": "b", "score": 1.0},
    ]
    with pytest.raises(DataError, match="the key 'late' comes after record"):
        parquet.write_parquet(tmp_path / "t.parquet", [*[{"query": "a"}] * 5000, {"query": "b", "late": 1}])


def test_all_records_have_the_same_id_key(tmp_path: Path) -> None:
    path = tmp_path / "a"
    contexts = {"question": "a", "contexts": [{"docid": "1", "score": 2}]}
    path.write_text(json.dumps({"one-a": contexts, "two-a": contexts, "it's": contexts}))
    assert list(RankingSource.open(path).read()) == ["one-a", "two-a", "it's"]
    path.write_text(json.dumps({"one a": contexts, "two a": contexts}))
    with pytest.raises(DataError, match="query id 'one a' contains white space"):
        RankingSource.open(path).read()


@pytest.mark.parametrize("name", ["beir.qrels", "irds.qrels", "st.labels"])
def test_judgements_in_records_do_not_contradict_each_other(name: str, tmp_path: Path) -> None:
    def of(grade: int) -> dict[str, Any]:
        records: dict[str, dict[str, Any]] = {
            "beir.qrels": {"query-id": "q", "corpus-id": "p", "score": grade},
            "irds.qrels": {"query_id": "q", "doc_id": "p", "relevance": grade},
            "st.labels": {"query_id": "q", "doc_ids": ["p"], "labels": [grade]},
        }
        return records[name]

    path = tmp_path / "a"
    path.write_text(records(of(1), of(1)))
    assert detect(path).format.name == name
    assert JudgementSource.open(path).read() == [Judgement("q", "p", 1)]
    path.write_text(records(of(1), of(1), of(0)))
    with pytest.raises(DataError, match=r"a:3.*: score 0 for \('q', 'p'\) contradicts .*(line 1|1, doc)"):
        JudgementSource.open(path).read()
    policy = Policy("skip")
    assert len(JudgementSource.open(path).read(policy)) == 1
    assert policy.skip_counts == {"contradicting judgement": 1}


def test_judgements_in_csv_and_as_booleans(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("query-id,corpus-id,score\nq,p1,1\nq,p2,0\nq,p3,2.0\nq,p4,True\nq,p5,false\n")
    assert [j.relevance for j in JudgementSource.open(path).read()] == [1, 0, 2, 1, 0]
    path.write_text(records({"query-id": "q", "corpus-id": "p", "score": True}))
    assert JudgementSource.open(path).read() == [Judgement("q", "p", 1)]
    path.write_text(
        records({"anchor": "a", "positive": "b", "label": True}, {"anchor": "a", "positive": "c", "label": False})
    )
    (example,) = TrainingSource.open(path).read()
    assert ([p.text for p in example.positives], [p.text for p in example.negatives]) == (["b"], ["c"])
    path.write_text("query-id,corpus-id,score\nq,p1,good\n")
    with pytest.raises(DataError, match="score 'good' is not an integer"):
        JudgementSource.open(path).read()


def test_queries_without_a_positive_are_counted(tmp_path: Path) -> None:
    path, policy = tmp_path / "a", Policy()
    rows = [("a", "b", 0), ("c", "d", 1), ("a", "e", 0), ("f", "g", 0)]
    path.write_text(records(*({"anchor": a, "positive": p, "label": label} for a, p, label in rows)))
    assert [example.query.text for example in TrainingSource.open(path).read(policy)] == ["c"]
    assert policy.report() == "noted: 2 queries without a positive, which give no example (first: a:1)"


@pytest.mark.parametrize(
    ("role", "lines"),
    [
        ("passages", ["id | text", "7 | a text"]),
        ("queries", ["qid | query", "7 | a text"]),
        ("examples", ["query_id | positive_id | negative_id", "q1 | p1 | p2"]),
        ("examples", ["query | positive | negative", "a query | the good | the bad"]),
        ("rankings", ["query_id | doc_id | rank", *RANKS]),
        ("rankings", ["qid | docid | score", "q1 | p1 | 0.75"]),
    ],
)
def test_a_header_line_is_no_data(role: str, lines: list[str], tmp_path: Path) -> None:
    with_header, without = tmp_path / "a", tmp_path / "b"
    with_header.write_text(table(*lines))
    without.write_text(table(*lines[1:]))
    assert detect(with_header, role).format == detect(without, role).format
    if detect(without, role).format.name == "msmarco.named":  # the format has ids, and the texts are in other files
        write_beir(tmp_path, [Passage("p1", "x"), Passage("p2", "y")], [Query("q1", "a")], {})
    policy = Policy()
    readers: dict[str, Callable[[Path], Any]] = {
        "passages": lambda path: [p.id for p in Corpus.open(path).read(policy)],
        "queries": lambda path: [q.id for q in QuerySource.open(path).read(policy)],
        "examples": lambda path: [e.positives for e in TrainingSource.open(path, None).read(policy)],
        "rankings": lambda path: RankingSource.open(path).read(policy),
    }
    assert readers[role](with_header) == readers[role](without) != []
    assert policy.report() == "noted: 1 header line, which is not data (first: a:1)"


@pytest.mark.parametrize(
    "rows",
    [
        [f"q{n} | p{n} | {n * 0.37:.2f}" for n in range(8)],
        [f"q{n} | p{n} | {n % 3}.0" for n in range(8)],
        ["user | item | rating", *(f"u{n} | i{n} | {n % 5 + 0.5}" for n in range(8))],
        [f"q{n} | p{n} | {n % 2 == 0}" for n in range(8)],
        [f"q{n} | p{n} | {('high', 'low')[n % 2]}" for n in range(8)],
        ["sentence1 | sentence2 | score", *(f"a text {n} | text {n} | {n / 10}" for n in range(8))],
        [f"a text {n} | the other {n} | {n % 5}" for n in range(8)],
        [f"a text {n} | the other {n} | {('entailment', 'neutral')[n % 2]}" for n in range(8)],
    ],
)
@pytest.mark.parametrize("role", ["passages", "examples", "judgements"])
def test_a_third_column_of_scores_or_labels_is_no_negative(rows: list[str], role: str, tmp_path: Path) -> None:
    """Otherwise, all of these passages would be relevant, or a score would become a passage."""
    path = tmp_path / "pairs.tsv"
    path.write_text(table(*rows))
    with pytest.raises(DataError, match=r"pairs\.tsv"):
        read(path, role)


def test_unknown_keys_are_printed_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(records({"_id": "1", "text": "x", "url": "u"}, {"_id": "2", "text": "y", "metadata": {}}))
    assert describe(path, "passages") == "BEIR corpus, JSON lines (other keys: url, metadata)"
    path.write_text(records({"_id": "1", "text": "x", "title": "t"}))
    assert describe(path, "passages") == "BEIR corpus, JSON lines"
    path.write_text(records({"qid": "1", "query": "x", "instruction": "find y", "url": "u"}))
    assert describe(path, "queries") == "Anserini topics, JSON lines (other keys: url)"
