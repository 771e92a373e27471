"""Reasons why a planned job cannot be started with its config."""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import ConfigDict

from jaxret.parallel.chips import Topology


def start_problems(verb: str, config: ConfigDict, topology: Topology) -> Iterator[str]:
    """Yield a sentence for each reason why a job cannot be started, or what its start needs on several hosts.

    Args:
        verb: train, encode or search.
        topology: chips of the plan.
    """
    platform = "gpu" if topology.chip.is_gpu else "tpu"
    required_platform = config.mesh.platform
    if required_platform and required_platform != platform and verb == "train":
        yield f"cannot be started: mesh.platform is {required_platform!r}, and {topology} is {platform!r}"
    if topology.hosts == 1:
        return
    hosts = f"{topology} is {topology.hosts} hosts"
    start = "with --coordinator=auto" if platform == "tpu" else "with --coordinator (docs/clusters.md)"
    if verb == "search":
        yield f"{hosts}: start jaxret search on each, {start}; each holds its part of the passages"
    elif verb == "train" and not config.mesh.coordinator:
        yield (
            f"cannot be started so: {hosts}, and mesh.coordinator is empty; set it to auto (TPU slices, srun) or to "
            "HOST:PORT of process 0, and start the command on each (docs/clusters.md)"
        )
    elif verb == "encode":
        start = "with --coordinator=auto" if platform == "tpu" else "each as a separate job"
        yield f"{hosts}: start jaxret encode on each, {start} (docs/encoding.md)"
