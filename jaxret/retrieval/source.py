"""A corpus that is to be encoded: looked at, and tokenised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from tqdm import tqdm

from jaxret.data.formats import CorpusScan, Policy, absolute, describe, scan_corpus
from jaxret.data.store import store_root
from jaxret.data.tokenized import TokenizedCorpus, find_corpus, stored_corpus
from jaxret.runs.run import Run
from jaxret.storage import sealed, write_json

Say = Callable[[str], None]


@dataclass
class Source:
    """A corpus that was looked at: counted and digested, and tokenised where it was before."""

    corpus: str | Path
    policy: Policy
    root: Path  # of token stores
    scan: CorpusScan
    texts: TokenizedCorpus | None

    def tokenized(self, run: Run, progress: bool, say: Say) -> TokenizedCorpus:
        """As tokens in a store, which are made unless they were before: for what needs the whole corpus at once."""
        if self.texts is None:
            self.texts = stored_corpus(self.corpus, self.scan, self.policy, run.tokenizer, self.root, progress, say)
        return self.texts


def look_at(run: Run, corpus: str | Path, on_error: str, store: str, say: Say) -> Source:
    """Checks and counts a corpus. Raises DataError for a bad record, ValueError if there is no passage."""
    root, policy = store_root(store or run.config.data.store), Policy(on_error)
    say(f"{corpus}: {describe(corpus, 'passages')}")
    texts = find_corpus(corpus, policy, run.tokenizer, root)
    scan = texts.scan if texts else scan_corpus(corpus, policy)
    if report := texts.report if texts else policy.report():
        say(report)
    if not scan.passages:
        raise ValueError(f"{corpus} has no passage to encode; give a folder or file with some")
    return Source(corpus, policy, root, scan, texts)


def speaker(progress: bool) -> Say:
    return tqdm.write if progress and jax.process_index() == 0 else lambda _: None


def note_corpus(folder: Path, corpus: str | Path, scan: CorpusScan, work: Path | None = None) -> None:
    """Writes where to find the text again."""
    write_json(folder / "corpus.json", sealed({"path": absolute(corpus), **scan.stat}), work)
