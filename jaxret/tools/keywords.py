"""jaxret keywords: pseudo-queries from the passages' own words, where no query generator is at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxret.data.formats import Policy, read_corpus
from jaxret.data.records import Passage
from jaxret.storage import atomic_write

_BLOCK = 1000  # passages weighed at a time


def keywords(passages: Iterable[Passage], vectorizer: Any, count: int) -> Iterator[tuple[Passage, str]]:
    """Each passage and its `count` words of the highest TF-IDF weight, best first, equal ones by alphabet; fewer, or
    none, if it has no more that count. `vectorizer` is a fitted TfidfVectorizer of scikit-learn."""
    words = vectorizer.get_feature_names_out()
    iterator = iter(passages)
    while block := list(islice(iterator, _BLOCK)):
        weights = vectorizer.transform(map(_text, block))
        for row, passage in enumerate(block):
            part = weights[row]
            best = np.lexsort((part.indices, -part.data))[:count]
            yield passage, " ".join(words[part.indices[best]])


def write_keywords(corpus: str | Path, out: str | Path, count: int = 8, progress: bool = True) -> tuple[int, int]:
    """Writes {"_id": passage id, "text": keywords} lines for a corpus; reads it twice.

    Returns (passages with keywords, passages). English stop words and words of one letter are left out.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    if count < 1:
        raise ValueError(f"count is {count}; a pseudo-query has at least 1 word")
    vectorizer = TfidfVectorizer(stop_words="english", sublinear_tf=True)
    try:
        vectorizer.fit(map(_text, tqdm(read_corpus(corpus, Policy()), "count words", disable=not progress, delay=1)))
    except ValueError as error:
        if "empty vocabulary" not in str(error):
            raise
        raise ValueError(f"{corpus} has no passage with an English word that is not a stop word") from error
    found = total = 0
    with atomic_write(Path(out)) as file:
        rows = keywords(read_corpus(corpus, Policy()), vectorizer, count)
        for passage, text in tqdm(rows, "keywords", unit="passage", disable=not progress, delay=1):
            total += 1
            if text:
                found += 1
                file.write(json.dumps({"_id": passage.id, "text": text}, ensure_ascii=False) + "\n")
    return found, total


def _text(passage: Passage) -> str:
    return f"{passage.title} {passage.text}"
