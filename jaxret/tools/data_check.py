"""jaxret data check: what a data set is, what is in it, and everything that is wrong with it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxret.data.files import DataError, PathLike, Policy
from jaxret.data.formats import (
    describe,
    hash_id,
    is_named,
    read_examples,
    read_judgements,
    read_located,
    read_queries,
    recognise,
)
from jaxret.data.formats.corpora import refuse_repeated
from jaxret.data.formats.format import text_id
from jaxret.data.formats.places import examples_in, has_judgements, is_folder, queries_in, splits_in
from jaxret.data.formats.readers import found_run, read_run
from jaxret.data.formats.recognise import by_name, source_path, split_source
from jaxret.data.records import Example, Judgement, Passage, Query
from jaxret.data.tokenizer import TextTokenizer
from jaxret.models.encoders.pretrained import resolve
from jaxret.types import Ragged

LENGTHS = (32, 64, 128, 256, 512)
_WHOLE = 2**20  # tokens: no text is cut


@dataclass
class Listing(Policy):
    """Leaves bad records out, and keeps what was wrong with each."""

    on_error: str = "skip"
    errors: list[DataError] = field(default_factory=list, init=False)

    def _count(self, error: DataError, reason: str) -> None:
        before = self.skipped.total()
        super()._count(error, reason)
        if self.skipped.total() > before:
            self.errors.append(error)


@dataclass
class Check:
    """What is told of a data set, line by line; `policy.errors` is every bad record."""

    source: str
    tokenizer: TextTokenizer | None
    lengths: Sequence[int]
    policy: Listing = field(default_factory=Listing)
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def attempt(self, what: str, read: Callable[[], None]) -> None:
        """A file that cannot be read at all is one more thing that is wrong; the others are read nevertheless."""
        try:
            read()
        except DataError as error:
            self.policy.errors.append(error)
            self.say(f"{what}: cannot be read")


def check_data(source: str, tokenizer: TextTokenizer | None = None, lengths: Sequence[int] = LENGTHS) -> Check:
    """Reads a folder or file to its end, whatever is wrong with it. Raises DataError only if it is no data set."""
    check = Check(source, tokenizer, lengths)
    path = source_path(source)
    if is_folder(path):
        _folder(check, path)
        return check
    found = recognise(source)
    roles = found.format.roles()
    if found.format.titles:  # one of two, and what it is content does not tell
        role = by_name(path)
        check.say(f"{source}: {describe(source, role)}, going by the name")
        roles = [role]
    else:
        check.say(f"{source}: {found}, which gives {', '.join(roles)}")
    readers = {"passages": _passages, "queries": _queries, "judgements": _judgements, "rankings": _rankings}
    if "examples" in roles:
        check.attempt("examples", lambda: _examples(check, read_examples(source, None, check.policy, targets=False)))
        roles = ["passages"] if found.format.examples else []
    for role in roles:
        check.attempt(role, lambda read=readers[role]: read(check, source))  # type: ignore[misc]
    return check


# Files


def _passages(check: Check, source: PathLike) -> np.ndarray:
    """Counts, lengths and duplicates of a corpus, of which 24 bytes a passage are held while it is read; hashes of its
    ids, sorted."""
    ids, texts, before = array("Q"), array("Q"), len(check.policy.errors)

    def noting() -> Iterator[Passage]:
        for _, passage in read_located(source, check.policy):
            ids.append(hash_id(passage.id))
            texts.append(hash_id(text_id(passage.text, passage.title)))
            yield passage

    lengths = _lengths(noting()) if check.tokenizer is None else _tokens(check.tokenizer.passages, noting())
    known, first = np.unique(np.frombuffer(ids, np.uint64), return_index=True)
    refuse_repeated(source, ids, check.policy)
    check.policy.errors[before:] = sorted(check.policy.errors[before:], key=_by_line)
    check.say(f"passages: {len(known):,}{_repeated(np.frombuffer(texts, np.uint64)[first])}")
    _tell_lengths(check, "passages", lengths[first])
    return known


def _by_line(error: DataError) -> tuple[int, str]:
    line = error.where.line
    return (line, "") if isinstance(line, int) else (0, str(line))


def _queries(check: Check, source: PathLike, name: str = "queries") -> None:
    found = read_queries(source, check.policy)
    answered = sum(bool(query.answers) for query in found)
    texts = np.array([hash_id(_same(query.text)) for query in found], np.uint64)
    answers = f", {answered:,} with answers" if answered else ""
    check.say(f"{name}: {len(found):,}{answers}{_repeated(texts)}")
    asked = [query.text for query in found]
    lengths = _lengths(found) if check.tokenizer is None else _tokens(check.tokenizer.queries, asked)
    _tell_lengths(check, "queries", lengths)


def _judgements(check: Check, source: PathLike, split: str | None = None) -> list[Judgement]:
    found = read_judgements(source, split, check.policy)
    grades = Counter(judgement.relevance for judgement in found)
    queries = {judgement.query_id for judgement in found}
    relevant = {judgement.query_id for judgement in found if judgement.relevance > 0}
    told = ", ".join(f"{count:,} of grade {grade}" for grade, count in sorted(grades.items()))
    name = f"judgements of {split}" if split else "judgements"
    check.say(f"{name}: {len(found):,} for {len(queries):,} queries ({told})")
    if len(queries) > len(relevant):
        check.say(f"  {len(queries) - len(relevant):,} queries have no relevant passage")
    return found


def _rankings(check: Check, source: PathLike, name: str = "rankings") -> None:
    found, scores = read_run(source, check.policy), ", ranks without scores" * found_run(source).format.ranks_alone
    depths = [len(ranking) for ranking in found.values()] or [0]
    check.say(f"{name}: of {len(found):,} queries, {min(depths):,} to {max(depths):,} passages each{scores}")


def _examples(check: Check, found: Sequence[Example], name: str = "examples") -> None:
    positives, negatives = (sum(len(getattr(e, side)) for e in found) for side in ("positives", "negatives"))
    scored = sum(e.scores > 0 for e in found)
    without = sum(not e.negatives for e in found)
    check.say(
        f"{name}: {len(found):,} queries, {positives:,} positives, {negatives:,} negatives, {scored:,} with scores"
    )
    if negatives and without:
        check.say(f"  {without:,} queries have no negative")
    again = len(found) - len({_same(e.query.text) for e in found})
    if again:
        check.say(f"  {again:,} have the query of an earlier one; what one says of it is not known of the other")


# Folders


def _folder(check: Check, folder: Path) -> None:
    source, splits = check.source, splits_in(folder)
    check.say(f"{source}: {describe(source, 'passages')}; splits: {', '.join(splits) or 'none'}")
    ids = [np.zeros(0, np.uint64)]
    check.attempt("passages", lambda: ids.append(_passages(check, source)))
    for path in queries_in(folder):
        check.attempt("queries", lambda path=path: _queries(check, _as(source, path), _shown(path)))  # type: ignore[misc]
    judged: dict[str, list[Judgement]] = {}
    texts: dict[str, dict[str, str]] = {}
    for split in splits:
        check.attempt(f"split {split}", lambda split=split: _split(check, folder, split, judged, texts))  # type: ignore[misc]
    for split, found in judged.items():
        _dangling(check, split, found, ids[-1], texts[split].keys())
    _leaks(check, judged, texts)


def _split(
    check: Check, folder: Path, split: str, judged: dict[str, list[Judgement]], texts: dict[str, dict[str, str]]
) -> None:
    file = examples_in(folder, split)
    gives = recognise(_as(check.source, file)).format.gives if file else lambda role: False
    if file and gives("rankings") and not gives("judgements") and not has_judgements(folder, split):
        return _rankings(check, _as(check.source, file), f"rankings of {split} ({file.name})")
    if file and gives("examples"):
        found = read_examples(check.source, split, check.policy, targets=False)
        _examples(check, found, f"examples of {split} ({file.name})")
    texts[split] = {query.id: _same(query.text) for query in read_queries(check.source, check.policy, split)}
    judged[split] = _judgements(check, check.source, split)


def _shown(path: Path) -> str:
    return "/".join(path.parts[-2:]) if is_named(path) else path.name


def _as(source: str, path: Path) -> str:
    """A file of a source, in the format that it forces, if it does."""
    name, _ = split_source(source)
    return f"{name}:{path}" if name else str(path)


def _dangling(
    check: Check, split: str, found: Sequence[Judgement], passages: np.ndarray, queries: Collection[str]
) -> None:
    there = np.isin(np.array([hash_id(j.passage_id) for j in found], np.uint64), passages)
    for what, missing in (
        ("passages that are not in the corpus", [j for j, is_there in zip(found, there) if not is_there]),
        ("queries that there are not", [j for j in found if j.query_id not in queries]),
    ):
        if missing:
            first = missing[0].passage_id if "corpus" in what else missing[0].query_id
            check.say(f"  {len(missing):,} judgements of {split} are for {what}, as {first!r}")


def _leaks(check: Check, judged: dict[str, list[Judgement]], texts: dict[str, dict[str, str]]) -> None:
    """Queries with the same words, and relevant passages, in two splits."""
    queries = {split: {texts[split].get(j.query_id, j.query_id) for j in found} for split, found in judged.items()}
    relevant = {split: {j.passage_id for j in found if j.relevance > 0} for split, found in judged.items()}
    splits = list(judged)
    for i, one in enumerate(splits):
        for two in splits[i + 1 :]:
            both, shared = queries[one] & queries[two], relevant[one] & relevant[two]
            if both:
                check.say(f"leak: {len(both):,} queries of {two} are in {one} too, as {min(both)!r}")
            if shared:
                check.say(f"{len(shared):,} relevant passages of {two} are relevant in {one} too")


# Lengths


def _same(text: str) -> str:
    """Texts that differ in case and blanks only are the same question."""
    return " ".join(text.casefold().split())


def _repeated(texts: np.ndarray) -> str:
    copies = len(texts) - len(np.unique(texts))
    return f", {copies:,} of them with the text of an earlier one" if copies else ""


def _lengths(texts: Iterable[Passage | Query]) -> np.ndarray:
    """In words: nobody said which tokens."""
    words = (len(one.text.split()) + len(getattr(one, "title", "").split()) for one in texts)
    return np.fromiter(words, np.int64)


def _tokens(encode: Callable[..., Ragged], texts: Iterable[object]) -> np.ndarray:
    """In tokens, markers and prompts included; a block of them is held at a time."""
    found: list[np.ndarray] = [np.zeros(0, np.int64)]

    def keep(blocks: Iterator[Ragged]) -> Ragged:
        found.extend(block.lengths for block in blocks)
        return Ragged.from_lists([])

    encode(texts, keep=keep)
    return np.concatenate(found)


def _tell_lengths(check: Check, what: str, lengths: np.ndarray) -> None:
    if not len(lengths):
        return
    unit = "words" if check.tokenizer is None else "tokens"
    middle, high = np.percentile(lengths, [50, 95])
    check.say(f"  {unit}: mean {lengths.mean():.1f}, median {middle:.0f}, 95 % {high:.0f}, longest {lengths.max():,}")
    if check.tokenizer is not None:
        cut = ", ".join(f"{np.mean(lengths > limit):.1%} at {limit}" for limit in check.lengths)
        check.say(f"  cut: {cut}")


def tell(source: str, tokenizer: str, lengths: Sequence[int]) -> None:
    """Prints what there is, and every bad record; with one, raises ValueError. tokenizer: a model's name, or ""."""
    reader = load_tokenizer(str(resolve(tokenizer, weights=False))) if tokenizer else None
    found = check_data(source, reader, lengths)
    print("\n".join(found.lines))
    for note in found.policy.noted():
        print(f"noted: {note}")
    for error in found.policy.errors:
        print(f"bad: {error}")
    if found.policy.errors:
        raise ValueError(f"{source}: {len(found.policy.errors):,} bad records, listed above")


def load_tokenizer(directory: str) -> TextTokenizer:
    """A tokenizer that cuts nothing."""
    return TextTokenizer.load(directory, _WHOLE, _WHOLE)
