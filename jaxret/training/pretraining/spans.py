"""A corpus as tokenized documents, from the store, cut into spans that fit an encoder."""

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
    """Return the text of a document, title first."""
    return f"{passage.title} {passage.text}".strip()


@dataclass(frozen=True)
class Documents:
    """Tokens of the documents of a corpus, title and text as one text, without markers; the digest of the corpus, and a
    report of bad records."""

    tokens: Ragged
    sha256: str
    report: str

    def __len__(self) -> int:
        return len(self.tokens)


def load_documents(
    corpus: Corpus, on_error: str, tokenizer: TextTokenizer, root: Path, progress: bool, log: Log
) -> Documents:
    """Return the documents of a corpus from the store, memory-mapped; tokenize them first if they are not stored.

    Args:
        on_error: policy for bad records, which raise DataError or are skipped.
        root: folder of stores.
    """
    plain = replace(tokenizer, query_prompt="")
    settings: dict[str, Any] = {"on_error": on_error, "documents": plain.settings()}
    if corpus.format_name:
        settings["formats"] = {"corpus": corpus.format_name}

    def make(writer: ColumnWriter) -> dict[str, Any]:
        policy = Policy(on_error)
        scan = corpus.scan(policy)

        def texts() -> Iterator[str]:
            passages = corpus.read(Policy(on_error), scan)
            for passage in with_progress(passages, "tokenize", scan.passages, shown=progress):
                yield document_text(passage)

        plain.without_markers(texts(), lambda blocks: writer.ragged("documents", blocks))
        return {"sha256": scan.sha256, "report": policy.report()}

    store = open_or_make_store(StoreOrigin(f"{corpus.name}.documents", corpus.files, settings), root, make, log)
    return Documents(store.ragged("documents"), store.facts["sha256"], store.facts["report"])


@dataclass(frozen=True)
class Spans:
    """Parts of documents that fit an encoder: span i is `tokens[starts[i]:stops[i]]`, and document d has the spans
    `first[d]` to `first[d + 1]`."""

    tokens: np.ndarray  # int32 [R]
    starts: np.ndarray  # int64 [S]
    stops: np.ndarray  # int64 [S]
    first: np.ndarray  # int64 [D + 1]
    left_out: int  # tokens of spans that are too short to learn from

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, span: int | np.integer) -> np.ndarray:
        return self.tokens[self.starts[span] : self.stops[span]]

    @cached_property
    def longest(self) -> int:
        return int((self.stops - self.starts).max())

    @cached_property
    def paired(self) -> np.ndarray:
        """Documents with two spans or more."""
        return np.flatnonzero(np.diff(self.first) > 1)


def cut_spans(documents: Ragged, longest: int, shortest: int, least: int = 1) -> Spans:
    """Cut every document into the fewest spans, as equal as possible.

    Args:
        documents: tokens.
        longest: tokens of a span, at most.
        shortest: tokens of a span; shorter ones are left out.
        least: spans of a document, at least.
    """
    lengths = documents.lengths
    counts = np.maximum(-(-lengths // longest), least)
    document = np.repeat(np.arange(len(documents)), counts)
    index = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the span in its document
    starts = documents.offsets[document] + index * lengths[document] // counts[document]
    stops = documents.offsets[document] + (index + 1) * lengths[document] // counts[document]
    valid = stops - starts >= shortest
    first = np.concatenate([[0], np.cumsum(np.bincount(document[valid], minlength=len(documents)))])
    left_out = int((stops - starts)[~valid].sum())
    return Spans(documents.flat, starts[valid], stops[valid], first, left_out)
