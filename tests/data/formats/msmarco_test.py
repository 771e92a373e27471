"""RocketQA's negatives, the collection with titles, and EntityQuestions: records, and errors in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import (
    Corpus,
    DataSource,
    QuerySource,
    RankingSource,
    TrainingSource,
    write_beir,
    write_dpr_corpus,
)
from jaxret.data.records import Judgement, Passage, Query
from tests.pipeline import REPOSITORY, environment

PASSAGES = [Passage(f"{i}", f"the text of passage {i} is a longer one", f"title {i}" * (i % 2)) for i in range(12)]


def write_rows(path: Path, *rows: str) -> Path:
    path.write_text("".join(row.replace(" | ", "\t") + "\n" for row in rows))
    return path


@pytest.mark.parametrize("count", [1, 3, 12])
def test_titles_and_texts_are_not_swapped(count: int, tmp_path: Path) -> None:
    """Passages with I3's columns and with DPR's, with and without DPR's header."""
    passages = PASSAGES[-count:]
    titled = write_rows(tmp_path / "c.tsv", *(f"{p.id} | {p.title} | {p.text}" for p in passages))
    plain = write_rows(tmp_path / "p.tsv", *(f"{p.id} | {p.text} | {p.title}" for p in passages))
    write_dpr_corpus(tmp_path / "psgs.tsv", passages)
    other = write_rows(tmp_path / "o.tsv", "id | title | text", *(f"{p.id} | {p.title} | {p.text}" for p in passages))
    names = ["rocketqa.passages", "dpr.passages", "dpr.passages", "dpr.passages"]
    for path, name in zip((titled, plain, tmp_path / "psgs.tsv", other), names, strict=True):
        assert DataSource.open(path).file().format.name == name
        assert list(Corpus.open(path).read()) == passages
    write_rows(tmp_path / "collection.splitTitle.tsv", *(f"{p.id} | {p.title} | {p.text}" for p in passages))
    (tmp_path / "psgs.tsv").unlink()
    assert list(Corpus.open(tmp_path).read()) == passages  # in a folder, the name of the file decides


def test_a_file_of_titles_alone_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "para.title.txt", *(f"{p.id} | a title of {p.id}" for p in PASSAGES))
    with pytest.raises(DataError, match=r"para.title.txt: .*passages .*RocketQA's para.txt"):
        list(Corpus.open(path).read())
    path.rename(tmp_path / "para.txt")
    assert len(list(Corpus.open(tmp_path / "para.txt").read())) == len(PASSAGES)


def test_negatives_are_read_from_a_file_of_ids(tmp_path: Path) -> None:
    queries = [Query("q1", "one"), Query("q2", "two")]
    judged = [Judgement("q1", "1", 1), Judgement("q2", "2", 1)]
    write_beir(tmp_path / "beir", PASSAGES, queries, {"train": judged})
    run = write_rows(tmp_path / "train.negatives.tsv", "q1 | 3,1,4", "q2 | 5,6")
    assert RankingSource.open(run).read() == {
        "q1": [("3", 1.0), ("1", 0.5), ("4", 1 / 3)],
        "q2": [("5", 1.0), ("6", 0.5)],
    }
    examples = TrainingSource.open(tmp_path / "beir", "train", run).read()
    assert [[p.id for p in e.negatives] for e in examples] == [["3", "4"], ["5", "6"]]  # passage 1 is relevant


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("q3 | 1,,2", "n.tsv:3: the second column is not a list of ids: '1,,2'; write ids between commas"),
        ("q3 | 1, 2", "n.tsv:3: the second column is not a list of ids: '1, 2'"),
        ("q3", "n.tsv:3: this row has 1 columns, beginning 'q3'; 2 are expected, separated by tabs: query id, passage"),
        ("q3 | 1,2 | x", "n.tsv:3: this row has 3 columns"),
        ("q1 | 9", "n.tsv:3: query id 'q1' was used before, on line 1"),
        (" | 1,2", "n.tsv:3: query id is empty"),
        ("q3 | 1,1", "n.tsv:3: passage '1' is retrieved twice for query 'q3'"),
    ],
)
def test_bad_lists_of_ids(row: str, message: str, tmp_path: Path) -> None:
    others = [f"r{i} | 5,6" for i in range(12)]  # in a file of many lines, a bad one does not change the format
    path = write_rows(tmp_path / "n.tsv", "q1 | 1,2", "q2 | 3,4", row, "q4 | 5,6", *others)
    with pytest.raises(DataError) as raised:
        RankingSource.open(path).read()
    assert message in str(raised.value)
    policy = Policy("skip")
    assert list(RankingSource.open(path).read(policy)["q4"]) == [("5", 1.0), ("6", 0.5)]
    assert policy.skip_counts.total() == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("9 | only a title", "c.tsv:2: this row has 2 columns, beginning '9'; 3 are expected"),
        ("9 |  | ", "c.tsv:2: passage '9' is empty (no text, no title)"),
        ("a b | t | text", "c.tsv:2: passage id 'a b' contains white space"),
    ],
)
def test_bad_rows_of_a_collection_with_titles(row: str, message: str, tmp_path: Path) -> None:
    rows = [f"{p.id} | {p.title} | {p.text}" for p in PASSAGES[:4]]
    path = write_rows(tmp_path / "c.tsv", rows[0], row, *rows[1:])
    with pytest.raises(DataError) as raised:
        list(Corpus.open(path).read())
    assert message in str(raised.value)


