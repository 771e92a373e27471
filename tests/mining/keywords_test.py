"""Pseudo-queries from a passage's rarest words."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxret.data.formats import Corpus, QuerySource, write_beir
from jaxret.data.records import Passage
from jaxret.mining.keywords import write_keywords
from tests.pipeline import run_script

PASSAGES = [
    Passage("a", "the quick fox and the river", "Foxes"),
    Passage("b", "a river and a river bank with an otter"),
    Passage("c", "the and of"),  # only stop words
    Passage("d", "the river otter sleeps, the otter sleeps"),
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_beir(tmp_path / "data", PASSAGES, [], {})
    return tmp_path / "data"


def test_the_rarest_and_most_repeated_words_come_first(corpus: Path, tmp_path: Path) -> None:
    assert write_keywords(Corpus.open(corpus), tmp_path / "pseudo.jsonl", count=2) == (3, 4)
    words_of = {query.id: query.text.split() for query in QuerySource.open(tmp_path / "pseudo.jsonl").read()}
    assert set(words_of) == {"a", "b", "d"}
    assert "river" not in words_of["a"], "the word is in every passage that has words"
    assert words_of["d"] == ["sleeps", "otter"]
    assert all(len(words) == 2 for words in words_of.values())


def test_a_count_of_zero_is_an_error(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="count is 0"):
        write_keywords(Corpus.open(corpus), tmp_path / "pseudo.jsonl", count=0)
    assert not (tmp_path / "pseudo.jsonl").exists()


def test_a_corpus_without_words_is_an_error(tmp_path: Path) -> None:
    write_beir(tmp_path / "data", PASSAGES[2:3], [], {})
    with pytest.raises(ValueError, match=r"data .*passage .*English"):
        write_keywords(Corpus.open(tmp_path / "data"), tmp_path / "pseudo.jsonl")
    (tmp_path / "data" / "corpus.jsonl").write_text('{"_id": "a", "text": "river"}\n{"_id": "b"}\n')
    with pytest.raises(ValueError, match=r"corpus.jsonl:2: there is no key 'text'"):
        write_keywords(Corpus.open(tmp_path / "data"), tmp_path / "pseudo.jsonl")


@pytest.mark.slow
def test_from_the_command_line(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "pseudo.jsonl"
    done = run_script("-m", "jaxret", "keywords", f"--corpus={corpus}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert f"3 of 4 passages have keywords, written to {out}" in done.stdout
