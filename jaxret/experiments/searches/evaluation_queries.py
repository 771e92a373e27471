"""Open and read the queries and judgements of an evaluation, and name its result."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxret.data.formats import DataSource, JudgementSource, Policy, QuerySource, is_named, read_judged_queries
from jaxret.data.formats.trec import reject_unknown_ids
from jaxret.data.lines import PathLike
from jaxret.data.records import Judgement, Query
from jaxret.parallel.progress import print_line
from jaxret.storage.atomic import read_json, sha256_json
from jaxret.storage.buckets.working_copy import shown_message

# File names that many data sets have.
SHARED_NAMES = ("train", "dev", "test", "val", "valid", "validation", "queries", "questions")
_ROLES = ("queries", "questions", "topics", "qrels")  # words before a split, as in queries.dev.small.tsv
_ENDINGS = ("tsv", "txt", "csv", "json", "jsonl", "parquet", "gz", "zst", "bz2", "xz", "qa", "trec", "qrels")


@dataclass(frozen=True)
class EvaluationSource:
    """The queries of an evaluation and their judgements, whose files and formats are detected once."""

    queries: QuerySource
    judgements: JudgementSource | None  # None: the evaluation has at most the answers of the queries

    @classmethod
    def open(cls, queries: PathLike, qrels: PathLike = "", split: str = "test") -> EvaluationSource:
        """Detect the files and their formats. Raises DataError for a file that is missing or has other records.

        Args:
            queries: folder, file or named set with queries.
            qrels: folder, file or named set with judgements; "" for none.
            split: split to read, where a source is a folder.
        """
        data = DataSource.open(queries)
        if not qrels:
            return cls(QuerySource.of(data, split), None)
        judged = data if str(qrels) == str(queries) else DataSource.open(qrels)  # one file may have both
        return cls(QuerySource.of(data, split), JudgementSource.of(judged, split))

    @property
    def dataset_name(self) -> str:
        """The name of the data set.

        It is the folder's name for a folder or its queries.jsonl, and the name without suffixes for another file. The
        folder's name precedes a file name that many data sets have ("nq/test.qa.csv" -> "nq-test",
        "msmarco/queries.dev.small.tsv" -> "msmarco-dev.small").
        """
        path = self.queries.data_files[0].path
        if self.queries.is_folder or is_named(path):
            return self.queries.data.name
        path, words = path.absolute(), _words(path)
        if path.name.startswith("queries.jsonl"):
            return path.parent.name or words[0]
        name = ".".join(words)
        is_shared = words[0].lower() in SHARED_NAMES or not path.name.startswith(words[0])
        return f"{path.parent.name}-{name}" if is_shared and path.parent.name else name

    @property
    def split(self) -> str:
        """The name of the split; "" if the queries belong to no split.

        A file of judgements is a split named after the file. Without judgements, a file of queries belongs to no split,
        and neither does queries.jsonl of a folder, which has the queries of all splits.
        """
        split = self.queries.split or ""
        if self.judgements:
            path = self.judgements.file.path
            return split if self.judgements.is_folder or is_named(path) else ".".join(_words(path))
        return split if self._is_disk_folder and split in _words(self.queries.data_files[0].path) else ""

    @property
    def name(self) -> str:
        """The name of the result: data set and split."""
        dataset, split = self.dataset_name, self.split
        return dataset if not split or dataset.endswith(f"-{split}") else f"{dataset}.{split}"

    def record(self, digests: Any) -> dict[str, Any]:
        """Return the entry `dataset` of a result on these data: the sources as the user named them, and their
        digests."""
        values = {"queries": shown_message(self.queries.source)}
        values |= {"qrels": shown_message(self.judgements.source)} if self.judgements else {}
        return {**values, "sha256": digests}

    @property
    def has_every_split(self) -> bool:
        """Whether a folder has the queries of all splits in one file, so that only judgements select a split."""
        if self.judgements or self.split or not self._is_disk_folder:
            return False
        return self.queries.data.layout.find_judgements(self.queries.split or "") is not None

    @property
    def _is_disk_folder(self) -> bool:
        return self.queries.is_folder and not is_named(self.queries.data_files[0].path)

    def read(self, policy: Policy, run_ids: Container[str] = ()) -> EvaluationQueries:
        """Read the queries and the judgements. `run_ids` are ids of queries to return even if they are not judged.
        Raises ValueError if there is no query or, with judgements, no judged query."""
        judgements: list[Judgement] = []
        if self.judgements is None:
            query_list = self.queries.read(policy)
        else:
            query_list, records = read_judged_queries(self.queries, self.judgements, policy)
            valid_ids = {query.id for query in query_list}
            judgements = [judgement for _, judgement in reject_unknown_ids(records, valid_ids, None, policy)]
        run_queries = {query.id: query for query in query_list if query.id in run_ids}
        if self.judgements:
            judged_ids = {judgement.query_id for judgement in judgements}
            query_list = [query for query in query_list if query.id in judged_ids]
        if not query_list:
            noun = "judged query" if self.judgements else "query"
            raise ValueError(f"{self.queries} has no {noun} to search for; give a folder or a file with some")
        return EvaluationQueries(query_list, judgements, self, run_queries)


@dataclass(frozen=True)
class EvaluationQueries:
    """Queries of an evaluation. With judgements, only judged queries are kept."""

    queries: list[Query]
    judgements: list[Judgement]
    source: EvaluationSource  # the source that they were read from
    # query id -> query, for the ids that the reader was given, judged or not
    run_queries: dict[str, Query] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """Return SHA-256 digests of the queries, with answers and instructions, and of the judgements, independent of
        their order and format."""
        values = {"queries": sha256_json(sorted(query.to_json() for query in self.queries))}
        if self.judgements:
            values["qrels"] = sha256_json(sorted([j.query_id, j.passage_id, j.relevance] for j in self.judgements))
        return values

    def provenance(self, policy: Policy, removed: bool, match: str) -> dict[str, Any]:
        """Return the entry `dataset` of an evaluation's provenance.

        Args:
            policy: the policy that counted skipped records.
            removed: whether self-matches were removed.
            match: how answers are read, "string" or "regex".
        """
        values = {"skipped": dict(policy.skip_counts), "self_matches": "removed" if removed else "kept"}
        values |= {"match": match} if match != "string" else {}
        values |= {"split": self.source.split} if self.source.judgements else {}
        return self.record() | values

    def record(self) -> dict[str, Any]:
        """Return the sources and the digests of the data, see `EvaluationSource.record`."""
        return self.source.record(self.digests())


def require_same_dataset(path: Path, record: Mapping[str, Any]) -> None:
    """Raise ValueError if a file has a result on other data than `record` (`EvaluationSource.record`): two folders may
    have one name. The same sources may have changed, and the same data may have moved."""
    report = read_json(path) if path.exists() else {}
    old = report.get("provenance", report).get("dataset")
    if old and old["sha256"] != record["sha256"]:
        old_sources, sources = (
            " with ".join(dict.fromkeys(filter(None, (values.get("queries"), values.get("qrels"))))) or "other data"
            for values in (old, record)
        )
        if old_sources != sources:
            raise ValueError(
                f"{path} is the result on {old_sources}, which that on {sources} would replace: give another --name "
                "for its files, or delete that file"
            )


def read_evaluation_queries(
    source: EvaluationSource, policy: Policy, run_ids: Container[str] = ()
) -> EvaluationQueries:
    """Read the queries and the judgements of an evaluation as `EvaluationSource.read`, and print a line about each
    source. Raises ValueError if there is no query or, with judgements, no judged query."""
    print_line(f"{source.queries}: {source.queries.describe()}")
    if source.judgements:
        print_line(f"{source.judgements}: {source.judgements.describe()}")
    evaluation_queries = source.read(policy, run_ids)
    if source.has_every_split:
        count = f"{len(evaluation_queries.queries):,} queries"
        print_line(f"{count}, of every split; --qrels={source.queries} selects the judged queries of one split")
    if policy.report():
        print_line(policy.report())
    return evaluation_queries


def _words(path: Path) -> list[str]:
    """Return the parts of a file's name without file endings and without the words of _ROLES."""
    words = path.name.split(".")
    while len(words) > 1 and words[-1].lower() in _ENDINGS:
        words.pop()
    return words[1:] if len(words) > 1 and words[0].lower() in _ROLES else words
