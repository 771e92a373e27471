"""Answers of the interfaces: the order of texts and passages in them, and their size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from jaxret.serving.counters import Counters
from jaxret.serving.device import DeviceThread
from jaxret.serving.refusal import Body, RefusalError
from jaxret.serving.routes import Routes
from jaxret.serving.serve_options import ServeOptions
from jaxret.serving.served import SearchAnswer, SearchHit
from jaxret.serving.served_reranker import ServedReranker
from tests.serving.fakes import PASSAGES, make_request, make_served

OPTIONS = ServeOptions(most_hits=6, most_numbers=12)


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    thread = DeviceThread(batch=4, queue_limit=10)
    yield thread
    thread.end()


def ask(device: DeviceThread, model: Any, path: str, body: dict[str, Any]) -> Any:
    """Return the JSON of the answer to a request."""
    routes = Routes([model], device, OPTIONS, Counters(device))
    routes.warm_up()

    async def run() -> Response:
        return await routes.endpoints()["POST", path](make_request(), Body(body))

    try:
        return json.loads(bytes(asyncio.run(run()).body))
    finally:
        routes.stop()


def search(items: Sequence[np.ndarray], k: int, searcher: Any, texts: bool) -> list[SearchAnswer]:
    """Return the passages 0 to k - 1 for each question, named by the length of the question."""
    return [
        SearchAnswer(
            [SearchHit(f"{ids[0]}-{n}", 1 - n / 8, "", "", (0,), ()) for n in range(k)],
            "",
            1,
            k,
            len(items),
            np.arange(k),
        )
        for ids in items
    ]


def test_each_question_has_its_own_k_best_passages_in_their_order(device: DeviceThread) -> None:
    """More passages than requested are searched, because programs exist for a few numbers only."""
    answer = ask(device, make_served(search=search), "/search", {"queries": ["four", "a", "two"], "k": 2})
    ids = [[hit["id"] for hit in hits] for hits in answer["results"]]
    assert ids == [["4-0", "4-1"], ["1-0", "1-1"], ["3-0", "3-1"]]
    assert [hit["score"] for hit in answer["results"][0]] == [1, 7 / 8]
    assert answer["proof"][0]["scored_exactly"] > 2, "control: more passages were searched"


@pytest.mark.parametrize(("questions", "k"), [(2, 4), (1, 7), (7, 1)])
def test_an_answer_has_at_most_the_allowed_hits(device: DeviceThread, questions: int, k: int) -> None:
    served = make_served(search=search)
    with pytest.raises(RefusalError, match=f"{questions * k} hits; 6 are"):
        ask(device, served, "/search", {"queries": ["x"] * questions, "k": k})
    answer = ask(device, served, "/search", {"queries": ["x"] * 2, "k": 3})
    assert list(map(len, answer["results"])) == [3, 3], "control: 6 hits are allowed"


def test_passages_that_do_not_exist_are_not_counted_as_hits(device: DeviceThread) -> None:
    with pytest.raises(RefusalError, match=f"{PASSAGES} hits; 6 are"):
        ask(device, make_served(search=search), "/search", {"queries": ["x"], "k": 10 * PASSAGES})


def test_texts_are_reranked_best_first_and_keep_their_numbers(device: DeviceThread) -> None:
    """Of equal scores, the first text comes first."""
    scores = {"a": 0.5, "b": 2.0, "c": -1.0, "d": 2.0}
    reranker = object.__new__(ServedReranker)
    vars(reranker).update(name="cross", warm_up=lambda *_: 0, pairs=lambda question, texts, cut: list(texts))
    vars(reranker).update(score=lambda items: [scores[item] for item in items])
    body = {"query": "x", "texts": list(scores), "raw_scores": True, "return_text": True}
    answer = ask(device, reranker, "/rerank", body)
    assert [(hit["index"], hit["text"]) for hit in answer] == [(1, "b"), (3, "d"), (0, "a"), (2, "c")]
    assert [hit["score"] for hit in answer] == [2, 2, 0.5, -1]
    answer = ask(device, reranker, "/rerank", {"query": "x", "texts": list(scores)})
    assert [(hit["index"], hit["score"]) for hit in answer][2] == (0, pytest.approx(1 / (1 + np.exp(-0.5))))
    assert "text" not in answer[0]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_vectors_have_the_order_of_the_texts(device: DeviceThread, path: str) -> None:
    model = SimpleNamespace(dimension=4, vectors_per_passage=1, late_interaction=False, sparse=False)
    model.vector_counts = lambda texts, side: np.ones(len(texts))
    served = make_served(
        run=SimpleNamespace(model=model), embed=lambda items, side: [np.eye(1, 4, ids[0]) for ids in items]
    )
    texts = ["abc", "a", "ab"]

    def vectors(texts: list[str]) -> list[list[float]]:
        answer = ask(device, served, path, {"input" if path.startswith("/v1") else "inputs": texts})
        return answer if path == "/embed" else [entry["embedding"] for entry in answer["data"]]

    assert vectors(texts) == np.eye(4)[[3, 1, 2]].tolist(), "control: 12 numbers are allowed"
    with pytest.raises(RefusalError, match="16 numbers; 12 are"):
        vectors([*texts, "b"])
