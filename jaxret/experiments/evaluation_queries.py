"""Read the queries and judgements of an evaluation, with their digests and the name of the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.data.formats import (
    JudgementSource,
    Policy,
    QuerySource,
    describe_source,
    is_named,
    read_judged_queries,
    read_queries,
    source_name,
    source_path,
)
from jaxret.data.formats.source_layout import has_judgements
from jaxret.data.formats.trec import reject_unknown_ids
from jaxret.data.records import Judgement, Query
from jaxret.parallel.progress import print_line
from jaxret.storage.atomic import sha256_json
from jaxret.storage.working_copy import shown_message

SHARED_NAMES = (
    "train",
    "dev",
    "test",
    "val",
    "valid",
    "validation",
    "queries",
    "questions",
)  # file names that many data sets have
_ROLES = ("queries", "questions", "topics", "qrels")  # words before a split, as in queries.dev.small.tsv
_ENDINGS = ("tsv", "txt", "csv", "json", "jsonl", "parquet", "gz", "zst", "bz2", "xz", "qa", "trec", "qrels")


@dataclass(frozen=True)
class EvaluationQueries:
    """Queries of an evaluation. With judgements, only judged queries are kept."""

    queries: list[Query]
    judgements: list[Judgement]
    dataset: str
    split: str  # "" if the queries belong to no split

    @property
    def name(self) -> str:
        """Return the name of the result: data set and split."""
        return _dataset_and_split(self.dataset, self.split)

    def digests(self) -> dict[str, str]:
        """Return SHA-256 digests of the queries, with answers and instructions, and of the judgements, independent of
        their order and format."""
        values = {"queries": sha256_json(sorted(query.to_json() for query in self.queries))}
        if self.judgements:
            records = sorted([one.query_id, one.passage_id, one.relevance] for one in self.judgements)
            values["qrels"] = sha256_json(records)
        return values

    def provenance(self, queries: str, qrels: str, policy: Policy, removed: bool, match: str) -> dict[str, Any]:
        """Return `dataset` of the provenance of an evaluation.

        Args:
            queries, qrels: the sources that were read.
            policy: the policy that counted skipped records.
            removed: whether self-matches were removed.
            match: how answers are read, "string" or "regex".
        """
        queries, qrels = shown_message(queries), shown_message(qrels)
        values: dict[str, Any] = {"queries": queries, "skipped": dict(policy.skip_counts), "sha256": self.digests()}
        values |= {"self_matches": "removed" if removed else "kept"}
        values |= {"match": match} if match != "string" else {}
        return values | ({"qrels": qrels, "split": self.split} if qrels else {})


def read_evaluation_queries(queries: str, qrels: str, split: str, policy: Policy) -> EvaluationQueries:
    """Read the queries and the judgements of an evaluation, and print a line about each source.

    Args:
        queries: folder or file with queries.
        qrels: folder or file with judgements; "" for none.
        split: split to read, where a source is a folder.
    Raises:
        ValueError: there is no query; with qrels, no judged query.
    """
    print_line(f"{queries}: {describe_source(queries, 'queries', split)}")
    if qrels:
        print_line(f"{qrels}: {describe_source(qrels, 'judgements', split)}")
    dataset = load_evaluation_queries(queries, qrels, split, policy)
    if not qrels and has_queries_of_every_split(queries, split):
        count = f"{len(dataset.queries):,} queries"
        print_line(f"{count}, of every split; --qrels={queries} selects the judged queries of one split")
    if policy.report():
        print_line(policy.report())
    return dataset


def load_evaluation_queries(queries: str, qrels: str, split: str, policy: Policy) -> EvaluationQueries:
    """Read the queries and the judgements of an evaluation, and print nothing.

    Args:
        queries, qrels, split, policy: as of `read_evaluation_queries`, which raises the same.
    """
    judgements: list[Judgement] = []
    if not qrels:
        query_list = read_queries(queries, policy, split)
    else:
        sources = QuerySource.open(queries, split), JudgementSource.open(qrels, split)
        query_list, records = read_judged_queries(*sources, policy)
        valid_ids = {query.id for query in query_list}
        judgements = [judgement for _, judgement in reject_unknown_ids(records, valid_ids, None, policy)]
        judged_ids = {judgement.query_id for judgement in judgements}
        query_list = [query for query in query_list if query.id in judged_ids]
    if not query_list:
        noun = "judged query" if qrels else "query"
        raise ValueError(f"{queries} has no {noun} to search for; give a folder or a file with some")
    return EvaluationQueries(query_list, judgements, dataset_name(queries), split_name(queries, qrels, split))


def result_name(queries: str, qrels: str, split: str) -> str:
    """Return `EvaluationQueries.name` without reading the files."""
    return _dataset_and_split(dataset_name(queries), split_name(queries, qrels, split))


def split_name(queries: str, qrels: str, split: str) -> str:
    """Return the name of the split, "" if the queries belong to none.

    A file of judgements is a split named after the file. Without judgements, a file of queries belongs to no split, and
    neither does queries.jsonl of a folder, which has the queries of all splits.
    """
    if qrels:
        return ".".join(_words(source_path(qrels))) if source_path(qrels).is_file() else split
    if not source_path(queries).is_dir() or split not in _words(QuerySource.open(queries, split).data_files[0].path):
        return ""
    return split


def has_queries_of_every_split(queries: str, split: str) -> bool:
    """Return whether a folder has the queries of all splits in one file, so that only judgements select a split."""
    path = source_path(queries)
    return path.is_dir() and not split_name(queries, "", split) and has_judgements(path, split)


def _dataset_and_split(dataset: str, split: str) -> str:
    return dataset if not split or dataset.endswith(f"-{split}") else f"{dataset}.{split}"


def dataset_name(queries: str | Path) -> str:
    """Return the name of a data set for its results.

    A folder or its queries.jsonl has the folder's name; any other file its own name without suffixes, after the
    folder's if many data sets have a file of that name ("nq/test.qa.csv" -> "nq-test",
    "msmarco/queries.dev.small.tsv" -> "msmarco-dev.small").
    """
    if is_named(source_path(queries)):
        return source_name(queries)
    path = source_path(queries).absolute()
    if path.is_dir():
        return path.name
    words = _words(path)
    if path.name.startswith("queries.jsonl"):
        return path.parent.name or words[0]
    name = ".".join(words)
    is_shared = words[0].lower() in SHARED_NAMES or not path.name.startswith(words[0])
    return f"{path.parent.name}-{name}" if is_shared and path.parent.name else name


def _words(path: Path) -> list[str]:
    """Return the parts of a file's name without file endings and without the words of _ROLES."""
    words = path.name.split(".")
    while len(words) > 1 and words[-1].lower() in _ENDINGS:
        words.pop()
    return words[1:] if len(words) > 1 and words[0].lower() in _ROLES else words
