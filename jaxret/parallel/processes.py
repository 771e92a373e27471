"""Joins the processes of one job, and exchanges small values between them."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from jaxret.parallel.memory import keep_freed_memory
from jaxret.parallel.rendezvous import wait_for_processes

_RAISED_IN_ALL = "raised_in_all_processes"  # attribute of errors that the other processes know already

# Platform -> requirements file of its environment.
REQUIREMENTS = {"tpu": "requirements-tpu.txt", "gpu": "requirements-gpu.txt", "cpu": "requirements.txt"}

# srun sets these for each task: job, hosts of the step, number of tasks, number of this task, its number on its host.
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def join_job(mesh: ConfigDict) -> None:
    """Keep freed memory, and join the job that `config.mesh` describes. Call it before the first array is made.

    Raises ValueError for settings that do not fit together, and RendezvousError if processes are missing.
    """
    keep_freed_memory()
    initialize_distributed(
        mesh.coordinator, mesh.num_processes, mesh.process_id, mesh.initialization_timeout, "--config.mesh."
    )


def initialize_distributed(
    coordinator: str = "", num_processes: int = 1, process_id: int = 0, timeout: int = 300, flag_prefix: str = "--"
) -> None:
    """Join a job of several processes. Does nothing for one process without a coordinator.

    Args:
        coordinator: "host:port" of process 0, or "auto" if the platform knows it (TPU pods, Slurm).
        num_processes: number of processes of the job.
        process_id: number of this process, from 0.
        timeout: seconds that the processes wait for each other.
        flag_prefix: prefix of the settings' names in errors.

    Raises:
        ValueError: the settings do not fit together.
        RendezvousError: some processes are missing; it is raised in every process that connected.
    """
    settings = f"{flag_prefix}num_processes={num_processes} and {flag_prefix}process_id={process_id}"
    if coordinator in ("", "auto"):
        if (num_processes, process_id) != (1, 0):
            raise ValueError(
                f"{settings} need {flag_prefix}coordinator=HOST:PORT; a single process, or 'auto', needs neither"
            )
        if not coordinator:
            return
    else:
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"{flag_prefix}coordinator={coordinator} must be HOST:PORT of process 0, or 'auto'")
        if num_processes < 2 or not 0 <= process_id < num_processes:
            raise ValueError(
                f"{flag_prefix}coordinator={coordinator} with {settings}: every process needs "
                "the number of processes (2 or more) and its own number (from 0)"
            )
    if timeout < 1:
        raise ValueError(f"{flag_prefix}initialization_timeout={timeout} must be at least 1 second")
    devices: Sequence[int] | None = None
    if coordinator == "auto":
        if not under_slurm():
            _initialize_by_platform(timeout, flag_prefix)
            return
        coordinator, num_processes, process_id, devices = slurm_task()
    if num_processes > 1:
        wait_for_processes(coordinator, num_processes, process_id, float(timeout))
        keep_stdout()
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=devices,
        initialization_timeout=timeout,
        cluster_detection_method="deactivate",  # the settings were detected above
    )


def keep_stdout() -> None:
    """Let Python print to a copy of standard output, and discard text that C++ libraries print there. Gloo, which
    connects processes on CPUs, prints a line for every group of processes."""
    try:
        if sys.stdout.fileno() != 1:
            return
    except (AttributeError, OSError):  # sys.stdout is replaced, as in a notebook
        return
    sys.stdout.flush()
    copy, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    stdout: Any = sys.stdout
    stream = io.TextIOWrapper(io.FileIO(copy, "w"), stdout.encoding, stdout.errors, write_through=True)
    if hasattr(stdout, "stream"):  # a wrapper that prints addresses instead of working copies
        stdout.stream = stream
    else:
        sys.stdout = stream


def under_slurm() -> bool:
    """Return whether this process is a task of srun, and not of Open MPI's mpirun, which srun may have started."""
    return all(name in os.environ for name in SLURM_VARIABLES) and "OMPI_MCA_orte_hnp_uri" not in os.environ


