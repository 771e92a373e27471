"""The passages of a corpus as tokens, a shard at a time: tokenised as the text is read, or as a store has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import islice
from threading import Event
from typing import NamedTuple, TypeAlias

from jaxret.data.files import Where
from jaxret.data.formats import Policy, corpus_file, files_of, read_corpus, stat_files
from jaxret.data.records import Passage
from jaxret.data.tokenized import TokenizedCorpus
from jaxret.data.tokenizer import TextTokenizer, Truncation
from jaxret.retrieval.source import Source
from jaxret.types import Ragged


class Part(NamedTuple):
    """Passages in a row. truncation: of all that were read up to here."""

    ids: Sequence[str]
    passages: Ragged
    truncation: Truncation


class StoreReader:
    """Of a corpus that was tokenised before."""

    def __init__(self, texts: TokenizedCorpus) -> None:
        self.texts = texts

    def part(self, start: int, stop: int, unwanted: Event | None = None) -> Part:
        """The passages from row `start` to `stop`. unwanted: as `TextReader` has it; a store takes no time."""
        return Part(self.texts.ids[start:stop], self.texts.passages.part(start, stop), self.texts.truncation)

    def require_unchanged(self) -> None:
        """A store is looked at when it is opened."""


class TextReader:
    """Reads the text from front to back and tokenises what is asked for, so that it should be asked for in order; for
    a row before the last one it begins anew. It holds one part."""

    def __init__(self, source: Source, tokenizer: TextTokenizer) -> None:
        self.source, self.tokenizer = source, tokenizer
        self._files = files_of(corpus_file(source.corpus))
        self._cut = Truncation("passages", tokenizer.passage_length)
        self._rest, self._at = self._from_front(), 0

    def _from_front(self) -> Iterator[Passage]:
        return read_corpus(self.source.corpus, Policy(self.source.policy.on_error), self.source.scan)

    def part(self, start: int, stop: int, unwanted: Event | None = None) -> Part:
        """The passages from row `start` to `stop`. unwanted: when it is set, another thread no longer waits for them,
        and reading ends at the next passage. Raises CancelledError then, and DataError if the corpus is another
        than was looked at."""
        if start < self._at:
            self._rest, self._at = self._from_front(), 0
        ids: list[str] = []

        def asked() -> Iterator[Passage]:
            for passage in islice(self._rest, stop - self._at):
                self._at += 1
                if unwanted and unwanted.is_set():
                    raise CancelledError
                if self._at > start:
                    ids.append(passage.id)
                    yield passage

        tokens = self.tokenizer.passages(asked(), cut=self._cut)
        return Part(ids, tokens, replace(self._cut))

    def require_unchanged(self) -> None:
        """Raises DataError if what was read may be of another corpus than was looked at: of another size or time. (The
        last passage of all comes only if the digest of the whole text is the same, too.)"""
        if stat_files(self._files) != self.source.scan.stat:
            found, remedy = "the file changed while it was encoded", "leave it alone, and encode it again"
            raise Where(corpus_file(self.source.corpus)).error("changed corpus", found, remedy)


Reader: TypeAlias = StoreReader | TextReader


def reader(source: Source, tokenizer: TextTokenizer) -> Reader:
    """Of a corpus that was looked at."""
    return StoreReader(source.texts) if source.texts else TextReader(source, tokenizer)
