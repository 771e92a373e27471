"""Queries, judgements, training examples and rankings, of whatever file or folder has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from jaxret.data.errors import Location, Policy
from jaxret.data.formats import beir, trec
from jaxret.data.formats.corpus import Corpus, read_corpus
from jaxret.data.formats.detect import detect_file, parse_source, source_exists, source_path
from jaxret.data.formats.examples_by_ids import join_texts
from jaxret.data.formats.format import DataFile
from jaxret.data.formats.questions import join_by_question
from jaxret.data.formats.source_layout import (
    examples_path,
    is_folder,
    judgements_path,
    query_paths,
    rankings_path,
    text_folder,
)
from jaxret.data.formats.texts import duplicate_id_error
from jaxret.data.libraries.named import is_named
from jaxret.data.libraries.open_sets import list_files
from jaxret.data.lines import PathLike, find_file, missing_file_error
from jaxret.data.records import Example, Judgement, Query, Rankings


def _files(source: PathLike, paths: Iterable[Path], role: str) -> list[DataFile]:
    """Detect files of a source, in the format that the source forces, if it does."""
    name, _ = parse_source(source)
    return [detect_file(f"{name}:{path}" if name else path, role) for path in paths]


def detect_queries(source: PathLike, split: str | None = None) -> list[DataFile]:
    """Return the description of the files that `read_queries` reads."""
    path = source_path(source)
    return _files(source, query_paths(path, split) if is_folder(path) else [path], "queries")


def read_queries(source: PathLike, policy: Policy | None = None, split: str | None = None) -> list[Query]:
    """Read the queries of a folder or file; of a folder that has a file for each split, those of `split`, or all.

    Where they have no ids, a query's is the number of its row, record or line, from "0".
    """
    policy = policy or Policy()
    files = detect_queries(source, split)
    queries: dict[str, Query] = {}
    first: dict[str, Path] = {}
    for file in files:
        for query in _queries(file, policy):
            if query.id in queries:
                error = duplicate_id_error(
                    query.id, "query id", Location(file.path), Location(file.path, first[query.id].name)
                )
                policy.reject(error)
                continue
            queries[query.id], first[query.id] = query, file.path
    return list(queries.values())


def _queries(file: DataFile, policy: Policy) -> Iterable[Query]:
    if file.format.queries is not None:
        return file.format.queries(file, policy)
    assert file.format.examples is not None
    return {example.query.id: example.query for _, example in file.format.examples(file, policy)}.values()


def read_judged_queries(
    queries: PathLike, judgements: PathLike, split: str | None, policy: Policy, judged: bool = True
) -> tuple[list[Query], list[tuple[Location, Judgement]]]:
    """Read queries, and judgements with their locations; these may be of other queries too.

    Judgements name queries by ids. Training records without ids, as DPR's, that are in another file than the queries
    are joined with them by the text of the question (`join_by_question`).

    Args:
        queries: a folder, file or named set.
        judgements: the same, or another one.
        split: of folders.
        judged: whether these are the judgements of these queries; in a folder, training records without ids beside
            queries with ids may be of other queries.
    """
    query_list = read_queries(queries, policy, split)
    records = None
    if judged or all(one.format.without_query_ids for one in detect_queries(queries, split)):
        records = joined_examples(detect_judgements(judgements, split), queries, query_list, split, policy)
    if records is None:
        return query_list, list(read_located_judgements(judgements, split, policy))
    relevant = (
        (location, Judgement(example.query.id, passage.id, 1))
        for location, example in records
        for passage in example.positives
    )
    return query_list, list(trec.reject_contradictions(relevant, policy))


def joined_examples(
    file: DataFile, source: PathLike, queries: Iterable[Query], split: str | None, policy: Policy
) -> Iterator[tuple[Location, Example]] | None:
    """Return the records of a file with the queries of a source; None if they are by ids, or of the same file.

    Args:
        file: of judgements or training records.
        source: a folder, file or named set.
        split: of a folder.
        policy: what to do with a record whose question the source does not have.
    """
    if not file.format.without_query_ids or file.format.examples is None:
        return None
    paths = [one.path for one in detect_queries(source, split)]
    if [str(path.absolute()) for path in paths] == [str(file.path.absolute())]:
        return None
    return join_by_question(file.format.examples(file, policy), queries, paths, policy)


def read_judgements(source: PathLike, split: str | None = None, policy: Policy | None = None) -> list[Judgement]:
    """Read the judgements of a folder's split or of a file; of training records, their positives. A bad record is what
    `policy` makes of it, by default an error."""
    return [judgement for _, judgement in read_located_judgements(source, split, policy or Policy())]


def detect_judgements(source: PathLike, split: str | None = None) -> DataFile:
    """Return the description of the file that `read_judgements` reads."""
    path = source_path(source)
    return _files(source, [judgements_path(path, split) if is_folder(path) else path], "judgements")[0]


def read_located_judgements(
    source: PathLike, split: str | None, policy: Policy
) -> Iterator[tuple[Location, Judgement]]:
    """Read the judgements with their places."""
    file = detect_judgements(source, split)
    if file.format.judgements is not None:
        yield from file.format.judgements(file, policy)
        return
    if file.format.id_examples is not None:
        for location, one in file.format.id_examples(file, policy):
            for key in one.positives:
                yield location, Judgement(one.query_id, key, 1)
        return
    assert file.format.examples is not None
    for location, example in file.format.examples(file, policy):
        for passage in example.positives:
            yield location, Judgement(example.query.id, passage.id, 1)


def read_examples(
    source: PathLike,
    split: str | None = None,
    policy: Policy | None = None,
    negatives_run: PathLike | None = None,
    targets: bool = True,
) -> list[Example]:
    """Read training examples, which share their passages (equal id, same object).

    A folder's are in its file of training records for the split. If it has none, or with `negatives_run`, they are
    made of its judgements: positives are the relevant passages of a query; negatives those judged not relevant or, with
    `negatives_run`, the passages it retrieved that are not judged relevant, in rank order. Records that name ids find
    the texts in their folder.

    Args:
        source: a folder, file or named set.
        split: of a folder.
        policy: what to do with bad records; by default an error.
        negatives_run: a run to take negatives from.
        targets: one example for each positive, its target, which the query's other positives follow (but one for each
            record of DPR). False: one for each query or record, as the file has them.
    """
    policy = policy or Policy()
    file = detect_examples(source, split, negatives_run)
    if file is None:
        examples = _judged(source, split, policy, negatives_run)
    elif file.format.examples is not None:
        examples = [example for _, example in file.format.examples(file, policy)]
    else:
        assert file.format.id_examples is not None
        folder = text_folder(file.path)
        records = list(file.format.id_examples(file, policy))
        queries = {} if all(one.query for _, one in records) else {q.id: q for q in read_queries(folder, policy, split)}
        examples = join_texts(records, queries, read_corpus(folder, policy), policy)
    if targets and (file is None or file.format.every_positive):
        return [one for example in examples for one in examples_by_target(example)]
    return examples


def targets_first_only(source: PathLike, split: str | None) -> bool:
    """Return whether of each training record the first positive alone is a target, as in DPR's."""
    file = detect_examples(source, split)
    return file is not None and not file.format.every_positive


