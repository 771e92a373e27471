"""`jaxret serve` as a process: answers, refusals, clients that misbehave, and its end."""

from __future__ import annotations

import base64
import http.client
import json
import re
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxret.api import Index, Passage, Retriever, SearchOptions
from jaxret.data.records import Query
from jaxret.parallel.mesh import make_mesh
from jaxret.runs.cut_vectors import cut_vectors
from jaxret.runs.reranker import open_reranker
from jaxret.serving.refusal import RefusalError
from jaxret.serving.serve_options import ServeOptions
from jaxret.serving.served import ServedRetriever, embedder_of_one
from jaxret.serving.served_reranker import ServedReranker
from jaxret.serving.shapes import batch_sizes, served_lengths
from jaxret.types import Ragged
from tests.pipeline import untrained_run
from tests.serving.servers import PASSAGES, Running, refused, running, start_server

pytestmark = pytest.mark.slow
TEI = ("/embed", "/embed_all", "/embed_sparse", "/rerank")
QUESTIONS = ["river stone music", "silver garden", "paper light forest winter market", "winter"]


def close(left: Any, right: Any) -> bool:
    """Return whether vectors or scores are equal, except for rounding in batches of another size."""
    return np.allclose(np.array(left), np.array(right), rtol=5e-6, atol=2e-5)


# Answers


def test_the_streams_of_a_server(server: Running) -> None:
    """stdout has the address, stderr one JSON object per line; neither has texts of requests."""
    assert re.fullmatch(
        r"mlr, dual, late, cross at http://127\.0\.0\.1:\d+ \(compiling; /health .*\)\n", server.first_line
    )
    server.ask("/search", {"queries": ["thunder copper meadow"], "k": 1})
    entries: list[dict[str, Any]] = []
    deadline = time.monotonic() + 30
    while not entries and time.monotonic() < deadline:  # a line is written after the answer
        entries = [entry for entry in server.log if entry.get("path") == "/search"]
    last = entries[-1]
    assert last.keys() == {"time", "event", "request", "client", "method", "path", "status", "bytes", "milliseconds"}
    assert {entry["event"] for entry in server.log} <= {"start", "ready", "request", "error", "library"}
    assert "thunder" not in server.stderr.read_text()


@pytest.mark.parametrize("name", ["mlr", "dual", "late"])
def test_search_has_the_results_of_an_index(server: Running, runs: Path, name: str) -> None:
    index = Index.open(Retriever.open(runs / name))
    for k in (3, 10, 25, 1000):
        status, answer = server.ask("/search", {"queries": QUESTIONS, "k": k, "model": name})
        assert status == 200
        for hits, expected in zip(answer["results"], index.search(QUESTIONS, k), strict=True):
            assert len(hits) == len(expected) == min(k, PASSAGES)
            assert close([hit["score"] for hit in hits], [hit.score for hit in expected])
            by_id = {hit.id: asdict(hit) for hit in expected}
            for hit in hits:
                if hit["id"] in by_id:  # near ties may be exchanged
                    own = by_id[hit["id"]]
                    assert (hit["title"], hit["text"]) == (own["title"], own["text"])
                    assert hit["vectors"] == list(own["vectors"])
    assert answer["exact"] is True
    assert answer["proof"][0]["proven"] is True
    assert answer["corpus"]["passages"] == PASSAGES


def test_search_names_the_winning_vector(server: Running) -> None:
    _, answer = server.ask("/search", {"queries": ["silver garden"], "k": 5, "model": "mlr"})
    for hit in answer["results"][0]:
        assert hit["winners"] == [f"layer {3 - hit['vectors'][0]}"]  # the last layer's vector is the first one
    _, answer = server.ask("/search", {"queries": ["silver garden"], "k": 5, "model": "late"})
    assert len(answer["query_vectors"][0]) == len(answer["results"][0][0]["winners"]) > 3
    assert re.fullmatch(r"\d+: \S+", answer["results"][0][0]["winners"][2])
    _, answer = server.ask("/search", {"queries": ["silver garden"], "k": 5, "model": "dual"})
    assert answer["results"][0][0]["winners"] == []


