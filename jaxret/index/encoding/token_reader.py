"""Read the tokens of a corpus, a shard at a time: from a token store, or from the text, which is then tokenized."""

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
    """Tokens of consecutive passages."""

    ids: Sequence[str]
    passages: Ragged  # token ids
    truncation: Truncation  # counts of all passages that were read so far


class StoreReader:
    """Reads a corpus from its token store."""

    def __init__(self, texts: TokenizedCorpus) -> None:
        self.texts = texts

    def part(self, start: int, stop: int, cancellation: Event | None = None) -> TokenBlock:
        """Return the passages from row `start` to `stop`. `cancellation` is not used, because a store is read at
        once."""
        return TokenBlock(self.texts.ids[start:stop], self.texts.passages.part(start, stop), self.texts.truncation)

    def require_unchanged(self) -> None:
        """Do nothing, because a store is verified when it is opened."""


class TextReader:
    """Reads the text from front to back, and tokenizes it. Rows should be read in order, because an earlier row
    restarts the reading. One block is held in memory."""

    def __init__(self, source: CorpusSource, tokenizer: TextTokenizer) -> None:
        self.source, self.tokenizer = source, tokenizer
        self._cut = Truncation("passages", tokenizer.passage_length)
        self._passages, self._position = self._from_front(), 0

    def _from_front(self) -> Iterator[Passage]:
        return self.source.corpus.read(Policy(self.source.policy.on_error), self.source.scan, progress=False)

    def part(self, start: int, stop: int, cancellation: Event | None = None) -> TokenBlock:
        """Return the passages from row `start` to `stop`.

        Raises CancelledError at the next passage when another thread sets `cancellation`, and DataError if the corpus
        changed after its inspection.
        """
        if start < self._position:
            self._passages, self._position = self._from_front(), 0
        ids: list[str] = []

        def passages() -> Iterator[Passage]:
            for passage in islice(self._passages, stop - self._position):
                self._position += 1
                if cancellation and cancellation.is_set():
                    raise CancelledError
                if self._position > start:
                    ids.append(passage.id)
                    yield passage

        tokens = self.tokenizer.passages(passages(), truncation=self._cut)
        return TokenBlock(ids, tokens, replace(self._cut))

    def require_unchanged(self) -> None:
        """Raise DataError if the size or time of the corpus changed after its inspection. (`Corpus.read` compares the
        digest before it yields the last passage.)"""
        if self.source.corpus.stat() != self.source.scan.stat:
            problem, remedy = "the file changed while it was encoded", "do not change it, and encode it again"
            raise Location(self.source.corpus.file.path).error("changed corpus", problem, remedy)


TokenReader: TypeAlias = StoreReader | TextReader


def open_token_reader(source: CorpusSource, tokenizer: TextTokenizer) -> TokenReader:
    """Return a reader of the corpus's token store or, without one, a reader that tokenizes the passages."""
    return StoreReader(source.texts) if source.texts else TextReader(source, tokenizer)