def has_teacher_scores(source: PathLike, split: str | None, negatives_run: PathLike | None, policy: Policy) -> bool:
    """Return whether training records have a teacher's scores of a target and a negative; reads up to the first.

    Args:
        source: a folder, file or named set.
        split: of a folder.
        negatives_run: the run that examples take their negatives from, if any.
    """
    file = detect_examples(source, split, negatives_run)
    if file is None or file.format.examples is None:  # judgements, or ids
        return False
    examples = (example for _, example in file.format.examples(file, policy))
    if file.format.every_positive:
        examples = (one for example in examples for one in examples_by_target(example))
    return any(example.is_distillable for example in examples)


def examples_by_target(example: Example) -> Iterator[Example]:
    """Yield the example for each of its positives, which comes first then."""

    def first(values: tuple, position: int) -> tuple:
        return (values[position], *values[:position], *values[position + 1 :]) if values else ()

    for position in range(len(example.positives)):
        yield replace(
            example,
            positives=first(example.positives, position),
            positive_scores=first(example.positive_scores, position),
        )


def detect_examples(source: PathLike, split: str | None, negatives_run: PathLike | None = None) -> DataFile | None:
    """Return the file of training records; None if examples are to be made of judgements. Raises DataError if a run is
    given for records that name their own negatives."""
    path = source_path(source)
    if is_folder(path):
        file = examples_path(path, split) if negatives_run is None else None
        return _files(source, [file], "examples")[0] if file else None
    training_file = detect_file(source, "examples")
    if negatives_run is not None:
        problem = "this file names its own negatives, and a run was given for them too"
        raise Location(path).error("two sources", problem, "use a run with a folder that has judgements")
    return training_file