def test_search_by_filters(server: Running, runs: Path) -> None:
    for several in (["red"], ["blue", "green"]):
        _, answer = server.ask("/search", {"queries": QUESTIONS[:2], "k": 50, "filter": {"colour": several}})
        options = SearchOptions(filters=tuple(f"colour:{value}" for value in several))
        expected = Index.open(Retriever.open(runs / "mlr"), options=options).search(QUESTIONS[:2], 50)
        for hits, own in zip(answer["results"], expected, strict=True):
            assert {hit["id"] for hit in hits} == {hit.id for hit in own}
    assert server.ask("/fields?model=mlr")[1]["fields"]["colour"][0].keys() == {"value", "passages"}
    for wrong, sentence in {
        "colour": 'filter is "colour"; it must be an object',
        "shape": 'no passage has a field "shape"; the fields are colour',
        "value": "filter 'colour:mauve': no passage has that value; colour is ",
        "range": "filter 'colour>=3': no passage has a value in this range; no value of colour is a number: colour is ",
    }.items():
        bodies = {"shape": {"shape": "round"}, "value": {"colour": "mauve"}, "range": {"colour": {"gte": 3}}}
        body = bodies.get(wrong, wrong)
        status, answer = server.ask("/search", {"queries": ["x"], "filter": body})
        assert (status, answer["error"]["message"][: len(sentence)]) == (422, sentence)


def test_search_with_metadata(server: Running) -> None:
    colours = {f"p{n}": ["red", "blue", "green"][n % 3] for n in range(PASSAGES)}
    body: dict[str, Any] = {"queries": QUESTIONS, "k": 25, "metadata": True}
    for more in ({}, {"texts": False, "model": "late"}, {"filter": {"colour": ["red", "blue"]}}):
        status, answer = server.ask("/search", body | more)
        assert status == 200
        for hits in answer["results"]:
            assert [hit["metadata"] for hit in hits] == [{"colour": colours[hit["id"]]} for hit in hits]
            assert len(hits) == 25
    assert "metadata" not in server.ask("/search", {"queries": ["x"]})[1]["results"][0][0]
    status, answer = server.ask("/search", body | {"metadata": 1})
    assert (status, answer["error"]["message"]) == (422, "metadata is 1; it must be true or false")


def test_answers_to_64_clients_equal_those_to_one(server: Running) -> None:
    generator = np.random.default_rng(1)
    names = ("mlr", "dual", "late")
    questions = [" ".join(generator.choice(QUESTIONS, 1 + n % 3)) for n in range(64)]

    def ask(number: int) -> Any:
        body = {"queries": [questions[number]], "k": 1 + number % 12, "model": names[number % 3]}
        if number % 5 == 0:
            body["filter"] = {"colour": "red"}
        return server.ask("/search", body)

    alone = [ask(number) for number in range(64)]
    barrier = threading.Barrier(64)

    def ask_together(number: int) -> list[Any]:
        barrier.wait()
        return [ask(number) for _ in range(3)]

    with ThreadPoolExecutor(64) as threads:
        together = list(threads.map(ask_together, range(64)))
    for number, answers in enumerate(together):
        for status, answer in answers:
            assert status == 200
            hits, expected = answer["results"][0], alone[number][1]["results"][0]
            assert close([hit["score"] for hit in hits], [hit["score"] for hit in expected])
            assert {hit["id"] for hit in hits[:-1]} <= {hit["id"] for hit in expected}
    assert alone[0][1]["results"] != alone[6][1]["results"], "control: other questions have other answers"
    metrics = server.ask("/metrics")[1]
    batches = dict(re.findall(r'jaxret_batch_texts_bucket\{le="([\d.]+|\+Inf)"\} (\S+)', metrics))
    assert float(batches["1.0"]) < float(batches["+Inf"]), "some requests were computed together"


