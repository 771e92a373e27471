"""BM25: the formula by hand, order and ties, queries without results, and published values on real data."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus, Policy
from jaxret.data.records import Judgement, Passage, Query
from jaxret.evaluation.metrics import evaluate
from jaxret.parallel import progress
from jaxret.runs.mismatch import ContractError
from jaxret.search import bm25_index
from jaxret.search.bm25 import BM25
from jaxret.search.bm25_index import keep_bm25_index, tokenize_words
from jaxret.search.bm25_settings import BM25Settings

PASSAGES = [
    Passage("cats", "Cats chase mice. The cat is quick."),
    Passage("dogs", "dogs chase cats", title="Loyal Animals"),
    Passage("fish", "fish swim"),
]


def test_scores_equal_lucenes_formula() -> None:
    """Tokens after stop words and stemming: cat chase mice cat quick | loyal anim dog chase cat | fish swim."""
    (ranking,) = BM25.of(PASSAGES, BM25Settings(k1=1.2, b=0.75)).search([Query("q", "the cats")], k=3).values()
    inverse_frequency = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))

    def score(count: int, length: int) -> float:
        return inverse_frequency * count / (count + 1.2 * (1 - 0.75 + 0.75 * length / 4))  # 4 = mean of 5, 5 and 2

    assert [passage for passage, _ in ranking] == ["cats", "dogs"]
    assert [value for _, value in ranking] == pytest.approx([score(2, 5), score(1, 5)], rel=1e-6)


def test_scores_equal_a_loop_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every passage, with a corpus of several blocks; other settings give other scores."""
    random = np.random.default_rng(1)
    words = ["river", "stone", "music", "light", "forest", "market", "winter", "garden"]
    texts = [list(random.choice(words, random.integers(0, 12))) for _ in range(50)]
    passages = [Passage(str(row), " ".join(text)) for row, text in enumerate(texts)]
    stems = {word: tokenize_words([word], "english", False)[0][0] for word in words}
    mean = sum(map(len, texts)) / len(texts)

    def score(query: list[str], text: list[str], k1: float, b: float) -> float:
        total = 0.0
        for word in query:
            frequency = sum(word in other for other in texts)
            inverse = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
            count = text.count(word)
            total += inverse * count / (count + k1 * (1 - b + b * len(text) / mean))
        return total

    assert len(set(stems.values())) == len(words), "no two words have the same stem"
    monkeypatch.setattr(bm25_index, "_BLOCK", 7)
    query = ["river", "garden", "river"]
    index = BM25.of(passages, BM25Settings(k1=1.3, b=0.6))
    scores = index.scores(Query("q", " ".join(query)), [passage.id for passage in passages])
    assert list(scores.values()) == pytest.approx([score(query, text, 1.3, 0.6) for text in texts], rel=1e-6)
    assert list(scores.values()) != pytest.approx([score(query, text, 0.9, 0.6) for text in texts], rel=1e-3)
    ranking = index.search([Query("q", " ".join(query))], k=50)["q"]
    expected = sorted(((p, s) for p, s in scores.items() if s > 0), key=lambda hit: (-hit[1], int(hit[0])))
    assert ranking == expected


def test_another_language_has_other_stems() -> None:
    passages = [Passage("1", "die Katzen jagen"), Passage("2", "cats chase")]
    german, plain = (BM25.of(passages, BM25Settings(language=language)) for language in ("german", "none"))
    assert [key for key, _ in german.search([Query("q", "Katze")], 2)["q"]] == ["1"]
    assert plain.search([Query("q", "Katze")], 2)["q"] == []
    assert [key for key, _ in plain.search([Query("q", "die")], 2)["q"]] == ["1"], "stop words are kept"
    with pytest.raises(ValueError, match=r"language .*'klingon'; .*arabic"):
        BM25Settings(language="klingon")
    with pytest.raises(ValueError, match=r"b .*1.5; .*1"):
        BM25Settings(b=1.5)


def test_the_title_is_indexed() -> None:
    run = BM25.of(PASSAGES).search([Query("q", "loyal")], k=3)
    assert [passage for passage, _ in run["q"]] == ["dogs"]


def test_passages_without_a_shared_word_are_not_retrieved() -> None:
    queries = [Query("fish", "a fish"), Query("unknown", "submarine"), Query("empty", ""), Query("stop", "what is the")]
    run = BM25.of(PASSAGES).search(queries, k=3)
    assert {query: [passage for passage, _ in ranking] for query, ranking in run.items()} == {
        "fish": ["fish"],
        "unknown": [],
        "empty": [],
        "stop": [],
    }


