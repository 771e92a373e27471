"""Interfaces of mteb for a run: SearchProtocol for its exact search, ModelMeta for its description."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from mteb.languages.iso_mappings import _hf_langs_to_iso_lang_scripts as mteb_languages
from mteb.models.model_meta import ModelMeta, ScoringFunction
from pydantic import ValidationError

from jaxret.data.formats import Corpus
from jaxret.data.formats.trec import descending_scores
from jaxret.data.records import Query
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.runs.run import Run
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import atomic_write

# Keys that a card states under ModelMeta's names, because Hugging Face has no names for them.
MTEB_KEYS = ("release_date", "open_weights", "public_training_code", "public_training_data", "reference", "citation")
_LISTS = ("language", "base_model", "training_datasets")  # keys whose value may be one text instead of a list


class MtebSearcher:
    """Encodes the corpus of a task into the run's folder, where the vectors stay, and searches it exactly.

    Attributes:
        mteb_model_meta: mteb's description of the run.
        corpora: name of a task -> its corpus, for tasks that are folders of the user.
    """

    def __init__(self, run: Run, out: Path, meta: ModelMeta) -> None:
        self.mteb_model_meta = meta
        self.corpora: dict[str, Corpus] = {}
        self._run, self._out = run, out
        self._searcher: Searcher | None = None

    def index(self, corpus: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, **_: Any) -> None:
        """Encode the corpus of a task.

        Args:
            corpus: mteb's table with the columns id, title and text.
            task_metadata: the task's metadata; its name and revision become part of the encoded corpus's name.
            hf_split: split of the task.
            hf_subset: subset of the task.
        """
        name = task_metadata.name
        if name not in self.corpora:
            parts = ["mteb", name, *([hf_subset] if hf_subset != "default" else []), hf_split]
            parts.append(task_metadata.revision[:12])  # another revision may have other passages
            folder = self._out / "corpora" / ".".join(parts)
            if not (folder / "corpus.jsonl").exists():
                _write_passages(folder / "corpus.jsonl", corpus)
            task_corpus, encoded_name = Corpus.open(folder), ".".join(parts)
        else:
            task_corpus, encoded_name = self.corpora[name], ""
        result = encode_corpus(self._run, task_corpus, encoded_name, EncodeOptions(on_error="keep"))
        self._searcher = Searcher(self._run, result.folder, many=True)

    def search(
        self, queries: Any, *, task_metadata: Any, top_k: int, top_ranked: Any = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """Return query id -> passage id -> score. No two scores of a query are equal, because mteb would order them by
        id.

        Args:
            queries: mteb's table with the columns id and text; the column instruction is optional.
            task_metadata: the task's metadata.
            top_k: number of passages per query.
            top_ranked: passages to rerank; it must be None.
        Raises:
            ValueError: `top_ranked` is given.
        """
        if top_ranked is not None:
            raise ValueError(f"{task_metadata.name} is a task of reranking; jaxret mteb evaluates only retrieval")
        assert self._searcher is not None  # `index` was called
        instructions = queries["instruction"] if "instruction" in queries.column_names else [""] * len(queries)
        records = [
            Query(str(key), text, instruction=instruction or "")
            for key, text, instruction in zip(queries["id"], queries["text"], instructions, strict=True)
        ]
        rankings = self._searcher.search(records, top_k, progress=True).rankings
        return {
            query: dict(zip([key for key, _ in ranking], descending_scores([score for _, score in ranking])))
            for query, ranking in rankings.items()
        }


def _write_passages(path: Path, corpus: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        for row in corpus:
            passage = {"_id": str(row["id"]), "title": row.get("title") or "", "text": row["text"] or ""}
            file.write(json.dumps(passage, ensure_ascii=False) + "\n")


def model_meta(run: Run, name: str, card: str = "") -> ModelMeta:
    """Return mteb's description of a run, from its contract, its weights and its model card. Values that the card does
    not state (licence, languages, training data, ...) are None.

    Args:
        run: the run to describe.
        name: ORGANIZATION/NAME of the model.
        card: path of the model card; "" for README.md in the run's folder, which may be missing.

    Raises:
        ValueError: mteb does not accept a value of the card.
        FileNotFoundError: the card does not exist.
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
    import jax

    model, leaves, late_interaction = run.model, jax.tree.leaves(run.params), run.model.late_interaction
    kind = "sparse" if model.sparse else "late-interaction" if late_interaction else "dense"
    score = ScoringFunction.COSINE if run.config.normalize else ScoringFunction.DOT_PRODUCT
    values: dict[str, Any] = {
        **dict.fromkeys((*MTEB_KEYS[:4], "languages", "license", "training_datasets")),  # unknown without a card
        "loader": None,
        "name": name,
        "revision": f"step-{run.checkpoint['step']}-{run.checkpoint['digest'][:12]}",
        "n_parameters": sum(leaf.size for leaf in leaves),
        "memory_usage_mb": round(sum(leaf.nbytes for leaf in leaves) / 2**20),
        "max_tokens": run.contract["passage_length"],
        "embed_dim": model.dimension,
        "framework": ["JAX"],
        "similarity_fn_name": ScoringFunction.MAX_SIM if late_interaction else score,
        "use_instructions": bool(run.config.tokens.query_prompt or run.config.tokens.prompts),
        "model_type": [kind],
    }
    return ModelMeta(**values | dict(metadata))


def card_values(path: Path) -> dict[str, Any]:
    """Return values for ModelMeta from a model card, a README.md with Hugging Face's metadata.

    The result has only the keys that the card states. The names of mteb's tasks are in the card's key
    `training_datasets`; its key `datasets` has names of the hub and is not read.

    Raises:
        ValueError: the file has no metadata, or mteb does not accept a value.
        FileNotFoundError: the file does not exist.
    """
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("---"):
        raise ValueError(f"{path} has no metadata: it must begin with YAML between two lines ---, such as license: mit")
    try:
        metadata = ModelCard(text).data.to_dict()
    except (ValueError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path}: the text between the lines --- must be YAML keys and values ({first})") from error
    for key in _LISTS:
        if key in metadata:
            metadata[key] = metadata[key] if isinstance(metadata[key], list) else [metadata[key]]
    values = {key: metadata[key] for key in MTEB_KEYS if key in metadata}
    if "license" in metadata:
        values["license"] = metadata.get("license_link") if metadata["license"] == "other" else metadata["license"]
    if "language" in metadata:
        values["languages"] = sorted({_language(path, str(name)) for name in metadata["language"]})
    if "base_model" in metadata:
        values["adapted_from"] = metadata["base_model"][0]
    if "training_datasets" in metadata:
        values["training_datasets"] = set(metadata["training_datasets"])
    return values


def _language(path: Path, name: str) -> str:
    if not (codes := mteb_languages(name)):
        raise ValueError(f"{path}: language is {name!r}; it must be a code of ISO 639, such as en or eng-Latn")
    return str(codes[0])
