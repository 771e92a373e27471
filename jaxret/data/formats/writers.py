"""Writers of records for each format. They return counts of the values that the format cannot hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxret.data.errors import Location
from jaxret.data.formats import example_writers, tevatron
from jaxret.data.formats.beir import QRELS_KEYS
from jaxret.data.formats.dpr import write_dpr_corpus, write_dpr_queries
from jaxret.data.formats.pylate_anserini import LABEL_KEYS
from jaxret.data.formats.trec import write_run
from jaxret.data.formats.writing import Losses, joined_text, write_records, write_tab_rows
from jaxret.data.record_checks import check_passage, check_query, require_id
from jaxret.data.records import Judgement, Passage, Query, Rankings

# Passages and queries


def passage_writer(key: str) -> Callable[[Path, Iterable[Passage]], Losses]:
    """Return a writer of passages as JSON records, in which `key` is the key of the id."""

    def write(path: Path, passages: Iterable[Passage]) -> Losses:
        def rows() -> Iterator[dict[str, str]]:
            for number, passage in enumerate(passages, 1):
                check_passage(passage, Location(path, f"passage {number}"))
                yield {key: passage.id, "title": passage.title, "text": passage.text}

        write_records(path, rows())
        return Counter()

    return write


def query_writer(key: str, text: str = "text", answers: bool = False) -> Callable[[Path, Iterable[Query]], Losses]:
    """Return a writer of queries as JSON records with the keys of id and text, and answers if `answers`."""

    def write(path: Path, queries: Iterable[Query]) -> Losses:
        losses: Losses = Counter()

        def rows() -> Iterator[dict[str, Any]]:
            for number, query in enumerate(queries, 1):
                check_query(query, Location(path, f"query {number}"))
                losses["queries' answers"] += not answers and bool(query.answers)
                options: dict[str, Any] = {"answers": list(query.answers)} if answers and query.answers else {}
                options |= {"instruction": query.instruction} if query.instruction else {}
                yield {key: query.id, text: query.text, **options}

        write_records(path, rows())
        return losses

    return write


def _collection(path: Path, passages: Iterable[Passage]) -> Losses:
    losses: Losses = Counter()

    def rows() -> Iterator[tuple[str, str]]:
        for number, passage in enumerate(passages, 1):
            check_passage(passage, Location(path, number))
            losses["titles (joined to the texts)"] += bool(passage.title)
            yield passage.id, joined_text(passage)

    write_tab_rows(path, rows(), losses)
    return losses


def _tab_queries(path: Path, queries: Iterable[Query]) -> Losses:
    losses: Losses = Counter()

    def rows() -> Iterator[tuple[str, str]]:
        for number, query in enumerate(queries, 1):
            check_query(query, Location(path, number))
            losses["queries' answers"] += bool(query.answers)
            losses["queries' instructions"] += bool(query.instruction)
            yield query.id, query.text

    write_tab_rows(path, rows(), losses)
    return losses


def _dpr_passages(path: Path, passages: Iterable[Passage]) -> Losses:
    losses: Losses = Counter()

    def counted() -> Iterator[Passage]:
        for passage in passages:
            losses["double quotes at the ends of texts"] += passage.text != passage.text.strip('"')
            yield passage

    write_dpr_corpus(path, counted())
    return losses


def _dpr_queries(path: Path, queries: Iterable[Query]) -> Losses:
    queries = list(queries)
    write_dpr_queries(path, queries)
    return Counter(
        {
            "queries' ids": sum(query.id != str(i) for i, query in enumerate(queries)),
            "queries' instructions": sum(bool(query.instruction) for query in queries),
        }
    )


# Judgements and rankings


def _qrels(path: Path, judgements: Iterable[Judgement]) -> Losses:
    rows = ((entry.query_id, "0", entry.passage_id, str(entry.relevance)) for entry in _checked(path, judgements))
    write_tab_rows(path, rows, Counter())
    return Counter()


def _beir_qrels(path: Path, judgements: Iterable[Judgement]) -> Losses:
    rows = ((entry.query_id, entry.passage_id, float(entry.relevance)) for entry in _checked(path, judgements))
    write_records(path, (dict(zip(QRELS_KEYS, row)) for row in rows))
    return Counter()


def _checked(path: Path, judgements: Iterable[Judgement]) -> Iterator[Judgement]:
    for number, judgement in enumerate(judgements, 1):
        require_id(judgement.query_id, "query id", Location(path, number))
        require_id(judgement.passage_id, "passage id", Location(path, number))
        yield judgement


def _trec_run(path: Path, rankings: Rankings) -> Losses:
    write_run(path, rankings, "jaxret")
    return Counter()


def _scored_run(path: Path, rankings: Rankings) -> Losses:
    rows = ((query, key, f"{score:#.9g}") for query, ranking in rankings.items() for key, score in ranking)
    write_tab_rows(path, rows, Counter())
    return Counter()


def _ranked_run(path: Path, rankings: Rankings) -> Losses:
    lists = rankings.items()
    write_tab_rows(
        path, ((query, key, str(n)) for query, ranking in lists for n, (key, _) in enumerate(ranking, 1)), Counter()
    )
    return Counter({"scores": sum(map(len, rankings.values()))})


def _labels(path: Path, judgements: Iterable[Judgement]) -> Losses:
    by_query: dict[str, dict[str, int]] = {}
    for judgement in _checked(path, judgements):
        by_query.setdefault(judgement.query_id, {})[judgement.passage_id] = judgement.relevance
    lists = by_query.items()
    write_records(path, (dict(zip(LABEL_KEYS, (query, [*grades], [*grades.values()]))) for query, grades in lists))
    return Counter()


# format -> role -> writer of its records to a file, which returns the counts of lost values
WRITERS: dict[str, dict[str, Callable[[Path, Any], Losses]]] = {
    "beir.texts": {"passages": passage_writer("_id"), "queries": query_writer("_id")},
    "beir.qrels": {"judgements": _beir_qrels},
    "dpr.examples": {"examples": example_writers.write_dpr_example_file},
    "dpr.passages": {"passages": _dpr_passages},
    "dpr.queries": {"queries": _dpr_queries},
    "msmarco.texts": {"passages": _collection, "queries": _tab_queries},
    "msmarco.named": {"examples": example_writers.write_id_triples},
    "msmarco.negatives": {"examples": example_writers.write_hard_negatives},
    "msmarco.triples": {"examples": example_writers.write_text_triples},
    "msmarco.run": {"rankings": _ranked_run},
    "tevatron.examples": {"examples": example_writers.write_tevatron_examples},
    "tevatron.first": {"examples": example_writers.write_tevatron_first},
    "tevatron.named": {"examples": example_writers.write_tevatron_id_examples},
    "tevatron.corpus": {"passages": passage_writer(tevatron.PASSAGE_ID)},
    "tevatron.queries": {"queries": query_writer(tevatron.QUERY_ID, tevatron.QUERY, answers=True)},
    "tevatron.run": {"rankings": _scored_run},
    "flag.examples": {"examples": example_writers.write_flag_examples},
    "st.labels": {"judgements": _labels},
    "st.tuples": {"examples": example_writers.write_tuples},
    "trec.qrels": {"judgements": _qrels},
    "trec.run": {"rankings": _trec_run},
}
