"""Queries, judgements, training examples and rankings, of whatever file or folder has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from jaxret.data.files import PathLike, Policy, Where, find_file, missing_file
from jaxret.data.formats import beir, joins, trec
from jaxret.data.formats.corpora import corpus_file, found_corpus, read_corpus
from jaxret.data.formats.places import examples_in, home, is_folder, judgements_in, queries_in, rankings_in
from jaxret.data.formats.recognise import Found, exists, recognise, source_path, split_source
from jaxret.data.formats.texts import duplicate_error
from jaxret.data.libraries.named import files_of, is_named
from jaxret.data.records import Example, Judgement, Query, Rankings


def _files(source: PathLike, paths: Iterable[Path], role: str) -> list[Found]:
    """What files of a source are, in the format that it names, if it does."""
    name, _ = split_source(source)
    return [recognise(f"{name}:{path}" if name else path, role) for path in paths]


def found_queries(source: PathLike, split: str | None = None) -> list[Found]:
    """The files that `read_queries` reads, and what they are."""
    path = source_path(source)
    return _files(source, queries_in(path, split) if is_folder(path) else [path], "queries")


def read_queries(source: PathLike, policy: Policy | None = None, split: str | None = None) -> list[Query]:
    """Reads the queries of a folder or file; of a folder that has a file for each split, those of `split`, or all.

    Where they have no ids, a query's is the number of its row, record or line, from "0".
    """
    policy = policy or Policy()
    files = found_queries(source, split)
    queries: dict[str, Query] = {}
    first: dict[str, Path] = {}
    for found in files:
        for query in _queries(found, policy):
            if query.id in queries:
                error = duplicate_error(
                    query.id, "query id", Where(found.path), Where(found.path, first[query.id].name)
                )
                policy.reject(error)
                continue
            queries[query.id], first[query.id] = query, found.path
    return list(queries.values())


def _queries(found: Found, policy: Policy) -> Iterable[Query]:
    if found.format.queries is not None:
        return found.format.queries(found.path, policy)
    assert found.format.examples is not None
    return {example.query.id: example.query for _, example in found.format.examples(found.path, policy)}.values()


def read_judgements(
    source: PathLike,
    split: str | None = None,
    policy: Policy | None = None,
    query_ids: Collection[str] | None = None,
    passage_ids: Collection[str] | None = None,
) -> list[Judgement]:
    """Reads the judgements of a folder's split or of a file; of training records, their positives.

    Where `query_ids` or `passage_ids` are given (sets, best), a judgement for any other id is bad input.
    """
    policy = policy or Policy()
    found = judgement_lines(source, split, policy)
    return [judgement for _, judgement in trec.known(found, query_ids, passage_ids, policy)]


def found_judgements(source: PathLike, split: str | None = None) -> Found:
    """The file that `read_judgements` reads, and what it is."""
    path = source_path(source)
    return _files(source, [judgements_in(path, split) if is_folder(path) else path], "judgements")[0]


def judgement_lines(source: PathLike, split: str | None, policy: Policy) -> Iterator[tuple[Where, Judgement]]:
    """The judgements with their places."""
    found = found_judgements(source, split)
    if found.format.judgements is not None:
        yield from found.format.judgements(found.path, policy)
        return
    if found.format.named is not None:
        for where, one in found.format.named(found.path, policy):
            for key in one.positives:
                yield where, Judgement(one.query_id, key, 1)
        return
    assert found.format.examples is not None
    for where, example in found.format.examples(found.path, policy):
        for passage in example.positives:
            yield where, Judgement(example.query.id, passage.id, 1)


def read_examples(
    source: PathLike,
    split: str | None = None,
    policy: Policy | None = None,
    negatives_run: PathLike | None = None,
    targets: bool = True,
) -> list[Example]:
    """Reads training examples, which share their passages (equal id, same object).

    A folder's are in its file of training records for the split or, if it has none or `negatives_run` is given, made of
    its judgements: positives are the relevant passages of a query; negatives those judged not relevant or, with
    `negatives_run` (a run), the passages it retrieved that are not judged relevant, in rank order. Records that name
    ids find the texts in their folder.

    One example for each positive, its target, which the query's other positives follow; but one for each record of DPR.
    targets=False: one for each query or record, as the file has them.
    """
    policy = policy or Policy()
    found = _training_file(source, split, negatives_run)
    if found is None:
        examples = _judged(source, split, policy, negatives_run)
    elif found.format.examples is not None:
        examples = [example for _, example in found.format.examples(found.path, policy)]
    else:
        assert found.format.named is not None
        folder = _folder_of(found)
        named = list(found.format.named(found.path, policy))
        queries = {} if all(one.query for _, one in named) else {q.id: q for q in read_queries(folder, policy, split)}
        examples = joins.joined(named, queries, read_corpus(folder, policy), policy)
    if targets and (found is None or found.format.every_positive):
        return [one for example in examples for one in targets_of(example)]
    return examples


def keeps_first(source: PathLike, split: str | None) -> bool:
    """Whether of each training record the first positive alone is a target, as in DPR's."""
    found = _training_file(source, split, None)
    return found is not None and not found.format.every_positive


