"""A folder in BEIR's layout as a task of mteb."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

from jaxret.data.errors import Policy
from jaxret.data.formats import Corpus
from jaxret.evaluation.self_matches import has_passages_as_queries
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.storage.atomic import sha256_json, sha256_json_lists


def folder_task(corpus: Corpus, source: EvaluationSource) -> AbsTaskRetrieval:
    """Return a task of mteb for a folder with a corpus, queries and judgements. The task's revision is a digest of all
    three.

    A split other than "test" is part of the task's name, because mteb writes one file of results per task.

    Raises:
        ValueError: no query is judged.
        FileNotFoundError: the folder does not exist.
        DataError: a record is bad.
    """
    folder_name = corpus.name
    data, split = source.read(Policy()), source.split
    relevant: dict[str, dict[str, int]] = {}
    for judgement in data.judgements:
        relevant.setdefault(judgement.query_id, {})[judgement.passage_id] = judgement.relevance
    passages = ([passage.id, passage.title, passage.text] for passage in corpus.read(Policy("keep")))
    revision = sha256_json({"corpus": sha256_json_lists(passages), **data.digests()})[:12]

    class FolderTask(AbsTaskRetrieval):  # type: ignore[misc]  # mteb has no types here
        ignore_identical_ids = has_passages_as_queries(folder_name)
        metadata = TaskMetadata(
            name=folder_name if split == "test" else f"{folder_name}.{split}",
            description=f"A folder in BEIR's layout: {folder_name}.",
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            dataset={"path": folder_name, "revision": revision},
            eval_splits=[split],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, **_: Any) -> None:
            queries = [
                {"id": record.id, "text": record.text, "instruction": record.instruction} for record in data.queries
            ]
            passages = (
                {"id": record.id, "title": record.title, "text": record.text} for record in corpus.read(Policy("keep"))
            )
            tables = {"corpus": Dataset.from_list(list(passages)), "queries": Dataset.from_list(queries)}
            self.dataset = {"default": {split: {**tables, "relevant_docs": relevant, "top_ranked": None}}}
            self.data_loaded = True

    return FolderTask()
