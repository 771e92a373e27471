"""What a search of files is asked: queries, their judgements, digests of both, and what results are called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.data.formats import (
    Policy,
    called,
    describe,
    found_queries,
    is_named,
    read_judgements,
    read_queries,
    source_path,
)
from jaxret.data.formats.places import has_judgements
from jaxret.data.records import Judgement, Query
from jaxret.storage import sha256_json

SHARED_NAMES = (
    "train",
    "dev",
    "test",
    "val",
    "valid",
    "validation",
    "queries",
    "questions",
)  # of files of any data set
_ROLES = ("queries", "questions", "topics", "qrels")  # what stands before a split, as in queries.dev.small.tsv
_ENDINGS = ("tsv", "txt", "csv", "json", "jsonl", "parquet", "gz", "zst", "bz2", "xz", "qa", "trec", "qrels")


@dataclass(frozen=True)
class Asked:
    """Queries and what is known about them. With judgements, the queries are those that are judged."""

    queries: list[Query]
    judgements: list[Judgement]
    dataset: str
    split: str  # "" where the queries are of none

    @property
    def name(self) -> str:
        """What results are called: data set and split."""
        return _named(self.dataset, self.split)

    def digests(self) -> dict[str, str]:
        """SHA-256 of the queries with their answers and of the judgements, in whatever order and format they came."""
        found = {"queries": sha256_json(sorted([q.id, q.text, list(q.answers)] for q in self.queries))}
        if self.judgements:
            judged = sorted([j.query_id, j.passage_id, j.relevance] for j in self.judgements)
            found["qrels"] = sha256_json(judged)
        return found

    def source(self, queries: str, qrels: str, policy: Policy, removed: bool, match: str) -> dict[str, Any]:
        """What an evaluation says of them: `dataset` of its provenance. removed: whether self-matches were; match: what
        answers are."""
        found: dict[str, Any] = {"queries": queries, "skipped": dict(policy.skipped), "sha256": self.digests()}
        found |= {"self_matches": "removed" if removed else "kept"}
        found |= {"match": match} if match != "string" else {}
        return found | ({"qrels": qrels, "split": self.split} if qrels else {})


def read_asked(queries: str, qrels: str, split: str, policy: Policy) -> Asked:
    """Reads the queries and, if there are qrels, the judgements; prints what they are. Raises ValueError if there is
    no query (with qrels: none that is judged)."""
    print(f"{queries}: {describe(queries, 'queries', split)}")
    asked = read_queries(queries, policy, split)
    if not qrels and of_every_split(queries, split):
        print(f"{len(asked):,} queries, of every split: those of one are the judged ones, with --qrels={queries}")
    judgements: list[Judgement] = []
    if qrels:
        print(f"{qrels}: {describe(qrels, 'judgements', split)}")
        judgements = read_judgements(qrels, split, policy, query_ids={query.id for query in asked})
        judged = {judgement.query_id for judgement in judgements}
        asked = [query for query in asked if query.id in judged]
    if policy.report():
        print(policy.report())
    if not asked:
        what = "judged query" if qrels else "query"
        raise ValueError(f"{queries} has no {what} to search for; give a folder or a file with some")
    return Asked(asked, judgements, dataset_name(queries), split_asked(queries, qrels, split))


def result_name(queries: str, qrels: str, split: str) -> str:
    """`Asked.name`, of files that are not read."""
    return _named(dataset_name(queries), split_asked(queries, qrels, split))


def split_asked(queries: str, qrels: str, split: str) -> str:
    """What the split is called, "" where the queries are of none: a file of judgements is one of its own, by its name;
    without judgements a file of queries has its own name, and queries.jsonl of a folder has those of all splits."""
    if qrels:
        return ".".join(_words(source_path(qrels))) if source_path(qrels).is_file() else split
    if not source_path(queries).is_dir() or split not in _words(found_queries(queries, split)[0].path):
        return ""
    return split


def of_every_split(queries: str, split: str) -> bool:
    """Whether it is a folder whose queries are in one file, and judgements alone say which are of the split."""
    path = source_path(queries)
    return path.is_dir() and not split_asked(queries, "", split) and has_judgements(path, split)


def _named(dataset: str, split: str) -> str:
    return dataset if not split or dataset.endswith(f"-{split}") else f"{dataset}.{split}"


def dataset_name(queries: str | Path) -> str:
    """What results are called. A folder or its queries.jsonl -> the folder's name; any other file -> its name without
    suffixes, after its folder's if many data sets have a file of that name ("nq/test.qa.csv" -> "nq-test",
    "msmarco/queries.dev.small.tsv" -> "msmarco-dev.small")."""
    if is_named(source_path(queries)):
        return called(queries)
    path = source_path(queries).absolute()
    if path.is_dir():
        return path.name
    words = _words(path)
    if path.name.startswith("queries.jsonl"):
        return path.parent.name or words[0]
    name = ".".join(words)
    shared = words[0].lower() in SHARED_NAMES or not path.name.startswith(words[0])
    return f"{path.parent.name}-{name}" if shared and path.parent.name else name


def _words(path: Path) -> list[str]:
    """The parts of a file's name without endings and without what the file is for."""
    words = path.name.split(".")
    while len(words) > 1 and words[-1].lower() in _ENDINGS:
        words.pop()
    return words[1:] if len(words) > 1 and words[0].lower() in _ROLES else words
