"""A corpus as documents of tokens, made once, and cut into spans that fit an encoder; documents keep their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxret.data.formats import Policy, called, corpus_file, files_of, read_corpus, scan_corpus, split_source
from jaxret.data.records import Passage
from jaxret.data.store import Origin, Say, Writer, stored
from jaxret.data.tokenizer import TextTokenizer
from jaxret.types import Ragged


def text_of(passage: Passage) -> str:
    """A document as a language model reads it."""
    return f"{passage.title} {passage.text}".strip()


@dataclass(frozen=True)
class Documents:
    """Tokens of the documents of a corpus, title and text as one text, without markers. sha256: of the corpus."""

    tokens: Ragged
    sha256: str
    report: str  # of bad records

    def __len__(self) -> int:
        return len(self.tokens)


def load_documents(
    corpus: str | Path, on_error: str, tokenizer: TextTokenizer, root: Path, progress: bool, say: Say
) -> Documents:
    """From the store, where they are memory-mapped; tokenised first if they are not there. Raises DataError."""
    plain = replace(tokenizer, query_prompt="")
    recipe: dict[str, Any] = {"on_error": on_error, "documents": plain.recipe()}
    if name := split_source(corpus)[0]:
        recipe["formats"] = {"corpus": name}

    def make(writer: Writer) -> dict[str, Any]:
        policy = Policy(on_error)
        scan = scan_corpus(corpus, policy)

        def texts() -> Iterator[str]:
            passages = read_corpus(corpus, Policy(on_error), scan)
            for passage in tqdm(passages, "tokenize", scan.passages, leave=False, delay=1, disable=not progress):
                yield text_of(passage)

        plain.bare(texts(), lambda blocks: writer.ragged("documents", blocks))
        return {"sha256": scan.sha256, "report": policy.report()}

    store = stored(Origin(f"{called(corpus)}.documents", files_of(corpus_file(corpus)), recipe), root, make, say)
    return Documents(store.ragged("documents"), store.facts["sha256"], store.facts["report"])


@dataclass(frozen=True)
class Spans:
    """Parts of documents, none longer than an encoder takes: span i is `tokens[starts[i]:stops[i]]`, and document d has
    the spans `first[d]` to `first[d + 1]`. left_out: tokens of spans that are too short to learn from."""

    tokens: np.ndarray  # int32 [R]
    starts: np.ndarray  # int64 [S]
    stops: np.ndarray  # int64 [S]
    first: np.ndarray  # int64 [D + 1]
    left_out: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, span: int | np.integer) -> np.ndarray:
        return self.tokens[self.starts[span] : self.stops[span]]

    @cached_property
    def longest(self) -> int:
        return int((self.stops - self.starts).max())

    @cached_property
    def paired(self) -> np.ndarray:
        """The documents that have two spans or more."""
        return np.flatnonzero(np.diff(self.first) > 1)


def cut(documents: Ragged, longest: int, shortest: int, least: int = 1) -> Spans:
    """Cuts every document into the fewest spans of at most `longest` tokens, but into `least` at least, as equal as can
    be; spans below `shortest` tokens are left out."""
    lengths = documents.lengths
    counts = np.maximum(-(-lengths // longest), least)
    document = np.repeat(np.arange(len(documents)), counts)
    place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the span in its document
    starts = documents.offsets[document] + place * lengths[document] // counts[document]
    stops = documents.offsets[document] + (place + 1) * lengths[document] // counts[document]
    kept = stops - starts >= shortest
    first = np.concatenate([[0], np.cumsum(np.bincount(document[kept], minlength=len(documents)))])
    left_out = int((stops - starts)[~kept].sum())
    return Spans(documents.flat, starts[kept], stops[kept], first, left_out)
