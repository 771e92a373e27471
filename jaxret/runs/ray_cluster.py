"""Run functions on the workers of a Ray cluster: options, connection, workers, and errors.

Any worker may run any call, and a call may be repeated.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from jaxret.configs.options import check_options, given_fields, option

if TYPE_CHECKING:
    from jaxret.runs.run import Run

T = TypeVar("T")

ANSWER_SECONDS = 10  # seconds to wait for an answer of the cluster
RETRIES = 3  # retries after a worker or its host died


@dataclass(frozen=True)
class EngineOptions:
    """The options that choose between this process and the workers of a Ray cluster. Raises ValueError for other
    values."""

    engine: str = option(
        "",
        "ray: use workers of the Ray cluster at RAY_ADDRESS, or of a new cluster on this machine; "
        "ray://HOST:PORT: of this cluster; default: work in this process (Ray needs pip install 'jaxret[ray]')",
    )
    workers: int = option(1, "with --engine: number of workers", lower_bound=1)
    resources: str = option("CPU:1", "with --engine: devices of each worker, such as GPU:1, TPU:4 or CPU:2")
    explicit_fields: tuple[str, ...] = ()  # fields on the command line, even with the default value

    def __post_init__(self) -> None:
        check_options(self)
        if self.engine not in ("", "ray") and not self.engine.startswith("ray://"):
            raise ValueError(f"engine is {self.engine!r}; it must be ray, or ray://HOST:PORT")
        if not self.engine and (names := given_fields(self, ("workers", "resources"), self.explicit_fields)):
            raise ValueError(f"{names[0]} needs engine: without one, this process does all work")
        self.worker_resources()

    def worker_resources(self) -> dict[str, Any]:
        """Return the resources of a worker as arguments of Ray. Raises ValueError unless the text is KIND:NUMBER."""
        kind, _, count = self.resources.partition(":")
        if not kind or not count.isdecimal() or int(count) < 1:
            raise ValueError(f"resources is {self.resources!r}; it must be a kind and a number, such as GPU:1 or CPU:2")
        if kind in ("CPU", "GPU"):
            return {"num_cpus": 1, f"num_{kind.lower()}s": int(count)}
        return {"num_cpus": 1, "resources": {kind: int(count)}}


@contextmanager
def connect_to_cluster(options: EngineOptions) -> Iterator[Any]:
    """Yield the module ray, connected to a cluster. At the end it disconnects, which ends this job's workers.

    Raises ValueError if Ray is not installed, and ConnectionError if nothing answers at the cluster's address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no statistics are sent to Ray's authors
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"--engine={options.engine} needs Ray: pip install 'jaxret[ray]'") from error
    _require_answer(options.engine if options.engine != "ray" else os.environ.get("RAY_ADDRESS", ""))
    address = options.engine if options.engine != "ray" else None  # Ray reads RAY_ADDRESS
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises many types of errors, and its messages have a traceback of its server
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise ConnectionError(
            f"the Ray cluster of --engine={options.engine} refuses this job ({reason.strip()[:300]}); if its "
            "authentication is on, set RAY_AUTH_TOKEN"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise ConnectionError if nothing answers at HOST:PORT. Ray itself would try for minutes without a message."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # "auto", or a local cluster
        return
    try:
        socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error}); start it, or correct the address"
        ) from error


@dataclass(frozen=True)
class RunOpening:
    """The arguments with which a worker opens a run."""

    workdir: str  # path or address of the run
    checkpoint: str  # "best", "last" or a step
    platform: str  # platform that workers must have: "gpu", "tpu", "cpu", or "" for any
    arguments: dict[str, Any]  # further arguments of `open_run`
    current: str = field(default_factory=os.getcwd)  # folder to which paths are relative

    def open(self) -> Run:
        """Open the run, and return it. Raises the errors of `open_run` and `require_platform`."""
        from jaxret.parallel.processes import require_platform  # imports JAX, which parsing flags must not
        from jaxret.runs.run import open_run

        if os.path.isdir(self.current):  # otherwise all files are in buckets, or opening the run raises an error
            os.chdir(self.current)
        require_platform(self.platform, "--platform")
        return open_run(self.workdir, self.checkpoint, **self.arguments)


