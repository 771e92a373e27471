"""`data check` reports errors in a data set, and describes its contents."""

from __future__ import annotations

import json
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.dataset_check import DataCheck, check_data, load_uncut_tokenizer, print_data_check
from jaxret.data.formats import DataSource, write_beir
from jaxret.data.lines import PathLike
from jaxret.data.records import Judgement, Passage, Query
from tests.pipeline import REPOSITORY, command, environment, write_encoder


def check_source(source: PathLike, *arguments: Any) -> DataCheck:
    return check_data(DataSource.open(source), *arguments)


def lines(path: Path, *rows: str | dict) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = ["river", "stone music", "river", "light paper forest"]
    passages = [Passage(f"p{i}", text) for i, text in enumerate(texts)]
    queries = [Query("q1", "What is  it"), Query("q2", "what is it", ("x",)), Query("q3", "other")]
    judged = {
        "train": [Judgement("q1", "p0", 1), Judgement("q3", "p1", 0)],
        "test": [Judgement("q2", "p0", 2), Judgement("q2", "p9", 1), Judgement("q9", "p1", 1)],
    }
    write_beir(tmp_path / "data", passages, queries, judged)
    return tmp_path / "data"


def test_a_folder(folder: Path) -> None:
    check = check_source(folder)
    assert check.lines == [
        f"{folder}: BEIR corpus, JSON lines; splits: train, test",
        "passages: 4, 1 of them with the text of an earlier one",
        "  the first, 'p0': text 'river'",
        "  words: mean 1.8, median 2, 95 % 3, longest 3",
        "queries.jsonl: 3, 1 with answers, 1 of them with the text of an earlier one",
        "  words: mean 2.3, median 3, 95 % 3, longest 3",
        "judgements of train: 2 for 2 queries (1 of grade 0, 1 of grade 1)",
        "  1 queries have no relevant passage",
        "judgements of test: 3 for 2 queries (2 of grade 1, 1 of grade 2)",
        "  1 judgements of test are for passages that are not in the corpus, such as 'p9'",
        "  1 judgements of test are for queries that do not exist, such as 'q9'",
        "leak: 1 queries of test are in train too, such as 'what is it'",
        "1 relevant passages of test are relevant in train too",
    ]
    assert not check.policy.errors


def test_every_bad_record_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "corpus.jsonl").read_text().splitlines()
    lines(folder / "corpus.jsonl", *text[:2], "{broken", *text[2:], text[0], {"_id": "e", "text": " "})
    (folder / "qrels" / "dev.tsv").write_bytes(b"q1\tp1\t1\nq1\tp2\tx\nq3\tp2\t1\n")
    (folder / "qrels" / "test.tsv.gz").write_bytes((folder / "qrels" / "test.tsv").read_bytes())
    (folder / "qrels" / "test.tsv").unlink()
    with pytest.raises(ValueError, match=r"data: 5 bad records, listed above"):
        print_data_check(DataSource.open(folder), None, [64])
    printed = [line.partition(f"{folder}/")[2] for line in capsys.readouterr().out.splitlines() if line[:5] == "bad: "]
    places = [line.partition(": ")[0] for line in printed]
    assert places == ["corpus.jsonl:3", "corpus.jsonl:6", "corpus.jsonl:7", "qrels/dev.tsv:2", "qrels/test.tsv.gz:1"]
    assert printed[0].startswith("corpus.jsonl:3: this is not JSON")


