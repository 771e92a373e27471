"""Encode a corpus with a checkpoint into shards of vectors, by any number of jobs. Jobs can be killed and started
again; the bytes of the shards are always the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxret.data.formats import ChangedCorpusError, Corpus, is_named, source_exists, source_path
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.collapse import collapse_warning
from jaxret.index.encoding.cut_corpus import cut_corpus, find_larger_vectors, named_larger_vectors
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.encode_plan import make_encode_plan
from jaxret.index.encoding.worker import EncodeWorker, finish_encoding
from jaxret.index.shard_set import ShardSet
from jaxret.index.shards import Manifest, ShardWriter, read_manifest
from jaxret.index.source import CorpusSource, inspect_corpus
from jaxret.parallel.events import emit
from jaxret.parallel.progress import job_log
from jaxret.runs.encoded_steps import ANNOUNCEMENT_FILE, announcement_files
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run, require_checkpoint
from jaxret.runs.run_warnings import RunWarning, keep_warnings, read_warnings
from jaxret.storage.atomic import write_json
from jaxret.storage.buckets.bucket_leases import open_leases
from jaxret.storage.buckets.working_copy import publish

SHARD_WARNINGS = {"collapse", "devices"}  # kinds that every job checks, also for passages that other jobs encoded


@dataclass(frozen=True)
class EncodeResult:
    """Counts of a call of `encode_corpus`."""

    folder: Path  # folder of the encoded corpus
    passages: int
    shards: int  # number of all shards
    shards_written: int  # shards that this job wrote; the others existed, or other jobs wrote them
    padding_ratio: float  # tokens computed for each real one
    programs: int  # number of compiled programs
    truncation: str  # a sentence about texts that were cut
    timing: dict[str, Any] | None  # JSON about the passages that this job encoded; None if it encoded none
    warnings: tuple[RunWarning, ...] = ()  # warnings about cut texts, collapsed vectors and mixed devices

    def describe_timing(self) -> str:
        """Return a line about the time; "" if this job encoded nothing."""
        if not self.timing:
            return ""
        passages, seconds, rate = (self.timing[key] for key in ("passages", "seconds", "passages_per_second"))
        speed = f"{self.timing['ms_per_passage']:,.3f} ms per passage, {rate:,.1f} per second"
        return f"{passages:,} passages encoded in {seconds:,.1f} s, compilation included: {speed}"


def corpus_name(corpus: Corpus) -> str:
    """Return the name of the folder under embeddings/ for a corpus: the name of its BEIR folder, of its file without
    suffixes, or of its data set."""
    path = source_path(corpus.source)
    if is_named(path):
        return corpus.name
    path = path.absolute()
    path = path.resolve() if path.name in ("", "..") else path
    return path.name if path.is_dir() else path.name.split(".")[0]


def default_name(corpus: Corpus | str, dimension: int = 0) -> str:
    """Return the default name of an encoded corpus. If vectors are cut, it ends with their size, and a name of an
    encoded corpus is used up to its first dot."""
    name = corpus.split(".")[0] if isinstance(corpus, str) else corpus_name(corpus)
    return f"{name}-{dimension}" if dimension else name


def find_corpus(source: str, options: EncodeOptions) -> Corpus | None:
    """Return the corpus at a path. Return None if vectors are to be cut and the path does not exist: it is then the
    name of an encoded corpus (`cut_encoded`). Raises DataError for any other path without a corpus."""
    return None if options.dimension and not source_exists(source) else Corpus.open(source)


def encode_corpus(
    run: Run, corpus: Corpus, name: str = "", options: EncodeOptions = EncodeOptions(), progress: bool = True
) -> EncodeResult:
    """Encode every passage of a corpus into `<workdir>/embeddings/<name>/`.

    The corpus is checked and counted; then one shard after another is read, tokenized (unless a store has its tokens),
    encoded and written, all at the same time, so memory does not grow with the corpus. Any number of jobs may encode at
    the same time, on any hosts that share the folder. Each job claims shards that no other job has (`leases.py`), takes
    over the shards of jobs that died, and returns when all shards exist.

    Args:
        run: the run whose checkpoint encodes.
        corpus: corpus to encode.
        name: name of the encoded corpus; "": `default_name`.
        options: how to read, encode and write.

    Raises:
        DataError: a bad record.
        ContractError: the folder holds vectors of another checkpoint or corpus.
        VectorError: vectors of a passage are not finite.
        ShardError: shards that were written are changed or removed while others are written.
    """
    name = name or default_name(corpus, options.dimension)
    if larger := find_vectors_to_cut(run, corpus, name, options):
        return cut_encoded(run, larger.name, options, name, progress)
    if options.dimension:
        run = run.with_dimension(options.dimension, "--dimension")
    folder = run.workdir.embeddings(name)
    source = inspect_corpus(run, corpus, options.on_error, options.store, job_log(progress))
    result = encode_source(run, folder, source, options, progress)
    keep_result(run, folder.name, result)
    publish(run.workdir)
    return result


def find_vectors_to_cut(run: Run, corpus: Corpus, name: str, options: EncodeOptions) -> Path | None:
    """Return the folder of the encoded corpus whose vectors `encode_corpus` cuts; None if it encodes the passages.

    Args:
        run, corpus, name, options: see `encode_corpus`.
    """
    if not options.dimension:
        return None
    run = run.with_dimension(options.dimension, "--dimension")
    folder = run.workdir.embeddings(name or default_name(corpus, options.dimension))
    return find_larger_vectors(run, corpus, folder, options.dtype)


def cut_encoded(
    run: Run, encoded_name: str, options: EncodeOptions, name: str = "", progress: bool = True
) -> EncodeResult:
    """Make an encoded corpus with shorter vectors: cut the vectors of another one to `options.dimension`. No text is
    read.

    Args:
        run: the run that encoded it.
        encoded_name: name of the encoded corpus.
        options: dimension and dtype.
        name: name of the new corpus; "": `default_name`.
        progress: whether to show progress.

    Raises:
        DataError: the run has no such corpus with vectors that can be cut.
        ValueError: an option changes the rows of shards, which stay the same.
        ContractError: the folder holds vectors of another corpus, checkpoint or dimension.
    """
    run = run.with_dimension(options.dimension, "--dimension")
    folder = run.workdir.embeddings(name or default_name(encoded_name, options.dimension))
    larger = named_larger_vectors(run, encoded_name, folder, options.dtype)
    if options.shard_rows or options.shard_mb:
        raise ValueError(
            f"dimension={options.dimension} cuts the shards of {larger.name} one by one, and they keep their rows: "
            "remove shard_rows and shard_mb"
        )
    job_log(progress)(
        f"the first {options.dimension} numbers of the vectors in {larger}, none of which is encoded again"
    )
    count = cut_corpus(run, larger, folder, options.dtype, progress, options.lease)
    manifest, cut = read_manifest(folder / "manifest.json"), open_encoded(folder)
    warnings = (*_text_warnings(run, larger.name), *shard_warnings(folder, manifest, job_log(progress)))
    shard_count = sum(len(part.manifest.shards) for part in cut.shards)
    result = EncodeResult(folder, cut.total_rows, shard_count, count, 0.0, 0, "", None, warnings)
    keep_result(run, folder.name, result)
    publish(folder)
    return _emit_result(result, manifest)


def _text_warnings(run: Run, encoded_name: str) -> list[RunWarning]:
    """Return the warnings about the texts of an encoded corpus, including appended texts."""
    lists = [
        warnings
        for job, warnings in read_warnings(run.workdir).items()
        if job == f"encode {encoded_name}" or job.rpartition(" ")[0] == f"append {encoded_name}"
    ]
    return [warning for warnings in lists for warning in warnings if warning.kind not in SHARD_WARNINGS]


def _emit_result(result: EncodeResult, manifest: Manifest) -> EncodeResult:
    """Return a result after emitting its event."""
    emit(
        "encoding",
        folder=result.folder,
        passages=result.passages,
        vectors=manifest.vectors,
        bytes=manifest.bytes,
        shards=result.shards,
        shards_written=result.shards_written,
        timing=result.timing,
        warnings=[warning.text for warning in result.warnings],
    )
    return result


def keep_result(run: Run, encoded_name: str, result: EncodeResult, part: int = 0) -> None:
    """Keep the warnings and the time of a job in the run's folder.

    A job that encoded nothing also keeps the warnings of earlier jobs. It writes nothing if the warnings are unchanged,
    because a finished folder may be read-only. Only the first process writes.

    Args:
        run: the run that encoded.
        encoded_name: name of the encoded corpus.
        result: result of the job.
        part: number of the appended part; 0: the corpus itself.
    """
    if jax.process_index() != 0:
        return
    job = f"append {encoded_name} {part}" if part else f"encode {encoded_name}"
    stored_warnings = read_warnings(run.workdir).get(job, [])
    text_warnings = [warning for warning in stored_warnings if warning.kind not in SHARD_WARNINGS]
    warnings = list(dict.fromkeys([*([] if result.shards_written else text_warnings), *result.warnings]))
    if result.shards_written or warnings != stored_warnings:
        keep_warnings(run.workdir, job, warnings)
    if result.timing:
        name = f"{encoded_name}.append-{part}" if part else encoded_name
        write_json(run.workdir.encoding_time(name), result.timing)


def encoding_time(run: Run, passages: int, seconds: float) -> dict[str, Any]:
    """Return the time of encoding, as JSON.

    Args:
        run: the run that encoded.
        passages: number of passages.
        seconds: time from reading the first text to writing the last shard.
    """
    return {
        "passages": passages,
        "seconds": round(seconds, 3),
        "ms_per_passage": round(1000 * seconds / passages, 4),
        "passages_per_second": round(passages / seconds, 2),
        "devices": run.mesh.size,
        "device": device_kind(run),
        "processors": os.cpu_count(),
    }


def encode_source(
    run: Run, folder: Path, source: CorpusSource, options: EncodeOptions = EncodeOptions(), progress: bool = True
) -> EncodeResult:
    """Encode an inspected corpus into a folder, and return the counts.

    Args:
        run: the run whose checkpoint encodes.
        source: the passages.
        options: how to encode and write.
    """
    log, scan = job_log(progress), source.scan
    plan = make_encode_plan(run, folder, source, options, progress)
    fingerprint = plan.fingerprint(run, scan)
    made_on = {"devices": run.mesh.size, "kind": device_kind(run)}
    try:
        writer = ShardWriter(folder, scan.passages, plan.shard_rows, fingerprint, made_on)
    except ContractError:
        if not forget_announcement(folder, options.lease):
            raise
        writer = ShardWriter(folder, scan.passages, plan.shard_rows, fingerprint, made_on)
    with open_leases(folder, options.lease) as leases:
        job = EncodeWorker(run, source, writer, leases, replace(run.embedder(), most_words=plan.words), progress)
        start = time.perf_counter()
        try:
            job.fill()
            require_checkpoint(run, folder)
            finish_encoding(writer, leases, source)
        except BaseException as error:
            if isinstance(error, ChangedCorpusError):
                writer.remove_shards(job.own_shards)
            if not leases.others_exist():
                writer.withdraw_announcement()
            publish(folder)  # else a bucket would keep what was removed
            raise
    rows_encoded = sum(shard.rows for shard in writer.shards if shard.index in job.own_shards)
    timing = encoding_time(run, rows_encoded, time.perf_counter() - start) if rows_encoded else None
    embedder = job.embedder
    manifest = writer.manifest()
    warnings = []
    if job.truncation and job.truncation.cut:
        warnings.append(RunWarning("truncation", str(job.truncation)))
    warnings += shard_warnings(folder, manifest, log)
    if job.own_shards:
        if len(job.own_shards) > 1 and not source.texts:
            log(str(job.truncation))
        log(f"{embedder.padding_ratio:.2f} tokens computed for each real one, {embedder.programs} program(s) compiled")
    result = EncodeResult(
        folder=folder,
        passages=scan.passages,
        shards=len(writer.shards),
        shards_written=len(job.own_shards),
        padding_ratio=embedder.padding_ratio,
        programs=embedder.programs,
        truncation=str(job.truncation or ""),
        timing=timing,
        warnings=tuple(warnings),
    )
    return _emit_result(result, manifest)


def shard_warnings(folder: Path, manifest: Manifest, log: Callable[[str], None]) -> list[RunWarning]:
    """Return the warnings of kinds SHARD_WARNINGS about finished shards, and log them."""
    warnings = []
    kinds = {str(entry.get("made_on", "others")) for entry in manifest.shards}
    if len(kinds) > 1:
        devices = " and on ".join(sorted(kinds))
        warnings.append(RunWarning("devices", f"shards were made on {devices}: their last digits differ by rounding"))
        log(warnings[-1].text)
    if warning := collapse_warning(ShardSet(folder, manifest)):
        warnings.append(RunWarning("collapse", warning))
        log(f"alarm: {warning}")
    return warnings


def forget_announcement(folder: Path, bound: float) -> bool:
    """Remove the record of the settings of a folder if the folder has no shard and no running job, so that other
    settings can be chosen. Return whether it was removed.

    bound: seconds after which a silent job of another host counts as dead.
    """
    start = folder / ANNOUNCEMENT_FILE
    if not start.exists() or any(path != start and path.exists() for path in announcement_files(folder)):
        return False
    with open_leases(folder, bound) as leases:
        if not all(map(leases.is_free, leases.names())):
            return False
        start.unlink(missing_ok=True)
    return True


def device_kind(run: Run) -> str:
    """Return the name of the devices of a run."""
    return str(run.mesh.devices.flat[0].device_kind)
