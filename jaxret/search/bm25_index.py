"""A BM25 index on disk in the files of bm25s, built in blocks of passages, and stored with digests.

bm25s itself needs the words of all passages as Python lists, about 5 KB for a passage of 100 words. This module counts
the words of a block at a time, and writes postings to disk. Memory holds only the vocabulary and 4 bytes for each
passage.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import metadata
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import Stemmer

from jaxret.data.formats import Corpus, Policy
from jaxret.data.records import Passage
from jaxret.index.source import note_corpus
from jaxret.parallel.progress import with_progress
from jaxret.runs.mismatch import require_equal
from jaxret.search.bm25_settings import NO_LANGUAGE, BM25Settings
from jaxret.storage.atomic import read_with_digest, sha256_file, with_digest, write_json
from jaxret.storage.transaction import new_folder

BM25_MANIFEST = "manifest.json"
_BLOCK = 16_384  # passages whose words are in memory
_DATA, _INDICES, _POINTERS = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
_VOCABULARY, _PARAMETERS, IDS = "vocab.index.json", "params.index.json", "ids.txt"
_FILES = (_DATA, _INDICES, _POINTERS, _VOCABULARY, _PARAMETERS, IDS)
_POSTING = np.dtype([("word", np.int32), ("row", np.int32), ("count", np.int32)])


def bm25s_module() -> ModuleType:
    """Return the module bm25s. It is imported at the first use, because the import starts JAX, and
    jax.distributed.initialize() must run before."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # bm25s sets DEBUG, without regard to the level of the program
    return bm25s


def tokenize_words(texts: Iterable[str], language: str, return_ids: bool) -> Any:
    """Return the words of texts from bm25s's tokenizer: two letters or more, lower case, no stop words, stemmed.

    `language` is the field of BM25Settings. `return_ids` returns numbers and a vocabulary instead of words.
    """
    if language == NO_LANGUAGE:
        return bm25s_module().tokenize(texts, stopwords=None, return_ids=return_ids, show_progress=False)
    stemmer = Stemmer.Stemmer(language)
    return bm25s_module().tokenize(
        texts, stopwords=_stop_words(language), stemmer=stemmer, return_ids=return_ids, show_progress=False
    )


def _stop_words(language: str) -> str | None:
    """Return the name of bm25s's list of stop words; None if it has none for the language.

    For English, it is the longer of two lists. It also has question words (what, how, does), which raises nDCG@10 by
    0.01 to 0.02 on data sets of questions.
    """
    if language in ("english", "porter"):
        return "english_plus"
    lists = ("german", "dutch", "french", "spanish", "portuguese", "italian", "russian", "swedish", "norwegian")
    return language if language in (*lists, "turkish", "danish") else None


def keep_bm25_index(
    folder: Path, corpus: Corpus, settings: BM25Settings, policy: Policy, progress: bool = False
) -> tuple[bool, dict[str, Any]]:
    """Build the index of a corpus in a folder, unless the folder already has it. Return (whether it was built, its
    manifest).

    A build that was killed starts again from the beginning.

    Args:
        folder: the folder of the index.
        corpus: the corpus.
        settings: the settings of BM25.
        policy: the policy for bad records.
        progress: whether to show a bar.

    Raises:
        ContractError: the folder has the index of another corpus, or with other settings.
        ValueError: a file of the index is damaged, or no passage has a word.
        DataError: a bad record.
    """
    scan = corpus.scan(policy)
    inputs = {"corpus": {"sha256": scan.sha256, "passages": scan.passages}, "settings": asdict(settings)}
    if (folder / BM25_MANIFEST).exists():
        manifest = read_bm25_manifest(folder)
        stored_values = {key: manifest[key] for key in inputs}
        remedy = "Give another --workdir, or remove the folder of the index."
        require_equal(stored_values, inputs, f"{folder}/{BM25_MANIFEST}", "this command", remedy)
        note_corpus(folder, corpus, scan)  # the file of the corpus may have been moved
        return False, manifest
    with new_folder(folder) as work:
        write_bm25_index(work, corpus.read(policy, scan), settings, progress, scan.passages)
        note_corpus(work, corpus, scan)
        files = {name: {"bytes": (work / name).stat().st_size, "sha256": sha256_file(work / name)} for name in _FILES}
        packages = {name: metadata.version(name) for name in ("bm25s", "PyStemmer", "numpy")}
        write_json(work / BM25_MANIFEST, with_digest({**inputs, "files": files, "packages": packages}))
    return True, read_bm25_manifest(folder, verify=False)


def read_bm25_manifest(folder: Path, verify: bool = True) -> dict[str, Any]:
    """Return the manifest of an index. Raises FileNotFoundError if none exists, and ValueError for a damaged file."""
    manifest = read_with_digest(folder / BM25_MANIFEST)
    for name, entry in manifest["files"].items():
        path = folder / name
        intact = path.is_file() and path.stat().st_size == entry["bytes"]
        if not intact or (verify and sha256_file(path) != entry["sha256"]):
            raise ValueError(f"{path} is missing or damaged; remove {folder} and run the same command again")
    return manifest


