"""A Ray cluster as a place to run work that any worker may do, and do again: options, connection, errors."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxret.configs.options import check_options, option

SECONDS = 10  # in which a cluster must answer
RETRIES = 3  # of work whose worker or host died


@dataclass(frozen=True)
class EngineOptions:
    """Where work runs: in this process, or by the workers of a Ray cluster. Raises ValueError for other values."""

    engine: str = option(
        "",
        "ray: workers of the Ray cluster at RAY_ADDRESS, else of one on this machine; ray://HOST:PORT: of that one; "
        "default: this process (pip install 'jaxret[ray]')",
    )
    workers: int = option(1, "with --engine: how many workers there are", lower_bound=1)
    resources: str = option("CPU:1", "with --engine: what a worker needs for itself, as GPU:1, TPU:4 or CPU:2")

    def __post_init__(self) -> None:
        check_options(self)
        if self.engine not in ("", "ray") and not self.engine.startswith("ray://"):
            raise ValueError(f"engine is {self.engine!r}; it must be ray, or ray://HOST:PORT")
        self.worker_resources()

    def worker_resources(self) -> dict[str, Any]:
        """Return the resources of a worker as arguments of Ray."""
        kind, _, count = self.resources.partition(":")
        if not kind or not count.isdecimal() or int(count) < 1:
            raise ValueError(f"resources is {self.resources!r}; it must be a kind and a number, as GPU:1 or CPU:2")
        if kind in ("CPU", "GPU"):
            return {"num_cpus": 1, f"num_{kind.lower()}s": int(count)}
        return {"num_cpus": 1, "resources": {kind: int(count)}}


@contextmanager
def connected(options: EngineOptions) -> Iterator[Any]:
    """Yield the module ray, connected to the cluster of `options`. Disconnecting at the end ends this job's workers.

    Raises ValueError where Ray is not installed, and ConnectionError where nothing answers at the cluster's address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"--engine={options.engine} needs Ray: pip install 'jaxret[ray]'") from error
    _require_answer(options.engine if options.engine != "ray" else os.environ.get("RAY_ADDRESS", ""))
    address = options.engine if options.engine != "ray" else None  # Ray reads RAY_ADDRESS
    ray.init(address=address, logging_level=logging.WARNING)
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise ConnectionError if nothing answers at HOST:PORT: Ray itself would try for minutes, without a word."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # "auto", or a local cluster
        return
    try:
        socket.create_connection((host, int(port)), SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error}); start it, or correct the address"
        ) from error
