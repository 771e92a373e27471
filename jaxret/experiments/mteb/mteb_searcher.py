"""A run as mteb sees it: its exact search as SearchProtocol, its facts as ModelMeta."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mteb.models.model_meta import ModelMeta, ScoringFunction
from pydantic import ValidationError

from jaxret.data.formats import Corpus
from jaxret.data.formats.trec import descending_scores
from jaxret.data.records import Query
from jaxret.experiments.mteb.card_values import card_values
from jaxret.index.encode import encode_corpus
from jaxret.index.encode_options import EncodeOptions
from jaxret.runs.run import Run
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import atomic_write


class MtebSearcher:
    """Encodes a task's corpus into the run's folder, where it stays, and searches it exactly.

    Attributes:
        mteb_model_meta: of the run.
        corpora: task -> its corpus, where that is a folder of the user's.
    """

    def __init__(self, run: Run, out: Path, meta: ModelMeta, progress: bool) -> None:
        self.mteb_model_meta = meta
        self.corpora: dict[str, Corpus] = {}
        self._run, self._out, self._progress = run, out, progress
        self._searcher: Searcher | None = None

    def index(self, corpus: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, **_: Any) -> None:
        """Encode a corpus.

        Args:
            corpus: mteb's table with the columns id, title and text.
            task_metadata: of the task; its name and revision are those of the encoded corpus.
            hf_split: part of the task.
            hf_subset: part of the task.
        """
        name = task_metadata.name
        if name not in self.corpora:
            parts = ["mteb", name, *([hf_subset] if hf_subset != "default" else []), hf_split]
            parts.append(task_metadata.revision[:12])  # another revision may have other passages
            folder = self._out / "corpora" / ".".join(parts)
            if not (folder / "corpus.jsonl").exists():
                _write_passages(folder / "corpus.jsonl", corpus)
            own_corpus, encoded_name = Corpus.open(folder), ".".join(parts)
        else:
            own_corpus, encoded_name = self.corpora[name], ""
        result = encode_corpus(self._run, own_corpus, encoded_name, EncodeOptions(on_error="keep"), self._progress)
        self._searcher = Searcher(self._run, result.folder, many=True)

    def search(
        self, queries: Any, *, task_metadata: Any, top_k: int, top_ranked: Any = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """Return query id -> passage id -> score. Scores fall strictly: mteb orders equal ones by id.

        Args:
            queries: mteb's table with the columns id and text, and perhaps instruction.
            task_metadata: of the task.
            top_k: passages of a query.
            top_ranked: passages to rank.
        Raises:
            ValueError: there are passages to rank.
        """
        if top_ranked is not None:
            raise ValueError(f"{task_metadata.name} gives the passages to rank; jaxret mteb has tasks of retrieval")
        assert self._searcher is not None  # `index` was called
        instructions = queries["instruction"] if "instruction" in queries.column_names else [""] * len(queries)
        records = [
            Query(str(key), text, instruction=instruction or "")
            for key, text, instruction in zip(queries["id"], queries["text"], instructions, strict=True)
        ]
        rankings = self._searcher.search(records, top_k, self._progress).rankings
        return {
            query: dict(
                zip([key for key, _ in ranking], descending_scores([score for _, score in ranking]), strict=True)
            )
            for query, ranking in rankings.items()
        }


def _write_passages(path: Path, corpus: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        for row in corpus:
            passage = {"_id": str(row["id"]), "title": row.get("title") or "", "text": row["text"] or ""}
            file.write(json.dumps(passage, ensure_ascii=False) + "\n")


def model_meta(run: Run, name: str, card: str = "") -> ModelMeta:
    """Return mteb's record of a run, from its contract, its weights and its card.

    Args:
        name: ORGANIZATION/NAME of the model.
        card: path of the card; "": README.md in the run's folder, if there is one. What no file states (licence,
            languages, training data, ...) is None.

    Raises:
        ValueError: a value of the card is none that mteb takes.
        FileNotFoundError: there is no such card.
    """
    path = Path(card) if card else run.workdir / "README.md"
    metadata = card_values(path) if card or path.exists() else {}
    try:
        return _model_meta(run, name, metadata)
    except ValidationError as error:
        first = error.errors()[0]
        key = next((str(part) for part in first["loc"] if str(part) in metadata), "metadata")
        raise ValueError(f"{path}: {key} is {metadata.get(key)!r}, which mteb does not take: {first['msg']}") from error


def _model_meta(run: Run, name: str, metadata: Mapping[str, Any]) -> ModelMeta:
    model, contract = run.model, run.contract
    late = model.late_interaction
    kind = "sparse" if model.sparse else "late-interaction" if late else "dense"
    score = ScoringFunction.COSINE if run.config.normalize else ScoringFunction.DOT_PRODUCT
    size = sum(leaf.size for leaf in _leaves(run.params))
    step, digest = run.checkpoint["step"], run.checkpoint["digest"]
    absent = ("release_date", "languages", "license", "open_weights", "public_training_code", "public_training_data")
    values: dict[str, Any] = {
        **dict.fromkeys((*absent, "training_datasets")),
        "loader": None,
        "name": name,
        "revision": f"step-{step}-{digest[:12]}",
        "n_parameters": size,
        "memory_usage_mb": round(sum(leaf.nbytes for leaf in _leaves(run.params)) / 2**20),
        "max_tokens": contract["passage_length"],
        "embed_dim": model.dimension,
        "framework": ["JAX"],
        "similarity_fn_name": ScoringFunction.MAX_SIM if late else score,
        "use_instructions": bool(run.config.tokens.query_prompt or run.config.tokens.prompts),
        "model_type": [kind],
    }
    return ModelMeta(**values | dict(metadata))


def _leaves(params: Any) -> list[Any]:
    import jax

    return list(jax.tree.leaves(params))