def test_embeddings_of_both_sides(server: Running, runs: Path) -> None:
    retriever = Retriever.open(runs / "dual")
    texts = [*QUESTIONS, "stone " * 60]
    sides = [np.asarray(retriever.encode_passages(texts))[:, 0], np.asarray(retriever.encode_queries(texts))]
    assert not close(*sides), "control: the sides differ"
    for model, side, expected in [
        ("dual", None, sides[0]),
        ("dual:passage", None, sides[0]),
        ("dual:query", None, sides[1]),
        ("dual", "query", sides[1]),
    ]:
        body = {"model": model, "input": texts} | ({"input_type": side} if side else {})
        status, answer = server.ask("/v1/embeddings", body)
        assert status == 200
        assert close([entry["embedding"] for entry in answer["data"]], expected)
        _, packed = server.ask("/v1/embeddings", body | {"encoding_format": "base64"})
        raw = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in packed["data"]]
        assert close(raw, expected)
        _, shorter = server.ask("/v1/embeddings", body | {"dimensions": 8})
        assert close([entry["embedding"] for entry in shorter["data"]], cut_vectors(expected, 8, normalize=True))
        tei = {"model": "dual", "inputs": texts, "prompt_name": side or model.partition(":")[2] or "passage"}
        assert close(server.ask("/embed", tei)[1], expected)
    assert [entry["id"] for entry in server.ask("/v1/models")[1]["data"]] == [
        *("mlr", "mlr:query", "dual", "dual:query", "late", "late:query", "cross")
    ]
    for entry in server.ask("/v1/models")[1]["data"]:
        assert server.ask(f"/v1/models/{entry['id']}") == (200, entry)
    status, answer = server.ask("/v1/models/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert server.ask("/v1/models/dual", {})[0] == 405


def test_all_vectors_of_a_text(server: Running, runs: Path) -> None:
    for name in ("mlr", "late"):
        retriever = Retriever.open(runs / name)
        _, answer = server.ask("/embed_all", {"model": name, "inputs": QUESTIONS})
        for own, expected in zip(answer, retriever.encode_passages(QUESTIONS), strict=True):
            assert close(own, expected)
    status, answer = server.ask("/v1/embeddings", {"model": "late", "input": "x"})
    assert (status, answer["error"]["message"]) == (
        400,
        "late has several vectors, or weights of words, for a text: POST /embed_all",
    )
    body = {"model": "mlr", "inputs": "river", "prompt_name": "query"}
    lengths = [np.linalg.norm(server.ask("/embed", body | more)[1][0]) for more in ({}, {"normalize": False})]
    own = Retriever.open(runs / "mlr").encode_queries(["river"])[0]
    assert lengths == pytest.approx([1, np.linalg.norm(own)], rel=1e-5), "by default, TEI's vectors have length 1"


def test_rerank(server: Running, runs: Path) -> None:
    texts = ["river stone", "music " * 40, "paper"]
    _, answer = server.ask("/rerank", {"query": "river", "texts": texts, "raw_scores": True, "return_text": True})
    reranker = open_reranker(runs / "cross")
    passages = {str(n): Passage(str(n), text) for n, text in enumerate(texts)}
    scores, _ = reranker({"q": Query("q", "river")}, passages, [("q", key) for key in passages])
    assert [entry["index"] for entry in answer] == np.argsort(-scores, kind="stable").tolist()
    assert close([entry["score"] for entry in answer], sorted(scores.tolist(), reverse=True))
    assert answer[0]["text"] == texts[answer[0]["index"]]
    _, answer = server.ask("/rerank", {"query": "river", "texts": texts})
    assert close([entry["score"] for entry in answer], [1 / (1 + np.exp(-s)) for s in sorted(scores, reverse=True)])


def test_explain(server: Running) -> None:
    status, answer = server.ask("/explain", {"query": "silver garden", "passage_id": "p3", "model": "mlr"})
    assert status == 200
    assert "the score is the product with layer" in answer["explanation"]
    status, answer = server.ask("/explain", {"query": "silver", "passage": "silver stone", "model": "late"})
    assert "query token" in answer["explanation"]
    status, answer = server.ask("/explain", {"query": "silver", "passage_id": "../../etc/passwd"})
    assert (status, answer["error"]["message"]) == (404, 'the corpus has no passage "../../etc/passwd"')


def test_info_and_metrics(server: Running) -> None:
    _, info = server.ask("/info")
    assert (info["model_id"], info["ready"], info["max_input_length"]) == ("mlr", True, 24)
    assert info["most_k"] == ServeOptions.most_k
    assert [model["id"] for model in info["models"]] == ["mlr", "dual", "late", "cross"]
    assert info["models"][0]["vectors_per_passage"] == 3
    server.ask("/nowhere")
    metrics = server.ask("/metrics")[1]
    assert 'jaxret_requests_total{route="other",status="404"}' in metrics
    assert "jaxret_ready 1.0" in metrics
    assert "nowhere" not in metrics, "paths that do not exist get no labels"


# Refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/embeddings", {"input": [[1, 2, 3]]}, 400, "LangChain: check_embedding_ctx_length=False"),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 400, "token ids, perhaps of another vocabulary"),
        (
            "/v1/embeddings",
            {"input": "x", "model": "dual", "dimensions": 33},
            400,
            "dimensions is 33; it must be 1 to 32, the size of a vector",
        ),
        ("/embed", {"inputs": "x", "model": "dual", "dimensions": 0}, 400, "dimensions is 0; it must be 1 to 32, the"),
        ("/search", {"queries": ["x"] * 900, "k": 500}, 413, "would have 108000 hits; 100000 are allowed: send fewer"),
        (
            "/embed_all",
            {"inputs": ["stone " * 60] * 1000, "model": "late"},
            413,
            "would have 768000 numbers; 500000 are allowed: send fewer texts at a time",
        ),
        ("/v1/embeddings", {"input": "x", "model": "gpt"}, 404, 'there is no model "gpt"; there are mlr, dual'),
        ("/v1/embeddings", {"input": "x", "encoding_format": "xml"}, 422, "must be one of float, base64"),
        ("/v1/embeddings", {"model": "dual"}, 422, "input is missing"),
        ("/v1/embeddings", {"input": ["x", ""]}, 422, "input[1] is blank"),
        ("/v1/embeddings", {"input": ["x", None]}, 422, "input[1] is null; it must be a text"),
        ("/v1/embeddings", {"input": []}, 422, "a list of texts that is not empty"),
        ("/v1/embeddings", {"input": "x" * 100_001}, 413, "has 100001 characters"),
        ("/v1/embeddings", {"input": ["x"] * 1025}, 413, "input has 1025 texts; a request may have 1024"),
        ("/v1/embeddings", {"input": "x", "model": "cross"}, 424, "cross is not a retriever"),
        ("/v1/embeddings", [1], 422, "the body must be a JSON object"),
        ("/v1/embeddings", b"{", 400, "double quotes: line 1 column 2"),
        ("/v1/embeddings", b"[" * 100_000, 400, "the body is not JSON"),
        ("/v1/embeddings", b'{"input": "\\ud800"}', 422, "half of a surrogate pair at character 1"),
        ("/search", b'{"queries": ["x"], "filter": {"\\ud800": 1}}', 422, 'no passage has a field "\\ud800"'),
        ("/search", {"queries": ["x"], "filter": {"colour": {"red": 1}}}, 422, 'is {"red": 1}; it must be a text'),
        ("/search", b'{"queries": ["x"], "k": "\\ud800"}', 422, 'k is "\\ud800"; it must be a whole number'),
        ("/embed", {"inputs": "x " * 60, "truncate": False, "model": "dual"}, 413, "more than 24 tokens"),
        ("/embed", {"inputs": "x", "truncation_direction": "left"}, 422, "must be one of right"),
        ("/embed_sparse", {"inputs": "x"}, 424, "mlr has dense vectors"),
        ("/rerank", {"query": "x", "texts": ["y"], "model": "mlr"}, 424, "mlr is not a cross-encoder"),
        ("/rerank", {"texts": ["y"]}, 422, "query is blank"),
        ("/search", {"queries": "x"}, 422, "queries must be a list of texts, not one text: put it in [ ]"),
        ("/search", {}, 422, "queries is missing: a list of texts"),
        ("/search", {"queries": ["x"], "k": 0}, 422, "k is 0; it must be 1 to 1000"),
        ("/search", {"queries": ["x"], "k": 1001}, 422, "k is 1001; it must be 1 to 1000"),
        ("/search", {"queries": ["x"], "k": True}, 422, "k is true; it must be a whole number"),
        (
            "/search",
            {"queries": ["x"], "filters": {}},
            422,
            '"filters" is not a key of this request; did you mean filter',
        ),
        ("/explain", {"query": "x", "id": "p1"}, 422, "(keys: query, passage_id, passage, title, top, model)"),
        ("/explain", {}, 422, "give query, passage"),
        ("/explain", {"query": "x", "model": "dual"}, 422, "explains a query and a passage together only: give both"),
        (
            "/explain",
            b'{"query": "x", "passage": "y", "title": "\\udcff"}',
            422,
            "title holds half of a surrogate pair",
        ),
        ("/search/", {"queries": ["x"]}, 404, "there is no such path"),
    ],
)
def test_a_bad_request_is_one_sentence(server: Running, path: str, body: Any, status: int, message: str) -> None:
    got, answer = server.ask(path, body)
    assert got == status
    text = answer["message"] if path in TEI else answer["error"]["message"]
    assert message in text
    assert "\n" not in text
    assert "/tmp" not in json.dumps(answer)
    assert "Traceback" not in json.dumps(answer)


