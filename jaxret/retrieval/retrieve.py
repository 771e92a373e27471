"""Questions -> run file and numbers, from a run and the shards it encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.contract import require_equal
from jaxret.data.formats import Policy, read_corpus, scan_corpus, stat_corpus
from jaxret.data.records import Judgement, Passage, Query, Rankings
from jaxret.data.tokenizer import Truncation
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.retrieval.backends import select_backend
from jaxret.retrieval.proof import SearchResult
from jaxret.retrieval.search import search
from jaxret.retrieval.self_check import self_check
from jaxret.retrieval.shard_set import ShardSet, open_shards
from jaxret.runs.run import Run
from jaxret.storage import read_json


@dataclass(frozen=True)
class Retrieved:
    """A ranking of passages for every query, and how it was found."""

    rankings: Rankings
    result: SearchResult
    shards: ShardSet
    truncation: Truncation  # of the queries

    @property
    def corpus(self) -> dict[str, Any]:
        """{"sha256", "passages"}."""
        return self.shards.manifest.fingerprint["corpus"]


def choose_corpus(run: Run, name: str = "") -> Path:
    """The folder of an encoded corpus; without a name, the only one there is. Raises FileNotFoundError."""
    folder = run.workdir / "embeddings"
    there = sorted(p.parent.name for p in folder.glob("*/manifest.json"))
    if not there:
        raise FileNotFoundError(f"{folder} has no encoded corpus; encode.py --workdir={run.workdir} --corpus=... first")
    if not name and len(there) > 1:
        raise ValueError(f"{folder} has several corpora, {', '.join(there)}: choose one with --corpus")
    if name and name not in there:
        raise FileNotFoundError(f"{folder} has no corpus {name!r}; it has {', '.join(there)}")
    return folder / (name or there[0])


def open_corpus(run: Run, folder: Path) -> ShardSet:
    """The shards in `folder`. Raises ContractError if another model, or another checkpoint of it, encoded them."""
    shards = open_shards(folder)
    made_by = shards.manifest.fingerprint
    remedy = (
        f"Encode the corpus with this checkpoint (encode.py --workdir={run.workdir} --name=...), "
        f"or search with --checkpoint={made_by['checkpoint']['step']}."
    )
    expected = {"contract": made_by["contract"], "checkpoint": made_by["checkpoint"]}
    now = {"contract": run.contract, "checkpoint": run.checkpoint}
    require_equal(expected, now, f"{folder}/manifest.json", f"the model in {run.workdir}", remedy)
    return shards


def retrieve(
    run: Run, queries: Sequence[Query], folder: Path, k: int, backend: str = "auto", progress: bool = True
) -> Retrieved:
    """Encodes the queries and searches the corpus in `folder` exactly; the k best passages of each, best first.

    Raises ValueError for k < 1 or no queries, RuntimeError if the search backend disagrees with a float64 product.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    if not queries:
        raise ValueError("there is no query to search for")
    shards = open_corpus(run, folder)
    cut = Truncation("queries", run.tokenizer.query_length)
    tokens = run.tokenizer.queries((query.text for query in queries), progress, cut)
    chosen = select_backend(backend, shards.ragged)
    self_check(chosen, shards.ragged)
    result = search(run.embedder()(tokens, "query", progress), shards, k, chosen, progress)
    ids = shards.ids(result.rows.reshape(-1))
    width = result.rows.shape[1]
    rankings = {
        query.id: [
            (passage, float(score))
            for passage, score in zip(ids[i * width : (i + 1) * width], result.scores[i], strict=True)
        ]
        for i, query in enumerate(queries)
    }
    return Retrieved(rankings, result, shards, cut)


def evaluate_retrieved(retrieved: Retrieved, judgements: Sequence[Judgement], measures: Sequence[str]) -> Evaluation:
    """The measures over all judged queries; a query that was not searched for counts as zero."""
    return evaluate(retrieved.rankings, judgements, measures)


def provenance(run: Run, retrieved: Retrieved, k: int, **more: Any) -> dict[str, Any]:
    """What a number was measured on: written beside it."""
    return {
        "checkpoint": run.checkpoint,
        "config": read_json(run.workdir / "config.json"),
        "training_data": read_json(run.workdir / "data.json"),
        "environment": read_json(run.workdir / "env.json"),
        "corpus": retrieved.corpus,
        "search": {"backend": retrieved.result.backend, "k": k, "exact": True},
        **more,
    }


def passage_texts(folder: Path, wanted: set[str]) -> dict[str, Passage]:
    """The passages with these ids, read again from the corpus that was encoded.

    Raises FileNotFoundError if it is no longer there, ContractError if it is another now.
    """
    written = read_json(folder / "corpus.json")
    path = Path(written["path"])
    if not path.exists():
        raise FileNotFoundError(f"the corpus that was encoded is no longer at {path}, so its text cannot be shown")
    if stat_corpus(path) != {key: written.get(key) for key in ("bytes", "modified")}:  # copied, perhaps: look closer
        expected = read_json(folder / "manifest.json")["fingerprint"]["corpus"]["sha256"]
        found, remedy = scan_corpus(path, Policy("skip")).sha256, "Encode it again, or put back what was encoded."
        require_equal({"sha256": expected}, {"sha256": found}, str(folder / "manifest.json"), str(path), remedy)
    texts = {p.id: p for p in read_corpus(path, Policy("skip")) if p.id in wanted}
    return {key: texts.get(key) or Passage(key, "") for key in wanted}  # one without text was encoded under "keep"
