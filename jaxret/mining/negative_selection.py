"""Select the negatives of a query from the rankings of pools, and make its training example."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxret.data.formats import hash_id
from jaxret.data.records import Example, Passage
from jaxret.data.tokens.teacher_scores import with_scores
from jaxret.evaluation.answer_matching import AnswerMatcher
from jaxret.mining.filters import RetrievedPassages, filter_passages, normalized_passage
from jaxret.mining.mining_settings import SAMPLE, MiningSettings
from jaxret.mining.pools import PoolResult, RankingFilePool
from jaxret.mining.training_queries import TrainingQuery


@dataclass
class MiningTally:
    """Counts of retrieved passages and of queries, by result."""

    passages: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # filter -> passages that it left out
    eligible: int = 0  # passages that passed all filters
    negatives: int = 0
    queries: Counter[str] = field(default_factory=Counter)  # end of a message "N queries ..." -> N
    target_scores: list[float] = field(default_factory=list)  # scores of positives, from which limits were computed

    def lines(self) -> list[str]:
        """Return the lines to print: share and number of the passages for each result, then the numbers of queries, and
        quantiles of the positives' scores."""
        rows = [
            (self.passages, "found"),
            *((count, f"left out: {name}") for name, count in self.left_out.items() if count),
        ]
        rows += [(self.eligible, "left"), (self.negatives, "kept")]
        lines = [f"  {count / max(self.passages, 1):>7.2%} {count:>12,}  {label}" for count, label in rows]
        lines += [f"  {count:,} queries {fate}" for fate, count in self.queries.items() if count]
        if self.target_scores:
            low, middle, high = np.quantile(self.target_scores, (0.05, 0.5, 0.95))
            lines.append(f"  positives score {middle:.4g} in the middle, nine of ten from {low:.4g} to {high:.4g}")
        return lines


