"""A checkpoint and a corpus -> shards of vectors; resumable, and the same bytes whether interrupted or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxret.data.formats import Policy, check_unchanged, read_corpus, scan_corpus
from jaxret.data.records import Passage
from jaxret.data.tokenizer import Truncation
from jaxret.retrieval.shards import Shard, ShardWriter
from jaxret.runs.run import Run
from jaxret.storage import write_json
from jaxret.types import VECTOR_DTYPES


@dataclass(frozen=True)
class EncodeResult:
    """What a call of `encode_corpus` did."""

    folder: Path
    passages: int
    shards: int
    shards_written: int  # the others were there already
    padding_ratio: float  # tokens computed for each real one
    programs: int  # compiled
    truncation: str
    finished: bool  # every shard is there, those of other processes too


def corpus_name(path: str | Path) -> str:
    """The folder under embeddings/ for a corpus: the name of its BEIR folder or of its file, without suffixes."""
    path = Path(path).absolute()
    path = path.resolve() if path.name in ("", "..") else path
    return path.name if path.is_dir() else path.name.split(".")[0]


def encode_corpus(
    run: Run, corpus: str | Path, name: str = "", on_error: str = "error", progress: bool = True
) -> EncodeResult:
    """Encodes every passage of a BEIR folder, corpus.jsonl or psgs.tsv into `<workdir>/embeddings/<name>/`.

    A first pass checks and counts the corpus; then one shard at a time is read, tokenised and encoded, so memory does
    not grow with the corpus. With several processes, each writes its own shards. Raises DataError for a bad record and
    ContractError if the folder holds vectors of another checkpoint or corpus.
    """
    say = tqdm.write if progress and jax.process_index() == 0 else lambda _: None
    policy = Policy(on_error)
    scan = scan_corpus(corpus, policy)
    if policy.report():
        say(policy.report())
    if not scan.passages:
        raise ValueError(f"{corpus} has no passage to encode; give a BEIR folder, corpus.jsonl or psgs.tsv with some")
    folder = run.workdir / "embeddings" / (name or corpus_name(corpus))
    produced_by = made_from(run, scan.sha256, scan.passages)
    writer = ShardWriter(folder, scan.passages, run.config.encode.shard_rows, produced_by)
    where = {"path": str(Path(corpus).absolute()), **scan.stat}
    write_json(folder / "corpus.json", where)  # where to find the text again
    pending = [s for s in writer.pending() if s.index % jax.process_count() == jax.process_index()]
    if pending:
        say(f"{scan.passages:,} passages in {pending[0].count} shard(s), {len(pending)} to encode")

    embedder, dtype = run.embedder(), vector_dtype(run.config.encode.dtype)
    passages = read_corpus(corpus, Policy(on_error), scan)
    cut = Truncation("passages", run.tokenizer.passage_length)
    for shard, rows in each_shard(passages, pending):
        ids: list[str] = []  # noted as the passages go by: only their tokens are kept
        tokens = run.tokenizer.passages(_noting(ids, rows), progress, cut)
        if shard is pending[0]:
            say(f"{cut}{' (the first shard)' if shard.count > 1 else ''}")
        vectors = embedder(tokens, "passage", progress).astype(dtype)
        fixed = run.retriever.vectors_per_passage is not None
        scan = check_unchanged(corpus, scan)  # shards of two corpora under one digest would never be found
        writer.write(shard, vectors.stacked() if fixed else vectors, ids)
    finished = not writer.pending()
    if finished:
        writer.finish()
    truncation = str(cut) if pending else ""
    if pending:
        total = f"{truncation}; " if len(pending) > 1 else ""  # of one shard it was said before
        say(
            f"{total}{embedder.padding_ratio:.2f} tokens computed for each real one, "
            f"{embedder.programs} programs compiled"
        )
    shards = -(-scan.passages // run.config.encode.shard_rows)
    return EncodeResult(
        folder, scan.passages, shards, len(pending), embedder.padding_ratio, embedder.programs, truncation, finished
    )


def each_shard(passages: Iterator[Passage], pending: list[Shard]) -> Iterator[tuple[Shard, Iterator[Passage]]]:
    """Reads the corpus once and yields the passages of each pending shard, to be taken before the next."""
    place = 0
    for shard in pending:
        for _ in islice(passages, shard.start - place):
            pass
        yield shard, islice(passages, shard.stop - shard.start)
        place = shard.stop


def _noting(ids: list[str], passages: Iterator[Passage]) -> Iterator[Passage]:
    for passage in passages:
        ids.append(passage.id)
        yield passage


def vector_dtype(name: str) -> Any:
    """numpy type of the vectors on disk."""
    if name not in VECTOR_DTYPES:
        raise ValueError(f"encode.dtype is {name!r}; it must be one of {', '.join(VECTOR_DTYPES)}")
    return np.dtype(name).type


def made_from(run: Run, sha256: str, passages: int) -> dict[str, Any]:
    """Everything that the bytes of the shards depend on."""
    return {
        "contract": run.contract,
        "checkpoint": run.checkpoint,
        "corpus": {"sha256": sha256, "passages": passages},
        "encode": run.config.encode.to_dict(),
    }
