"""Passages are split into sentences, equal parts or windows of words, and documents are joined again."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxret.data.chunks import ChunkOptions, document_id, joined_chunks, split_passage, split_text
from jaxret.data.formats import Corpus, TrainingSource
from jaxret.data.records import Passage
from jaxret.search.documents import join_passages
from tests.pipeline import environment

TEXT = "one two  three four\nfive six seven"


def test_equal_parts_differ_by_one_word() -> None:
    assert split_text(TEXT, ChunkOptions(equal=3)) == ["one two", "three four", "five six seven"]
    assert split_text("one two", ChunkOptions(equal=8)) == ["one", "two"]
    hundred = " ".join(map(str, range(100)))
    assert [len(part.split()) for part in split_text(hundred, ChunkOptions(equal=8))] == [12, 13, 12, 13] * 2


def test_windows_overlap_and_keep_white_space() -> None:
    assert split_text(TEXT, ChunkOptions(words=3)) == ["one two  three", "four\nfive six", "seven"]
    windows = ["one two  three", "three four\nfive", "five six seven"]  # a fourth window would have no new word
    assert split_text(TEXT, ChunkOptions(words=3, overlap=1)) == windows
    assert split_text("one", ChunkOptions(words=3, overlap=2)) == ["one"]


@pytest.mark.slow
@hypothesis.given(st.text(), st.integers(1, 9), st.booleans())
def test_the_words_of_a_text_are_those_of_its_chunks(text: str, count: int, equal: bool) -> None:
    chunks = split_text(text, ChunkOptions(equal=count) if equal else ChunkOptions(words=count))
    assert [word for chunk in chunks for word in chunk.split()] == text.split()
    assert chunks == [""] or all(chunk == chunk.strip() and chunk for chunk in chunks)
    assert len(chunks) <= count or not equal


@hypothesis.given(st.text(), st.integers(1, 9), st.data())
def test_windows_overlap_with_the_previous_window(text: str, words: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, words - 1))
    chunks = [chunk.split() for chunk in split_text(text, ChunkOptions(words=words, overlap=overlap))]
    again = chunks[0] + [word for chunk in chunks[1:] for word in chunk[overlap:]]
    assert again == text.split()
    assert all(one[-overlap:] == two[:overlap] for one, two in itertools.pairwise(chunks)) or not overlap
    assert all(len(chunk) > overlap for chunk in chunks[1:])


@hypothesis.given(st.integers(0, 60), st.integers(1, 9), st.data())
def test_chunks_are_joined_without_their_overlap(count: int, words: int, data: st.DataObject) -> None:
    text = " ".join(map(str, range(count)))
    overlap = data.draw(st.integers(0, words - 1))
    chunks = split_text(text, ChunkOptions(words=words, overlap=overlap))
    assert joined_chunks(chunks) == text
    assert joined_chunks([]) == ""
    assert joined_chunks(["the dog", "dog eats", "no more"]) == "the dog dog eats no more"


def test_the_longest_overlap_is_written_once() -> None:
    """A word that is repeated where chunks overlap also looks like an overlap of one word."""
    text = "the bell rang rang rang and rang"
    chunks = split_text(text, ChunkOptions(words=5, overlap=3))
    assert chunks == ["the bell rang rang rang", "rang rang rang and rang"]
    assert joined_chunks(chunks) == text


def test_sentences() -> None:
    pytest.importorskip("sentencex")
    text = "Mr. Smith met Dr. Jones in the U.S. Senate. It cost 3.5 million.  They left!"
    expected = ["Mr. Smith met Dr. Jones in the U.S. Senate.", "It cost 3.5 million.", "They left!"]
    assert split_text(text, ChunkOptions(sentences=True)) == expected
    assert split_text(" ", ChunkOptions(sentences=True)) == [""]


def test_ids() -> None:
    chunks = split_passage(Passage("a#b", "one two", "Title"), ChunkOptions(words=1))
    assert chunks == [Passage("a#b#0", "one", "Title"), Passage("a#b#1", "two", "Title")]
    assert [document_id(chunk.id) for chunk in chunks] == ["a#b", "a#b"]
    assert [document_id(key) for key in ("a#b", "#1", "7", "a#", "D7#12")] == ["a#b", "#1", "7", "a#", "D7"]


@pytest.mark.parametrize("options", [{}, {"equal": 2, "words": 3}, {"words": 3, "overlap": 3}, {"equal": -1}])
def test_contradicting_options_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give one of|overlap is 3|equal is -1"):
        ChunkOptions(**options)


def test_a_document_is_the_sequence_of_its_chunks() -> None:
    """The documents include one with more chunks than one read returns, one without chunks, and one that does not
    exist."""
    long = Passage("long", " ".join(map(str, range(40))), "Title")
    stored = {chunk.id: chunk for chunk in split_passage(long, ChunkOptions(words=1))} | {"one": Passage("one", "text")}
    reads = []

    def read(ids: object) -> dict[str, Passage]:
        reads.append(ids)
        return {key: stored.get(key) or Passage(key, "") for key in ids}  # type: ignore[attr-defined]

    assert join_passages(read, ["long", "one", "none"]) == {
        "long": long,
        "one": Passage("one", "text"),
        "none": Passage("none", ""),
    }
    assert len(reads) == 4, "the last read returns no chunk"
    stored["long#3"] = stored["long#31"] = Passage("empty", "")
    (joined,) = join_passages(read, ["long"]).values()
    assert joined.text.split() == [str(number) for number in range(40) if number not in (3, 31)]


def test_a_document_lacks_its_deleted_chunks() -> None:
    """They are absent even if so many are deleted that one read returns none, and if the chunks next to them
    overlap."""
    words = [str(number) for number in range(81)]
    chunks = split_passage(Passage("a", " ".join(words)), ChunkOptions(words=3, overlap=1))
    stored = {chunk.id: chunk for chunk in chunks}
    deleted_ids = {f"a#{number}" for number in range(16, 32)}

    def read(ids: Collection[str]) -> dict[str, Passage]:
        return {key: stored.get(key) or Passage(key, "") for key in ids}

    (joined,) = join_passages(read, ["a"], deleted_ids).values()
    assert joined.text.split() == [*words[:33], *words[64:]]
    (joined,) = join_passages(read, ["a"], set(stored)).values()
    assert joined == Passage("a", "")


def jaxret(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxret", "data", "chunk", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


def test_a_corpus_and_training_records_are_split(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "p1", "title": "T", "text": "red fox. blue sea."}\n')
    done = jaxret(tmp_path, "corpus.jsonl", "chunks.jsonl.gz", "--equal=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 records read, 2 written: chunks.jsonl.gz\n"
    chunks = [Passage("p1#0", "red fox.", "T"), Passage("p1#1", "blue sea.", "T")]
    assert list(Corpus.open(tmp_path / "chunks.jsonl.gz").read()) == chunks

    def passage(key: str, text: str) -> dict[str, str]:
        return {"passage_id": key, "title": "", "text": text}

    records = [
        {"question": "q1", "answers": ["Sea"], "positive_ctxs": [passage("1", "red fox blue sea")]},
        {"question": "q2", "answers": ["fox blue"], "positive_ctxs": [passage("1", "red fox blue sea")]},
    ]
    for record in records:
        record |= {"negative_ctxs": [], "hard_negative_ctxs": [passage("2", "old sea map")]}
    (tmp_path / "train.json").write_text(json.dumps(records))
    done = jaxret(tmp_path, "train.json", "train.jsonl", "--words=2")
    assert done.stdout.splitlines() == [
        "2 records read, 1 written: train.jsonl",
        "1 training records are left out: no chunk of a positive has an answer",
    ]
    (example,) = TrainingSource.open(tmp_path / "train.jsonl", None).read()
    assert (example.query.text, example.query.answers) == ("q1", ("Sea",))
    assert example.positives == (Passage("1#1", "blue sea"),)
    assert example.negatives == (Passage("2#0", "old sea"), Passage("2#1", "map"))


@pytest.mark.slow
def test_unsplittable_input_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "p1", "text": "red fox"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "train.jsonl").write_text('{"query": "q", "pos": ["red fox"], "neg": ["blue sea"]}\n')
    for arguments, message in {
        ("corpus.jsonl", "out.jsonl"): "give one of sentences, equal=N and words=N",
        ("corpus.jsonl", "corpus.jsonl", "--words=1"): "corpus.jsonl is a file of corpus.jsonl (what is split)",
        ("train.jsonl", "out.jsonl", "--words=1"): "train.jsonl: query '0' has no answers",
        ("corpus.jsonl", "no/out.jsonl", "--words=1"): "there is no folder",
        ("empty.jsonl", "out.jsonl", "--words=1"): "empty.jsonl has no record to split",
    }.items():
        done = jaxret(tmp_path, *arguments)
        assert done.returncode == 1, done
        assert message in done.stderr
        assert not (tmp_path / "out.jsonl").exists()
    assert (tmp_path / "corpus.jsonl").read_text().startswith('{"_id"')
