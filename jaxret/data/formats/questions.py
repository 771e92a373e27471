"""Join training records without query ids, such as DPR's, with a file of queries by the text of the question.

Row numbers cannot join them: DPR's dev.json lacks the questions of dev.qa.csv for which no passage is known.
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
    """Yield training records with the query of the same text. Case and repeated spaces do not count.

    If several queries have one text, the first query goes to the first record with this text, and so on. If there are
    more records than queries, they get the last query.

    Args:
        records: training records with their locations.
        queries: queries of other files.
        files: the files of these queries, for errors.
        policy: what to do with a record whose question is in none of these files.
    """
    by_text: dict[str, list[Query]] = defaultdict(list)
    for query in queries:
        by_text[question_key(query.text)].append(query)
    use_counts: Counter[str] = Counter()

    def join(example: Example, location: Location) -> Example:
        text = question_key(example.query.text)
        if text not in by_text:
            names = " nor ".join(map(str, files))
            problem = f"its question {example.query.text[:100]!r} is not in {names}"
            remedy = "use files that belong together, or remove the record (questions are joined by their text)"
            raise location.error("unknown question", problem, remedy)
        text_queries = by_text[text]
        query = text_queries[min(use_counts[text], len(text_queries) - 1)]
        use_counts[text] += 1
        return replace(example, query=query)

    return policy.parse_records(records, join)