def write_bm25_index(
    folder: Path, passages: Iterable[Passage], settings: BM25Settings, progress: bool = False, total: int | None = None
) -> None:
    """Write the index of passages with Lucene's formula. The text of a passage is `title + " " + text`.

    The score of a word in a passage is log(1 + (N - d + 0.5) / (d + 0.5)) * n / (n + k1 * (1 - b + b * l / mean)). N is
    the number of passages, d the number of passages with the word, n the count of the word in the passage, l the length
    of the passage in words (without stop words), and mean the mean length.

    Args:
        folder: an existing folder.
        passages: the corpus, in the order of its rows.
        settings: the settings of BM25.
        progress: whether to show a bar.
        total: number of passages, for the bar.

    Raises:
        ValueError: an id occurs twice, or no passage has a word.
    """
    vocabulary: dict[str, int] = {}
    lengths, sizes = array("i"), []
    raw = folder / "postings.raw"
    bar = with_progress(passages, "BM25 index", total, "passage", progress)
    with open(folder / IDS, "w", encoding="utf-8", newline="\n") as ids, open(raw, "wb") as file:
        for block in _split_passages(iter(bar)):
            ids.writelines(f"{passage.id}\n" for passage in block)
            postings = _count_words(block, settings.language, vocabulary, lengths)
            postings.tofile(file)
            sizes.append(len(postings))
    if not vocabulary:
        raise ValueError(f"none of the {len(lengths)} passages has a word; give a corpus with text")
    _write_scores(folder, raw, sizes, np.array(lengths), len(vocabulary), settings)
    raw.unlink()
    write_json(folder / _VOCABULARY, vocabulary)
    parameters = {"k1": settings.k1, "b": settings.b, "method": "lucene", "num_docs": len(lengths)}
    write_json(folder / _PARAMETERS, {**parameters, "version": metadata.version("bm25s")})


def _split_passages(passages: Iterator[Passage]) -> Iterator[list[Passage]]:
    while block := list(islice(passages, _BLOCK)):
        yield block


def _count_words(block: list[Passage], language: str, vocabulary: dict[str, int], lengths: array[int]) -> np.ndarray:
    """Return the postings of a block, sorted by word and row; extend the vocabulary and the lengths in entries."""
    tokens = tokenize_words((f"{passage.title} {passage.text}" for passage in block), language, True)
    numbers = np.zeros(len(tokens.vocab), np.int64)
    for word in sorted(tokens.vocab):  # bm25s numbers words differently in each run
        numbers[tokens.vocab[word]] = vocabulary.setdefault(word, len(vocabulary))
    first, counts = len(lengths), np.array([len(words) for words in tokens.ids], np.int32)
    lengths.frombytes(counts.tobytes())
    flat = np.fromiter((word for words in tokens.ids for word in words), np.int64, int(counts.sum()))
    keys, repeats = np.unique(numbers[flat] * len(block) + np.repeat(np.arange(len(block)), counts), return_counts=True)
    postings = np.empty(len(keys), _POSTING)
    postings["word"], postings["row"] = keys // len(block), keys % len(block) + first
    postings["count"] = repeats
    return postings


def _write_scores(
    folder: Path, raw: Path, sizes: list[int], lengths: np.ndarray, words: int, settings: BM25Settings
) -> None:
    """Sort the postings of all blocks by word, and write their scores as a sparse matrix [passages, words] by column.

    Args:
        folder: the folder of the index.
        raw: file with the postings of all blocks.
        sizes: number of postings of each block.
        lengths: number of words of each passage.
        words: size of the vocabulary.
        settings: the settings of BM25.
    """
    postings = np.memmap(raw, _POSTING, "r")
    ends = np.cumsum([0, *sizes])
    frequency = np.zeros(words, np.int64)
    for start, end in pairwise(ends):
        frequency += np.bincount(postings["word"][start:end], minlength=words)
    inverse = np.log(1 + (len(lengths) - frequency + 0.5) / (frequency + 0.5))
    norm = settings.k1 * (1 - settings.b + settings.b * (lengths / lengths.mean()))
    pointers = np.concatenate([[0], np.cumsum(frequency)])
    np.save(folder / _POINTERS, pointers, allow_pickle=False)
    create = np.lib.format.open_memmap
    data = create(folder / _DATA, "w+", np.float32, (len(postings),))
    indices = create(folder / _INDICES, "w+", np.int32, (len(postings),))
    next_offsets = pointers[:-1].copy()  # where the next posting of each word is written
    for start, end in pairwise(ends):
        block = postings[start:end]
        present, firsts, counts = np.unique(block["word"], return_index=True, return_counts=True)
        entries = np.repeat(next_offsets[present] - firsts, counts) + np.arange(len(block))
        data[entries] = inverse[block["word"]] * block["count"] / (block["count"] + norm[block["row"]])
        indices[entries] = block["row"]
        next_offsets[present] += counts
    data.flush()
    indices.flush()
