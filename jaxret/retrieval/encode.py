"""A checkpoint and a corpus -> shards of vectors; resumable, and the same bytes whether interrupted or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxret import distributed
from jaxret.data.formats import CorpusScan, Policy, absolute, called, describe, is_named, scan_corpus, source_path
from jaxret.data.store import store_root
from jaxret.data.tokenized import TokenizedCorpus, find_corpus, stored_corpus
from jaxret.retrieval.passages import place
from jaxret.retrieval.shards import DTYPES, Shard, ShardError, ShardWriter, VectorError, read_entry
from jaxret.runs.embedder import Embedder
from jaxret.runs.lock import hold, locked
from jaxret.runs.run import Run
from jaxret.storage import sealed, write_json
from jaxret.types import VECTOR_DTYPES

# Passages per shard at most, unless asked for: a kill loses one shard's work. 8,192 passages take BERT-base about ten
# minutes on a laptop and seconds on an accelerator, are 25 MB, and sorting them by length wastes no more than 50,000.
SHARD_ROWS = 8192
COUNTED = 65_536  # passages whose vectors are counted at a time
MB = 10**6


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
    """The folder under embeddings/ for a corpus: the name of its BEIR folder or of its file, without suffixes, or
    of its set."""
    if is_named(source_path(path)):
        return called(path)
    path = source_path(path).absolute()
    path = path.resolve() if path.name in ("", "..") else path
    return path.name if path.is_dir() else path.name.split(".")[0]


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
        """As tokens, which are made unless they were before."""
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


def encode_corpus(
    run: Run,
    corpus: str | Path,
    name: str = "",
    on_error: str = "error",
    progress: bool = True,
    dtype: str = "",
    shard_rows: int = 0,
    store: str = "",
    shard_mb: int = 0,
) -> EncodeResult:
    """Encodes every passage of a folder or file into `<workdir>/embeddings/<name>/`.

    The corpus is checked, counted and, unless it was before, tokenised into a store; then one shard at a time is
    encoded, so memory does not grow with the corpus. With several processes, each writes its own shards.

    dtype: of the vectors on disk; "": the run's encode.dtype. shard_rows, shard_mb: passages per shard, and MB of
    vectors (10^6 bytes), whichever is less; 0: as the folder's shards have it, else the run's encode.shard_rows, but no
    more than SHARD_ROWS, and encode.shard_mb. store: the folder of token stores; "": the run's data.store, else the
    user's cache.

    Raises DataError for a bad record, ContractError if the folder holds vectors of another checkpoint or corpus,
    VectorError for a passage whose vectors are not finite, and ShardError if shards are missing in the end although no
    other process is to write them.
    """
    folder = run.workdir.embeddings(name or corpus_name(corpus))
    source = look_at(run, corpus, on_error, store, speaker(progress))
    return encode_source(run, folder, source, progress, dtype, shard_rows, shard_mb)


def encode_source(
    run: Run,
    folder: Path,
    source: Source,
    progress: bool = True,
    dtype: str = "",
    shard_rows: int = 0,
    shard_mb: int = 0,
) -> EncodeResult:
    """As `encode_corpus`, of a corpus that was looked at, into a folder."""
    say, scan = speaker(progress), source.scan
    dtype = vector_dtype(dtype or run.config.encode.dtype)
    rows = rows_begun(folder)
    if shard_mb or not rows or shard_rows not in (0, rows):
        rows = rows_per_shard(run, source, dtype, shard_rows, shard_mb, progress)
    produced_by = made_from(run, scan.sha256, scan.passages, dtype, rows, contract_begun(run, folder))
    writer = ShardWriter(folder, scan.passages, rows, produced_by, {"devices": run.mesh.size, "kind": device_kind(run)})
    embedder, mine = run.embedder(), []
    left = writer.pending() or read_entry(folder / "manifest.json") is None or locked(folder)
    if distributed.any_process(bool(left)):
        with hold(folder, "encoding"):
            mine = [s for s in writer.pending() if s.index % jax.process_count() == jax.process_index()]
            note_corpus(folder, source.corpus, scan)
            if mine:
                texts = source.tokenized(run, progress, say)
                say(f"{scan.passages:,} passages in {mine[0].count} shard(s), {len(mine)} to encode")
                say(str(texts.truncation))
                write_shards(run, embedder, writer, mine, texts, source.corpus, progress)
            distributed.wait_for_all()
            finished = finish(writer, say)
    else:
        note_corpus(folder, source.corpus, scan)
        finished = finish(writer, say)
    if mine:
        say(f"{embedder.padding_ratio:.2f} tokens computed for each real one, {embedder.programs} programs compiled")
    return EncodeResult(
        folder=folder,
        passages=scan.passages,
        shards=len(writer.shards),
        shards_written=len(mine),
        padding_ratio=embedder.padding_ratio,
        programs=embedder.programs,
        truncation=str(source.texts.truncation) if source.texts else "",
        finished=finished,
    )


def rows_per_shard(run: Run, source: Source, dtype: str, shard_rows: int, shard_mb: int, progress: bool = False) -> int:
    """Passages per shard: as many as are allowed, and as have no more than the allowed MB of vectors. Where a passage
    has as many vectors as tokens, these are counted first, so that the largest shard is within the limit too."""
    rows = shard_rows or min(run.config.encode.shard_rows, SHARD_ROWS)
    megabytes = shard_mb or run.config.encode.shard_mb
    vectors = megabytes * MB // (run.retriever.dimension * np.dtype(DTYPES[dtype]).itemsize)
    each = run.retriever.vectors_per_passage
    if each is not None:
        return max(1, min(rows, vectors // each))
    passages = source.tokenized(run, progress, speaker(progress)).passages
    parts = np.array_split(np.arange(len(passages)), -(-len(passages) // COUNTED))
    counts = np.concatenate([run.retriever.vector_counts(passages.take(part), "passage") for part in parts])
    return rows_within(counts, rows, vectors)


def rows_within(counts: np.ndarray, rows: int, most: int) -> int:
    """Of equal shards of at most `rows` passages, which have `counts` vectors [N], a size at which none has above
    `most` (or 1)."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    rows = min(rows, len(counts))
    while rows > 1:
        starts = np.arange(0, len(counts), rows)
        largest = int((ends[np.minimum(starts + rows, len(counts))] - ends[starts]).max())
        if largest <= most:
            break
        rows = max(1, min(rows - 1, rows * most // largest))
    return rows


def write_shards(
    run: Run,
    embedder: Embedder,
    writer: ShardWriter,
    shards: list[Shard],
    texts: TokenizedCorpus,
    corpus: str | Path,
    progress: bool,
) -> None:
    """Encodes and writes some shards, one at a time. The bar is that of all shards of this process, also of those that
    an earlier start wrote."""
    dtype = writer.made_from["fingerprint"]["encode"]["dtype"]
    fixed = run.retriever.vectors_per_passage is not None
    own = [shard for shard in writer.shards if shard.index % jax.process_count() == jax.process_index()]
    total, left = sum(shard.rows for shard in own), sum(shard.rows for shard in shards)
    with tqdm(total=total, initial=total - left, desc="encode", unit="text", disable=not progress, delay=1) as bar:
        for done, shard in enumerate(shards, len(own) - len(shards)):
            bar.set_postfix_str(f"{done} of {len(own)} shards", refresh=False)
            tokens = texts.passages.part(shard.start, shard.stop)
            vectors = embedder(tokens, "passage", advance=bar.update).astype(dtype)
            try:
                writer.write(shard, vectors.stacked() if fixed else vectors, texts.ids[shard.start : shard.stop])
            except VectorError as error:
                raise ValueError(f"{place(corpus, error.passage_id)}{error}") from error
        bar.set_postfix_str(f"{len(own)} of {len(own)} shards")


def finish(writer: ShardWriter, say: Say) -> bool:
    """Completes the folder, if every shard is there; those of other processes may not be."""
    missing = writer.pending()
    if missing and jax.process_count() == 1:
        raise ShardError(
            f"{writer.folder}: {len(missing)} of {len(writer.shards)} shards, from {missing[0]} on, were changed or "
            "removed while others were written: does another job encode into this folder? Run encode again"
        )
    if missing:
        return False
    made_on = {str(entry.get("made_on", "others")) for entry in writer.finish().shards}
    if len(made_on) > 1:
        say(f"shards were made on {' and on '.join(sorted(made_on))}: their last digits differ by rounding")
    return True


def note_corpus(folder: Path, corpus: str | Path, scan: CorpusScan) -> None:
    """Writes where to find the text again, if that is not written there: a finished folder may be read-only."""
    where = {"path": absolute(corpus), **scan.stat}
    if read_entry(folder / "corpus.json") != where:
        write_json(folder / "corpus.json", sealed(where))


def begun(folder: Path) -> Iterator[dict[str, Any]]:
    """What the shards that are in a folder were made from."""
    for path in [folder / "manifest.json", *sorted(folder.glob("shard-*.json"))]:
        yield read_entry(path) or {}


def rows_begun(folder: Path) -> int:
    """The rows per shard of a folder that has some; 0 if none has."""
    return next((rows for entry in begun(folder) if type(rows := entry.get("rows_per_shard")) is int), 0)


def contract_begun(run: Run, folder: Path) -> dict[str, Any]:
    """The run's contract, as an older version wrote it if the folder has shards of that version."""
    for entry in begun(folder):
        made_by = entry.get("fingerprint")
        contract = made_by.get("contract") if isinstance(made_by, dict) else None
        if isinstance(contract, dict) and run.understands(contract):
            return contract
    return run.contract


def device_kind(run: Run) -> str:
    return str(run.mesh.devices.flat[0].device_kind)


def vector_dtype(name: str) -> str:
    """numpy's name of the type of the vectors on disk."""
    if name not in VECTOR_DTYPES:
        raise ValueError(f"encode.dtype is {name!r}; it must be one of {', '.join(VECTOR_DTYPES)}")
    return name


def made_from(
    run: Run, sha256: str, passages: int, dtype: str, shard_rows: int, contract: dict[str, Any]
) -> dict[str, Any]:
    """Everything that the bytes of the shards depend on."""
    settings = {"dtype": dtype, "shard_rows": shard_rows, "tokens_per_batch": run.config.encode.tokens_per_batch}
    return {
        "contract": contract,
        "checkpoint": run.checkpoint,
        "corpus": {"sha256": sha256, "passages": passages},
        "encode": settings,
    }
