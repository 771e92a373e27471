"""Split passages into chunks: sentences, equal parts, or windows of words. Passage ID becomes ID#0, ID#1, ..."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxret.configs.options import check_options, option
from jaxret.data.records import Passage

CHUNK_SEPARATOR = "#"  # Anserini's segmented corpora have the same separator


@dataclass(frozen=True)
class ChunkOptions:
    """Where passages are split: one of `sentences`, `equal` and `words`. Raises ValueError for none or several."""

    sentences: bool = option(False, "make a chunk of each sentence, with sentencex (pip install 'jaxret[chunks]')")
    equal: int = option(0, "number of chunks of a passage, with equally many words", lower_bound=0)
    words: int = option(0, "words of a chunk; the last one of a passage may have fewer", lower_bound=0)
    overlap: int = option(
        0, "with --words: number of words at the end of a chunk that the next chunk repeats", lower_bound=0
    )
    language: str = option("en", "with --sentences: code of the texts' language")

    def __post_init__(self) -> None:
        check_options(self)
        if [self.sentences, bool(self.equal), bool(self.words)].count(True) != 1:
            raise ValueError("give one of sentences, equal=N and words=N")
        if self.overlap and self.overlap >= self.words:
            raise ValueError(f"overlap is {self.overlap}; it must be less than the words of a chunk ({self.words})")


def document_id(passage_id: str) -> str:
    """Return the id of a chunk's document: "D7" for "D7#12". Other ids are returned unchanged."""
    document, separator, number = passage_id.rpartition(CHUNK_SEPARATOR)
    return document if separator and document and number.isdecimal() else passage_id


def split_text(text: str, options: ChunkOptions) -> list[str]:
    """Return the chunks of a text in order, without white space at their ends, or [""] if the text is blank.

    Raises ValueError if sentencex, which splits sentences, is not installed.
    """
    if options.sentences:
        chunks = [sentence.strip() for sentence in _sentences(text, options.language)]
        return [chunk for chunk in chunks if chunk] or [""]
    words = [match.span() for match in re.finditer(r"\S+", text)]
    return [text[words[start][0] : words[stop - 1][1]] for start, stop in _windows(len(words), options)] or [""]


def split_passage(passage: Passage, options: ChunkOptions) -> list[Passage]:
    """Return the chunks of a passage, each with its title.

    Example:
        >>> chunks = split_passage(Passage("7", "one two three four five"), ChunkOptions(words=3, overlap=1))
        >>> [(chunk.id, chunk.text) for chunk in chunks]
        [('7#0', 'one two three'), ('7#1', 'three four five')]
    """
    texts = split_text(passage.text, options)
    return [replace(passage, id=f"{passage.id}{CHUNK_SEPARATOR}{i}", text=text) for i, text in enumerate(texts)]


def split_passages(passages: Iterable[Passage], options: ChunkOptions) -> Iterator[Passage]:
    for passage in passages:
        yield from split_passage(passage, options)


def joined_chunks(texts: Sequence[str]) -> str:
    """Return the text of consecutive chunks, joined with spaces.

    Words that every chunk shares with the end of the chunk before it are written once: overlapping chunks share equally
    many words everywhere. If two chunks without overlap end and begin with the same word, this word is lost.
    """
    words = [text.split() for text in texts]
    shortest = min((len(chunk_words) for chunk_words in words[:-1]), default=0)
    pairs = list(itertools.pairwise(words))
    overlap = next((n for n in range(shortest, 0, -1) if all(left[-n:] == right[:n] for left, right in pairs)), 0)
    new = [part for text in texts[1:] for part in text.split(maxsplit=overlap)[overlap:]]
    return " ".join([*texts[:1], *new])


def _windows(count: int, options: ChunkOptions) -> Sequence[tuple[int, int]]:
    """Return (number of the first word, number of the first word after the chunk) of each chunk."""
    if options.equal:
        parts = min(options.equal, count)
        return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
    step = options.words - options.overlap
    starts = range(0, max(count - options.overlap, min(count, 1)), step)
    return [(start, min(start + options.words, count)) for start in starts]


def _sentences(text: str, language: str) -> list[str]:
    try:
        from sentencex import segment
    except ImportError as error:
        raise ValueError("--sentences needs sentencex: pip install 'jaxret[chunks]'") from error
    return list(segment(language, text))
