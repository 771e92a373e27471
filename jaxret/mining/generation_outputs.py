"""Files that are made from generated queries.

<out>/pseudo-queries.jsonl    the first query of each passage, for data.pseudo_queries
<out>/training/               a data set in BEIR's layout, for data.train: each query with its passage as the positive
<out>/expanded/corpus.jsonl   the corpus with the queries after its texts (docT5query, Nogueira and Lin 2019)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jaxret.data.formats import Corpus, CorpusScan, Policy
from jaxret.data.formats.beir import QRELS_HEADER
from jaxret.data.records import Passage
from jaxret.mining.generation_options import EXPANDED, PSEUDO_QUERIES, TRAINING
from jaxret.storage.atomic import atomic_write

TRAINING_CORPUS, EXPANDED_CORPUS = OUTPUT_CORPORA = "training/corpus.jsonl", "expanded/corpus.jsonl"


@dataclass
class GeneratedQueries:
    """A corpus with the generated queries of its passages, read from disk each time."""

    corpus: Corpus
    scan: CorpusScan
    on_error: str
    read: Callable[[], Iterator[tuple[str, list[str]]]]  # yields (passage id, queries) in the corpus's order
    count: int = 0  # number of queries
    with_queries: int = 0  # number of passages with queries

    def count_queries(self) -> None:
        """Count the queries and the passages with queries, by reading every part."""
        lengths = [len(texts) for _, texts in self.read()]
        self.count, self.with_queries = sum(lengths), sum(length > 0 for length in lengths)

    def passages(self) -> Iterator[tuple[Passage, list[str]]]:
        """Yield each passage with its queries. Raises ValueError for queries that are not those of the corpus's
        passage."""
        passages = self.corpus.read(Policy(self.on_error), self.scan)
        for passage, (key, texts) in zip(passages, self.read(), strict=True):
            if passage.id != key:
                raise ValueError(f"found queries of passage {key!r}, expected those of passage {passage.id!r}")
            yield passage, texts


def write_pseudo_queries(queries: GeneratedQueries, folder: Path, work: Path) -> list[Path]:
    """Write a line {"_id": passage id, "text": its first query} for each passage, and return the file."""
    path = folder / "pseudo-queries.jsonl"
    _write_lines(path, work, (_line(_id=key, text=texts[0]) for key, texts in queries.read() if texts))
    return [path]


def write_training_set(generated_queries: GeneratedQueries, folder: Path, work: Path) -> list[Path]:
    """Write a BEIR folder with the corpus, the queries, and judgements of the split train, and return the folder."""
    training = folder / "training"
    (training / "qrels").mkdir(parents=True, exist_ok=True)

    def queries() -> Iterator[tuple[str, str, str]]:
        for key, texts in generated_queries.read():
            yield from ((f"{key}-{number}", text, key) for number, text in enumerate(texts, 1))

    def judgements() -> Iterator[str]:
        yield QRELS_HEADER
        yield from (f"{query}\t{key}\t1" for query, _, key in queries())

    passages = (
        _line(_id=passage.id, title=passage.title, text=passage.text) for passage, _ in generated_queries.passages()
    )
    _write_lines(folder / TRAINING_CORPUS, work, passages)
    _write_lines(training / "queries.jsonl", work, (_line(_id=query, text=text) for query, text, _ in queries()))
    _write_lines(training / "qrels" / "train.tsv", work, judgements())
    return [training]


def write_expanded_corpus(queries: GeneratedQueries, folder: Path, work: Path) -> list[Path]:
    """Write the corpus with each passage's queries after its text, and return the file."""
    path = folder / EXPANDED_CORPUS
    path.parent.mkdir(exist_ok=True)

    def expanded_lines() -> Iterator[str]:
        for passage, texts in queries.passages():
            longer = replace(passage, text=" ".join(filter(None, [passage.text, *texts])))
            yield _line(_id=longer.id, title=longer.title, text=longer.text)

    _write_lines(path, work, expanded_lines())
    return [path]


OUTPUTS: dict[str, Callable[[GeneratedQueries, Path, Path], list[Path]]] = {
    PSEUDO_QUERIES: write_pseudo_queries,
    TRAINING: write_training_set,
    EXPANDED: write_expanded_corpus,
}


def _line(**record: str) -> str:
    return json.dumps(record, ensure_ascii=False)


def _write_lines(path: Path, work: Path, lines: Iterable[str]) -> None:
    with atomic_write(path, work=work) as file:
        file.writelines(f"{line}\n" for line in lines)
