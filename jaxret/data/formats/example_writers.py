"""Write training files from examples. The writers return counts of the values that a format cannot hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jaxret.data.errors import Location
from jaxret.data.formats import dpr, flag_embedding, msmarco, tevatron
from jaxret.data.formats.format import content_id
from jaxret.data.formats.writing import Losses, joined_text, write_json_array, write_records, write_tab_rows
from jaxret.data.lines import PathLike
from jaxret.data.record_checks import check_passage, check_query
from jaxret.data.records import Example, Passage, Query


def count_losses(examples: Iterable[Example], *contents: str) -> Losses:
    """Count the values of examples that a file does not hold. `contents` lists the values that it holds: "query ids",
    "passage ids", "titles", "answers", "instructions", "scores".
    """
    losses: Losses = Counter()
    for number, example in enumerate(examples):
        passages = (*example.positives, *example.negatives)
        losses["queries' ids"] += "query ids" not in contents and example.query.id != str(number)
        losses["queries' instructions"] += "instructions" not in contents and bool(example.query.instruction)
        losses["queries' answers"] += "answers" not in contents and bool(example.query.answers)
        losses["scores"] += 0 if "scores" in contents else example.score_count
        if "titles" not in contents:
            losses["titles (joined to the texts)"] += sum(bool(passage.title) for passage in passages)
        if "passage ids" not in contents:
            losses["passages' ids"] += sum(
                passage.id != content_id(passage.text, passage.title) for passage in passages
            )
    return losses


def example_writer(record: Callable[[Example], dict[str, Any]], *contents: str) -> Callable[[Path, Any], Losses]:
    """Return a writer of a record for each example. `contents`: see `count_losses`."""

    def write(path: Path, examples: Iterable[Example]) -> Losses:
        examples = list(examples)
        write_records(path, map(record, examples))
        return count_losses(examples, *contents)

    return write


def triple_writer(
    fields: Callable[[Query, Passage, Passage], tuple[str, str, str]], *contents: str
) -> Callable[[Path, Any], Losses]:
    """Return a writer of a row for each positive with each negative. `contents`: see `count_losses`."""

    def write(path: Path, examples: Iterable[Example]) -> Losses:
        examples = list(examples)
        losses = count_losses(examples, *contents)
        losses["queries without negatives"] = sum(not example.negatives for example in examples)
        triples = ((e.query, p, n) for e in examples for p in e.positives for n in e.negatives)
        write_tab_rows(path, (fields(*triple) for triple in triples), losses)
        return losses

    return write


def write_dpr_examples(path: PathLike, examples: Iterable[Example]) -> Losses:
    """Write biencoder JSON[.gz]. The format has no query ids: readers give the queries the ids "0", "1", ..."""

    def context(passage: Passage, location: Location) -> dict[str, str]:
        check_passage(passage, location)
        return {"title": passage.title, "text": passage.text, dpr.PASSAGE_IDS[0]: passage.id}

    def record(number: int, example: Example) -> dict[str, Any]:
        location = Location(Path(path), f"record {number}")
        return {
            dpr.QUESTION: check_query(example.query, location).text,
            dpr.ANSWERS: list(example.query.answers),
            dpr.POSITIVES: [context(passage, location) for passage in example.positives],
            dpr.NEGATIVES: [],
            dpr.HARD_NEGATIVES: [context(passage, location) for passage in example.negatives],
        }

    examples = list(examples)
    write_json_array(path, (record(number, example) for number, example in enumerate(examples)))
    return count_losses(examples, "answers", "titles", "passage ids")


def make_tevatron_record(example: Example, every_positive: bool = True) -> dict[str, Any]:
    """Return a record of Tevatron's first form, with our keys for scores and `every_positive` (see `Format`)."""

    def texts_with_scores(passages: Iterable[Passage], scores: Iterable[float]) -> list[dict[str, Any]]:
        texts: list[dict[str, Any]] = [
            {tevatron.PASSAGE_ID: passage.id, "title": passage.title, "text": passage.text} for passage in passages
        ]
        for text, score in zip(texts, scores):  # scores may be ()
            text |= {tevatron.SCORE: score} if math.isfinite(score) else {}
        return texts

    first = {} if every_positive else {tevatron.EVERY_POSITIVE: False}
    texts = {
        tevatron.POSITIVES: texts_with_scores(example.positives, example.positive_scores),
        tevatron.NEGATIVES: texts_with_scores(example.negatives, example.negative_scores),
    }
    return {
        tevatron.QUERY_ID: example.query.id,
        tevatron.QUERY: example.query.text,
        **optional_keys(example.query),
        **first,
        **texts,
    }


