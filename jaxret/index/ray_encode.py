"""Encode a corpus by the workers of a Ray cluster.

Each worker is a job as `encode_corpus` describes it: it claims shards that no other has, writes them into the run's
folder, and ends when all are there. Ray starts a worker again whose host died, and starts those that found no room when
a host comes. So the shards are the same, whatever happens; the folder must be in a bucket, or shared by the hosts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from jaxret.index.encode import encode_corpus
from jaxret.index.encode_options import EncodeOptions
from jaxret.index.ray_cluster import RETRIES, EngineOptions, connected
from jaxret.parallel.processes import require_platform
from jaxret.parallel.progress import job_log
from jaxret.runs.run import open_run


@dataclass(frozen=True)
class EncodeJob:
    """The arguments of a worker: how the run is opened, and what is encoded.

    Attributes:
        workdir: path or address of the run.
        checkpoint: "best", "last" or a step.
        platform: "gpu", "tpu" or "cpu" that workers must have; "" for any.
        opening: further arguments of `open_run`.
        corpus: path or address of the passages.
        name: of the encoded corpus; "" for that of the corpus.
        options: how to encode and write.
        current: folder that paths are relative to.
    """

    workdir: str
    checkpoint: str
    platform: str
    opening: dict[str, Any]
    corpus: str
    name: str
    options: EncodeOptions
    current: str = field(default_factory=os.getcwd)

    def run(self) -> str:
        """Encode what no other worker does, until all is there; return the error that ended it, or ""."""
        if os.path.isdir(self.current):  # else all is in buckets, or a path is missed by its name
            os.chdir(self.current)
        try:
            require_platform(self.platform, "--platform")
            run = open_run(self.workdir, self.checkpoint, **self.opening)
            encode_corpus(run, self.corpus, self.name, self.options, progress=False)
        except (ValueError, OSError, RuntimeError) as error:  # the driver raises them: a bad record is bad again
            return str(error) or type(error).__name__
        return ""


def encode_by_ray(job: EncodeJob, engine: EngineOptions, progress: bool = True) -> None:
    """Encode a corpus by the workers of a cluster; return when every shard exists.

    Args:
        job: what is encoded.
        engine: the cluster and its workers.
        progress: print how many workers there are.

    Raises:
        ValueError: the error of a worker, which would be that of every other.
        RuntimeError: every worker died more than RETRIES times.
    """
    with connected(engine) as ray:
        task = ray.remote(max_retries=RETRIES, retry_exceptions=False, **engine.worker_resources())(EncodeJob.run)
        pending = [task.remote(job) for _ in range(engine.workers)]
        job_log(progress)(f"{engine.workers} workers of Ray, each with {engine.resources}")
        kind, count = engine.resources.split(":")
        if ray.cluster_resources().get(kind, 0) < int(count):
            job_log(progress)(f"the cluster has no {engine.resources} now: workers wait until a host comes that has")
        try:
            while pending:  # the first one ends when all shards are there, or by an error
                (done,), pending = ray.wait(pending, num_returns=1)
                try:
                    error = ray.get(done)
                except ray.exceptions.RayTaskError:  # a fault of the code, not of a host
                    raise
                except ray.exceptions.RayError as died:
                    if not pending:
                        raise RuntimeError(
                            f"every worker of Ray died {RETRIES + 1} times, the last one: {died}"
                        ) from died
                    job_log(progress)(f"a worker of Ray died {RETRIES + 1} times; {len(pending)} are left: {died}")
                    continue
                if error:
                    raise ValueError(error)
                return
        finally:
            for other in pending:
                ray.cancel(other, force=True)