def _judged(source: PathLike, split: str | None, policy: Policy, negatives_run: PathLike | None) -> list[Example]:
    queries, judgements = read_judged_queries(source, source, split, policy)
    run = None if negatives_run is None else read_ranked_lines(negatives_run, policy)
    return beir.examples_of_judgements(queries, judgements, read_corpus(source, policy), run, policy)


def example_files(source: PathLike, split: str | None = None, negatives_run: PathLike | None = None) -> list[Path]:
    """Return the files that `read_examples` reads when it is given the same, or that libraries read for it. Raises its
    DataError for one that is missing."""
    run = [] if negatives_run is None else run_files(negatives_run)
    training_file = detect_examples(source, split, negatives_run)
    files: list[Path | None] = [training_file.path if training_file else None]
    if training_file is None or training_file.format.examples is None:
        texts = source if training_file is None else text_folder(training_file.path)
        files += [detect_judgements(source, split).path] if training_file is None else []
        queries = query_paths(source_path(texts), split)
        files += [*queries, Corpus.open(texts).file.path]
        files += [find_file(path.parent, "answers.jsonl") for path in queries if path.name.startswith("queries.jsonl")]
    return [*(file for place in files if place for file in list_files(place)), *run]


def run_files(source: PathLike) -> list[Path]:
    """Return the files that `read_run` reads. Raises DataError for one that is missing."""
    path = _run_path(source)
    if not source_exists(path):
        raise missing_file_error(path)
    return list(list_files(path))


def _run_path(source: PathLike) -> Path:
    path = source_path(source)
    return rankings_path(path) if is_named(path) and is_folder(path) else path


def detect_run(source: PathLike) -> DataFile:
    """Return the description of the file that `read_run` reads."""
    return _files(source, [_run_path(source)], "rankings")[0]


def require_run_scores(source: PathLike, purpose: str) -> None:
    """Raise DataError if a run has ranks alone. purpose: of its scores, for the error."""
    file = detect_run(source)
    if file.format.without_scores:
        problem = f"this is a ranking without scores ({file}), and {purpose} are wanted"
        raise Location(file.path).error("no scores", problem, "give one with scores, as a TREC run")


def read_run_lines(source: PathLike, policy: Policy) -> Iterator[trec.RunLine]:
    """Yield the lines of a run, in the file's order, with places."""
    file = detect_run(source)
    assert file.format.rankings is not None
    return file.format.rankings(file, policy)


def read_ranked_lines(source: PathLike, policy: Policy) -> dict[str, list[trec.RunLine]]:
    """Return a run by query, each in rank order, with places."""
    return trec.rank_lines(read_run_lines(source, policy), policy)


def read_run(source: PathLike, policy: Policy | None = None) -> Rankings:
    """Read a run: query id -> [(passage id, score)] in rank order."""
    run_lines = read_ranked_lines(source, policy or Policy())
    return {query: [(line.passage_id, line.score) for line in lines] for query, lines in run_lines.items()}


def describe_source(
    source: PathLike, role: str, split: str | None = None, negatives_run: PathLike | None = None
) -> str:
    """Return the format that a role is read from, in words: "MS MARCO collection, 2 columns".

    Args:
        source: a folder, file or named set.
        role: "passages", "queries", "judgements" or "examples".
        split: of a folder.
        negatives_run: the run that examples take their negatives from, if any.

    Raises:
        DataError: as reading would.
    """
    if role == "passages":
        return str(Corpus.open(source).file)
    if role == "queries":
        return str(detect_queries(source, split)[0])
    if role == "judgements":
        return str(detect_judgements(source, split))
    file = detect_examples(source, split, negatives_run)
    return str(file or f"{detect_judgements(source, split)}; {Corpus.open(source).file}")