class NegativeSelector:
    """Selects negatives by the settings, and counts what it left out.

    teacher: scores that margins compare and the file stores, instead of the pool's. concatenated: whether records of
    other files follow; then all scores of the file must come from one scorer.
    """

    def __init__(
        self, settings: MiningSettings, teacher: RankingFilePool | None = None, concatenated: bool = False
    ) -> None:
        self.settings, self.teacher, self.concatenated = settings, teacher, concatenated
        self.tally, self._matcher = MiningTally(), AnswerMatcher(settings.match)

    def with_corpus_texts(self, training_query: TrainingQuery, texts: Mapping[str, Passage]) -> TrainingQuery:
        """Return the query with the corpus's texts for its positives that are in the corpus. A training file has one
        text for an id, and the negatives of other queries have the corpus's text."""
        positives = tuple(  # an encoded corpus returns empty passages for unknown ids
            passage if (passage := texts.get(positive.id)) and (passage.text or passage.title) else positive
            for positive in training_query.positives
        )
        self.tally.queries["have a positive that is other text in the corpus, which is taken"] += (
            positives != training_query.positives
        )
        return TrainingQuery(training_query.query, positives)

    def make_example(
        self, training_query: TrainingQuery, results: Sequence[PoolResult], texts: Mapping[str, Passage]
    ) -> Example | None:
        """Make the example of a query from the result of each pool. Return None if it has no positive.

        Passages without a score are written without one.
        """
        windows = [self.window(result, texts) for result in results]
        if self.settings.positives_from_retrieval:
            training_query = TrainingQuery(training_query.query, self._answering(training_query, windows[0]))
            if not training_query.positives:
                self.tally.queries["found no passage with an answer, and are left out"] += 1
                self.tally.left_out["of a query without a positive"] += len(windows[0])
                return None
        relevant = frozenset(passage.id for passage in training_query.positives)
        teacher_scores = dict(self.teacher.ranking(training_query.query.id)) if self.teacher else None
        negatives: dict[str, tuple[Passage, float]] = {}
        target_scores: list[float] = []
        for number, (result, passages) in enumerate(zip(results, windows, strict=True)):
            scores = teacher_scores if teacher_scores is not None else dict(result.ranking)
            pool_scores = result.positives if teacher_scores is None else teacher_scores
            # A teacher's scores are the same for all pools.
            candidates = passages if teacher_scores is None else itertools.chain(*windows)
            target_scores = positive_scores(training_query, pool_scores, scores, candidates)
            array = np.array([scores.get(passage.id, math.nan) for passage in passages], np.float64)
            lowest = min((score for score in target_scores if not math.isnan(score)), default=math.nan)
            case = RetrievedPassages(training_query.query, training_query.positives, relevant, passages, array, lowest)
            for row in self._select(case, number):
                negatives.setdefault(passages[row].id, (passages[row], float(array[row])))
        self.tally.negatives += len(negatives)
        self.tally.queries["have no negative"] += not negatives
        passages = tuple(passage for passage, _ in negatives.values())
        if teacher_scores is None and (len(results) > 1 or self.concatenated):
            return Example(training_query.query, training_query.positives, passages)
        by_id = {passage.id: score for passage, score in zip(training_query.positives, target_scores, strict=True)}
        by_id |= {key: score for key, (_, score) in negatives.items()}
        finite = {key: score for key, score in by_id.items() if math.isfinite(score)}
        return with_scores(Example(training_query.query, training_query.positives, passages), finite)

    def score_concatenated(self, example: Example, query_texts: Mapping[str, str]) -> Example:
        """Return a record of a --concat file with the teacher's scores, or without scores.

        query_texts: id -> text of the queries that the teacher scored. Ids may be row numbers, so the texts must be
        equal.
        """
        same_query = self.teacher is not None and query_texts.get(example.query.id) == example.query.text
        record = with_scores(
            example, dict(self.teacher.ranking(example.query.id)) if self.teacher and same_query else {}
        )
        self.tally.queries["of --concat have no score of the teacher"] += (
            self.teacher is not None and not record.score_count
        )
        return record

    def window(self, result: PoolResult, texts: Mapping[str, Passage]) -> tuple[Passage, ...]:
        """Return the passages at the ranks in use that have a text in the corpus."""
        ids = [key for key, _ in result.ranking[self.settings.skip : self.settings.depth]]
        passages = tuple(texts[key] for key in ids if key in texts)
        self.tally.passages += len(ids)
        self.tally.left_out["no such text in the corpus"] += len(ids) - len(passages)
        return passages

    def _answering(self, training_query: TrainingQuery, passages: Sequence[Passage]) -> tuple[Passage, ...]:
        if not training_query.query.answers:
            return ()
        has = self._matcher((passage.text for passage in passages), training_query.query)
        return tuple(passage for passage, right in zip(passages, has, strict=True) if right)

    def _select(self, case: RetrievedPassages, pool: int) -> list[int]:
        """Return the rows of the passages that become negatives, ascending."""
        mask, left_out = filter_passages(case, self.settings, self._matcher)
        self.tally.left_out.update(left_out)
        if self.settings.compares and not math.isfinite(case.positive):
            self.tally.queries["have a positive that nobody scored: nothing passes a margin"] += 1
        elif self.settings.compares:
            self.tally.target_scores.append(case.positive)
        rows = np.flatnonzero(mask)
        self.tally.eligible += len(rows)
        if self.settings.draw == SAMPLE and len(rows) > self.settings.keep:
            random = np.random.default_rng((self.settings.seed, hash_id(case.query.id), pool))
            rows = np.sort(random.choice(rows, self.settings.keep, replace=False))
        return rows[: self.settings.keep].tolist()


def positive_scores(
    training_query: TrainingQuery,
    pool_scores: Mapping[str, float],
    scores: Mapping[str, float],
    passages: Iterable[Passage],
) -> list[float]:
    """Return a score for each positive: the score of its id, else of a retrieved passage with its text, else NaN.

    Args:
        training_query: the query and its positives.
        pool_scores: id -> score of positives, which the pool may not have retrieved.
        scores: id -> score of retrieved passages.
        passages: the retrieved passages; those of files without ids are compared by text.
    """
    texts: dict[str, float] = {}
    if not all(math.isfinite(pool_scores.get(positive.id, math.nan)) for positive in training_query.positives):
        for passage in passages:
            if passage.id in scores:
                texts.setdefault(normalized_passage(passage), scores[passage.id])

    def score(positive: Passage) -> float:
        score_by_id = pool_scores.get(positive.id, scores.get(positive.id, math.nan))
        return score_by_id if math.isfinite(score_by_id) else texts.get(normalized_passage(positive), score_by_id)

    return [score(positive) for positive in training_query.positives]
