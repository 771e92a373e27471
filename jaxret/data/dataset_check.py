"""Describe a data set, count its records, and list its bad ones (`jaxret data check`)."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import (
    Corpus,
    DataSource,
    JudgementSource,
    QuerySource,
    RankingSource,
    TrainingSource,
    hash_id,
    is_named,
    open_role,
    read_judged_queries,
)
from jaxret.data.formats.detect import role_by_name
from jaxret.data.formats.format import content_id
from jaxret.data.formats.set_folders import is_folder_of_sets, list_sets
from jaxret.data.record_checks import question_key
from jaxret.data.records import Judgement, Passage, Query
from jaxret.data.tokens.tokenizer import SEPARATOR, TextTokenizer
from jaxret.parallel.events import emit
from jaxret.types import Ragged

CUT_LENGTHS = (32, 64, 128, 256, 512)
_UNCUT_LENGTH = 2**20  # length limit in tokens above every text
_EXCERPT = 60  # characters of the first passage's title, and of its text


@dataclass
class ListingPolicy(Policy):
    """Leaves bad records out, and keeps their errors."""

    on_error: str = "skip"
    errors: list[DataError] = field(default_factory=list, init=False)

    def _count(self, error: DataError) -> None:
        count = self.skip_counts.total()
        super()._count(error)
        if self.skip_counts.total() > count:
            self.errors.append(error)


@dataclass
class DataCheck:
    """The report of one data set."""

    source: DataSource
    tokenizer: TextTokenizer | None  # counts tokens; None: words are counted
    lengths: Sequence[int]  # length limits in tokens, for the shares of texts that they would cut
    # Its `errors` are those of all bad records and of the unreadable files
    policy: ListingPolicy = field(default_factory=ListingPolicy)
    lines: list[str] = field(default_factory=list)  # the report
    unreadable: list[DataError] = field(default_factory=list)  # errors of files that cannot be read at all
    # Numbers of a single file by name, such as "passages" and "judged queries"
    counts: dict[str, float | int] = field(default_factory=dict)

    def add_line(self, line: str) -> None:
        self.lines.append(line)

    def attempt(self, name: str, read: Callable[[], None]) -> None:
        """Call `read`. If a file cannot be read at all, add the error to the report, so that other files are read."""
        try:
            read()
        except DataError as error:
            self.policy.errors.append(error)
            self.unreadable.append(error)
            self.add_line(f"{name}: cannot be read")


def check_data(
    source: DataSource, tokenizer: TextTokenizer | None = None, lengths: Sequence[int] = CUT_LENGTHS
) -> DataCheck:
    """Read a folder or file to its end, and return the report of all errors. Raises DataError only if it is not a data
    set."""
    check = DataCheck(source, tokenizer, lengths)
    if is_folder_of_sets(source.path):
        for members in list_sets(source.path).values():
            for folder in members.values():
                member = check_data(source.member(folder), tokenizer, lengths)
                check.lines += [*([""] if check.lines else []), *member.lines]
                check.policy.errors += member.policy.errors
                check.unreadable += member.unreadable
                for kind, locations in member.policy.notes.items():
                    check.policy.notes.setdefault(kind, set()).update(locations)
        return check
    if source.is_folder:
        _folder(check)
        return check
    file = source.file()
    roles = file.format.roles()
    if file.format.titles:  # the content does not show whether these are passages or queries
        role = role_by_name(source.path)
        check.add_line(f"{source}: {source.file(role)}, going by the name")
        roles = [role]
    else:
        check.add_line(f"{source}: {file}, which gives {', '.join(roles)}")
    readers: dict[str, Callable[[DataCheck, Any], Any]]
    readers = {"passages": _passages, "queries": _queries, "judgements": _judgements, "rankings": _rankings}
    if "examples" in roles:
        check.attempt("examples", lambda: _examples(check, TrainingSource.of(source), "examples"))
        roles = ["passages"] if file.format.examples else []
    for role in roles:
        check.attempt(role, lambda role=role: readers[role](check, open_role(source, role)))  # type: ignore[misc]
    return check


# Files


def _passages(check: DataCheck, corpus: Corpus) -> np.ndarray:
    """Report counts, lengths and duplicates of a corpus, with 24 bytes of memory for each passage. Return the hashes of
    its ids, sorted."""
    ids, texts, first_error = array("Q"), array("Q"), len(check.policy.errors)
    first_read = ""

    def note_hashes() -> Iterator[Passage]:
        nonlocal first_read
        for _, passage in corpus.read_located(check.policy):
            first_read = first_read or _describe_first(check, passage)
            ids.append(hash_id(passage.id))
            texts.append(hash_id(content_id(passage.text, passage.title)))
            yield passage

    passages = note_hashes()
    lengths = _count_words(passages) if check.tokenizer is None else _count_tokens(check.tokenizer.passages, passages)
    hashes, first = np.unique(np.frombuffer(ids, np.uint64), return_index=True)
    corpus.reject_repeated_ids(ids, check.policy)
    check.policy.errors[first_error:] = sorted(check.policy.errors[first_error:], key=_by_line)
    check.counts["passages"] = len(hashes)
    check.add_line(f"passages: {len(hashes):,}{_describe_duplicates(np.frombuffer(texts, np.uint64)[first])}")
    if first_read:
        check.add_line(first_read)
    _log_lengths(check, "passages", lengths[first])
    return hashes


def cut_for_display(passage: Passage) -> Passage:
    """Return a passage with the end of its title and the beginning of its text: models differ in the separator between
    the two."""
    title, text = passage.title.strip(), passage.text
    title = title if len(title) <= _EXCERPT else f"...{title[-_EXCERPT:]}"
    return replace(passage, title=title, text=text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}...")


def _describe_first(check: DataCheck, passage: Passage) -> str:
    excerpt = cut_for_display(passage)
    if check.tokenizer is None:
        parts = f"title {excerpt.title!r}, text {excerpt.text!r} (--tokenizer=MODEL joins them as the model does)"
        return f"  the first, {passage.id!r}: {parts if excerpt.title else f'text {excerpt.text!r}'}"
    return f"  the first, {passage.id!r}, as the model reads it: {check.tokenizer.passage_as_read(excerpt)!r}"


def _by_line(error: DataError) -> tuple[int, str]:
    line = error.location.line
    return (line, "") if isinstance(line, int) else (0, str(line))


def _queries(check: DataCheck, source: QuerySource, name: str = "queries") -> None:
    queries = source.read(check.policy)
    check.counts["queries"] = len(queries)
    with_answers = sum(bool(query.answers) for query in queries)
    texts = np.array([hash_id(question_key(query.text)) for query in queries], np.uint64)
    answers = f", {with_answers:,} with answers" if with_answers else ""
    check.add_line(f"{name}: {len(queries):,}{answers}{_describe_duplicates(texts)}")
    lengths = _count_words(queries) if check.tokenizer is None else _count_tokens(check.tokenizer.queries, queries)
    _log_lengths(check, "queries", lengths)


def _judgements(check: DataCheck, source: JudgementSource) -> None:
    _log_judgements(check, source.read(check.policy), "judgements")


def _log_judgements(check: DataCheck, judgements: Sequence[Judgement], name: str) -> None:
    grades = Counter(judgement.relevance for judgement in judgements)
    queries = {judgement.query_id for judgement in judgements}
    relevant = {judgement.query_id for judgement in judgements if judgement.relevance > 0}
    parts = ", ".join(f"{count:,} of grade {grade}" for grade, count in sorted(grades.items()))
    check.counts["judgements"], check.counts["judged queries"] = len(judgements), len(queries)
    check.counts["relevant judgements"] = sum(count for grade, count in grades.items() if grade > 0)
    check.add_line(f"{name}: {len(judgements):,} for {len(queries):,} queries ({parts})")
    if len(queries) > len(relevant):
        check.add_line(f"  {len(queries) - len(relevant):,} queries have no relevant passage")


def _rankings(check: DataCheck, source: RankingSource, name: str = "rankings") -> None:
    rankings, scores = source.read(check.policy), ", ranks without scores" if source.without_scores else ""
    depths = [len(ranking) for ranking in rankings.values()] or [0]
    check.add_line(f"{name}: of {len(rankings):,} queries, {min(depths):,} to {max(depths):,} passages each{scores}")


def _examples(check: DataCheck, source: TrainingSource, name: str) -> None:
    examples = source.read(check.policy, targets=False)
    positives, negatives = (
        sum(len(getattr(example, side)) for example in examples) for side in ("positives", "negatives")
    )
    count = sum(example.score_count > 0 for example in examples)
    without = sum(not example.negatives for example in examples)
    check.add_line(
        f"{name}: {len(examples):,} queries, {positives:,} positives, {negatives:,} negatives, {count:,} with scores"
    )
    check.counts["examples"] = len(examples)
    check.counts["examples with those left out"] = len(examples) + check.policy.skip_counts.total()
    if targets := len({example.positives[0].id for example in examples if example.positives}):
        check.counts["examples per first positive"] = len(examples) / targets
        check.add_line(f"  {len(examples) / targets:.2f} queries with the same first positive, mean")
    if negatives:
        low, high = (extreme(len(example.negatives) for example in examples) for extreme in (min, max))
        check.add_line(f"  {low:,} to {high:,} negatives per query")
    if negatives and without:
        check.add_line(f"  {without:,} queries have no negative")
    repeated_queries = len(examples) - len({question_key(example.query.text) for example in examples})
    if repeated_queries:
        check.add_line(
            f"  {repeated_queries:,} have the query of an earlier example; the positives of one are not known "
            "positives of the other"
        )


# Folders


def _folder(check: DataCheck) -> None:
    source, layout = check.source, check.source.layout
    splits, ids = layout.list_splits(), [np.zeros(0, np.uint64)]
    if layout.find_passages() or not _has_questions(source):
        corpus = Corpus.of(source)
        check.add_line(f"{source}: {corpus.file}; splits: {', '.join(splits) or 'none'}")
        check.attempt("passages", lambda: ids.append(_passages(check, corpus)))
    else:
        check.add_line(f"{source}: {QuerySource.of(source).describe()}; no passages")
    for path in layout.list_queries():
        member = source.member(path)
        check.attempt("queries", lambda it=member: _queries(check, QuerySource.of(it), _short_path(it.path)))  # type: ignore[misc]
    judgements_by_split: dict[str, list[Judgement]] = {}
    texts: dict[str, dict[str, str]] = {}
    for split in splits:
        check.attempt(f"split {split}", lambda split=split: _split(check, split, judgements_by_split, texts))  # type: ignore[misc]
    for split, judgements in judgements_by_split.items():
        _log_dangling(check, split, judgements, ids[-1], texts[split].keys())
    _leaks(check, judgements_by_split, texts)


def _has_questions(source: DataSource) -> bool:
    try:
        return bool(source.layout.list_queries())
    except DataError:
        return False


def _split(
    check: DataCheck,
    split: str,
    judgements_by_split: dict[str, list[Judgement]],
    texts: dict[str, dict[str, str]],
) -> None:
    source = check.source
    if path := source.layout.find_examples(split):
        gives = source.detect(path).format.gives
        if gives("rankings") and not gives("judgements") and not source.layout.find_judgements(split):
            return _rankings(check, RankingSource.of(source.member(path)), f"rankings of {split} ({path.name})")
        if gives("examples"):
            _examples(check, TrainingSource.of(source, split), f"examples of {split} ({path.name})")
    sources = QuerySource.of(source, split), JudgementSource.of(source, split)
    queries, records = read_judged_queries(*sources, check.policy, judged=False)
    texts[split] = {query.id: question_key(query.text) for query in queries}
    judgements_by_split[split] = [judgement for _, judgement in records]
    _log_judgements(check, judgements_by_split[split], f"judgements of {split}")


def _short_path(path: Path) -> str:
    return "/".join(path.parts[-2:]) if is_named(path) else path.name


def _log_dangling(
    check: DataCheck, split: str, judgements: Sequence[Judgement], passages: np.ndarray, queries: Collection[str]
) -> None:
    """Report judgements of passages and queries that do not exist. `passages` has the hashes of the corpus's ids."""
    in_corpus = np.isin(np.array([hash_id(judgement.passage_id) for judgement in judgements], np.uint64), passages)
    without_passage = [judgement for judgement, exists in zip(judgements, in_corpus) if not exists]
    for subject, entries in (
        ("passages that are not in the corpus", without_passage),
        ("queries that do not exist", [entry for entry in judgements if entry.query_id not in queries]),
    ):
        if entries:
            first = entries[0].passage_id if "corpus" in subject else entries[0].query_id
            check.add_line(f"  {len(entries):,} judgements of {split} are for {subject}, such as {first!r}")


