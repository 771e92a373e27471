"""The interfaces of a server: OpenAI's embeddings, text-embeddings-inference (TEI), and jaxret's own interface."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxret.data.records import Passage
from jaxret.models.heads.head import Side
from jaxret.search.searcher import Searcher
from jaxret.serving.answers import json_answer
from jaxret.serving.counters import Counters, log_event
from jaxret.serving.device import DeviceThread, Operation
from jaxret.serving.filter_searchers import CORPUS_ERRORS, FilterLimit
from jaxret.serving.gateway import Endpoint
from jaxret.serving.refusal import Body, RefusalError, check_text, shown
from jaxret.serving.serve_options import ServeOptions
from jaxret.serving.served import ServedModel, ServedRetriever
from jaxret.serving.served_reranker import ServedReranker
from jaxret.version import __version__

_SIDES: dict[str, Side] = {
    "query": "query",
    "search_query": "query",
    "passage": "passage",
    "document": "passage",
    "search_document": "passage",
}
_HIT_NUMBERS = 30  # a hit takes as long to encode as this many numbers
_SHORT = 1000  # characters of texts that are tokenized in less than a millisecond


class Routes:
    """The endpoints over some runs and the thread of the device."""

    def __init__(
        self, models: Sequence[ServedModel], device: DeviceThread, options: ServeOptions, counters: Counters
    ) -> None:
        """Keep the runs.

        Args:
            models: runs; the first run of a task is the default of this task.
            device: thread that computes.
            options: limits of requests.
            counters: counts of the server.
        """
        self._models = {model.name: model for model in models}
        self._device, self._options, self._counters = device, options, counters
        self._start_time = int(time.time())
        self._ready = False
        self._stop = threading.Event()
        # Openings of filters and of changed corpora wait for each other in this thread, and do not occupy the threads
        # of requests.
        self._opener = ThreadPoolExecutor(1, "opener")
        self._filter_limit = FilterLimit()

    def warm_up(self) -> None:
        """Compile all programs in the thread of the device. The server answers when this is done."""
        start, programs = time.perf_counter(), 0

        def compile_programs(models: Sequence[ServedModel]) -> list[int]:
            should_stop = self._stop.is_set
            return [model.warm_up(lambda text: log_event("start", message=text), should_stop) for model in models]

        for count in self._device.submit(Operation(compile_programs), list(self._models.values())).result():
            programs += count
        if self._stop.is_set():
            return
        self._counters.programs.set(programs)
        self._counters.ready.set(1)
        self._ready = True
        log_event("ready", programs=programs, seconds=round(time.perf_counter() - start, 1))

    def stop(self) -> None:
        """End `warm_up` after the program that is being compiled, and end the thread that opens filters and corpora."""
        self._stop.set()
        self._opener.shutdown(wait=False, cancel_futures=True)

    def endpoints(self) -> dict[tuple[str, str], Endpoint]:
        """Return (method, path) -> endpoint. A path that ends with / includes all paths below it."""
        posts: dict[str, Endpoint] = {
            "/v1/embeddings": self._openai_embeddings,
            "/embed": self._embed,
            "/embed_all": self._embed_all,
            "/embed_sparse": self._embed_sparse,
            "/rerank": self._rerank,
            "/search": self._search,
            "/explain": self._explain,
            "/refresh": self._refresh,
        }
        gets: dict[str, Endpoint] = {
            "/v1/models": self._openai_models,
            "/v1/models/": self._openai_model,
            "/info": self._info,
            "/fields": self._fields,
            "/health": self._health,
            "/metrics": self._metrics,
        }
        return {("POST", path): answer for path, answer in posts.items()} | {
            ("GET", path): answer for path, answer in gets.items()
        }

    # OpenAI

    async def _openai_embeddings(self, request: Request, body: Body) -> Response:
        name = body.get("model", str, "")
        model, side = self._retriever_of(
            name, body.choice("input_type", tuple(_SIDES), "passage"), "input_type" in body
        )
        texts = body.texts("input", self._options.most_inputs, self._options.most_characters)
        encoding = body.choice("encoding_format", ("float", "base64"), "float")
        dimensions = body.get("dimensions", int, model.dimension)
        model.cut([], dimensions)  # refuses wrong dimensions before anything is computed
        if not model.side_is_single(side):
            raise RefusalError(
                400, f"{model.name} has several vectors, or weights of words, for a text: {_other_path(model)}"
            )
        tokens = await self._tokens(model, texts, side)
        self._allow(len(texts) * dimensions, "numbers")
        vectors = model.cut(await self._compute(Operation(model.embed, (side,)), tokens), dimensions)

        def content() -> dict[str, Any]:
            data = [
                {"object": "embedding", "index": index, "embedding": _encode_vector(text_vectors[0], encoding)}
                for index, text_vectors in enumerate(vectors)
            ]
            count = sum(map(len, tokens))
            usage = {"prompt_tokens": count, "total_tokens": count}
            return {"object": "list", "data": data, "model": name or model.name, "usage": usage}

        return await json_answer(content, len(texts) * dimensions)

    async def _openai_models(self, request: Request, body: Body) -> Response:
        return JSONResponse({"object": "list", "data": list(map(self._openai_entry, self._openai_names()))})

    async def _openai_model(self, request: Request, body: Body) -> Response:
        name = request.scope["path"].removeprefix("/v1/models/")
        if name not in self._openai_names():
            have = ", ".join(self._openai_names())
            raise RefusalError(404, f"there is no model {shown(name)}; there are {have}", "model_not_found")
        return JSONResponse(self._openai_entry(name))

    def _openai_names(self) -> list[str]:
        return [
            name
            for model in self._models.values()
            for name in ([model.name] if isinstance(model, ServedReranker) else [model.name, f"{model.name}:query"])
        ]

    def _openai_entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._start_time, "owned_by": "jaxret"}

    # TEI

    async def _embed(self, request: Request, body: Body) -> Response:
        model, side, vectors = await self._tei_vectors(body, normalize=True)
        if not model.side_is_single(side):
            raise RefusalError(
                424, f"{model.name} has several vectors, or weights of words, for a text: {_other_path(model)}"
            )
        return await _json_vectors([text_vectors[0] for text_vectors in vectors])

    async def _embed_all(self, request: Request, body: Body) -> Response:
        model, _, vectors = await self._tei_vectors(body)
        if model.run.model.sparse:
            raise RefusalError(424, f"{model.name} has weights of words: POST /embed_sparse")
        return await _json_vectors(vectors)

    async def _embed_sparse(self, request: Request, body: Body) -> Response:
        model, _, vectors = await self._tei_vectors(body)
        if not model.run.model.sparse:
            raise RefusalError(424, f"{model.name} has dense vectors: POST /embed or /embed_all")
        numbers = 2 * sum(int(np.count_nonzero(text_vectors)) for text_vectors in vectors)
        self._allow(numbers, "numbers")  # known only after the computation, because most weights are 0
        return await json_answer(
            lambda: [
                [
                    {"index": int(word), "value": float(text_vectors[0, word])}
                    for word in np.flatnonzero(text_vectors[0])
                ]
                for text_vectors in vectors
            ],
            numbers,
        )

    async def _tei_vectors(self, body: Body, normalize: bool = False) -> tuple[ServedRetriever, Side, list[np.ndarray]]:
        """Return the model, the side and the vectors of a request's texts. `normalize` is the default of the request's
        key "normalize"."""
        model, side = self._retriever_of(
            body.get("model", str, ""), body.choice("prompt_name", tuple(_SIDES), "passage"), "prompt_name" in body
        )
        texts = body.texts("inputs", self._options.most_inputs, self._options.most_characters)
        dimensions = body.get("dimensions", int, model.dimension)
        model.cut([], dimensions)
        body.choice("truncation_direction", ("right", "Right"), "right")
        tokens = await self._tokens(model, texts, side, body.get("truncate", bool, True))
        if not model.run.model.sparse:
            self._allow(model.vectors_of(tokens, side) * dimensions, "numbers")
        vectors = model.cut(await self._compute(Operation(model.embed, (side,)), tokens), dimensions)
        if body.get("normalize", bool, normalize):
            norms = [np.linalg.norm(text_vectors, axis=1, keepdims=True) for text_vectors in vectors]
            vectors = [
                text_vectors / np.maximum(norm, 1e-12) for text_vectors, norm in zip(vectors, norms, strict=True)
            ]
        return model, side, vectors

    async def _rerank(self, request: Request, body: Body) -> Response:
        model = self._of_task(body.get("model", str, ""), ServedReranker, "a cross-encoder, which /rerank needs")
        question = check_text(body.get("query", str, ""), "query", self._options.most_characters)
        texts = body.texts("texts", self._options.most_inputs, self._options.most_characters)
        pairs = await run_in_threadpool(model.pairs, question, texts, body.get("truncate", bool, True))
        scores = np.array(await self._compute(Operation(model.score), pairs))
        if not body.get("raw_scores", bool, False):
            scores = 1 / (1 + np.exp(-scores))
        with_text = body.get("return_text", bool, False)
        return JSONResponse(
            [
                {"index": row, "score": float(scores[row]), **({"text": texts[row]} if with_text else {})}
                for row in np.argsort(-scores, kind="stable").tolist()
            ]
        )

    async def _info(self, request: Request, body: Body) -> Response:
        first, *_ = self._models.values()
        options = self._options
        kinds = {"retrieval": "embedding", "reranking": "reranker"}
        return JSONResponse(
            {
                "model_id": first.name,
                "model_sha": _checkpoint(first)["digest"],
                "model_dtype": "float32",
                "model_type": {kinds[first.task]: {}},
                "max_concurrent_requests": options.queue,
                "max_input_length": _lengths(first)[-1],
                "max_batch_tokens": options.batch * _lengths(first)[-1],
                "max_client_batch_size": options.most_inputs,
                "most_k": options.most_k,
                "auto_truncate": True,
                "tokenization_workers": 1,
                "version": __version__,
                "ready": self._ready,
                "models": [_model_facts(model) for model in self._models.values()],
            }
        )

    # jaxret's own interface

    async def _search(self, request: Request, body: Body) -> Response:
        body.require_keys("queries", "k", "filter", "texts", "metadata", "model")
        model = self._of_task(body.get("model", str, ""), ServedRetriever, "a retriever, which /search needs")
        queries = body.texts("queries", self._options.most_inputs, self._options.most_characters, single=False)
        k, texts = body.count("k", 10, self._options.most_k), body.get("texts", bool, True) and self._options.texts
        with_metadata = body.get("metadata", bool, False)
        if with_metadata and not self._options.texts:
            raise RefusalError(404, "this server reads no metadata, as it has no texts (--notexts)", "no_texts")
        hits = len(queries) * min(k, model.passages)
        self._allow(hits, "hits")
        tokens = await self._tokens(model, queries, "query")
        async with self._open_searcher(request, model, body.get("filter", dict, {})) as filter_searcher:
            operation = Operation(model.search, (model.count(k), filter_searcher, texts))
            with _corpus_at_hand(request, '; "texts": false needs no texts' if texts else ""):
                answers = await self._compute(operation, tokens)
            metadata: list[dict[str, Any]] = []
            if with_metadata:
                rows = np.concatenate([answer.rows[:k] for answer in answers])
                with _corpus_at_hand(request):
                    metadata = await self._metadata(filter_searcher, rows)
        assert model.searcher is not None
        searcher = model.searcher
        exact = searcher.vectors.is_exact()

        def content() -> dict[str, Any]:
            results = [[asdict(hit) for hit in answer.hits[:k]] for answer in answers]
            for hit, fields in zip((hit for ranking in results for hit in ranking), metadata):  # [] if not requested
                hit["metadata"] = fields
            return {
                "model": model.name,
                "corpus": {"name": model.encoded_name, **searcher.encoded_corpus.corpus_identity},
                "exact": exact,
                "results": results,
                "query_vectors": [model.question_labels(ids) for ids in tokens],
                "proof": [
                    {
                        "proven": exact,
                        "backend": answer.backend,
                        "rounds": answer.rounds,
                        "scored_exactly": answer.scored_pairs,
                        "questions": answer.batch,
                    }
                    for answer in answers
                ],
            }

        return await json_answer(content, _HIT_NUMBERS * hits)

    async def _metadata(self, searcher: Searcher, rows: np.ndarray) -> list[dict[str, Any]]:
        """Return the metadata of the passages of rows. The thread of openings reads them, because the first time may
        take long: some corpora are copied."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._opener, searcher.texts.metadata_of_rows, rows)

    @asynccontextmanager
    async def _open_searcher(
        self, request: Request, model: ServedRetriever, filters: Mapping[str, Any]
    ) -> AsyncIterator[Searcher]:
        """Yield the searcher of a request's filter, or the searcher of all passages without a filter. A separate thread
        opens it, so that neither the device nor requests without a filter wait."""
        assert model.searcher is not None
        assert model.filters is not None
        if not filters:
            yield model.searcher
            return
        async with self._filter_limit.hold(json.dumps([model.name, filters], sort_keys=True)):
            with _corpus_at_hand(request):
                loop = asyncio.get_running_loop()
                searcher = await loop.run_in_executor(self._opener, model.filters.open, filters)
            yield searcher

    async def _explain(self, request: Request, body: Body) -> Response:
        body.require_keys("query", "passage_id", "passage", "title", "top", "model")
        model = self._of_task(body.get("model", str, ""), ServedRetriever, "a retriever, which /explain needs")
        limit = self._options.most_characters
        question = check_text(body.get("query", str, ""), "query", limit) if "query" in body else ""
        passage, key = None, body.get("passage_id", str, "")
        if "passage" in body:
            text = check_text(body.get("passage", str, ""), "passage", limit)
            title = body.get("title", str, "")
            passage = Passage("passage", text, check_text(title, "title", limit) if title else "")
        if bool(passage) == bool(key) and (passage or not question):
            raise RefusalError(422, "give query, passage (a text), passage_id, or query and one of the others")
        if key and not self._options.texts:
            raise RefusalError(404, "this server has no texts (--notexts)", "no_texts")
        operation = Operation(model.explanations, (body.count("top", 10, 100),))
        with _corpus_at_hand(request):
            (explanation,) = await self._compute(operation, [(question, passage, key)])
        if isinstance(explanation, RefusalError):
            raise explanation
        return JSONResponse({"model": model.name, "explanation": explanation})

    async def _refresh(self, request: Request, body: Body) -> Response:
        body.require_keys("model")
        if name := body.get("model", str, ""):
            self._of_task(name, ServedRetriever, "a retriever, which /refresh needs")
        if not self._ready:
            raise _starting()
        with _corpus_at_hand(request, "; the old passages are still searched"):
            names = [name] if name else list(self._models)
            changes = await asyncio.get_running_loop().run_in_executor(self._opener, self._refresh_corpora, names)
        return JSONResponse({"refreshed": changes})

    def _refresh_corpora(self, names: Sequence[str]) -> list[str]:
        """Open those corpora of models again that were changed, and return the names of these models. Requests that
        arrive before a corpus is open search the old passages."""
        changes = []
        for name in names:
            model = self._models[name]
            if isinstance(model, ServedRetriever) and model.is_stale:
                self._models[name] = model = model.reopen()
                log_event("refresh", model=name, passages=model.passages)
                changes.append(name)
        return changes

    async def _fields(self, request: Request, body: Body) -> Response:
        model = self._of_task(request.query_params.get("model", ""), ServedRetriever, "a retriever")
        if not self._options.search:
            return JSONResponse({"model": model.name, "fields": {}})
        with _corpus_at_hand(request):
            fields = await run_in_threadpool(lambda: model.filters.fields)
        content = {name: [{"value": v, "passages": n} for v, n in values] for name, values in fields.items()}
        return JSONResponse({"model": model.name, "fields": content})

    async def _health(self, request: Request, body: Body) -> Response:
        return JSONResponse({"status": "ok"} if self._ready else {"status": "starting"}, 200 if self._ready else 503)

    async def _metrics(self, request: Request, body: Body) -> Response:
        return Response(self._counters.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # Parts

    async def _compute(self, operation: Operation, items: Sequence[Any]) -> list[Any]:
        if not self._ready:
            raise _starting()
        return await asyncio.wrap_future(self._device.submit(operation, items))

    async def _tokens(self, model: ServedRetriever, texts: Sequence[str], *arguments: Any) -> list[np.ndarray]:
        """Return the token ids of texts. Long texts are tokenized in a thread, because they would delay other
        requests."""
        if sum(map(len, texts)) <= _SHORT:  # tokenizing takes less time than waking a thread
            return model.tokens(texts, *arguments)
        return await run_in_threadpool(model.tokens, texts, *arguments)

    def _allow(self, count: int, kind: str) -> None:
        """Raise `RefusalError` for an answer with more hits or numbers than are allowed."""
        limit = {"hits": self._options.most_hits, "numbers": self._options.most_numbers}[kind]
        if count > limit:
            message = f"the answer would have {count} {kind}; {limit} are allowed: send fewer texts at a time"
            raise RefusalError(413, message, "answer_too_large")

    def _of_task(self, name: str, kind: type[Any], description: str) -> Any:
        """Return the model with a name, or the first model of a kind if the name is ""."""
        if not name:
            for model in self._models.values():
                if isinstance(model, kind):
                    return model
            raise RefusalError(424, f"no run of this server is {description}", "no_model")
        if name not in self._models:
            have = ", ".join(self._models)
            raise RefusalError(404, f"there is no model {shown(name)}; there are {have}", "model_not_found")
        if not isinstance(self._models[name], kind):
            raise RefusalError(424, f"{name} is not {description}", "no_model")
        return self._models[name]

    def _retriever_of(self, name: str, side: str, explicit: bool) -> tuple[ServedRetriever, Side]:
        """Return the retriever and the side of a model's id: NAME, NAME:passage or NAME:query.

        Args:
            name: the id; "" for the first retriever.
            side: side of the texts if the id has none.
            explicit: whether the request has a side.
        """
        front, _, side_name = name.rpartition(":")
        if name in self._models or side_name not in _SIDES:
            front, side_name = name, side
        elif explicit and _SIDES[side_name] != _SIDES[side]:
            raise RefusalError(422, f"model {shown(name)} contradicts the side {side}")
        return self._of_task(front, ServedRetriever, "a retriever, which embeddings need"), _SIDES[side_name]


def _starting() -> RefusalError:
    return RefusalError(503, "the server is starting: /health says when it is ready", "starting")


@contextmanager
def _corpus_at_hand(request: Request, remedy: str = "") -> Iterator[None]:
    """Turn errors of reading the files of a corpus in the block into `RefusalError`. The log has the reason."""
    try:
        yield
    except CORPUS_ERRORS as error:
        log_event("error", request=request.state.number, path=request.url.path, message=str(error)[:2000])
        message = f"the corpus cannot be read (the log has the cause as request {request.state.number}){remedy}"
        raise RefusalError(503, message, "no_texts") from None


async def _json_vectors(vectors: Sequence[np.ndarray]) -> Response:
    return await json_answer(lambda: [array.tolist() for array in vectors], sum(array.size for array in vectors))


def _encode_vector(vector: np.ndarray, encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def _other_path(model: ServedRetriever) -> str:
    return "POST /embed_sparse" if model.run.model.sparse else "POST /embed_all"


def _checkpoint(model: ServedModel) -> Mapping[str, Any]:
    return model.run.checkpoint if isinstance(model, ServedRetriever) else model.reranker.origin["checkpoint"]


def _lengths(model: ServedModel) -> tuple[int, int]:
    """Return the upper bounds of the lengths of queries and of passages, in tokens."""
    tokenizer = model.run.tokenizer if isinstance(model, ServedRetriever) else model.reranker.tokenizer
    return tokenizer.query_length, tokenizer.passage_length


def _model_facts(model: ServedModel) -> dict[str, Any]:
    """Return the facts about a model for /info."""
    query_length, passage_length = _lengths(model)
    checkpoint = _checkpoint(model)
    facts: dict[str, Any] = {
        "id": model.name,
        "task": model.task,
        "step": checkpoint["step"],
        "query_length": query_length,
        "passage_length": passage_length,
    }
    if isinstance(model, ServedReranker):
        return facts
    facts |= {"head": model.run.config.head.name, "dimension": model.dimension, "corpus": None}
    facts["vectors_per_passage"] = model.run.model.vectors_per_passage
    if model.searcher:
        facts["corpus"] = {"name": model.encoded_name, **model.searcher.encoded_corpus.corpus_identity}
        facts["backend"] = model.searcher.vectors.description
        facts["stale"] = model.is_stale
    return facts
