"""Encode a corpus with the workers of a Ray cluster.

Each worker is a job of `encode_corpus`: it claims shards that no other worker has, writes them into the run's folder,
and ends when all shards exist. If a host dies, Ray starts its worker again. Workers without a host wait for one. The
shards do not depend on this. The run's folder must be in a bucket, or shared by the hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.data.formats import Corpus
from jaxret.index.encoding.encode import encode_corpus, find_vectors_to_cut
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.parallel.progress import print_line
from jaxret.runs.ray_cluster import RETRIES, EngineOptions, RunOpening, connect_to_cluster, describe_workers


@dataclass(frozen=True)
class EncodeJob:
    """The arguments of a worker."""

    run: RunOpening  # how the run is opened
    source: str  # path or address of the corpus, which each worker opens
    name: str  # name of the encoded corpus; "": the name of the corpus
    options: EncodeOptions  # how to encode and write

    def encode(self) -> str:
        """Encode shards that no other worker encodes, until all exist. Return the text of an error, or "". If vectors
        can be cut instead, do nothing."""
        try:
            run, corpus = self.run.open(), Corpus.open(self.source)
            if not find_vectors_to_cut(run, corpus, self.name, self.options):  # the driver cuts vectors
                encode_corpus(run, corpus, self.name, self.options, progress=False)
        # The error is returned, because Ray would restart a worker that raises it. The driver raises it once.
        except (ValueError, OSError, RuntimeError) as error:
            return str(error) or type(error).__name__
        return ""


def encode_by_ray(job: EncodeJob, engine: EngineOptions) -> None:
    """Encode a corpus with the workers of a cluster. Return when every shard exists.

    Args:
        job: arguments of the workers.
        engine: the cluster and its workers.

    Raises:
        ValueError: a worker ended with an error that every other worker would also have.
        RuntimeError: every worker died more than RETRIES times.
    """
    with connect_to_cluster(engine) as ray:
        remote_encode = ray.remote(max_retries=RETRIES, retry_exceptions=False, **engine.worker_resources())(
            EncodeJob.encode
        )
        tasks = [remote_encode.remote(job) for _ in range(engine.workers)]
        describe_workers(ray, engine)
        try:
            while tasks:  # the first worker ends when all shards exist, or with an error
                (first,), tasks = ray.wait(tasks, num_returns=1)
                try:
                    error = ray.get(first)
                except ray.exceptions.RayTaskError:  # an error of the code, not of a host
                    raise
                except ray.exceptions.RayError as failure:
                    if not tasks:
                        raise RuntimeError(
                            f"every worker of Ray died {RETRIES + 1} times, the last one: {failure}"
                        ) from failure
                    print_line(f"a worker of Ray died {RETRIES + 1} times; {len(tasks)} are left: {failure}")
                    continue
                if error:
                    raise ValueError(error)
                return
        finally:
            for task in tasks:
                ray.cancel(task, force=True)
