"""Open a run, and encode, cut, append or delete passages: `jaxret encode`."""

from __future__ import annotations

from typing import Any

from jaxret.data.formats import Corpus
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import EncodeResult, cut_encoded, encode_corpus, find_corpus
from jaxret.index.encoding.encode_request import EncodeRequest
from jaxret.index.encoding.ray_encode import EncodeJob, encode_by_ray
from jaxret.index.encoding.update import append_corpus, delete_passages, encoded_passage_length
from jaxret.models.encoders.fused import describe_attention
from jaxret.parallel.memory import keep_freed_memory
from jaxret.parallel.processes import require_platform
from jaxret.parallel.progress import print_line
from jaxret.runs.ray_cluster import RunOpening
from jaxret.runs.run import open_run, stored_config
from jaxret.runs.workdir import Workdir


def run_encode(request: EncodeRequest) -> None:
    """Encode, append or delete the passages of a request, and print counts. Raises the errors of `encode_corpus`,
    `append_corpus`, `cut_encoded`, `delete_passages` and `encode_by_ray`."""
    workdir = Workdir(request.workdir)
    if request.delete:
        folder = corpus_folder(workdir, request.name, "--name")
        deletions, passages_left = delete_passages(folder, request.delete)
        print(f"{deletions:,} passage(s) deleted from {folder}; {passages_left:,} are left")
        return
    keep_freed_memory()
    request.processes.join()
    if not request.engine.engine:  # the workers of an engine have the devices, not this process
        require_platform(request.platform, "--platform")
    stored_config(workdir)  # a missing run is reported before a missing corpus
    if request.append:
        result = _append(request, workdir, Corpus.open(request.corpus))
    else:
        result = _encode(request, find_corpus(request.corpus, request.options))
    if result.timing:
        print(result.describe_timing())
    part_of = f", a part of {result.folder.parent}" if request.append else ""
    print(f"{result.passages:,} passages are in {result.folder}{part_of}")


def _append(request: EncodeRequest, workdir: Workdir, corpus: Corpus) -> EncodeResult:
    folder = corpus_folder(workdir, request.name, "--name")
    length = encoded_passage_length(folder) if request.passage_length is None else request.passage_length
    run = open_run(request.workdir, request.checkpoint, **_overrides(request, length))
    print_line(describe_attention(run.config.encoder.attention))
    return append_corpus(run, corpus, folder, request.options)


def _encode(request: EncodeRequest, corpus: Corpus | None) -> EncodeResult:
    """Encode a corpus, with the workers of an engine if the request has one. If `corpus` is None, cut the vectors of
    the encoded corpus that the request names. Raises ValueError for an engine that would have no work."""
    if request.engine.engine and not corpus and request.corpus in Workdir(request.workdir).corpora:
        raise ValueError(
            f"--engine={request.engine.engine}: workers encode passages, but {request.corpus} is an encoded corpus, "
            "whose vectors this process cuts. Remove --engine"
        )
    overrides = _overrides(request, request.passage_length)
    if request.engine.engine and corpus:
        opening = RunOpening(request.workdir, request.checkpoint, request.platform, overrides)
        encode_by_ray(EncodeJob(opening, corpus.source, request.name, request.options), request.engine)
    run = open_run(request.workdir, request.checkpoint, **overrides)
    print_line(describe_attention(run.config.encoder.attention))
    if corpus is None:
        return cut_encoded(run, request.corpus, request.options, request.name)
    return encode_corpus(run, corpus, request.name, request.options)


def _overrides(request: EncodeRequest, passage_length: int | None) -> dict[str, Any]:
    """Return the arguments of `open_run` from a request."""
    return {
        "passage_length": passage_length,
        "tokens_per_batch": request.tokens_per_batch,
        "attention": request.attention,
    }