def test_bad_records_are_counted_by_reason_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The TriviaQA and SQuAD files of DPR have records without a positive, which training leaves out."""
    path = tmp_path / "train.json"
    positive = {"title": "", "text": "river", "passage_id": "1"}
    empty = {"answers": ["a"], "negative_ctxs": [], "hard_negative_ctxs": []}
    records = [{**empty, "question": str(n), "positive_ctxs": [positive] * (n == 1)} for n in range(3)]
    path.write_text(json.dumps(records))
    print_data_check(DataSource.open(path), None, [64], "skip")
    printed = capsys.readouterr().out
    assert "examples: 1 queries, 1 positives" in printed
    assert f"left out: 2 records: no positive (first: {path}:record 0)" in printed
    assert "bad:" not in printed
    with pytest.raises(ValueError, match="2 bad records"):
        print_data_check(DataSource.open(path), None, [64])


def test_an_unreadable_file_is_an_error_with_every_on_error(folder: Path) -> None:
    (folder / "qrels" / "test.tsv.gz").write_bytes((folder / "qrels" / "test.tsv").read_bytes())
    (folder / "qrels" / "test.tsv").unlink()
    with pytest.raises(ValueError, match="1 bad records"):
        print_data_check(DataSource.open(folder), None, [64], "skip")


def test_records_with_repeated_queries_are_counted(tmp_path: Path) -> None:
    rows = [{"query": query, "pos": [text], "neg": []} for query, text in (("a", "x"), ("b", "y"), ("A", "z"))]
    check = check_source(str(lines(tmp_path / "a.jsonl", *rows)))
    message = "  1 have the query of an earlier example; the positives of one are not known positives of the other"
    assert message in check.lines
    assert message not in check_source(str(lines(tmp_path / "b.jsonl", *rows[:2]))).lines


def test_notes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"anchor": "a", "positive": "x", "label": 0}, {"anchor": "b", "positive": "y", "label": 1}]
    print_data_check(DataSource.open(lines(tmp_path / "a.jsonl", *rows)), None, [64])
    message = "noted: 1 queries without a positive, which give no example (first: a.jsonl:1)"
    assert message in capsys.readouterr().out.splitlines()


def test_a_folder_in_a_forced_format(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"premise": "a", "other": "b"}) + "\n")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"premise": "a", "other": "b"}) + "\n")
    (tmp_path / "queries.jsonl").write_text(json.dumps({"premise": "a", "other": "b"}) + "\n")
    check = check_source(f"st.tuples:{tmp_path}")
    assert not check.policy.errors
    assert any(line.startswith("examples of train (train.jsonl): 1 queries") for line in check.lines), check.lines


@pytest.mark.exhaustive
def test_a_corpus_is_checked_in_less_than_100_bytes_a_passage(tmp_path: Path) -> None:
    """An id, a text and a length take 8 bytes each."""
    path, held = tmp_path / "corpus.jsonl", []
    for count in (500, 2_500):
        lines(
            path, *({"_id": f"a long id of passage {i}".replace(" ", "-"), "text": f"text {i}"} for i in range(count))
        )
        check_source(path)  # imports and caches do not count
        tracemalloc.start()
        check_source(path)
        held.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (held[1] - held[0]) / 2_000 < 100


def test_lengths_in_tokens(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_uncut_tokenizer(str(write_encoder(tmp_path / "encoder")))
    check = check_source(folder, tokenizer, (3, 4))
    passages = tokenizer.passages(Passage("", text) for text in ("river", "stone music", "river", "light paper forest"))
    assert passages.lengths.tolist() == [3, 4, 3, 5]
    assert "  tokens: mean 3.8, median 4, 95 % 5, longest 5" in check.lines
    assert f"  cut: {np.mean(passages.lengths > 3):.1%} at 3, {np.mean(passages.lengths > 4):.1%} at 4" in check.lines


@pytest.mark.parametrize(("separator", "joined"), [(" ", "Rivers stone"), ("[SEP]", "Rivers [SEP] stone")])
def test_the_first_passage_is_shown_as_it_is_read(tmp_path: Path, separator: str, joined: str) -> None:
    """It shows where title and text are joined, for texts of any length."""
    rows = [
        {"_id": "a", "title": "Rivers", "text": "stone"},
        {"_id": "b", "title": "", "text": "x" * 150},
        {"_id": "c", "title": "x" * 150 + "Rivers", "text": "stone" + "x" * 150},
    ]
    path = str(lines(tmp_path / "corpus.jsonl", *rows))
    parts = "  the first, 'a': title 'Rivers', text 'stone' (--tokenizer=MODEL joins them as the model does)"
    assert parts in check_source(path).lines
    tokenizer = load_uncut_tokenizer(write_encoder(tmp_path / "encoder"), separator)
    assert f"  the first, 'a', as the model reads it: {joined!r}" in check_source(path, tokenizer).lines
    path = str(lines(tmp_path / "b.jsonl", *reversed(rows)))
    longest = f"'...{'x' * 54}{joined}{'x' * 55}...'"
    assert f"  the first, 'c', as the model reads it: {longest}" in check_source(path, tokenizer).lines
    path = str(lines(tmp_path / "c.jsonl", rows[1]))
    assert f"  the first, 'b', as the model reads it: '{'x' * 60}...'" in check_source(path, tokenizer).lines
    assert f"  the first, 'b': text '{'x' * 60}...'" in check_source(path).lines


SCORED = {"docid": "2", "text": "y", "score": 1}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["1\ta text", "2\ta text"], "MS MARCO collection, 2 columns, going by the name"),
        (["q1 0 p1 1"], "judgements: 1 for 1 queries (1 of grade 1)"),
        (["q1 Q0 p1 1 2.5 t", "q1 Q0 p2 2 1.5 t"], "rankings: of 1 queries, 2 to 2 passages each"),
        ([{"query": "a", "pos": ["x"], "neg": ["y"]}], "examples: 1 queries, 1 positives, 1 negatives, 0 with scores"),
        (
            [{"query_id": "q", "query": "a", "positive_passages": [{"docid": "1", "text": "x"}, SCORED]}],
            "examples: 1 queries, 2 positives, 0 negatives, 1 with scores",
        ),
    ],
)
def test_files(rows: list, expected: str, tmp_path: Path) -> None:
    check = check_source(str(lines(tmp_path / "a.tsv", *rows)))
    assert any(expected in line for line in check.lines), check.lines
    assert not check.policy.errors


def test_the_negatives_of_a_query_are_counted(tmp_path: Path) -> None:
    """Each further column of texts contains negatives, whatever its name, like in sentence-transformers."""
    rows = [{"anchor": f"question {n}", "positive": f"river {n}", "source": f"page {n}"} for n in range(3)]
    path = lines(tmp_path / "rows.jsonl", *rows, {"anchor": "question 0", "positive": "river 9", "source": "page 9"})
    output = check_source(f"st.tuples:{path}").lines
    assert "negatives 'source'" in output[0]
    assert "  1 to 2 negatives per query" in output


def test_a_file_of_questions_by_its_name(tmp_path: Path) -> None:
    check = check_source(str(lines(tmp_path / "questions.tsv", "1\ta text", "2\ta text")))
    assert any("MS MARCO queries, 2 columns, going by the name" in line for line in check.lines), check.lines


def test_a_folder_of_a_teachers_scores(tmp_path: Path) -> None:
    """PyLate's format: a file named after a split is a ranking of passages without judgements."""
    lines(tmp_path / "documents.jsonl", {"document_id": 1, "text": "stone"}, {"document_id": 2, "text": "river"})
    lines(tmp_path / "queries.jsonl", {"query_id": 1, "text": "a question"})
    lines(tmp_path / "train.jsonl", {"query_id": 1, "document_ids": [1, 2], "scores": [2.5, 0.5]})
    check = check_source(tmp_path)
    assert "rankings of train (train.jsonl): of 1 queries, 2 to 2 passages each" in check.lines
    assert not check.policy.errors


def test_limits_are_in_tokens(tmp_path: Path) -> None:
    """A limit without a tokenizer is refused, because the words of a text have no limit."""
    path = lines(tmp_path / "a.tsv", "1\ta text")
    line = command("-m", "jaxret", "data", "check", str(path), "--lengths=32")
    done = subprocess.run(line, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: --lengths are limits in tokens, which only a --tokenizer can count: give one\n"


def test_ambiguous_content_is_described_by_the_file_name(tmp_path: Path) -> None:
    assert "MS MARCO queries" in check_source(str(lines(tmp_path / "queries.dev.tsv", "1\ta text"))).lines[0]