def test_methods_paths_hosts_and_kinds_of_content(server: Running, runs: Path) -> None:
    assert server.ask("/search")[0] == 405
    assert server.ask("/health", {})[0] == 405
    for method, path, allowed in (("GET", "/search", "POST"), ("PUT", "/health", "GET")):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request(method, path)
        with connection.getresponse() as response:
            assert (response.status, response.headers["allow"]) == (405, allowed)
        connection.close()
    assert server.ask("/search", {"queries": ["x"]}, {"content-type": "text/plain"})[0] == 415
    assert server.ask("/search", {"queries": ["x"]}, {"host": "evil.example"})[0] == 403
    assert server.ask("/search", {"queries": ["x"]}, {"host": "localhost:1"})[0] == 200
    assert server.ask("/search", {"queries": ["x"]}, {"host": "127.0.0.2:8080"})[0] == 200
    assert server.ask("/search", {"queries": ["x"]}, {"host": "[::1]:8080"})[0] == 200
    assert server.ask("/search", {"queries": ["x"]}, {"host": "127.0.0.1.evil.example"})[0] == 403
    for path in (
        "/../config.json",
        "/..%2f..%2fetc/passwd",
        "/config.json",
        "//etc/passwd",
        f"/{runs}/mlr/config.json",
    ):
        status, answer = server.ask(path)
        assert (status, answer["error"]["message"]) == (404, "there is no such path")