class RayWorkers:
    """Workers of a Ray cluster that call functions. Any worker may run any call; if it dies, the call is repeated.

    A worker that died is replaced, RETRIES times in a row. Workers without resources wait until the cluster has a new
    host. During this time, the other workers run their calls. Workers open runs with `platform` and `attention`.
    """

    def __init__(self, ray: Any, options: EngineOptions, platform: str = "", attention: str | None = None) -> None:
        """Start workers.

        Args:
            ray: the module, connected to a cluster.
            options: the number of workers, and the resources of each.
            platform: platform that workers must have: "gpu", "tpu", "cpu", or "" for any.
            attention: implementation of attention; None: the same as in training.
        """
        self.count, self.platform, self.attention = options.workers, platform, attention
        self._ray = ray
        self._create = ray.remote(**options.worker_resources())(_Worker).remote
        self._actors: dict[int, Any] = {}  # number -> worker that is alive or waits for resources
        self._deaths = [0] * self.count  # deaths of each worker since it last finished a call
        self._calls: dict[Any, tuple[int, int | None]] = {}  # answer -> (worker, index of the call; None: its start)
        self._idle: set[int] = set()  # numbers of idle workers
        for number in range(self.count):
            self._start(number)

    def _start(self, number: int) -> None:
        self._actors[number] = self._create()
        self._calls[self._actors[number].call.remote(_start_empty)] = (number, None)

    def share(self, value: Any) -> Any:
        """Return a reference to a value for the arguments of many calls; the value is sent to each host once."""
        return self._ray.put(value)

    def run(self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
        """Return the results of `function(state, *call)` for each call; `state` is a dict that the worker keeps.

        A worker first runs the call with its own number, because an earlier `run` may have made its state for this
        call.

        Raises the error of a call, which is not repeated, and RuntimeError if no worker is left.
        """
        results: dict[int, T] = {}
        queue = list(range(len(calls)))
        while len(results) < len(calls):
            for number in sorted(self._idle if queue else ()):
                place = number if number in queue else queue[0] if queue else None
                if place is not None:
                    queue.remove(place)
                    self._idle.remove(number)
                    answer = self._actors[number].call.remote(function, *calls[place])
                    self._calls[answer] = (number, place)
            (answer,), _ = self._ray.wait(list(self._calls), num_returns=1)
            number, place = self._calls.pop(answer)
            try:
                result = self._ray.get(answer)
            except self._ray.exceptions.RayTaskError as error:
                self._idle.add(number)
                self._calls = {call: (busy, None) for call, (busy, _) in self._calls.items()}  # no call of a later run
                raise error.cause from error
            except self._ray.exceptions.RayError as error:
                queue += [] if place is None else [place]
                self._replace(number, error)
                continue
            self._idle.add(number)
            if place is not None:
                results[place], self._deaths[number] = result, 0
        return [results[place] for place in range(len(calls))]

    def _replace(self, number: int, error: Exception) -> None:
        """Restart a worker that died. Raises RuntimeError if it died too often and no other worker is left."""
        self._deaths[number] += 1
        if self._deaths[number] <= RETRIES:
            self._start(number)
            return
        del self._actors[number]
        if not self._actors:
            raise RuntimeError(f"every worker of Ray died {RETRIES + 1} times, the last one: {error}") from error


class _Worker:
    """The process of a worker. It calls functions with a dict that exists until the process ends."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(self._state, *arguments)


def _start_empty(state: dict[str, Any]) -> None:
    """Do nothing. The answer shows that the worker has started."""


@contextmanager
def ray_workers(
    options: EngineOptions, platform: str = "", attention: str | None = None
) -> Iterator[RayWorkers | None]:
    """Yield the workers of a Ray cluster, or None if the options have no engine.

    Raises the errors of `connect_to_cluster`.
    """
    if not options.engine:
        yield None
        return
    with connect_to_cluster(options) as ray:
        describe_workers(ray, options)
        yield RayWorkers(ray, options, platform, attention)


def describe_workers(ray: Any, options: EngineOptions) -> None:
    """Print the number of workers, and whether they have to wait for a host."""
    from jaxret.parallel.progress import print_line  # imports tqdm, which parsing flags must not

    print_line(f"{options.workers} workers of Ray, each with {options.resources}")
    kind, count = options.resources.split(":")
    if ray.cluster_resources().get(kind, 0) < int(count):
        print_line(f"the cluster has no {options.resources} now: workers wait until a host comes that has")