def _leaks(check: DataCheck, judgements_by_split: dict[str, list[Judgement]], texts: dict[str, dict[str, str]]) -> None:
    """Report queries with the same words, and the same relevant passages, in two splits."""
    queries = {
        split: {texts[split].get(judgement.query_id, judgement.query_id) for judgement in judgements}
        for split, judgements in judgements_by_split.items()
    }
    relevant = {
        split: {judgement.passage_id for judgement in judgements if judgement.relevance > 0}
        for split, judgements in judgements_by_split.items()
    }

    for first, second in itertools.combinations(judgements_by_split, 2):
        common_queries, passages = queries[first] & queries[second], relevant[first] & relevant[second]
        if common_queries:
            check.add_line(
                f"leak: {len(common_queries):,} queries of {second} are in {first} too, such as {min(common_queries)!r}"
            )
        if passages:
            check.add_line(f"{len(passages):,} relevant passages of {second} are relevant in {first} too")


# Lengths


def _describe_duplicates(texts: np.ndarray) -> str:
    copies = len(texts) - len(np.unique(texts))
    return f", {copies:,} of them with the text of an earlier one" if copies else ""


def _count_words(records: Iterable[Passage | Query]) -> np.ndarray:
    """Return the length of each record in words, for a check without a tokenizer."""
    counts = (len(record.text.split()) + len(getattr(record, "title", "").split()) for record in records)
    return np.fromiter(counts, np.int64)


