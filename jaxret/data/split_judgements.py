"""Split judgements by whether their relevant passages have training queries (I3, section 5.3 and table 4)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jaxret.data.errors import Policy
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.formats.sources import JudgementSource
from jaxret.data.records import Judgement
from jaxret.parallel.events import emit
from jaxret.storage.atomic import atomic_write
from jaxret.storage.folder_kinds import JUDGEMENTS, require_folder_kind

SETS = ("set0", "set1")


class JudgementSets(NamedTuple):
    """Judgements of three groups of queries, by whether their relevant passages also have training queries."""

    set0: list[Judgement]  # no relevant passage of the query has a training query
    set1: list[Judgement]  # all relevant passages of the query have training queries
    remainder: list[Judgement]  # some but not all relevant passages of the query have training queries


def split_by_training(judgements: Iterable[Judgement], training_passages: set[str]) -> JudgementSets:
    """Return the judgements of each set of queries, in their order. Queries without a relevant passage are in no set.

    Args:
        judgements: judgements of the queries to split.
        training_passages: ids of passages that are relevant to a training query.
    """
    by_query: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        by_query.setdefault(judgement.query_id, []).append(judgement)
    sets = JudgementSets([], [], [])
    for entries in by_query.values():
        has_training = {entry.passage_id in training_passages for entry in entries if entry.relevance > 0}
        if has_training:
            sets[2 if len(has_training) > 1 else int(has_training.pop())].extend(entries)
    return sets


def write_judgement_sets(
    train: JudgementSource, qrels: JudgementSource, out: str, policy: Policy | None = None
) -> JudgementSets:
    """Write `qrels.set0.tsv` and `qrels.set1.tsv` into a folder, and print how many queries each has.

    Args:
        train: relevant passages of training queries: judgements, or training records.
        qrels: the judgements to split.
        out: folder to write.

    Raises:
        DataError: a bad record.
        FileExistsError: the folder is of another kind.
        ValueError: no training query has a relevant passage, a set is empty, or an output file is an input.
    """
    require_folder_kind(Path(out), JUDGEMENTS)
    paths = [Path(out) / f"qrels.{name}.tsv" for name in SETS]
    # Other files of the folder are not inputs: they may be outputs of an earlier call, which are replaced.
    sources = [("the judgements", source.data.member(source.file.path)) for source in (train, qrels)]
    for path in paths:
        require_other_output(path, sources)
    training_passages = {judgement.passage_id for judgement in train.read(policy) if judgement.relevance > 0}
    if not training_passages:
        raise ValueError(f"{train} has no relevant passage; give training data with judgements")
    sets = split_by_training(qrels.read(policy), training_passages)
    for name, entries in zip(SETS, sets):
        if not entries:
            relevant = "no relevant passage" if name == "set1" else "only relevant passages"
            raise ValueError(
                f"{name} would be empty: the judged queries of {qrels} have {relevant} with a training query in {train}"
            )
    with atomic_write(paths[0]) as first, atomic_write(paths[1]) as second:
        for file, entries in zip((first, second), sets):
            file.write("query-id\tcorpus-id\tscore\n")
            file.writelines(f"{entry.query_id}\t{entry.passage_id}\t{entry.relevance}\n" for entry in entries)
            file.flush()  # a full disk raises its error before the old files are removed
        for path in paths:  # removed first, so that a killed job leaves no file of an earlier split next to a new one
            path.unlink(missing_ok=True)
    counts = [len({entry.query_id for entry in entries}) for entries in sets]
    emit("split", files=dict(zip(SETS, paths)), queries=counts)
    print(f"{counts[0]:,} queries without training queries for their relevant passages: {paths[0]}")
    print(f"{counts[1]:,} queries with training queries for all their relevant passages: {paths[1]}")
    print(f"{counts[2]:,} queries with training queries for some of them are in neither set")
    return sets
