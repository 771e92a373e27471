"""Print vectors of two texts from a client library, as JSON: python clients.py CLIENT ADDRESS MODEL DOCS

CLIENT is a key of CLIENTS; DOCS is docs/serving.md, whose LangChain subclass is run unchanged. This file needs the
packages of requirements-clients.txt, but not jaxret. It prints {"document": [...], "query": [...]}.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCUMENT, QUERY = "river stone music", "silver garden"
Vectors = tuple[list[float], list[float]]


def langchain(address: str, model: str, docs: str) -> Vectors:
    """Return the vectors of the subclass in the documentation."""
    (code,) = re.findall(r"```python\n(from langchain_openai.*?)```", Path(docs).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "docs"}
    exec(code.replace("http://127.0.0.1:8080", address).replace('"dual"', repr(model)), names)
    return names["embeddings"].embed_documents([DOCUMENT])[0], names["embeddings"].embed_query(QUERY)


def llama_index(address: str, model: str, docs: str) -> Vectors:
    """Return the vectors of two model names, one per side."""
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding as Embedding

    passages, queries = (
        Embedding(model_name=name, api_base=f"{address}/v1", api_key="none") for name in (model, f"{model}:query")
    )
    return passages.get_text_embedding(DOCUMENT), queries.get_query_embedding(QUERY)


def llama_index_openai(address: str, model: str, docs: str) -> Vectors:
    """Return the vectors of two model names, one per side."""
    from llama_index.embeddings.openai import OpenAIEmbedding as Embedding

    passages, queries = (
        Embedding(model_name=name, api_base=f"{address}/v1", api_key="none") for name in (model, f"{model}:query")
    )
    return passages.get_text_embedding(DOCUMENT), queries.get_query_embedding(QUERY)


def llama_index_tei(address: str, model: str, docs: str) -> Vectors:
    """Return vectors of the passage side for both texts, because /embed has one model."""
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference as Embedding

    embedding = Embedding(model_name=model, base_url=address)
    return embedding.get_text_embedding(DOCUMENT), embedding.get_text_embedding(QUERY)


def haystack(address: str, model: str, docs: str) -> Vectors:
    """Return the vectors of Haystack's embedders of documents and of texts."""
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    common: dict[str, Any] = {"api_base_url": f"{address}/v1", "api_key": Secret.from_token("none")}
    documents = OpenAIDocumentEmbedder(model=model, progress_bar=False, **common).run([Document(content=DOCUMENT)])
    return documents["documents"][0].embedding, OpenAITextEmbedder(model=f"{model}:query", **common).run(QUERY)[
        "embedding"
    ]


CLIENTS: dict[str, Callable[[str, str, str], Vectors]] = {
    "langchain": langchain,
    "llama_index": llama_index,
    "llama_index_openai": llama_index_openai,
    "llama_index_tei": llama_index_tei,
    "haystack": haystack,
}


if __name__ == "__main__":
    document, query = CLIENTS[sys.argv[1]](*sys.argv[2:])
    print(json.dumps({"document": document, "query": query}))
