"""A Ray cluster with several hosts on loopback; tests kill some and add others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import environment

QUICK = {  # a dead host is noticed in two seconds instead of fifteen
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,  # otherwise, workers wait for all other processes of a busy machine
}


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """A head without processors, with its address in RAY_ADDRESS; the tests add hosts. Ray would replace 127.0.0.1 by
    another address. Skip the test without Ray."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed (requirements-ray.txt)")
    head = {"num_cpus": 0, "node_ip_address": "127.0.0.2", "include_dashboard": False, "_system_config": QUICK}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        hosts = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        try:
            patch.setenv("RAY_ADDRESS", hosts.address)
            yield hosts
        finally:
            hosts.shutdown()


def add_host(cluster: Any, number: int, processors: int = 1) -> Any:
    return cluster.add_node(num_cpus=processors, node_ip_address=f"127.0.0.{number}")


def stop_second_worker(hosts: Sequence[Any], seconds: float = 240) -> tuple[Any, int]:
    """Wait until a second worker on the hosts has loaded JAX for its call, and stop it (SIGSTOP) before it answers.

    The first one encodes queries, so the second one searches. At that time it has not opened the run yet, which takes
    much longer than listing the processes. Returns its host and process.
    """
    raylets = {host.all_processes["raylet"][0].process.pid: host for host in hosts}
    with_jax: set[int] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for process in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            folder = Path(f"/proc/{process}")
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent not in raylets or "jaxlib" not in (folder / "maps").read_text():
                    continue
                with_jax.add(process)
                if len(with_jax) < 2:
                    continue
                os.kill(process, signal.SIGSTOP)
                if (folder / "cmdline").read_bytes().startswith(b"ray::_Worker.call"):
                    return raylets[parent], process
                os.kill(process, signal.SIGCONT)
            except OSError:  # the process has ended
                continue
        time.sleep(0.03)
    raise TimeoutError(f"no second worker of the hosts was in a call with JAX in {seconds} s")
