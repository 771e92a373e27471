"""FlagEmbedding's training records: a query, texts of positives and negatives, and optional scores of a teacher.

A record's `prompt` is the instruction of its query; its `type` is not read.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.file_sample import FileSample
from jaxret.data.formats.format import DataFile, Format, content_id, id_from_location
from jaxret.data.formats.shared_passages import ScoredPassages, SharedPassages, make_example, no_positive_error
from jaxret.data.formats.texts import parse_instruction, record_list
from jaxret.data.record_checks import (
    check_passage,
    check_query,
    finite_number,
    normalize_question,
    require_key,
    shorten,
)
from jaxret.data.records import Example, Passage, Query, Record

QUERY, POSITIVES, NEGATIVES, PROMPT = "query", "pos", "neg", "prompt"
POSITIVE_SCORES, NEGATIVE_SCORES = "pos_scores", "neg_scores"


def read_flag_examples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Example]]:
    """Yield one example for each record. The id of a query is the number of its record; the id of a passage is a hash
    of its text. Raises DataError for a record of another form."""
    pool = SharedPassages(policy)

    def parse_text(value: object, location: Location) -> Passage:
        if not isinstance(value, str):
            raise location.error("wrong type", f"this is {value!r:.60}", "a text is expected")
        return check_passage(Passage(content_id(value), value), location, policy)

    def side(record: Record, key: str, scores_key: str, location: Location) -> ScoredPassages:
        texts = record_list(record, key, location)
        scores = record_scores(record, scores_key, len(texts), location)
        return pool.parse_scored(zip(texts, scores), key, location, parse_text)

    def parse(record: Record, location: Location) -> Example:
        question = normalize_question(require_key(record, QUERY, str, location))
        instruction = parse_instruction(record, location, PROMPT)
        query = check_query(Query(id_from_location(location), question, instruction=instruction), location)
        positives = side(record, POSITIVES, POSITIVE_SCORES, location)
        if not positives:
            raise no_positive_error(location, POSITIVES)
        return make_example(query, positives, side(record, NEGATIVES, NEGATIVE_SCORES, location))

    return policy.parse_records(read_records(file, policy), parse)


def record_scores(record: Record, key: str, count: int, location: Location) -> list[float] | list[None]:
    """Return the scores of a list in a record, or None for each text if the record has no scores.

    Args:
        record: record that may have the key.
        key: key of the list.
        count: number of texts, each of which needs a score.
        location: location of the record, for errors.

    Raises:
        DataError: there are more or fewer scores, or a score is not a finite number.
    """
    scores = record_list(record, key, location)
    if not scores:
        return [None] * count
    if len(scores) != count:
        problem = f"{key!r} has {len(scores)} scores for {count} texts"
        raise location.error("wrong number of scores", problem, "write one for each text, or remove the key")
    numbers = list[float]()
    for score in scores:
        if isinstance(score, str) or (number := finite_number(score)) is None:
            raise location.error("bad score", f"{key!r} holds {shorten(score)}", "a score is a finite number")
        numbers.append(number)
    return numbers


def _is_flag_records(sample: FileSample) -> bool:
    return any(
        isinstance(record.get(QUERY), str) and isinstance(record.get(POSITIVES), list) for record in sample.records
    )


FORMATS = (
    Format(
        name="flag.examples",
        title="FlagEmbedding training records",
        description=f"JSON records with {QUERY}, {POSITIVES}, {NEGATIVES} (lists of texts), and perhaps "
        f"{POSITIVE_SCORES}, {NEGATIVE_SCORES}, {PROMPT}",
        matches=_is_flag_records,
        keys=(QUERY, POSITIVES, NEGATIVES, POSITIVE_SCORES, NEGATIVE_SCORES, PROMPT),
        without_query_ids=True,
        examples=read_flag_examples,
    ),
)