def test_unexpected_errors_reveal_no_paths(runs: Path, tmp_path: Path) -> None:
    """The corpus's file is deleted while the server runs: searches without texts still succeed, and the log has the
    reason for the failures of others."""
    shutil.copytree(runs / "dual", tmp_path / "dual")
    corpus = tmp_path / "corpus.jsonl"
    shutil.copyfile(runs / "corpus.jsonl", corpus)
    Index.build(Retriever.open(tmp_path / "dual"), corpus, "moved", progress=False)
    with running(tmp_path / "stderr", str(tmp_path / "dual"), "--corpus=moved", "--batch=1") as server:
        assert server.ask("/search", {"queries": ["x"]})[0] == 200
        corpus.rename(tmp_path / "elsewhere.jsonl")
        status, answer = server.ask("/search", {"queries": ["x"]})
        assert status == 503
        assert re.fullmatch(
            r'the corpus cannot be read \(the log has the cause as request \w{16}\); "texts": false needs no texts',
            answer["error"]["message"],
        )
        assert server.ask("/search", {"queries": ["x"], "texts": False})[0] == 200
        for path, body in {
            "/explain": {"query": "x", "passage_id": "p1"},
            "/search": {"queries": ["x"], "texts": False, "filter": {"colour": "red"}},
            "/fields": None,
        }.items():
            status, answer = server.ask(path, body)
            assert (status, answer["error"]["code"]) == (503, "no_texts")
            assert re.fullmatch(r"the corpus cannot be read \(.* request \w{16}\)", answer["error"]["message"])
            entry = [entry for entry in server.log if entry["event"] == "error" and entry["path"] == path][-1]
            assert "no longer at" in entry["message"]
            assert entry["request"] in answer["error"]["message"]


@pytest.mark.daily("name")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{runs}/dual", "--host=0.0.0.0"), "--host=0.0.0.0 can be reached from other machines: set the variable"),
        pytest.param(
            ("{runs}/dual", "--host=no.such.invalid"),
            "--host=no.such.invalid: there is no such address",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(("{runs}/nowhere",), "nowhere is not a run (it has no config.json)", marks=pytest.mark.exhaustive),
        pytest.param(
            ("{runs}/dual", "{runs}/encoder/../dual"), "two runs have the name dual", marks=pytest.mark.exhaustive
        ),
        (("{runs}/dual", "--corpus=other"), "has no corpus 'other'; it has corpus"),
        pytest.param(("a:b=run",), "write NAME=FOLDER, with a name of printable characters without a colon", id="name"),
        (("{runs}/dual", "--batch=0"), "--batch=0: it must be a whole number of at least 1"),
    ],
)
def test_a_bad_start_is_one_sentence(request: pytest.FixtureRequest, arguments: tuple[str, ...], message: str) -> None:
    if any("{runs}" in argument for argument in arguments):
        runs = request.getfixturevalue("runs")
        arguments = tuple(argument.format(runs=runs) for argument in arguments)
    assert message in refused(*arguments, "--port=0")


