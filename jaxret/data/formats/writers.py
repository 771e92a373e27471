"""Writers of records for each format. They return counts of the values that the format cannot hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxret.data.errors import Location
from jaxret.data.formats import example_writers, tevatron
from jaxret.data.formats.beir import QRELS_KEYS
from jaxret.data.formats.dpr import CORPUS_COLUMNS
from jaxret.data.formats.pylate_anserini import LABEL_KEYS
from jaxret.data.formats.trec import write_run
from jaxret.data.formats.writing import Losses, joined_text, write_csv_rows, write_records, write_tab_rows
from jaxret.data.lines import PathLike
from jaxret.data.record_checks import check_passage, check_query, require_id
from jaxret.data.records import Judgement, Passage, Query, Rankings

Writer = Callable[[Path, Any], Losses]
LossKinds = Mapping[str, Callable[[Any], bool]]  # kind of value that a format cannot hold -> whether a record has it


def _check_judgement(judgement: Judgement, location: Location) -> None:
    require_id(judgement.query_id, "query id", location)
    require_id(judgement.passage_id, "passage id", location)


def record_writer(
    check: Callable[[Any, Location], object],
    row: Callable[[Any], Any],
    kinds: LossKinds | None = None,
    write: Callable[..., None] = write_records,
) -> Writer:
    """Return a writer of passages, queries or judgements. A record that a reader would reject is an error.

    Args:
        check: function that raises DataError for a record that a reader would reject.
        row: function that returns what is written of a record: an object, or the fields of a table.
        kinds: kinds of values that the format cannot hold.
        write: function of a path and rows, and for tables of the losses, that writes the file.
    """

    def write_all(path: Path, records: Iterable[Any]) -> Losses:
        losses: Losses = Counter()

        def rows() -> Iterator[Any]:
            for number, record in enumerate(records, 1):
                check(record, Location(path, f"{type(record).__name__.lower()} {number}"))
                for kind, is_lost in (kinds or {}).items():
                    losses[kind] += is_lost(record)
                yield row(record)

        write(path, rows(), *([] if write is write_records else [losses]))
        return losses

    return write_all


def passage_writer(key: str) -> Writer:
    """Return a writer of passages as JSON records, in which `key` is the key of the id."""
    return record_writer(
        check_passage,
        lambda passage: (
            {key: passage.id, "title": passage.title, "text": passage.text}
            | ({"metadata": dict(passage.metadata)} if passage.metadata else {})
        ),
    )


def query_writer(key: str, text: str = "text", answers: bool = False) -> Writer:
    """Return a writer of queries as JSON records with the keys of id and text, and answers if `answers`."""

    def row(query: Query) -> dict[str, Any]:
        options = example_writers.optional_keys(query)
        return {key: query.id, text: query.text} | {k: v for k, v in options.items() if answers or k != "answers"}

    return record_writer(check_query, row, {} if answers else _ANSWERS)


_ANSWERS: LossKinds = {"queries' answers": lambda query: bool(query.answers)}
_INSTRUCTIONS: LossKinds = {"queries' instructions": lambda query: bool(query.instruction)}
_TITLES: LossKinds = {"titles (joined to the texts)": lambda passage: bool(passage.title)}
# DPR's readers drop these quotes.
_QUOTES: LossKinds = {"double quotes at the ends of texts": lambda passage: passage.text != passage.text.strip('"')}
_beir_passages, _beir_queries = passage_writer("_id"), query_writer("_id")
write_dpr_corpus = record_writer(
    check_passage,
    lambda passage: (passage.id, passage.text, passage.title),
    _QUOTES,
    partial(write_csv_rows, header=CORPUS_COLUMNS),
)
_dpr_queries = record_writer(
    check_query, lambda query: (query.text, repr(list(query.answers))), _INSTRUCTIONS, write_csv_rows
)


def write_dpr_queries(path: PathLike, queries: Iterable[Query]) -> Losses:
    """Write *.qa.csv[.gz]. The format has no ids: readers give the queries the ids "0", "1", ..."""
    queries = list(queries)
    losses = _dpr_queries(Path(path), queries)
    losses["queries' ids"] = sum(query.id != str(number) for number, query in enumerate(queries))
    return losses


def _judgement_fields(judgement: Judgement) -> tuple[str, str, str]:
    return judgement.query_id, judgement.passage_id, str(judgement.relevance)


def _beir_judgement(judgement: Judgement) -> dict[str, Any]:
    return dict(zip(QRELS_KEYS, (judgement.query_id, judgement.passage_id, float(judgement.relevance))))


def write_beir(
    folder: PathLike,
    passages: Iterable[Passage],
    queries: Iterable[Query],
    judgements: Mapping[str, Iterable[Judgement]],
) -> None:
    """Write a BEIR folder. A record that a reader would reject is an error; duplicate ids are not detected.

    Readers return the same records, except that they replace U+2019 in queries by an apostrophe.

    Args:
        folder: folder to write, which is made if it does not exist.
        passages: passages for corpus.jsonl.
        queries: queries for queries.jsonl; their answers, if any, go to answers.jsonl.
        judgements: split -> its judgements.
    """
    folder, queries = Path(folder), list(queries)
    _beir_passages(folder / "corpus.jsonl", passages)
    _beir_queries(folder / "queries.jsonl", queries)
    # An answers.jsonl of older queries must not stay, so it is replaced even by an empty one.
    if any(query.answers for query in queries) or (folder / "answers.jsonl").exists():
        answers = ({"_id": query.id, "answers": list(query.answers)} for query in queries if query.answers)
        write_records(folder / "answers.jsonl", answers)
    write_qrels = record_writer(_check_judgement, _judgement_fields, write=partial(write_tab_rows, header=QRELS_KEYS))
    for split, entries in judgements.items():
        write_qrels(folder / "qrels" / f"{split}.tsv", entries)


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
    for number, judgement in enumerate(judgements, 1):
        _check_judgement(judgement, Location(path, f"judgement {number}"))
        by_query.setdefault(judgement.query_id, {})[judgement.passage_id] = judgement.relevance
    lists = by_query.items()
    write_records(path, (dict(zip(LABEL_KEYS, (query, [*grades], [*grades.values()]))) for query, grades in lists))
    return Counter()


# format -> role -> writer of its records to a file, which returns the counts of lost values
WRITERS: dict[str, dict[str, Writer]] = {
    "beir.texts": {"passages": _beir_passages, "queries": _beir_queries},
    "beir.qrels": {"judgements": record_writer(_check_judgement, _beir_judgement)},
    "dpr.examples": {"examples": example_writers.write_dpr_examples},
    "dpr.passages": {"passages": write_dpr_corpus},
    "dpr.queries": {"queries": write_dpr_queries},
    "msmarco.texts": {
        "passages": record_writer(check_passage, lambda p: (p.id, joined_text(p)), _TITLES, write_tab_rows),
        "queries": record_writer(check_query, lambda q: (q.id, q.text), {**_ANSWERS, **_INSTRUCTIONS}, write_tab_rows),
    },
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
    "trec.qrels": {
        "judgements": record_writer(
            _check_judgement, lambda j: (j.query_id, "0", *_judgement_fields(j)[1:]), {}, write_tab_rows
        )
    },
    "trec.run": {"rankings": _trec_run},
}