def test_scores_of_given_passages_equal_those_of_a_search() -> None:
    index, query = BM25.of(PASSAGES), Query("q", "the loyal cats")
    scores = dict(index.search([query], k=3)["q"])
    assert index.scores(query, ["fish", "dogs", "absent"]) == {"fish": 0.0, "dogs": scores["dogs"]}
    assert index.scores(query, ["absent"]) == {}


def test_ties_keep_the_corpus_order_at_every_cutoff() -> None:
    texts = ["apple pear", "plum", "pear apple", "apple apple", "apple pear", "pear plum", "apple plum"]
    index = BM25.of([Passage(f"p{row}", text) for row, text in enumerate(texts)])
    query = [Query("q", "apple")]
    full = index.search(query, k=7)["q"]
    assert [passage for passage, _ in full] == ["p3", "p0", "p2", "p4", "p6"]
    assert len({score for _, score in full}) == 2
    for k in range(1, 6):
        assert index.search(query, k)["q"] == full[:k]


def test_top_k_equals_a_full_sort() -> None:
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(12)]
    passages = [Passage(str(row), " ".join(rng.choice(words, rng.integers(1, 6)))) for row in range(300)]
    index = BM25.of(passages)
    query = Query("q", "word1 word2 word3")
    full = index.search([query], k=300)["q"]
    assert full == sorted(full, key=lambda item: (-item[1], int(item[0])))
    assert len({score for _, score in full}) < len(full)  # control: some scores are equal
    for k in (1, 10, 57):
        assert index.search([query], k)["q"] == full[:k]


def test_nothing_is_printed_by_default(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL", 1e-6)
    index = BM25.of(PASSAGES)
    with caplog.at_level(logging.DEBUG):
        BM25.of(PASSAGES).search([Query("q", "cats"), Query("empty", "")], k=2)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert [record for record in caplog.records if record.name == "bm25s"] == []
    index.search([Query("q", "cats")], k=2, progress=True)
    assert "BM25 search" in capfd.readouterr().err


def test_bad_input_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"0 passages .*word"):
        BM25.of([])
    with pytest.raises(ValueError, match=r"2 passages .*word"):
        BM25.of([Passage("1", "the"), Passage("2", "")])
    with pytest.raises(ValueError, match="passage id 'cats' occurs twice"):
        BM25.of([*PASSAGES, PASSAGES[0]])
    index = BM25.of(PASSAGES)
    with pytest.raises(ValueError, match="query id 'q' occurs twice"):
        index.search([Query("q", "cats"), Query("q", "dogs")], k=1)
    with pytest.raises(ValueError, match="k is 0"):
        index.search([Query("q", "cats")], k=0)


def test_a_kept_index_is_opened_again_if_it_is_whole_and_has_the_same_settings(tmp_path: Path) -> None:
    file, folder = tmp_path / "corpus.jsonl", tmp_path / "index"
    file.write_text("".join(json.dumps({"_id": one.id, "text": one.text}) + "\n" for one in PASSAGES))

    def keep(**settings: float) -> bool:
        return keep_bm25_index(folder, Corpus.open(file), BM25Settings(**settings), Policy())[0]  # type: ignore[arg-type]

    assert [keep(), keep()] == [True, False]
    with pytest.raises(ContractError, match=r"settings\.k1: 0\.9 .*, 1\.2"):
        keep(k1=1.2)
    scores = folder / "data.csc.index.npy"
    scores.write_bytes(scores.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"data\.csc\.index\.npy .*damaged; remove"):
        keep()


def test_scifact(data_dir: Path) -> None:
    """Anserini's BM25 has nDCG@10 .679 and R@100 .925 on BEIR's SciFact, with other stop words."""
    folder = data_dir / "scifact"
    if not folder.is_dir():
        pytest.skip(f"no SciFact at {folder}")
    corpus = [json.loads(line) for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()]
    qrels = [line.split("\t") for line in (folder / "qrels" / "test.tsv").read_text("utf-8").splitlines()[1:]]
    judgements = [Judgement(query, passage, int(relevance)) for query, passage, relevance in qrels]
    judged = {judgement.query_id for judgement in judgements}
    texts = [json.loads(line) for line in (folder / "queries.jsonl").read_text("utf-8").splitlines()]
    queries = [Query(row["_id"], row["text"]) for row in texts if row["_id"] in judged]

    run = BM25.of([Passage(row["_id"], row["text"], row["title"]) for row in corpus]).search(queries, k=100)
    evaluation = evaluate(run, judgements, ["nDCG@10", "R@100"])
    assert evaluation.mean == pytest.approx({"nDCG@10": 0.679, "R@100": 0.925}, abs=0.015)
    assert (evaluation.queries_found, evaluation.queries_expected) == (300, 300)