@pytest.mark.slow
def test_files_of_relations_are_one_set_of_questions(tmp_path: Path) -> None:
    for relation, questions in {"P17": ["where is a", "where is b"], "P19": ["where was c born"]}.items():
        records = [{"question": question, "answers": [question[-1]]} for question in questions]
        (tmp_path / f"{relation}.test.json").write_text(json.dumps(records))
    (tmp_path / "P17.dev.json").write_text(json.dumps([{"question": "dev", "answers": ["x"]}]))
    queries = QuerySource.open(tmp_path, "test").read()
    assert [(q.id, q.answers) for q in queries] == [("P17-0", ("a",)), ("P17-1", ("b",)), ("P19-0", ("n",))]
    assert [q.id for q in QuerySource.open(tmp_path / "P19.test.json").read()] == ["P19-0"]
    (tmp_path / "P20.test.json").write_text(
        '[{"question": "who", "answers": "me"}, {"answers": ["x"], "question": ""}]'
    )
    message = "P20.test.json:record 0: the value of 'answers' is a string: 'me'; a list of strings is expected"
    with pytest.raises(DataError, match=message.replace(".", r"\.")):
        QuerySource.open(tmp_path, "test").read()
    done = subprocess.run(
        [sys.executable, "-m", "jaxret", "data", "check", str(tmp_path)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stdout.startswith(f"{tmp_path}: EntityQuestions, a JSON array; no passages\n")
    assert f"bad: {tmp_path}/{message}" in done.stdout
    assert f"bad: {tmp_path}/P20.test.json:record 1: query '1' has no text" in done.stdout


def test_splits_may_share_queries(tmp_path: Path) -> None:
    """Two queries with the same id and text are one query; with different texts they are an error."""
    (tmp_path / "queries.train.tsv").write_text("1\twhat is a river\n2\twho\n")
    (tmp_path / "queries.dev.tsv").write_text("1\twhat is a river\n3\twhy\n")
    queries = QuerySource.open(tmp_path).read()
    assert {query.id: query.text for query in queries} == {"1": "what is a river", "2": "who", "3": "why"}
    (tmp_path / "queries.dev.tsv").write_text("1\tanother\n")
    with pytest.raises(DataError, match=r"'1' was used before"):
        QuerySource.open(tmp_path).read()


def test_numbers_of_rows_are_ids_of_one_file(tmp_path: Path) -> None:
    """DPR's questions have no ids, so those of two splits cannot be told apart."""
    for split, question in (("dev", "who"), ("test", "why")):
        (tmp_path / f"{split}.qa.csv").write_text(f"what is it\t['a']\n{question}\t['b']\n")
    with pytest.raises(DataError, match=r"test\.qa\.csv: .* name a split"):
        QuerySource.open(tmp_path).read()
    assert [query.text for query in QuerySource.open(tmp_path, "dev").read()] == ["what is it", "who"]
