"""Match answers in passages like DPR, and compute top-k accuracy: the share of queries with an answer in their first k
passages. Answers are strings, or regular expressions as in CuratedTREC."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import regex

from jaxret.data.records import Query
from jaxret.evaluation.metrics import Evaluation

# A run of letters, digits and marks is a token; so is every other character that is neither a separator nor a control.
_TOKEN = regex.compile(r"([\p{L}\p{N}\p{M}]+)|([^\p{Z}\p{C}])", regex.IGNORECASE | regex.UNICODE | regex.MULTILINE)
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE
_SEPARATOR = "\0"  # a control character, so never inside a token
_CACHED_PASSAGES = 2**16  # about 60 MB of 100-word passages


def tokenize(text: str) -> list[str]:
    """Return the lower-cased tokens of the NFD form of a text, by which answers are compared."""
    return [match.group().lower() for match in _TOKEN.finditer(unicodedata.normalize("NFD", text))]


def has_answer(text: str, answers: Iterable[str]) -> bool:
    """Return whether the tokens of one of the answers occur consecutively in the tokens of `text` (string matching).

    As in DPR, `text` is the passage's text without its title. Unlike in DPR, an answer without tokens ("") occurs
    nowhere. In DPR it occurs everywhere, so that every passage counts as right.

    Example:
        >>> has_answer("The tower is in Paris.", ["paris"]), has_answer("Parisian towers", ["Paris"])
        (True, False)
    """
    return _matcher(answers, "string")(_join_tokens(text))


class AnswerMatcher:
    """`has_answer` for many queries, with a cache of prepared passages. match: "string" or "regex"."""

    def __init__(self, match: str = "string") -> None:
        self.match = match
        self._prepare = lru_cache(_CACHED_PASSAGES)(lambda text: _prepare_text(text, match))

    def __call__(self, texts: Iterable[str], query: Query) -> list[bool]:
        """Return for each text whether it has any of the query's answers. Raises ValueError for an answer that is not
        a regular expression."""
        right = _matcher(query.answers, self.match, f"query {query.id!r}: ")
        return [right(self._prepare(text)) for text in texts]


def _join_tokens(text: str) -> str:
    return "".join(f"{_SEPARATOR}{token}" for token in tokenize(text)) + _SEPARATOR


def check_answers(queries: Iterable[Query], match: str) -> None:
    """Raise ValueError for an answer that is not a regular expression, if `match` is "regex"."""
    for query in queries if match == "regex" else ():
        _matcher(query.answers, match, f"query {query.id!r}: ")


def answer_ranks(
    run: Mapping[str, Sequence[tuple[str, float]]],
    queries: Iterable[Query],
    passage_texts: Mapping[str, str],
    depth: int,
    match: str = "string",
) -> dict[str, int | None]:
    """Return query id -> rank from 1 of the first passage with an answer; None if none of the first `depth` has one.

    Args:
        run: query id -> [(passage id, score)], best first. A missing query has no passages.
        queries: all queries to count, with their answers.
        passage_texts: passage id -> text without title.
        depth: number of passages that are searched for an answer.
        match: "string" or "regex".

    Raises:
        ValueError: an answer is not a regular expression, or a retrieved passage has no text.
    """

    passage = lru_cache(_CACHED_PASSAGES)(lambda passage_id: _prepare_text(passage_texts[passage_id], match))
    return {query.id: _first_rank(query, run.get(query.id, ())[:depth], passage, match) for query in queries}


def _prepare_text(text: str, match: str) -> str:
    return _join_tokens(text) if match == "string" else unicodedata.normalize("NFD", text)


def _matcher(answers: Iterable[str], match: str, error_prefix: str = "") -> Callable[[str], bool]:
    """Return a function of a text from `_prepare_text`: whether it has any of the answers."""
    if match == "string":
        # A separator is before and after every token, so that a substring consists of whole tokens.
        token_lists = [tokens for tokens in map(_join_tokens, answers) if tokens != _SEPARATOR]
        return lambda text: any(tokens in text for tokens in token_lists)
    patterns = []
    for answer in filter(str.strip, answers):  # a blank answer occurs nowhere, as in `has_answer`
        try:
            patterns.append(regex.compile(unicodedata.normalize("NFD", answer), _FLAGS))
        except regex.error as error:
            raise ValueError(
                f"{error_prefix}the answer {answer!r} is not a regular expression ({error}); correct it, or remove "
                "--match=regex"
            ) from error
    return lambda text: any(pattern.search(text) for pattern in patterns)


def _first_rank(
    query: Query, ranking: Sequence[tuple[str, float]], passage: Callable[[str], str], match: str
) -> int | None:
    right = _matcher(query.answers, match, f"query {query.id!r}: ")
    for rank, (passage_id, _) in enumerate(ranking, 1):
        try:
            text = passage(passage_id)
        except KeyError:
            raise ValueError(
                f"passage {passage_id!r} (rank {rank} of query {query.id!r}) has no text; "
                "use the corpus that the run was made with"
            ) from None
        if right(text):
            return rank
    return None


def answer_accuracy(
    run: Mapping[str, Sequence[tuple[str, float]]],
    queries: Iterable[Query],
    passage_texts: Mapping[str, str],
    cutoffs: Sequence[int],
    match: str = "string",
) -> Evaluation:
    """Return "Accuracy@k" for every k: the share of queries (0-1) with an answer in their first k passages.

    Args:
        run: the rankings (see `answer_ranks`).
        queries: all queries to count, with their answers.
        passage_texts: passage id -> text without title.
        cutoffs: the values of k, each 1 or more.
        match: "string" or "regex".
    """
    ranks = answer_ranks(run, queries, passage_texts, max(cutoffs), match)
    per_query = {
        f"Accuracy@{k}": {query: float(rank is not None and rank <= k) for query, rank in ranks.items()}
        for k in cutoffs
    }
    mean = {name: sum(values.values()) / len(ranks) for name, values in per_query.items()}
    return Evaluation(mean, per_query, len(ranks), sum(bool(run.get(query)) for query in ranks))
