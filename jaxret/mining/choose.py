"""One query, and what pools found for it -> its training example."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxret.data.formats import hash_id
from jaxret.data.records import Example, Passage
from jaxret.data.teacher import scored_by
from jaxret.evaluation.answers import AnswerMatcher
from jaxret.mining.asked import Asked
from jaxret.mining.filters import SAMPLE, Case, Settings, kept_by, normalised
from jaxret.mining.pools import FilePool, Found


@dataclass
class Tally:
    """What became of the candidates, and of the queries."""

    found: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # by filter
    left: int = 0  # after the filters, of which so many are kept
    kept: int = 0
    queries: Counter[str] = field(default_factory=Counter)  # what happened to how many of them
    positives: list[float] = field(default_factory=list)  # scores that limits were taken from

    def lines(self) -> list[str]:
        rows = [
            (self.found, "found"),
            *((count, f"left out: {name}") for name, count in self.left_out.items() if count),
        ]
        rows += [(self.left, "left"), (self.kept, "kept")]
        told = [f"  {count / max(self.found, 1):>7.2%} {count:>12,}  {what}" for count, what in rows]
        told += [f"  {count:,} queries {what}" for what, count in self.queries.items() if count]
        if self.positives:
            low, middle, high = np.quantile(self.positives, (0.05, 0.5, 0.95))
            told.append(f"  positives score {middle:.4g} in the middle, nine of ten from {low:.4g} to {high:.4g}")
        return told


class Chooser:
    """Chooses negatives by the settings. teacher: whose scores margins compare, and the file keeps, instead of the
    pool's. followed: whether other records follow in the file, all of whose scores must be of
    one scorer."""

    def __init__(self, settings: Settings, teacher: FilePool | None = None, followed: bool = False) -> None:
        self.settings, self.teacher, self.followed = settings, teacher, followed
        self.tally, self._matcher = Tally(), AnswerMatcher(settings.match)

    def as_there(self, asked: Asked, texts: Mapping[str, Passage]) -> Asked:
        """The query with its positives as the corpus has them, those that it has: a file has one text for an id, and
        another query's negatives have that one."""
        positives = tuple(  # an encoded corpus has empty passages for those that it lacks
            there if (there := texts.get(own.id)) and (there.text or there.title) else own for own in asked.positives
        )
        self.tally.queries["have a positive that is other text in the corpus, which is taken"] += (
            positives != asked.positives
        )
        return Asked(asked.query, positives)

    def example(self, asked: Asked, founds: Sequence[Found], texts: Mapping[str, Passage]) -> Example | None:
        """What each pool found -> the example; None if it has no positive. Scores are kept, of the passages that have
        one."""
        windows = [self.window(found, texts) for found in founds]
        if self.settings.positives_from_retrieval:
            asked = Asked(asked.query, self._answering(asked, windows[0]))
            if not asked.positives:
                self.tally.queries["found no passage with an answer, and are left out"] += 1
                self.tally.left_out["of a query without a positive"] += len(windows[0])
                return None
        relevant = frozenset(passage.id for passage in asked.positives)
        taught = dict(self.teacher.ranking(asked.query.id)) if self.teacher else None
        negatives: dict[str, tuple[Passage, float]] = {}
        known: list[float] = []
        for number, (found, passages) in enumerate(zip(founds, windows, strict=True)):
            scores = taught if taught is not None else dict(found.ranking)
            known = positive_scores(asked, found.positives if taught is None else taught, scores, passages)
            array = np.array([scores.get(passage.id, math.nan) for passage in passages], np.float64)
            lowest = min((score for score in known if not math.isnan(score)), default=math.nan)
            case = Case(asked.query, asked.positives, relevant, passages, array, lowest)
            for place in self._kept(case, number):
                negatives.setdefault(passages[place].id, (passages[place], float(array[place])))
        self.tally.kept += len(negatives)
        self.tally.queries["have no negative"] += not negatives
        passages = tuple(passage for passage, _ in negatives.values())
        if taught is None and (len(founds) > 1 or self.followed):
            return Example(asked.query, asked.positives, passages)
        scored = {passage.id: score for passage, score in zip(asked.positives, known, strict=True)}
        scored |= {key: score for key, (_, score) in negatives.items()}
        there = {key: score for key, score in scored.items() if math.isfinite(score)}
        return scored_by(Example(asked.query, asked.positives, passages), there)

    def followed_by(self, example: Example, asked: Mapping[str, str]) -> Example:
        """A record of a file that follows, with the teacher's scores and nobody else's. asked: the texts of the queries
        that the teacher scored, by id: that of another may be a row's number."""
        known = self.teacher is not None and asked.get(example.query.id) == example.query.text
        scored = scored_by(example, dict(self.teacher.ranking(example.query.id)) if self.teacher and known else {})
        self.tally.queries["of --concat have no score of the teacher"] += self.teacher is not None and not scored.scores
        return scored

    def window(self, found: Found, texts: Mapping[str, Passage]) -> tuple[Passage, ...]:
        """The passages at the ranks that are looked at, those without a text left out."""
        ids = [key for key, _ in found.ranking[self.settings.skip : self.settings.depth]]
        there = tuple(texts[key] for key in ids if key in texts)
        self.tally.found += len(ids)
        self.tally.left_out["no such text in the corpus"] += len(ids) - len(there)
        return there

    def _answering(self, asked: Asked, passages: Sequence[Passage]) -> tuple[Passage, ...]:
        if not asked.query.answers:
            return ()
        has = self._matcher((passage.text for passage in passages), asked.query)
        return tuple(passage for passage, right in zip(passages, has, strict=True) if right)

    def _kept(self, case: Case, pool: int) -> list[int]:
        """Places of the passages that become negatives, ascending."""
        allowed, left_out = kept_by(case, self.settings, self._matcher)
        self.tally.left_out.update(left_out)
        if self.settings.compares and not math.isfinite(case.positive):
            self.tally.queries["have a positive that nobody scored: nothing passes a margin"] += 1
        elif self.settings.compares:
            self.tally.positives.append(case.positive)
        places = np.flatnonzero(allowed)
        self.tally.left += len(places)
        if self.settings.draw == SAMPLE and len(places) > self.settings.keep:
            random = np.random.default_rng((self.settings.seed, hash_id(case.query.id), pool))
            places = np.sort(random.choice(places, self.settings.keep, replace=False))
        return places[: self.settings.keep].tolist()


def positive_scores(
    asked: Asked, known: Mapping[str, float], scores: Mapping[str, float], passages: Sequence[Passage]
) -> list[float]:
    """Of each positive: by its id, else that of a candidate with its text (files without ids), else NaN."""
    texts: dict[str, float] = {}
    if not all(math.isfinite(known.get(positive.id, math.nan)) for positive in asked.positives):
        for passage in passages:
            texts.setdefault(normalised(passage.text), scores.get(passage.id, math.nan))

    def score(positive: Passage) -> float:
        found = known.get(positive.id, scores.get(positive.id, math.nan))
        return found if math.isfinite(found) else texts.get(normalised(positive.text), found)

    return [score(positive) for positive in asked.positives]
