"""What is in a training file that was mined: read again and counted, whatever the filters were."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxret.data.files import Policy
from jaxret.data.records import Example, Passage
from jaxret.evaluation.answers import AnswerMatcher
from jaxret.mining.asked import Asked, stream_examples
from jaxret.mining.filters import normalised

NEARLY = 0.8  # of the words of two texts together, so many are in both


@dataclass
class Audit:
    """Counts of records and of negatives. `scored`: negatives whose score, and whose target's, the file has."""

    records: int = 0
    without_negatives: int = 0
    negatives: int = 0
    again: int = 0  # judged relevant to the query, or with the text of one of its positives
    of_others: int = 0  # a positive of another query
    nearly: int = 0  # nearly the text of one of its positives, and none of `again`
    answers: int = 0  # an answer string in it, where the query has some
    answerable: int = 0  # negatives of queries with answer strings
    above: int = 0  # scored above the target
    scored: int = 0

    def add(self, example: Example, relevant: frozenset[str], others: Iterable[str], matcher: AnswerMatcher) -> None:
        """relevant: ids of the query's judged positives; others: of all queries' positives."""
        self.records += 1
        self.without_negatives += not example.negatives
        self.negatives += len(example.negatives)
        own = relevant | {positive.id for positive in example.positives}
        texts = {normalised(positive.text) for positive in example.positives}
        bags = [_words(positive) for positive in example.positives]
        again = [p.id in own or normalised(p.text) in texts for p in example.negatives]
        self.again += sum(again)
        self.of_others += sum(p.id in others and p.id not in own for p in example.negatives)
        self.nearly += sum(not same and _is_near(_words(p), bags) for p, same in zip(example.negatives, again))
        if example.query.answers:
            self.answerable += len(example.negatives)
            self.answers += sum(matcher((p.text for p in example.negatives), example.query))
        if example.taught:
            self.scored += sum(map(math.isfinite, example.negative_scores))
            self.above += sum(score > example.positive_scores[0] for score in example.negative_scores)

    def __str__(self) -> str:
        lines = [
            (self.again, self.negatives, "the positive again (judged so, or the same text)"),
            (self.of_others, self.negatives, "another query's positive"),
            (self.nearly, self.negatives, f"nearly the positive's text ({NEARLY:.0%} of the words)"),
            (self.answers, self.answerable, "an answer string in it"),
            (self.above, self.scored, "scored above the positive"),
        ]
        told = [f"  {_part(count, total):>7} {count:>12,} of {total:,}  {what}" for count, total, what in lines]
        each = self.negatives / self.records if self.records else 0
        empty = f", {self.without_negatives:,} without negatives" if self.without_negatives else ""
        return "\n".join(
            [f"audit: {self.records:,} records{empty}, {each:.1f} negatives each; of the negatives", *told]
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def audit(path: Path, asked: Iterable[Asked], match: str = "string") -> Audit:
    """Reads a file that `mine` wrote, a record at a time. match: what answers are."""
    relevant = {
        (one.query.id, one.query.text): frozenset(p.id for p in one.positives) for one in asked if one.positives
    }
    others = {key for ids in relevant.values() for key in ids}
    found, matcher = Audit(), AnswerMatcher(match)
    for example in stream_examples(path, Policy()):
        found.add(example, relevant.get((example.query.id, example.query.text), frozenset()), others, matcher)
    return found


def _words(passage: Passage) -> frozenset[str]:
    return frozenset(passage.text.lower().split())


def _is_near(words: frozenset[str], bags: Iterable[frozenset[str]]) -> bool:
    return any(len(words & bag) >= NEARLY * len(words | bag) for bag in bags if words or bag)


def _part(count: int, total: int) -> str:
    return f"{count / total:.2%}" if total else "-"