def optional_keys(query: Query) -> dict[str, Any]:
    """Return the answers and the instruction of a query, if it has them, as keys of a record."""
    answers = {"answers": list(query.answers)} if query.answers else {}
    return answers | ({"instruction": query.instruction} if query.instruction else {})


def write_flag_examples(path: Path, examples: Iterable[Example]) -> Losses:
    """Write JSON lines for FlagEmbedding. A record has scores only if all its passages have one. Titles are joined to
    the texts. Return counts of the values that the file does not hold."""

    def has_all_scores(example: Example) -> bool:
        return example.score_count == len(example.positives) + len(example.negatives)

    def record(example: Example) -> dict[str, Any]:
        scores = {
            flag_embedding.POSITIVE_SCORES: list(example.positive_scores),
            flag_embedding.NEGATIVE_SCORES: list(example.negative_scores),
        }
        return {
            flag_embedding.QUERY: example.query.text,
            flag_embedding.POSITIVES: [joined_text(passage) for passage in example.positives],
            flag_embedding.NEGATIVES: [joined_text(passage) for passage in example.negatives],
            **(scores if has_all_scores(example) else {}),
            **({flag_embedding.PROMPT: example.query.instruction} if example.query.instruction else {}),
        }

    examples = list(examples)
    losses = example_writer(record, "instructions", "scores")(path, examples)
    losses["scores of records in which a passage has none"] = sum(
        example.score_count for example in examples if not has_all_scores(example)
    )
    return losses


def write_tuples(path: Path, examples: Iterable[Example]) -> Losses:
    """Write pairs if no example has a negative, otherwise a triplet for each positive with each negative."""
    examples = list(examples)
    triplets = any(example.negatives for example in examples)
    losses = count_losses(examples, "scores")
    losses["queries without negatives"] = triplets * sum(not example.negatives for example in examples)

    def rows() -> Iterator[dict[str, Any]]:
        for example in examples:
            for i, positive in enumerate(example.positives):
                pair = {"anchor": example.query.text, "positive": joined_text(positive)}
                if not triplets:
                    yield pair
                for j, negative in enumerate(example.negatives):
                    scores = [*example.positive_scores[i : i + 1], *example.negative_scores[j : j + 1]]
                    has_scores = len(scores) == 2 and all(map(math.isfinite, scores))
                    yield {**pair, "negative": joined_text(negative), **({"scores": scores} if has_scores else {})}

    def has_both_scores(example: Example) -> bool:
        return all(any(map(math.isfinite, side)) for side in (example.positive_scores, example.negative_scores))

    write_records(path, rows())
    losses["scores in records without one on the other side"] = sum(
        example.score_count for example in examples if not has_both_scores(example)
    )
    return losses


def _id_record(example: Example) -> dict[str, Any]:
    return {
        tevatron.QUERY_ID: example.query.id,
        tevatron.QUERY_TEXT: example.query.text,
        "query_image": None,
        **optional_keys(example.query),  # a reader that has the text does not read the file of queries
        tevatron.POSITIVE_IDS: [passage.id for passage in example.positives],
        tevatron.NEGATIVE_IDS: [passage.id for passage in example.negatives],
    }


def _hard_negatives_record(example: Example) -> dict[str, Any]:
    return {
        msmarco.QUERY_ID: example.query.id,
        msmarco.POSITIVES: [passage.id for passage in example.positives],
        msmarco.NEGATIVES: {"all": [passage.id for passage in example.negatives]},
    }


_TEVATRON = ("query ids", "answers", "instructions", "titles", "passage ids")
write_tevatron_examples = example_writer(make_tevatron_record, *_TEVATRON, "scores")
write_tevatron_first = example_writer(partial(make_tevatron_record, every_positive=False), *_TEVATRON, "scores")
write_tevatron_id_examples = example_writer(_id_record, *_TEVATRON)
write_hard_negatives = example_writer(_hard_negatives_record, "query ids", "passage ids", "titles")
write_id_triples = triple_writer(lambda query, p, n: (query.id, p.id, n.id), "query ids", "passage ids", "titles")
write_text_triples = triple_writer(lambda query, p, n: (query.text, joined_text(p), joined_text(n)))