def test_a_port_in_use(runs: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = refused(str(runs / "dual"), f"--port={port}")
    assert line == f"error: --port={port} of 127.0.0.1 is in use; choose another, or 0 for a free one"


@pytest.mark.exhaustive
def test_a_run_without_vectors_and_a_corpus_without_texts(runs: Path, tmp_path: Path) -> None:
    untrained_run(tmp_path / "bare", runs / "encoder", runs / "data")
    assert "has no encoded corpus; jaxret encode" in refused(str(tmp_path / "bare"))
    with running(tmp_path / "stderr", str(tmp_path / "bare"), "--nosearch", "--batch=1") as server:
        status, answer = server.ask("/search", {"queries": ["x"]})
        assert (status, answer["error"]["code"]) == (404, "no_corpus")
        assert server.ask("/v1/embeddings", {"input": "x"})[0] == 200
        assert server.stop() == (0, "stopped\n")
    corpus = tmp_path / "corpus.jsonl"
    shutil.copyfile(runs / "corpus.jsonl", corpus)
    Index.build(Retriever.open(tmp_path / "bare"), corpus, progress=False)
    corpus.unlink()
    line = refused(str(tmp_path / "bare"))
    assert "no text can be shown; --notexts serves ids and scores without texts" in " ".join(line.split("): "))


def test_a_refresh_while_clients_search(runs: Path, tmp_path: Path) -> None:
    """Every answer is that of one state of the corpus, and none fails."""
    untrained_run(tmp_path / "run", runs / "encoder", runs / "data", normalize=True)
    Index.build(Retriever.open(tmp_path / "run"), runs / "corpus.jsonl", "docs", progress=False)
    with running(tmp_path / "stderr", str(tmp_path / "run"), "--batch=2") as server:
        answers: list[tuple[int, Any]] = []
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                answers.append(server.ask("/search", {"queries": ["blue castle"], "k": 1000}))

        client = threading.Thread(target=ask)
        client.start()
        assert server.ask("/refresh", {}) == (200, {"refreshed": []})
        index = Index.open(Retriever.open(tmp_path / "run"), "docs")
        index.append([Passage("new", "blue castle")], progress=False)
        assert server.ask("/info")[1]["models"][0]["stale"] is True
        assert server.ask("/refresh", {"model": "run"}) == (200, {"refreshed": ["run"]})
        last = server.ask("/search", {"queries": ["blue castle"], "k": 1000})
        done.set()
        client.join()
        assert server.ask("/info")[1]["models"][0]["stale"] is False
        shutil.rmtree(tmp_path / "run" / "embeddings" / "docs")
        status, answer = server.ask("/refresh", {})
        assert status == 503
        assert answer["error"]["message"].endswith("the old passages are still searched")
        assert server.ask("/search", {"queries": ["blue castle"], "k": 1000, "texts": False})[0] == 200
        assert server.ask("/refresh", {"name": "run"})[0] == 422
    sizes = []
    for status, answer in [*answers, last]:
        assert status == 200, answer
        ids = [hit["id"] for hit in answer["results"][0]]
        assert answer["corpus"]["passages"] == len(ids) == PASSAGES + ("new" in ids)
        sizes.append(len(ids))
    assert sizes == sorted(sizes), "after an answer of the new corpus, none of the old one"
    assert (sizes[0], sizes[-1]) == (PASSAGES, PASSAGES + 1)


# Clients that misbehave


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def test_a_huge_body(server: Running) -> None:
    status, answer = server.ask("/search", b" " * (9 * 2**20))
    assert (status, answer["error"]["message"]) == (
        413,
        "the body has more than 8388608 bytes, --most_bytes of the server",
    )
    with connect(server) as client:  # the body is sent in chunks, without Content-Length
        client.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        client.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        for _ in range(9):
            client.sendall(piece)
        client.sendall(b"0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")
    assert server.ask("/search", {"queries": ["x"]})[0] == 200


def test_slow_clients_are_disconnected_and_block_nobody(server: Running) -> None:
    """A head without an end, a missing body, a slow body, and a connection without data."""
    head = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
    clients = [connect(server) for _ in range(4)]
    clients[0].sendall(head)
    clients[1].sendall(head + b"\r\n")
    clients[2].sendall(head + b"\r\n")
    start = time.monotonic()
    while time.monotonic() < start + 5:
        try:
            clients[2].sendall(b" ")
        except OSError:
            break
        assert server.ask("/search", {"queries": ["x"]})[0] == 200
        time.sleep(0.3)
    answers = [read_all(client) for client in clients]
    assert [answer[:12] for answer in answers] == [b"", b"HTTP/1.1 408", b"HTTP/1.1 408", b""]
    assert b"the request did not arrive in 3 s" in answers[1]


def read_all(client: socket.socket) -> bytes:
    """Read from a connection until the server ends it."""
    parts = []
    with client:
        try:
            while part := client.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
    return b"".join(parts)


def test_requests_of_dead_clients_are_not_computed(server: Running) -> None:
    """Clients send large requests and disconnect: the requests leave the queue, and the log says 499."""
    body = json.dumps({"model": "dual", "input": ["stone " * 30] * 1000}).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(6):
        with connect(server) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.05)
    deadline = time.monotonic() + 60
    while "jaxret_waiting_texts 0.0" not in server.ask("/metrics")[1]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.ask("/search", {"queries": ["x"]})[0] == 200
    assert 499 in {entry.get("status") for entry in server.log}


