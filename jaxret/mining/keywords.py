"""Pseudo-queries from the words of the passages, for use without a query generator."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jaxret.data.formats import Corpus
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.records import Passage
from jaxret.parallel.progress import with_progress
from jaxret.storage.atomic import atomic_write

_WORD = re.compile(r"\w\w+")


def keywords(
    passages: Iterable[Passage], inverse_frequencies: Mapping[str, float], count: int
) -> Iterator[tuple[Passage, str]]:
    """Yield each passage with the `count` words of the highest TF-IDF weight, best first; equal weights in alphabetical
    order.

    The weight of a word that occurs n times is (1 + ln n) idf. Words without an idf are left out, so there may be
    fewer words than `count`, or none.
    """
    for passage in passages:
        counts = Counter(_words(passage))
        weights = {
            word: (1 + math.log(n)) * inverse_frequencies[word]
            for word, n in counts.items()
            if word in inverse_frequencies
        }
        yield passage, " ".join(sorted(weights, key=lambda word: (-weights[word], word))[:count])


def inverse_document_frequencies(passages: Iterable[Passage]) -> dict[str, float]:
    """Return word -> ln((1 + passages) / (1 + passages with the word)) + 1, without English stop words."""
    from bm25s.stopwords import STOPWORDS_EN_PLUS  # imported late, because bm25s starts JAX

    frequencies: Counter[str] = Counter()
    total = 0
    for passage in passages:
        frequencies.update(set(_words(passage)))
        total += 1
    for word in STOPWORDS_EN_PLUS:
        frequencies.pop(word, None)
    return {word: math.log((1 + total) / (1 + n)) + 1 for word, n in frequencies.items()}


def write_keywords(corpus: Corpus, out: str | Path, count: int = 8) -> tuple[int, int]:
    """Write {"_id": passage id, "text": keywords} lines for a corpus, which is read twice.

    Args:
        out: file to write.
        count: words for each passage, at most. English stop words and words of one letter are left out.
    Returns:
        (passages with keywords, passages).

    Raises:
        ValueError: `count` is below 1, no passage has an English word, or the output is a file of the corpus.
    """
    if count < 1:
        raise ValueError(f"count is {count}; a pseudo-query has at least 1 word")
    require_other_output(out, [("the corpus", corpus.data)])
    idf = inverse_document_frequencies(with_progress(corpus.read(), "count words", unit="passage"))
    if not idf:
        raise ValueError(f"{corpus.source} has no passage with an English word that is not a stop word")
    with_keywords = total = 0
    with atomic_write(Path(out)) as file:
        rows = keywords(corpus.read(), idf, count)
        for passage, text in with_progress(rows, "keywords", unit="passage"):
            total += 1
            if text:
                with_keywords += 1
                file.write(json.dumps({"_id": passage.id, "text": text}, ensure_ascii=False) + "\n")
    return with_keywords, total


def _words(passage: Passage) -> list[str]:
    return _WORD.findall(f"{passage.title} {passage.text}".lower())
