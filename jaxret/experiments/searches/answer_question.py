"""Search an encoded corpus for one question, and print the best passages: `jaxret search --query`.

It does not import evaluation and the formats of judgements, because imports take most of the time of an answer.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence

from jaxret.data.record_checks import check_question
from jaxret.data.records import Passage
from jaxret.index.shards import ShardError
from jaxret.parallel.events import emit
from jaxret.runs.mismatch import ContractError
from jaxret.search.searcher import Searcher


def show_answer(searcher: Searcher, question: str, k: int, progress: bool = True) -> None:
    """Print the best passages for a question.

    Args:
        searcher: searches the corpus.
        question: text of the question.
        k: number of passages.
        progress: whether progress is printed.
    """
    start = time.perf_counter()
    outcome = searcher.search([check_question(question)], k, progress)
    if not searcher.group.leads:
        return
    ranking = outcome.rankings["0"]
    passages: dict[str, Passage] = {}
    try:
        passages = searcher.texts.read({passage for passage, _ in ranking})
    except (FileNotFoundError, ContractError, ShardError) as error:
        print(error)
    seconds = time.perf_counter() - start
    print(f"{question}   ({search_kind(searcher)} of {describe_passages(searcher)}, {seconds:.3f} s)")
    print_ranking(ranking, passages)
    hits = []
    for rank, (key, score) in enumerate(ranking, 1):
        texts = {name: getattr(passages.get(key), name, None) for name in ("title", "text")}  # None: cannot be read
        hits.append({"rank": rank, "id": key, "score": score, **texts})
    emit("hits", question=question, exact=search_kind(searcher).startswith("exact"), seconds=seconds, hits=hits)


def print_ranking(ranking: Sequence[tuple[str, float]], passages: Mapping[str, Passage]) -> None:
    """Print a line for each passage: rank, score, id, title, and the beginning of the text."""
    for rank, (key, score) in enumerate(ranking, 1):
        passage = passages.get(key)
        title = f"{key}  {passage.title}" if passage and passage.title not in ("", key) else key
        text = textwrap.shorten(passage.text, 90, placeholder=" ...") if passage else ""
        print(f"{rank:3d}. {score:8.4f}  {title:<35}  {text}")


def describe_passages(searcher: Searcher) -> str:
    """Return the passages that are searched, such as "12 of 57,578 passages, those with section:python"."""
    rows, passages = searcher.encoded_corpus.total_rows, searcher.encoded_corpus.corpus_identity["passages"]
    clause = " that documents are ranked by" if searcher.max_passage else ""
    if not searcher.filters:
        return f"{passages:,} passages{clause}"
    return f"{rows:,} of {passages:,} passages{clause}, those with {' '.join(searcher.filters)}"


def search_kind(searcher: Searcher) -> str:
    """Return "approximate search" or "exact search"."""
    return "exact search" if searcher.vectors.is_exact() else "approximate search"