def has_scores(source: PathLike, split: str | None, negatives_run: PathLike | None, policy: Policy) -> bool:
    """Whether training records have a teacher's scores, of a target and a negative; reads as far as the first."""
    found = _training_file(source, split, negatives_run)
    if found is None or found.format.examples is None:  # judgements, or ids
        return False
    examples = (example for _, example in found.format.examples(found.path, policy))
    if found.format.every_positive:
        examples = (one for example in examples for one in targets_of(example))
    return any(example.taught for example in examples)


def _folder_of(found: Found) -> Path:
    """Where the texts are that a file names by ids."""
    return home(found.path)


def targets_of(example: Example) -> Iterator[Example]:
    """The example for each of its positives, which comes first then."""

    def first(values: tuple, place: int) -> tuple:
        return (values[place], *values[:place], *values[place + 1 :]) if values else ()

    for place in range(len(example.positives)):
        yield replace(
            example,
            positives=first(example.positives, place),
            positive_scores=first(example.positive_scores, place),
        )


def _training_file(source: PathLike, split: str | None, negatives_run: PathLike | None) -> Found | None:
    """The file of training records; None if examples are to be made of judgements."""
    path = source_path(source)
    if is_folder(path):
        file = examples_in(path, split) if negatives_run is None else None
        return _files(source, [file], "examples")[0] if file else None
    found = recognise(source, "examples")
    if negatives_run is not None:
        told = "this file names its own negatives, and a run was given for them too"
        raise Where(path).error("two sources", told, "use a run with a folder that has judgements")
    return found


def _judged(source: PathLike, split: str | None, policy: Policy, negatives_run: PathLike | None) -> list[Example]:
    judged = list(judgement_lines(source, split, policy))
    run = None if negatives_run is None else ranked_lines(negatives_run, policy)
    return beir.examples(read_queries(source, policy, split), judged, read_corpus(source, policy), run, policy)


def example_files(source: PathLike, split: str | None = None, negatives_run: PathLike | None = None) -> list[Path]:
    """The files that `read_examples` reads when it is given the same, or that libraries read for it. Raises its
    DataError for one that is missing."""
    run = [] if negatives_run is None else run_files(negatives_run)
    found = _training_file(source, split, negatives_run)
    files: list[Path | None] = [found.path if found else None]
    if found is None or found.format.examples is None:
        texts = source if found is None else _folder_of(found)
        files += [found_judgements(source, split).path] if found is None else []
        queries = queries_in(source_path(texts), split)
        files += [*queries, corpus_file(texts)]
        files += [find_file(path.parent, "answers.jsonl") for path in queries if path.name.startswith("queries.jsonl")]
    return [*(file for place in files if place for file in files_of(place)), *run]


def run_files(source: PathLike) -> list[Path]:
    """The files that `read_run` reads. Raises DataError for one that is missing."""
    place = _run_place(source)
    if not exists(place):
        raise missing_file(place)
    return list(files_of(place))


def _run_place(source: PathLike) -> Path:
    path = source_path(source)
    return rankings_in(path) if is_named(path) and is_folder(path) else path


def found_run(source: PathLike) -> Found:
    """The file that `read_run` reads, and what it is."""
    return _files(source, [_run_place(source)], "rankings")[0]


def require_scores(source: PathLike, wanted: str) -> None:
    """Raises DataError if a run says ranks alone; wanted: what its scores are to be, for the error."""
    found = found_run(source)
    if found.format.ranks_alone:
        told = f"this is a ranking without scores ({found}), and {wanted} are wanted"
        raise Where(found.path).error("no scores", told, "give one with scores, as a TREC run")


def run_lines(source: PathLike, policy: Policy) -> Iterator[trec.RunLine]:
    """The lines of a run, in the file's order, with places."""
    found = found_run(source)
    assert found.format.rankings is not None
    return found.format.rankings(found.path, policy)


def ranked_lines(source: PathLike, policy: Policy) -> dict[str, list[trec.RunLine]]:
    """A run by query, each in rank order, with places."""
    return trec.ranked(run_lines(source, policy), policy)


def read_run(source: PathLike, policy: Policy | None = None) -> Rankings:
    """Reads a run: query id -> [(passage id, score)] in rank order."""
    ranked = ranked_lines(source, policy or Policy())
    return {query: [(line.passage_id, line.score) for line in lines] for query, lines in ranked.items()}


def describe(source: PathLike, role: str, split: str | None = None, negatives_run: PathLike | None = None) -> str:
    """What is read of a source, in a few words: "MS MARCO collection, 2 columns". Raises DataError as reading would."""
    if role == "passages":
        return str(found_corpus(source))
    if role == "queries":
        return str(found_queries(source, split)[0])
    if role == "judgements":
        return str(found_judgements(source, split))
    found = _training_file(source, split, negatives_run)
    return str(found or f"{found_judgements(source, split)}; {found_corpus(source)}")
