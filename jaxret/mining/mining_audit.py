"""Count faults in the negatives of a mined training file. The file is read back, and the filters are not used."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxret.data.errors import Policy
from jaxret.data.records import Example, Passage
from jaxret.evaluation.answer_matching import AnswerMatcher
from jaxret.mining.filters import normalized_passage
from jaxret.mining.training_queries import TrainingQuery, stream_mined_examples

NEAR_SHARE = 0.8  # two texts are nearly the same if they have this share of their words in common


@dataclass
class MiningAudit:
    """Counts of records and of negatives."""

    records: int = 0
    without_negatives: int = 0
    negatives: int = 0
    repeats_positive: int = 0  # judged relevant to the query, or with the text of one of its positives
    positive_of_other_query: int = 0  # a positive of another query
    near_positive: int = 0  # nearly the text of one of its positives, and not counted by `repeats_positive`
    with_answer: int = 0  # contains an answer string of its query
    answerable: int = 0  # negatives of queries with answer strings
    above_best_positive: int = 0  # scored above the best of its positives
    scored: int = 0  # negatives with a score whose target also has a score

    def add(
        self, example: Example, relevant: frozenset[str], all_positives: Iterable[str], matcher: AnswerMatcher
    ) -> None:
        """Count one example.

        Args:
            example: a record of the file.
            relevant: ids of the query's judged positives.
            all_positives: ids of all queries' positives.
            matcher: matcher of the queries' answers.
        """
        self.records += 1
        self.without_negatives += not example.negatives
        self.negatives += len(example.negatives)
        positive_ids = relevant | {positive.id for positive in example.positives}
        texts = set(map(normalized_passage, example.positives))
        bags = [_words(positive) for positive in example.positives]
        repeats = [p.id in positive_ids or normalized_passage(p) in texts for p in example.negatives]
        self.repeats_positive += sum(repeats)
        self.positive_of_other_query += sum(
            p.id in all_positives and p.id not in positive_ids for p in example.negatives
        )
        self.near_positive += sum(
            not repeated and _is_near(_words(p), bags) for p, repeated in zip(example.negatives, repeats)
        )
        if example.query.answers:
            self.answerable += len(example.negatives)
            self.with_answer += sum(matcher((passage.text for passage in example.negatives), example.query))
        if example.is_distillable:
            self.scored += sum(map(math.isfinite, example.negative_scores))
            best = max(filter(math.isfinite, example.positive_scores))
            self.above_best_positive += sum(score > best for score in example.negative_scores)

    def __str__(self) -> str:
        lines = [
            (self.repeats_positive, self.negatives, "the positive again (judged so, or the same text)"),
            (self.positive_of_other_query, self.negatives, "another query's positive"),
            (self.near_positive, self.negatives, f"nearly the positive's text ({NEAR_SHARE:.0%} of the words)"),
            (self.with_answer, self.answerable, "an answer string in it"),
            (self.above_best_positive, self.scored, "scored above the best positive"),
        ]
        mean = self.negatives / self.records if self.records else 0
        empty = f", {self.without_negatives:,} without negatives" if self.without_negatives else ""
        text = f"audit: {self.records:,} records{empty}, {mean:.1f} negatives each; of the negatives"
        for count, total, label in lines:
            text += f"\n  {f'{count / total:.2%}' if total else '-':>7} {count:>12,} of {total:,}  {label}"
        return text


def audit_mined_file(path: Path, queries: Iterable[TrainingQuery], match: str = "string") -> MiningAudit:
    """Audit a file that `jaxret mine` wrote, one record at a time. match: "string" or "regex", for the queries'
    answers."""
    relevant = {
        (entry.query.id, entry.query.text): frozenset(p.id for p in entry.positives)
        for entry in queries
        if entry.positives
    }
    all_positives = {key for ids in relevant.values() for key in ids}
    counts, matcher = MiningAudit(), AnswerMatcher(match)
    for example in stream_mined_examples(path, Policy()):
        counts.add(example, relevant.get((example.query.id, example.query.text), frozenset()), all_positives, matcher)
    return counts


def _words(passage: Passage) -> frozenset[str]:
    return frozenset(normalized_passage(passage).split())


def _is_near(words: frozenset[str], bags: Iterable[frozenset[str]]) -> bool:
    return any(len(words & bag) >= NEAR_SHARE * len(words | bag) for bag in bags if words or bag)