def test_a_full_queue(runs: Path, tmp_path: Path) -> None:
    with running(tmp_path / "stderr", str(runs / "dual"), "--batch=1", "--queue=8") as server:

        def ask(number: int) -> tuple[int, Any]:
            return server.ask("/v1/embeddings", {"input": ["stone " * 30] * 6})

        with ThreadPoolExecutor(32) as threads:
            answers = list(threads.map(ask, range(96)))
        assert {status for status, _ in answers} == {200, 429}
        message = next(answer for status, answer in answers if status == 429)["error"]["message"]
        assert re.fullmatch(r"\d+ texts wait, and at most 8 may; try again in a moment", message)


def test_a_token(runs: Path, tmp_path: Path) -> None:
    """With a token, every route except the page and /health needs it, and other hosts may send requests."""
    with running(tmp_path / "stderr", str(runs / "dual"), "--batch=1", JAXRET_TOKEN="sesame") as server:
        right, wrong = {"authorization": "Bearer sesame"}, {"authorization": "Bearer sesam"}
        for headers in ({}, wrong, {"authorization": "sesame"}):
            for path, body in (
                ("/search", {"queries": ["x"]}),
                ("/metrics", None),
                ("/info", None),
                ("/nowhere", None),
            ):
                assert server.ask(path, body, headers)[0] == 401
        assert server.ask("/search", {"queries": ["x"]}, right | {"host": "gpu.example"})[0] == 200
        assert server.ask("/health")[0] == server.ask("/")[0] == 200
        assert "sesame" not in server.stderr.read_text()


# The end


def test_sigterm_under_load(runs: Path, tmp_path: Path) -> None:
    """Every request that began is answered; later ones cannot connect. The exit status is 0."""
    with running(tmp_path / "stderr", str(runs / "dual"), "--batch=4") as server:
        answers: list[tuple[int, Any]] = []
        stopping = threading.Event()

        def ask() -> None:
            while True:
                try:
                    answers.append(server.ask("/v1/embeddings", {"input": ["river stone"] * 8}))
                except OSError:
                    assert stopping.is_set()
                    return

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        stopping.set()
        assert server.stop() == (0, "stopped\n")
        for thread in threads:
            thread.join(30)
        assert {status for status, _ in answers} == {200}
        assert all(len(answer["data"]) == 8 for _, answer in answers)
        assert [entry["signal"] for entry in server.log if entry["event"] == "stop"] == ["SIGTERM"]


def test_sigterm_during_the_start(runs: Path, tmp_path: Path) -> None:
    """During compilations, the server does not wait for the programs of the last run."""
    names = [str(runs / name) for name in ("mlr", "dual", "late", "cross")]
    with running(tmp_path / "stderr", *names, wait=False) as server:
        assert server.stop() == (0, "stopped\n")
        assert "ready" not in {entry["event"] for entry in server.log}
        assert not [entry for entry in server.log if entry.get("message", "").startswith("cross")]


