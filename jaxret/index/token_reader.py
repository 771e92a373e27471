"""The passages of a corpus as tokens, a shard at a time: tokenized as the text is read, or from a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import islice
from threading import Event
from typing import NamedTuple, TypeAlias

from jaxret.data.errors import Location
from jaxret.data.formats import Policy
from jaxret.data.records import Passage
from jaxret.data.tokens.tokenized import TokenizedCorpus
from jaxret.data.tokens.tokenizer import TextTokenizer, Truncation
from jaxret.index.source import CorpusSource
from jaxret.types import Ragged


class TokenBlock(NamedTuple):
    """Consecutive passages. truncation: of all that were read up to here."""

    ids: Sequence[str]
    passages: Ragged
    truncation: Truncation


class StoreReader:
    """Reads a corpus that was tokenized before."""

    def __init__(self, texts: TokenizedCorpus) -> None:
        self.texts = texts

    def part(self, start: int, stop: int, cancellation: Event | None = None) -> TokenBlock:
        """Return the passages from row `start` to `stop`. cancellation: not needed, a store takes no time."""
        return TokenBlock(self.texts.ids[start:stop], self.texts.passages.part(start, stop), self.texts.truncation)

    def require_unchanged(self) -> None:
        """Do nothing: a store is verified when it is opened."""


class TextReader:
    """Reads the text from front to back and tokenizes it. Rows should be read in order: for an earlier row it starts
    from the beginning. It holds one block."""

    def __init__(self, source: CorpusSource, tokenizer: TextTokenizer) -> None:
        self.source, self.tokenizer = source, tokenizer
        self._cut = Truncation("passages", tokenizer.passage_length)
        self._rest, self._position = self._from_front(), 0

    def _from_front(self) -> Iterator[Passage]:
        return self.source.corpus.read(Policy(self.source.policy.on_error), self.source.scan, progress=False)

    def part(self, start: int, stop: int, cancellation: Event | None = None) -> TokenBlock:
        """Return the passages from row `start` to `stop`.

        cancellation: when another thread sets it, reading ends at the next passage. Raises CancelledError then, and
        DataError if the corpus differs from the inspected one.
        """
        if start < self._position:
            self._rest, self._position = self._from_front(), 0
        ids: list[str] = []

        def passages() -> Iterator[Passage]:
            for passage in islice(self._rest, stop - self._position):
                self._position += 1
                if cancellation and cancellation.is_set():
                    raise CancelledError
                if self._position > start:
                    ids.append(passage.id)
                    yield passage

        tokens = self.tokenizer.passages(passages(), truncation=self._cut)
        return TokenBlock(ids, tokens, replace(self._cut))

    def require_unchanged(self) -> None:
        """Raise DataError if the size or time of the corpus differs from the inspected one. (The last passage of all
        comes only if the digest of the whole text is the same, too.)"""
        if self.source.corpus.stat() != self.source.scan.stat:
            problem, remedy = "the file changed while it was encoded", "leave it alone, and encode it again"
            raise Location(self.source.corpus.file.path).error("changed corpus", problem, remedy)


TokenReader: TypeAlias = StoreReader | TextReader


def open_token_reader(source: CorpusSource, tokenizer: TextTokenizer) -> TokenReader:
    return StoreReader(source.texts) if source.texts else TextReader(source, tokenizer)
