"""Records -> files: a writer for what a format holds, which counts what it cannot hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.data.files import Where, check_passage, check_query, require_id
from jaxret.data.formats import example_writers
from jaxret.data.formats.dpr import write_dpr_corpus, write_dpr_queries
from jaxret.data.formats.trec import write_run
from jaxret.data.formats.writing import Lost, joined_text, write_records, write_table
from jaxret.data.records import Judgement, Passage, Query, Rankings

# Passages and queries


def passages_as(key: str, text: str = "text", title: str = "title") -> Callable[[Path, Iterable[Passage]], Lost]:
    """A writer of JSON records with these keys; title "": no titles."""

    def write(path: Path, passages: Iterable[Passage]) -> Lost:
        lost: Lost = Counter()

        def rows() -> Iterator[dict[str, str]]:
            for number, passage in enumerate(passages, 1):
                check_passage(passage, Where(path, f"passage {number}"))
                lost["titles (joined to the texts)"] += not title and bool(passage.title)
                titled = {title: passage.title} if title else {}
                yield {key: passage.id, **titled, text: passage.text if title else joined_text(passage)}

        write_records(path, rows())
        return lost

    return write


def queries_as(key: str, text: str = "text", answers: bool = False) -> Callable[[Path, Iterable[Query]], Lost]:
    """A writer of JSON records with these keys."""

    def write(path: Path, queries: Iterable[Query]) -> Lost:
        lost: Lost = Counter()

        def rows() -> Iterator[dict[str, Any]]:
            for number, query in enumerate(queries, 1):
                check_query(query, Where(path, f"query {number}"))
                lost["queries' answers"] += not answers and bool(query.answers)
                more = {"answers": list(query.answers)} if answers and query.answers else {}
                yield {key: query.id, text: query.text, **more}

        write_records(path, rows())
        return lost

    return write


def _collection(path: Path, passages: Iterable[Passage]) -> Lost:
    lost: Lost = Counter()

    def rows() -> Iterator[tuple[str, str]]:
        for number, passage in enumerate(passages, 1):
            check_passage(passage, Where(path, number))
            lost["titles (joined to the texts)"] += bool(passage.title)
            yield passage.id, joined_text(passage)

    write_table(path, rows(), lost)
    return lost


def _tab_queries(path: Path, queries: Iterable[Query]) -> Lost:
    lost: Lost = Counter()

    def rows() -> Iterator[tuple[str, str]]:
        for number, query in enumerate(queries, 1):
            check_query(query, Where(path, number))
            lost["queries' answers"] += bool(query.answers)
            yield query.id, query.text

    write_table(path, rows(), lost)
    return lost


def _dpr_passages(path: Path, passages: Iterable[Passage]) -> Lost:
    lost: Lost = Counter()

    def counted() -> Iterator[Passage]:
        for passage in passages:
            lost["double quotes at the ends of texts"] += passage.text != passage.text.strip('"')
            yield passage

    write_dpr_corpus(path, counted())
    return lost


def _dpr_queries(path: Path, queries: Iterable[Query]) -> Lost:
    queries = list(queries)
    write_dpr_queries(path, queries)
    return Counter({"queries' ids": sum(query.id != str(i) for i, query in enumerate(queries))})


# Judgements and rankings


def _qrels(path: Path, judgements: Iterable[Judgement]) -> Lost:
    rows = ((j.query_id, "0", j.passage_id, str(j.relevance)) for j in _checked(path, judgements))
    write_table(path, rows, Counter())
    return Counter()


def judgements_as(
    query: str, passage: str, score: str, kind: type = int
) -> Callable[[Path, Iterable[Judgement]], Lost]:
    """A writer of JSON records with these keys; kind: of the scores."""

    def write(path: Path, judgements: Iterable[Judgement]) -> Lost:
        checked = _checked(path, judgements)
        write_records(path, ({query: j.query_id, passage: j.passage_id, score: kind(j.relevance)} for j in checked))
        return Counter()

    return write


def _checked(path: Path, judgements: Iterable[Judgement]) -> Iterator[Judgement]:
    for number, judgement in enumerate(judgements, 1):
        require_id(judgement.query_id, "query id", Where(path, number))
        require_id(judgement.passage_id, "passage id", Where(path, number))
        yield judgement


def _trec_run(path: Path, rankings: Rankings) -> Lost:
    write_run(path, rankings, "jaxret")
    return Counter()


def _scored_run(path: Path, rankings: Rankings) -> Lost:
    rows = ((query, key, f"{score:#.9g}") for query, found in rankings.items() for key, score in found)
    write_table(path, rows, Counter())
    return Counter()


def _ranked_run(path: Path, rankings: Rankings) -> Lost:
    lists = rankings.items()
    write_table(
        path, ((query, key, str(n)) for query, found in lists for n, (key, _) in enumerate(found, 1)), Counter()
    )
    return Counter({"scores": sum(map(len, rankings.values()))})


def _scores(path: Path, rankings: Rankings) -> Lost:
    lists = ((query, *zip(*found)) for query, found in rankings.items() if found)
    write_records(
        path, ({"query_id": q, "document_ids": list(ids), "scores": list(scores)} for q, ids, scores in lists)
    )
    return Counter()


def _scored_documents(path: Path, rankings: Rankings) -> Lost:
    pairs = ((query, key, score) for query, found in rankings.items() for key, score in found)
    write_records(path, ({"query_id": query, "doc_id": key, "score": score} for query, key, score in pairs))
    return Counter()


def _labels(path: Path, judgements: Iterable[Judgement]) -> Lost:
    found: dict[str, dict[str, int]] = {}
    for judgement in _checked(path, judgements):
        found.setdefault(judgement.query_id, {})[judgement.passage_id] = judgement.relevance
    lists = found.items()
    write_records(path, ({"query_id": q, "doc_ids": [*grades], "labels": [*grades.values()]} for q, grades in lists))
    return Counter()


@dataclass(frozen=True)
class Writer:
    """Writes what a role holds to a file, and counts what is lost."""

    role: str
    write: Callable[[Path, Any], Lost]


WRITERS: dict[str, tuple[Writer, ...]] = {
    "beir.texts": (Writer("passages", passages_as("_id")), Writer("queries", queries_as("_id"))),
    "beir.qrels": (Writer("judgements", judgements_as("query-id", "corpus-id", "score", float)),),
    "dpr.examples": (Writer("examples", example_writers.dpr_examples),),
    "dpr.passages": (Writer("passages", _dpr_passages),),
    "dpr.queries": (Writer("queries", _dpr_queries),),
    "msmarco.texts": (Writer("passages", _collection), Writer("queries", _tab_queries)),
    "msmarco.named": (Writer("examples", example_writers.named_triples),),
    "msmarco.negatives": (Writer("examples", example_writers.hard_negatives),),
    "msmarco.triples": (Writer("examples", example_writers.triples),),
    "msmarco.run": (Writer("rankings", _ranked_run),),
    "tevatron.examples": (Writer("examples", example_writers.tevatron_examples),),
    "tevatron.first": (Writer("examples", example_writers.tevatron_first),),
    "tevatron.named": (Writer("examples", example_writers.tevatron_named),),
    "tevatron.corpus": (Writer("passages", passages_as("docid")),),
    "tevatron.queries": (Writer("queries", queries_as("query_id", "query", answers=True)),),
    "tevatron.run": (Writer("rankings", _scored_run),),
    "flag.examples": (Writer("examples", example_writers.flag_examples),),
    "st.labels": (Writer("judgements", _labels),),
    "st.tuples": (Writer("examples", example_writers.tuples),),
    "irds.docs": (Writer("passages", passages_as("doc_id")),),
    "irds.qrels": (Writer("judgements", judgements_as("query_id", "doc_id", "relevance")),),
    "irds.pairs": (Writer("examples", example_writers.document_pairs),),
    "irds.scores": (Writer("rankings", _scored_documents),),
    "trec.qrels": (Writer("judgements", _qrels),),
    "trec.run": (Writer("rankings", _trec_run),),
    "pylate.documents": (Writer("passages", passages_as("document_id", title="")),),
    "pylate.queries": (Writer("queries", queries_as("query_id")),),
    "pylate.scores": (Writer("rankings", _scores),),
    "anserini.corpus": (Writer("passages", passages_as("id", "contents", title="")),),
    "anserini.topics": (Writer("queries", queries_as("qid", "query")),),
}
