"""The real clients of other libraries against a server.

openai runs here. The others run in another environment (requirements-clients.txt), whose interpreter is
JAXRET_CLIENTS_PYTHON; without it they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pipeline import REPOSITORY
from tests.serving.clients import DOCUMENT, QUERY
from tests.serving.servers import Running, running

pytestmark = pytest.mark.slow
MODULES = {
    "langchain": "langchain_openai",
    "llama_index": "llama_index.embeddings.openai_like",
    "llama_index_openai": "llama_index.embeddings.openai",
    "llama_index_tei": "llama_index.embeddings.text_embeddings_inference",
    "haystack": "haystack",
}


def served_vectors(server: Running) -> tuple[list[float], list[float], list[float]]:
    """Return the vectors of the document, of the query, and of the query as a passage."""
    return tuple(  # type: ignore[return-value]
        server.ask("/embed", {"model": "dual", "inputs": text, "prompt_name": side})[1][0]
        for text, side in ((DOCUMENT, "passage"), (QUERY, "query"), (QUERY, "passage"))
    )


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_openai(server: Running, encoding: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    document, query, _ = served_vectors(server)
    more = {"encoding_format": encoding} if encoding else {}
    answer = client.embeddings.create(model="dual", input=[DOCUMENT], **more)
    assert np.allclose(vector_of(answer, encoding), document, atol=2e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    answer = client.embeddings.create(model="dual:query", input=QUERY, **more)
    assert np.allclose(vector_of(answer, encoding), query, atol=2e-5)
    assert not np.allclose(document, query, atol=1e-2), "control: texts differ"
    assert "dual:query" in [model.id for model in client.models.list()]
    with pytest.raises(openai.NotFoundError, match='there is no model "gpt"'):
        client.embeddings.create(model="gpt", input="x")
    with pytest.raises(openai.BadRequestError, match="another vocabulary"):
        client.embeddings.create(model="dual", input=[[1, 2, 3]])


def vector_of(answer: Any, encoding: str | None) -> Any:
    """Return a vector. If base64 is requested by name, the client does not decode it."""
    vector = answer.data[0].embedding
    if encoding == "base64":
        import base64

        return np.frombuffer(base64.b64decode(vector), "<f4")
    return vector


@pytest.mark.parametrize(
    "name",
    [name if name == "langchain" else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODULES],
)
def test_clients_of_other_libraries(server: Running, runs: Path, name: str, tmp_path: Path) -> None:
    python = os.environ.get("JAXRET_CLIENTS_PYTHON", sys.executable)
    seen = subprocess.run([python, "-c", f"import {MODULES[name]}"], capture_output=True, text=True, timeout=240)
    if seen.returncode:
        pytest.skip(f"{MODULES[name]} is missing: requirements-clients.txt says how to install it")
    if name == "llama_index_tei":  # this client cannot name a model, so a server with a single model answers
        with running(tmp_path / "stderr", str(runs / "dual"), "--batch=1") as alone:
            compare(alone, name, python, tmp_path)
    else:
        compare(server, name, python, tmp_path)


def compare(server: Running, name: str, python: str, home: Path) -> None:
    """Compare the vectors of a client with those of the server.

    Args:
        server: server with the model "dual".
        name: the client.
        python: interpreter with the client's packages.
        home: empty folder.
    """
    script, docs = REPOSITORY / "tests" / "serving" / "clients.py", REPOSITORY / "docs" / "serving.md"
    arguments = [python, str(script), name, f"http://127.0.0.1:{server.port}", "dual", str(docs)]
    variables = {**os.environ, "HOME": str(home), "HAYSTACK_TELEMETRY_ENABLED": "False"}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    vectors = json.loads(done.stdout.splitlines()[-1])
    document, query, query_as_passage = served_vectors(server)
    assert np.allclose(vectors["document"], document, atol=2e-5)
    expected = query_as_passage if name == "llama_index_tei" else query
    assert np.allclose(vectors["query"], expected, atol=2e-5)
