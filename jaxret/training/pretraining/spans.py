"""Tokenize the documents of a corpus, and cut them into spans that fit an encoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.formats import Corpus, Policy
from jaxret.data.records import Passage
from jaxret.data.tokens.store import ColumnWriter, StoreOrigin, open_or_make_store
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.parallel.progress import with_progress
from jaxret.types import Log, Ragged


def document_text(passage: Passage) -> str:
    """Return the title and the text of a document as one text."""
    return f"{passage.title} {passage.text}".strip()


@dataclass(frozen=True)
class Documents:
    """The tokenized documents of a corpus."""

    tokens: Ragged  # ids of title and text, without markers
    sha256: str  # digest of the corpus
    report: str  # sentence about skipped records; "" for none

    def __len__(self) -> int:
        return len(self.tokens)


def load_documents(
    corpus: Corpus, on_error: str, tokenizer: TextTokenizer, root: Path, progress: bool, log: Log
) -> Documents:
    """Return the tokenized documents of a corpus, memory-mapped from the store. They are tokenized first if the store
    does not have them.

    Args:
        corpus: the corpus.
        on_error: policy for bad records: "error" raises DataError, "skip" skips them.
        tokenizer: the tokenizer of the run; its prompts are not used.
        root: folder of stores.
        progress: whether progress is printed.
        log: prints a line.
    """
    plain = replace(tokenizer, query_prompt="")
    settings: dict[str, Any] = {"on_error": on_error, "documents": plain.settings()}
    if corpus.data.format_name:
        settings["formats"] = {"corpus": corpus.data.format_name}

    def make(writer: ColumnWriter) -> dict[str, Any]:
        policy = Policy(on_error)
        scan = corpus.scan(policy)

        def texts() -> Iterator[str]:
            passages = corpus.read(Policy(on_error), scan)
            for passage in with_progress(passages, "tokenize", scan.passages, progress=progress):
                yield document_text(passage)

        plain.without_markers(texts(), lambda blocks: writer.ragged("documents", blocks))
        return {"sha256": scan.sha256, "report": policy.report()}

    store = open_or_make_store(StoreOrigin(f"{corpus.name}.documents", corpus.files, settings), root, make, log)
    return Documents(store.ragged("documents"), store.facts["sha256"], store.facts["report"])


@dataclass(frozen=True)
class Spans:
    """Parts of documents that fit an encoder. Span i is `tokens[starts[i]:stops[i]]`. Document d has the spans from
    `first[d]` to `first[d + 1] - 1`."""

    tokens: np.ndarray  # int32 [R], ids of all documents
    starts: np.ndarray  # int64 [S]
    stops: np.ndarray  # int64 [S]
    first: np.ndarray  # int64 [D + 1]
    left_out: int  # number of tokens in spans that are too short to learn from

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, span: int | np.integer) -> np.ndarray:
        return self.tokens[self.starts[span] : self.stops[span]]

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest span."""
        return int((self.stops - self.starts).max())

    @cached_property
    def documents_with_pairs(self) -> np.ndarray:
        """Numbers of the documents with at least two spans."""
        return np.flatnonzero(np.diff(self.first) > 1)


def cut_spans(documents: Ragged, longest: int, shortest: int, least: int = 1) -> Spans:
    """Cut every document into as few spans as possible, of lengths as equal as possible.

    Args:
        documents: tokens of the documents.
        longest: largest number of tokens of a span.
        shortest: smallest number of tokens of a span; shorter spans are left out.
        least: smallest number of spans of a document.
    """
    lengths = documents.lengths
    counts = np.maximum(-(-lengths // longest), least)
    document = np.repeat(np.arange(len(documents)), counts)
    index = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # number in the document
    starts = documents.offsets[document] + index * lengths[document] // counts[document]
    stops = documents.offsets[document] + (index + 1) * lengths[document] // counts[document]
    valid = stops - starts >= shortest
    first = np.concatenate([[0], np.cumsum(np.bincount(document[valid], minlength=len(documents)))])
    left_out = int((stops - starts)[~valid].sum())
    return Spans(documents.flat, starts[valid], stops[valid], first, left_out)
