"""Training records without query ids, such as DPR's, beside a file of queries: joined by the text of the question.

Their row numbers are unrelated. DPR's dev.json lacks the questions of dev.qa.csv for which no passage is known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxret.data.errors import Location, Policy
from jaxret.data.record_checks import question_key
from jaxret.data.records import Example, Query


def join_by_question(
    records: Iterable[tuple[Location, Example]], queries: Iterable[Query], files: Sequence[Path], policy: Policy
) -> Iterator[tuple[Location, Example]]:
    """Yield training records with the query of the same text, without its case and repeated spaces.

    Of several queries with one text, the first goes to the first record with it, and so on; further records get the
    last.

    Args:
        queries: queries of other files.
        files: these files, for errors.
        policy: what to do with a record whose question none of these files has.
    """
    by_text: dict[str, list[Query]] = defaultdict(list)
    for query in queries:
        by_text[question_key(query.text)].append(query)
    use_counts: Counter[str] = Counter()
    for location, example in records:
        text = question_key(example.query.text)
        if text not in by_text:
            names = " nor ".join(map(str, files))
            problem = f"its question {example.query.text[:100]!r} is not in {names}"
            remedy = "use files that belong together, or leave the record out (questions are joined by their text)"
            policy.reject(location.error("unknown question", problem, remedy))
            continue
        same = by_text[text]
        query = same[min(use_counts[text], len(same) - 1)]
        use_counts[text] += 1
        yield location, replace(example, query=query)