def _count_tokens(encode: Callable[..., Ragged], texts: Iterable[object]) -> np.ndarray:
    """Return the length of each text in tokens, with markers and prompts. One block of tokens at a time is held."""
    lengths: list[np.ndarray] = [np.zeros(0, np.int64)]

    def collect(blocks: Iterator[Ragged]) -> Ragged:
        lengths.extend(block.lengths for block in blocks)
        return Ragged.from_lists([])

    encode(texts, sink=collect)
    return np.concatenate(lengths)


def _log_lengths(check: DataCheck, name: str, lengths: np.ndarray) -> None:
    if not len(lengths):
        return
    unit = "words" if check.tokenizer is None else "tokens"
    middle, high = np.percentile(lengths, [50, 95])
    check.add_line(
        f"  {unit}: mean {lengths.mean():.1f}, median {middle:.0f}, 95 % {high:.0f}, longest {lengths.max():,}"
    )
    if check.tokenizer is not None:
        cut = ", ".join(f"{np.mean(lengths > limit):.1%} at {limit}" for limit in check.lengths)
        check.add_line(f"  cut: {cut}")


def print_data_check(
    source: DataSource, tokenizer: TextTokenizer | None, lengths: Sequence[int], on_error: str = "error"
) -> DataCheck:
    """Print the description and every bad record; return the report.

    Args:
        source: folder, file or named data set.
        tokenizer: tokenizer that counts tokens; None: words are counted.
        lengths: length limits in tokens.
        on_error: "error" prints every bad record; "skip" prints the number and the first location for each reason.

    Raises:
        ValueError: a record is bad; under "skip", a file cannot be read.
    """
    check = check_data(source, tokenizer, lengths)
    print("\n".join(check.lines))
    for note in check.policy.describe_notes():
        print(f"noted: {note}")
    errors = check.policy.errors
    if on_error == "skip":
        records = [error for error in errors if error not in check.unreadable]
        for reason, count in Counter(error.reason for error in records).items():
            first = next(error for error in records if error.reason == reason)
            print(f"left out: {count:,} records: {reason} (first: {first.location})")
        errors = check.unreadable
    for error in errors:
        print(f"bad: {error}")
    problems = list(map(str, check.policy.errors))
    emit("data", source=str(source), lines=check.lines, notes=list(check.policy.describe_notes()), problems=problems)
    if errors:
        raise ValueError(f"{source}: {len(errors):,} bad records, listed above")
    return check


def load_uncut_tokenizer(directory: str | Path, title_separator: str = SEPARATOR) -> TextTokenizer:
    """Load a tokenizer that cuts no text."""
    return TextTokenizer.load(directory, _UNCUT_LENGTH, _UNCUT_LENGTH, title_separator=title_separator)