def test_names_of_runs_and_events(runs: Path, tmp_path: Path) -> None:
    """NAME=FOLDER names a run, and --json prints a line for the start and for the end."""
    with start_server(tmp_path / "stderr", f"{runs}/dual", f"again={runs}/dual", "--batch=1", "--json") as server:
        assert server.stdout is not None
        start = json.loads(server.stdout.readline())
        assert (start["event"], start["models"]) == ("serving", ["dual", "again"])
        server.send_signal(signal.SIGTERM)
        end = [json.loads(line) for line in server.communicate(timeout=60)[0].splitlines()]
        assert [(line["event"], line["address"]) for line in end] == [("stopped", start["address"])]
        assert server.returncode == 0


# Shapes


@pytest.fixture(scope="module")
def served(runs: Path) -> ServedRetriever:
    return ServedRetriever(str(runs / "late"), "", "best", ServeOptions(batch=16), SearchOptions())


def test_nothing_is_compiled_after_the_start(served: ServedRetriever) -> None:
    """Texts of any length and number, and searches with any number of passages, use the programs of `warm_up`. Control:
    it compiled some."""
    compilations: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    assert served.searcher is not None
    try:
        compiled = served.warm_up()
        assert compiled > 4
        assert compilations
        compilations.clear()
        for length in (1, 3, 9, 20, 50):
            for count in (1, 2, 7, 16, 33):
                for side in ("query", "passage"):
                    served.embed(served.tokens(["stone " * length] * count, side), side)  # type: ignore[arg-type]
                for k in (1, 25, 31, 100, 301, 700):
                    tokens = served.tokens(["stone " * length] * count, "query")
                    if length > 8:
                        served.search(tokens, served.count(k), served.searcher, False)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert served.embedder.programs == compiled
    assert not compilations


def test_a_single_text_has_the_vectors_of_a_batch(served: ServedRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = served.tokens(["silver castle bridge"], "query")
    run = served.run
    one = replace(run, mesh=make_mesh(devices=jax.devices()[:1]), program_cache={}).embedder()
    alone = embedder_of_one(one)
    assert alone is not None
    assert "0" in alone.params["encoder"]["layers"]
    texts = Ragged.from_lists([tokens[0].tolist()])
    np.testing.assert_allclose(alone(texts, "query").flat, served.embed(tokens * 2, "query")[0], atol=2e-6)
    used = replace(alone, program_cache={})
    monkeypatch.setattr(served, "_short_embedder", used)
    for others in (tokens * 2, [np.tile(tokens[0], 30)]):  # two texts, or a long one
        served.embed(others, "query")
        assert not used.program_cache
    served.embed(tokens, "query")
    assert used.program_cache
    assert embedder_of_one(served.embedder) is None, "eight devices"
    monkeypatch.setattr("jaxret.serving.served._COPIED_BYTES", 1000)
    assert embedder_of_one(one) is None, "the model is too large to be in memory twice"


@pytest.mark.parametrize("between", [0, 1])
def test_pairs_of_every_length_are_compiled(runs: Path, between: int) -> None:
    """Pairs may also have more markers between the texts. Control: without `warm_up` there is no program."""
    served = ServedReranker(str(runs / "cross"), "best", ServeOptions(batch=2))
    scorer = served.reranker.scorer
    joiner = replace(scorer.joiner, between=scorer.joiner.between[:1] or (served.reranker.tokenizer.sep_id,) * between)
    served.reranker = replace(served.reranker, scorer=replace(scorer, joiner=joiner))
    assert served.reranker.scorer.program.count == 0
    compiled = served.warm_up()
    for length in (1, 2, 3, 4, 9, 20, 50):
        served.score(served.pairs("stone", ["stone " * length]))
    assert served.reranker.scorer.program.count == compiled > 2


def test_pairs_that_would_be_cut(runs: Path) -> None:
    served = ServedReranker(str(runs / "cross"), "best", ServeOptions())
    scorer = served.reranker.scorer
    joiner = replace(scorer.joiner, limit=12)
    served.reranker = replace(served.reranker, scorer=replace(scorer, joiner=joiner))
    assert len(served.pairs("stone stone", ["stone " * 4, "stone " * 8])) == 2
    assert len(served.pairs("stone stone", ["stone " * 4], cut=False)) == 1
    with pytest.raises(RefusalError, match=r"1 .*12 tokens"):
        served.pairs("stone stone", ["stone " * 4, "stone " * 8], cut=False)


def test_lengths_of_served_texts() -> None:
    assert batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(4096)[-2:] == [2048, 4096]
    assert served_lengths(64) == [8, 16, 24, 32, 48, 64]
    assert served_lengths(12) == [8, 12]
    assert served_lengths(512)[-3:] == [256, 384, 512]
