"""A served run: the order of results, documents, and a corpus that changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxret.api import EncodeOptions, Hit, Index, Retriever
from jaxret.data.chunks import document_id
from jaxret.data.records import Passage
from jaxret.experiments.explain import explain, vector_labels
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.encoding.update import delete_ids
from jaxret.runs.mismatch import ContractError
from jaxret.search.proof import SearchResult
from jaxret.search.search_options import SearchOptions
from jaxret.serving.serve_options import ServeOptions
from jaxret.serving.served import ServedRetriever
from jaxret.serving.served_reranker import ServedReranker
from jaxret.types import Ragged
from tests.pipeline import untrained_run, write_data, write_encoder
from tests.serving.fakes import make_searcher, make_served

CHUNKS = {
    "a#0": "silver river stone garden",
    "a#1": "castle bridge light",
    "b#0": "garden music",
    "b#1": "stone silver",
}


LENGTHS = (5, 1, 9, 2, 3)  # tokens of five texts, which are computed in batches of two, the shortest first
BATCHES = [[1, 2], [3, 5], [9]]


def test_vectors_and_rankings_have_the_order_of_the_texts() -> None:
    """The vector of a text, its score, and the id of its best passage are its length."""
    batches: list[list[int]] = []

    def embed(texts: Ragged, side: str) -> Ragged:
        batches.append(texts.lengths.tolist())
        return Ragged.from_stacked(texts.lengths[:, None, None].astype(np.float32))

    def nearest(vectors: Ragged, k: int) -> tuple[SearchResult, list[list[str]]]:
        rows = np.zeros((len(vectors), k), np.int64)
        return SearchResult(vectors.flat, rows, "", (len(vectors),)), [[f"p{length:g}"] for (length,) in vectors.flat]

    def best_vectors(outcome: Any) -> list[list[tuple[int, ...]]]:
        return [[(0,)]] * len(outcome.result.rows)

    run = SimpleNamespace(model=SimpleNamespace(vectors_per_passage=1))
    served = make_served(options=ServeOptions(batch=2), run=run, embedder=embed, _short_embedder=None)
    texts = [np.zeros(length, np.int32) for length in LENGTHS]
    assert [vectors.tolist() for vectors in served.embed(texts, "passage")] == [[[length]] for length in LENGTHS]
    assert batches == BATCHES
    searcher = make_searcher(nearest=nearest, best_vectors=best_vectors, encoded_corpus=object.__new__(EncodedCorpus))
    answers = served.search(texts, 1, searcher, texts=False)
    assert [[(hit.id, hit.score) for hit in answer.hits] for answer in answers] == [[(f"p{n}", n)] for n in LENGTHS]
    assert [answer.batch for answer in answers] == [2, 2, 1, 2, 2]


def test_scores_of_pairs_have_the_order_of_the_pairs() -> None:
    batches: list[list[int]] = []

    def score(queries: Ragged, passages: Ragged, query_rows: np.ndarray, passage_rows: np.ndarray) -> np.ndarray:
        batches.append(passages.lengths_of(passage_rows).tolist())
        return passages.lengths_of(passage_rows).astype(np.float32)

    served = object.__new__(ServedReranker)
    vars(served).update(options=ServeOptions(batch=2), reranker=SimpleNamespace(scorer=score))
    query = np.zeros(3, np.int32)
    assert served.score([(query, np.zeros(length, np.int32)) for length in LENGTHS]) == list(LENGTHS)
    assert batches == BATCHES


def test_winners_and_explanations_of_a_document_are_those_of_its_best_passage(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data", train=2, dev=1)
    lines = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in CHUNKS.items()]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    keys = {"head__name": "colbert", "head__colbert__late": True, "normalize": True}
    run = untrained_run(tmp_path / "run", tmp_path / "encoder", tmp_path / "data", **keys)
    plain = Index.build(Retriever.open(tmp_path / "run"), tmp_path / "corpus.jsonl", progress=False)
    served = ServedRetriever(str(tmp_path / "run"), "", "best", ServeOptions(), SearchOptions(max_passage=True))
    question = "castle bridge light"
    best: dict[str, Hit] = {}
    for one in plain.search([question], 4)[0]:
        best.setdefault(document_id(one.id), one)
    assert served.searcher is not None
    (answer,) = served.search(served.tokens([question], "query"), 2, served.searcher, texts=True)
    assert [hit.id for hit in answer.hits] == list(best)
    assert best["a"].id == "a#1", "the second passage wins"
    for hit in answer.hits:
        passage = Passage(best[hit.id].id, best[hit.id].text, best[hit.id].title)
        labels = vector_labels(run, run.tokenizer.passages([passage]), "passage")
        assert hit.winners == tuple(labels[place] for place in hit.vectors)
        assert served.explanations([(question, None, hit.id)], 5) == [explain(run, question, passage, 5)]


def test_a_refreshed_model_searches_the_changed_corpus(tmp_path: Path) -> None:
    """The old model answers as before, because requests may still use it. A corpus that cannot be opened is refused."""
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data", train=2, dev=1)
    untrained_run(tmp_path / "run", tmp_path / "encoder", tmp_path / "data", normalize=True)
    passages = [Passage(key, text) for key, text in CHUNKS.items()]
    index = Index.build(Retriever.open(tmp_path / "run"), passages, progress=False)
    old = ServedRetriever(str(tmp_path / "run"), "", "best", ServeOptions(batch=2), SearchOptions())
    assert not old.is_stale

    def search(model: ServedRetriever) -> list[tuple[str, str]]:
        assert model.searcher is not None
        (answer,) = model.search(model.tokens(["winter market paper"], "query"), 5, model.searcher, texts=True)
        return [(hit.id, hit.text) for hit in answer.hits]

    before = search(old)
    index.append([Passage("c#0", "winter market paper")], progress=False)
    assert old.is_stale
    new = old.reopen()
    assert not new.is_stale
    assert search(new)[0] == ("c#0", "winter market paper")
    assert new.filters is not None
    assert len(search(new)) == len(before) + 1 == new.passages
    assert search(old) == before

    folder = tmp_path / "run" / "embeddings" / new.encoded_name
    delete_ids(folder, dict.fromkeys([*CHUNKS, "c#0"]))
    with pytest.raises(ContractError, match="all were deleted"):
        new.reopen()
    shutil.rmtree(folder)
    Index.build(Retriever.open(tmp_path / "run"), passages, folder.name, EncodeOptions(dimension=8), progress=False)
    with pytest.raises(ContractError, match="restart the server"):
        new.reopen()
