"""A BM25 index on disk in bm25s's files, built a block of passages at a time and kept with digests.

bm25s builds an index from the words of all passages as Python lists, about 5 KB a passage of 100 words. Here they are
counted a block at a time, into postings on disk, so that memory does not grow with the corpus but for the vocabulary
and 4 bytes a passage.
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

MANIFEST = "manifest.json"
_BLOCK = 16_384  # passages whose words are in memory
_DATA, _INDICES, _POINTERS = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
_VOCABULARY, _PARAMETERS, IDS = "vocab.index.json", "params.index.json", "ids.txt"
_FILES = (_DATA, _INDICES, _POINTERS, _VOCABULARY, _PARAMETERS, IDS)
_POSTING = np.dtype([("word", np.int32), ("row", np.int32), ("count", np.int32)])


def bm25s_module() -> ModuleType:
    """Return bm25s, imported at first use, because importing it starts JAX: jax.distributed.initialize() must have run
    by then."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG, whatever the program's level is
    return bm25s


def tokenize_words(texts: Iterable[str], language: str, return_ids: bool) -> Any:
    """Return the words of texts as bm25s does: two letters or more, in lower case, without stop words, stemmed.

    Args:
        language: of BM25Settings.
        return_ids: numbers and a vocabulary; else words.
    """
    if language == NO_LANGUAGE:
        return bm25s_module().tokenize(texts, stopwords=None, return_ids=return_ids, show_progress=False)
    stemmer = Stemmer.Stemmer(language)
    return bm25s_module().tokenize(
        texts, stopwords=_stop_words(language), stemmer=stemmer, return_ids=return_ids, show_progress=False
    )


def _stop_words(language: str) -> str | None:
    """Return the name of bm25s's list of stop words; None if it has none for the language.

    For English the longer of its two lists: it also has the words that questions are made of (what, how, does), which
    on question data sets is worth 0.01 to 0.02 of nDCG@10.
    """
    if language in ("english", "porter"):
        return "english_plus"
    lists = ("german", "dutch", "french", "spanish", "portuguese", "italian", "russian", "swedish", "norwegian")
    return language if language in (*lists, "turkish", "danish") else None


def keep_bm25_index(
    folder: Path, corpus: Corpus, settings: BM25Settings, policy: Policy, progress: bool = False
) -> tuple[bool, dict[str, Any]]:
    """Build the index of a corpus into a folder unless it is there; return whether it was built, and its manifest.

    A build that is killed leaves nothing that counts, and starts again.

    Args:
        policy: for bad records.

    Raises:
        ContractError: the folder has the index of another corpus, or with other settings.
        ValueError: a file of the index is damaged, or no passage has a word.
        DataError: a bad record.
    """
    scan = corpus.scan(policy)
    inputs = {"corpus": {"sha256": scan.sha256, "passages": scan.passages}, "settings": asdict(settings)}
    if (folder / MANIFEST).exists():
        manifest = read_bm25_manifest(folder)
        stored_values = {key: manifest[key] for key in inputs}
        remedy = "Give another --workdir, or remove the folder of the index."
        require_equal(stored_values, inputs, f"{folder}/{MANIFEST}", "this command", remedy)
        note_corpus(folder, corpus, scan)  # it may have been moved
        return False, manifest
    with new_folder(folder) as work:
        write_bm25_index(work, corpus.read(policy, scan), settings, progress, scan.passages)
        note_corpus(work, corpus, scan)
        files = {name: {"bytes": (work / name).stat().st_size, "sha256": sha256_file(work / name)} for name in _FILES}
        packages = {name: metadata.version(name) for name in ("bm25s", "PyStemmer", "numpy")}
        write_json(work / MANIFEST, with_digest({**inputs, "files": files, "packages": packages}))
    return True, read_bm25_manifest(folder, verify=False)


def read_bm25_manifest(folder: Path, verify: bool = True) -> dict[str, Any]:
    """Return the manifest of an index. Raises FileNotFoundError without one, and ValueError for a damaged file."""
    manifest = read_with_digest(folder / MANIFEST)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or (verify and _differs(path, entry)):
            raise ValueError(f"{path} is missing or damaged; remove {folder} and run the same command again")
    return manifest


def _differs(path: Path, entry: dict[str, Any]) -> bool:
    return sha256_file(path) != entry["sha256"]


def write_bm25_index(
    folder: Path, passages: Iterable[Passage], settings: BM25Settings, progress: bool = False, total: int | None = None
) -> None:
    """Write the index of passages, with `title + " " + text` each, by Lucene's formula.

    The score of a word w in a passage of length l (words, without stop words) that has it n times, among N passages of
    which d have it: log(1 + (N - d + 0.5) / (d + 0.5)) * n / (n + k1 * (1 - b + b * l / mean length)).

    Args:
        folder: an existing folder.
        passages: the corpus, in the order of its rows.
        total: number of passages, for the bar.

    Raises:
        ValueError: an id occurs twice, or no passage has a word.
    """
    vocabulary: dict[str, int] = {}
    lengths, sizes = array("i"), []
    raw = folder / "postings.raw"
    bar = with_progress(passages, "BM25 index", total, "passage", progress)
    with open(folder / IDS, "w", encoding="utf-8", newline="\n") as ids, open(raw, "wb") as file:
        for block in _blocks(iter(bar)):
            ids.writelines(f"{passage.id}\n" for passage in block)
            postings = _count_words(block, settings.language, vocabulary, lengths)
            postings.tofile(file)
            sizes.append(len(postings))
    if not vocabulary:
        raise ValueError(f"no word in any of the {len(lengths)} passages; give a corpus with text")
    _write_scores(folder, raw, sizes, np.array(lengths), len(vocabulary), settings)
    raw.unlink()
    write_json(folder / _VOCABULARY, vocabulary)
    parameters = {"k1": settings.k1, "b": settings.b, "method": "lucene", "num_docs": len(lengths)}
    write_json(folder / _PARAMETERS, {**parameters, "version": metadata.version("bm25s")})


def _blocks(passages: Iterator[Passage]) -> Iterator[list[Passage]]:
    while block := list(islice(passages, _BLOCK)):
        yield block


def _count_words(block: list[Passage], language: str, vocabulary: dict[str, int], lengths: array[int]) -> np.ndarray:
    """Return the postings of a block, by word and then by row; extend the vocabulary and the lengths."""
    tokens = tokenize_words((f"{passage.title} {passage.text}" for passage in block), language, True)
    numbers = np.zeros(len(tokens.vocab), np.int64)
    for word in sorted(tokens.vocab):  # bm25s's own numbers differ from run to run
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
        raw: the postings of the blocks.
        sizes: postings of each block.
        lengths: words of each passage.
        words: size of the vocabulary.
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
    next_places = pointers[:-1].copy()  # where the next posting of each word goes
    for start, end in pairwise(ends):
        block = postings[start:end]
        present, firsts, counts = np.unique(block["word"], return_index=True, return_counts=True)
        place = np.repeat(next_places[present] - firsts, counts) + np.arange(len(block))
        data[place] = inverse[block["word"]] * block["count"] / (block["count"] + norm[block["row"]])
        indices[place] = block["row"]
        next_places[present] += counts
    data.flush()
    indices.flush()
