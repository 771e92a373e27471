"""Parts of a server without a model: served runs whose operations are functions of a test, and requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from starlette.requests import Request

from jaxret.search.searcher import Searcher
from jaxret.serving.served import ServedRetriever

PASSAGES = 20  # passages of the corpus of `make_served`


def make_searcher(**values: Any) -> Searcher:
    """Return a searcher with only these attributes."""
    searcher = object.__new__(Searcher)
    vars(searcher).update(values)
    return searcher


def make_served(**values: Any) -> ServedRetriever:
    """Return a served run of an exact search with these attributes. The tokens of a text are its number of
    characters."""
    served = object.__new__(ServedRetriever)
    encoded_corpus = SimpleNamespace(total_rows=PASSAGES, corpus_identity={"passages": PASSAGES})
    searcher = make_searcher(
        vectors=SimpleNamespace(generator=None, is_exact=lambda: True), encoded_corpus=encoded_corpus
    )
    vars(served).update(
        name="run",
        encoded_name="data",
        searcher=searcher,
        filters=SimpleNamespace(),
        warm_up=lambda *_: 0,
        tokens=lambda texts, *_: [np.array([len(text)]) for text in texts],
        question_labels=lambda ids: [],
    )
    vars(served).update(values)
    return served


def request_scope(method: str) -> dict[str, Any]:
    """Return the ASGI scope of a request for JSON from this machine."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {"type": "http", "method": method, "path": "/x", "headers": headers, "query_string": b"", "client": None}


def make_request() -> Request:
    return Request(request_scope("POST"))
