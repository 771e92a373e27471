"""Encode a corpus by the workers of a Ray cluster.

Each worker is a job as `encode_corpus` describes it: it claims shards that no other has, writes them into the run's
folder, and ends when all are there. Ray starts a worker again whose host died, and starts those that found no room when
a host comes. So the shards are the same, whatever happens; the folder must be in a bucket, or shared by the hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.data.formats import Corpus
from jaxret.index.encode import encode_corpus, find_vectors_to_cut
from jaxret.index.encode_options import EncodeOptions
from jaxret.parallel.progress import job_log
from jaxret.runs.ray_cluster import RETRIES, EngineOptions, RunOpening, connected, describe_workers


@dataclass(frozen=True)
class EncodeJob:
    """The arguments of a worker: how the run is opened, and what is encoded."""

    run: RunOpening  # how the run is opened
    source: str  # path or address of the corpus, which each worker opens
    name: str  # of the encoded corpus; "" for that of the corpus
    options: EncodeOptions  # how to encode and write

    def encode(self) -> str:
        """Encode what no other worker does, until all is there, unless vectors are to be cut; return the error that
        ended it, or ""."""
        try:
            run, corpus = self.run.open(), Corpus.open(self.source)
            if not find_vectors_to_cut(run, corpus, self.name, self.options):  # the driver cuts, once
                encode_corpus(run, corpus, self.name, self.options, progress=False)
        except (ValueError, OSError, RuntimeError) as error:  # the driver raises them: a bad record is bad again
            return str(error) or type(error).__name__
        return ""


def encode_by_ray(job: EncodeJob, engine: EngineOptions, progress: bool = True) -> None:
    """Encode a corpus by the workers of a cluster; return when every shard exists.

    Args:
        engine: the cluster and its workers.
        progress: print how many workers there are.

    Raises:
        ValueError: the error of a worker, which would be that of every other.
        RuntimeError: every worker died more than RETRIES times.
    """
    with connected(engine) as ray:
        task = ray.remote(max_retries=RETRIES, retry_exceptions=False, **engine.worker_resources())(EncodeJob.encode)
        tasks = [task.remote(job) for _ in range(engine.workers)]
        describe_workers(ray, engine, progress)
        try:
            while tasks:  # the first one ends when all shards are there, or by an error
                (first,), tasks = ray.wait(tasks, num_returns=1)
                try:
                    error = ray.get(first)
                except ray.exceptions.RayTaskError:  # a fault of the code, not of a host
                    raise
                except ray.exceptions.RayError as failure:
                    if not tasks:
                        raise RuntimeError(
                            f"every worker of Ray died {RETRIES + 1} times, the last one: {failure}"
                        ) from failure
                    job_log(progress)(f"a worker of Ray died {RETRIES + 1} times; {len(tasks)} are left: {failure}")
                    continue
                if error:
                    raise ValueError(error)
                return
        finally:
            for other in tasks:
                ray.cancel(other, force=True)