def slurm_task() -> tuple[str, int, int, Sequence[int] | None]:
    """Return coordinator, number of tasks, number of this task, and its devices (None: all devices of its host).

    The coordinator is the first host of the step. Its port is `JAX_COORDINATOR_PORT`, or one of the last 4,096 ports,
    which the job's id selects, so that two jobs on one host have different ports.
    """
    job, hosts, tasks, number, number_on_host = (os.environ[name] for name in SLURM_VARIABLES)
    port = os.environ.get("JAX_COORDINATOR_PORT") or str(65536 - 4096 + int(job) % 4096)
    # "node7", "node7,other3", "node[007-009,12],other3", "rack1-node[3,5]"
    prefix, bracket, ranges = hosts.partition(",")[0].partition("[")
    first = prefix + re.split(r"[-\]]", ranges)[0] if bracket else prefix
    # The only task of a host has all devices. One of several tasks has the device with its number.
    one_task_per_host = tasks == os.environ.get("SLURM_STEP_NUM_NODES")
    return f"{first}:{port}", int(tasks), int(number), None if one_task_per_host else [int(number_on_host)]


def _initialize_by_platform(timeout: int, flag_prefix: str) -> None:
    """Join a job that JAX detects itself: a TPU pod, Kubernetes, Open MPI."""
    try:
        jax.distributed.initialize(initialization_timeout=timeout)
    except ValueError as error:  # JAX detected no job and has no address
        raise ValueError(
            f"{flag_prefix}coordinator=auto: neither a TPU pod nor a task of srun was detected; give {flag_prefix}"
            f"coordinator=HOST:PORT, {flag_prefix}num_processes and {flag_prefix}process_id"
        ) from error


def require_platform(platform: str, setting: str) -> None:
    """Raise ValueError unless JAX runs on `platform`: "tpu", "gpu", "cpu", or "" for any.

    Without this check, JAX uses the CPU if there is no accelerator. "cpu" makes JAX ignore accelerators. `setting` is
    the name of the setting, for the error.
    """
    if platform not in ("", *REQUIREMENTS):
        raise ValueError(f"{setting} is {platform!r}; it must be one of {', '.join(REQUIREMENTS)}, or empty for any")
    if not platform:
        return
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.local_devices()
        device = devices[0]
        report = f"{len(devices)} of {device.platform} ({device.device_kind})"
        if device.platform == platform:
            return
    except RuntimeError as error:  # JAX_PLATFORMS names a missing platform
        report = str(error).splitlines()[0]
    environment = f" (JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']})" if os.environ.get("JAX_PLATFORMS") else ""
    raise ValueError(
        f"{setting} is {platform!r}, but JAX{environment} reports: {report}. A {platform.upper()} needs its "
        f"driver and an environment installed from {REQUIREMENTS[platform]}"
    )


def any_process(flag: bool) -> bool:
    """Return whether the flag is set in any process. All processes must call this, and get the same result."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def from_first_process(text: str) -> str:
    """Return the text of process 0 (at most 4,096 bytes). All processes must call this."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode()[:4096].ljust(4096, b"\0"), np.uint8)
    values = np.asarray(multihost_utils.broadcast_one_to_all(data))
    return values.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes. All processes must call this."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(len(data)))).reshape(-1)
    buffer = np.zeros(sizes.max(), np.uint8)
    buffer[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(buffer)).reshape(len(sizes), -1)
    return [row[:size].astype(np.uint8).tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


@contextmanager
def agreement() -> Iterator[None]:
    """Run a block in all processes. If one process fails in the block, every process raises an error at its end, or in
    `agreed_texts`, so that no process waits for one that has ended."""
    try:
        yield
    except Exception as error:
        if not getattr(error, _RAISED_IN_ALL, False):
            agreed_texts("", error)
        raise
    agreed_texts("")


def agreed_texts(text: str, error: Exception | None = None) -> list[str]:
    """Return the texts of all processes, like `gather_texts`. If a process has an error, here or in `agreement`, raise
    it in this process, and an error that names the process in all other processes."""
    failure: Exception | None = error
    texts: list[str] = []
    try:
        texts = gather_texts(f"!{type(error).__name__}: {error}" if error else f" {text}")
    except Exception as problem:  # a process has died
        failure = error or problem
    for number, message in enumerate(texts):
        if message.startswith("!") and not failure:
            failure = RuntimeError(f"process {number} of this job ended with {message[1:].splitlines()[0]}")
    if failure:
        vars(failure)[_RAISED_IN_ALL] = True
        raise failure
    return [message[1:] for message in texts]


def wait_for_all() -> None:
    """Wait until every process has called this."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wait_for_all")
