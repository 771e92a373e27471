"""The source of an encoded corpus: its inspection before encoding, and the record of its path (corpus.json)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jaxret.data.formats import Corpus, CorpusScan, Policy, source_path
from jaxret.data.tokens.store import store_root
from jaxret.data.tokens.tokenized import TokenizedCorpus, load_or_tokenize_corpus, load_tokenized_corpus
from jaxret.index.shards import read_entry
from jaxret.runs.run import Run
from jaxret.storage.atomic import with_digest, write_json
from jaxret.types import Log


@dataclass
class CorpusSource:
    """An inspected corpus: counted and digested, with its tokens if it was tokenized before."""

    corpus: Corpus
    policy: Policy
    root: Path  # folder of token stores
    scan: CorpusScan
    texts: TokenizedCorpus | None  # tokens from a store; None: the corpus is not tokenized yet

    def open_tokens(self, run: Run, progress: bool, log: Log) -> TokenizedCorpus:
        """Return the tokens of the corpus from a store, for steps that need the whole corpus at once. Make the store if
        it does not exist."""
        if self.texts is None:
            self.texts = load_or_tokenize_corpus(
                self.corpus, self.scan, self.policy, run.tokenizer, self.root, progress, log
            )
        return self.texts


def inspect_corpus(run: Run, corpus: Corpus, on_error: str, store: str, log: Log) -> CorpusSource:
    """Check and count a corpus. Raises DataError for a bad record, and ValueError if the corpus has no passage.

    Args:
        run: run whose tokenizer made the token store, if it exists.
        corpus: corpus to check.
        on_error: "error", "skip" or "keep".
        store: folder of token stores; "": the run's folder.
        log: function for messages.
    """
    root, policy = store_root(store or run.config.data.store), Policy(on_error)
    log(f"{corpus}: {corpus.file}")
    texts = load_tokenized_corpus(corpus, policy, run.tokenizer, root)
    scan = texts.scan if texts else corpus.scan(policy)
    if report := texts.report if texts else policy.report():
        log(report)
    if not scan.passages:
        raise ValueError(f"{corpus} has no passage to encode; give a folder or file with passages")
    return CorpusSource(corpus, policy, root, scan, texts)


def note_corpus(folder: Path, corpus: Corpus, scan: CorpusScan, work: Path | None = None) -> None:
    """Write corpus.json, the record of the path, size and time of a corpus.

    Args:
        folder: folder of the vectors.
        corpus: corpus that is encoded.
        scan: scan of the corpus, with its size and time.
        work: folder of the file until it is complete.
    """
    write_json(folder / "corpus.json", with_digest({"path": corpus.absolute, **scan.stat}), work)


def open_source(path: str) -> Corpus:
    """Open the corpus at the path in a corpus.json (`note_corpus`). Raises DataError if it no longer exists."""
    return Corpus.open(path)


def encoded_source(folder: Path) -> str:
    """Return the absolute path of the folder or file that was encoded into `folder`, or "" if it is unknown."""
    path = (read_entry(folder / "corpus.json") or {}).get("path")
    return path if isinstance(path, str) else ""


def encoded_sources(run: Path) -> list[str]:
    """Return the known sources (`encoded_source`) of the corpora that a run has encoded or `jaxret bm25` has
    indexed."""
    return [source for file in sorted(run.glob("*/*/corpus.json")) if (source := encoded_source(file.parent))]


def is_source(path: str, name: str) -> bool:
    """Return whether a name and a path refer to the same file or folder, even if they are spelled differently."""
    return bool(path) and os.path.realpath(source_path(path)) == os.path.realpath(source_path(name))
