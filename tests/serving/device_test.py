"""The device's thread: which requests are computed together, in which order, and their effects on each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jaxret.serving.device import DeviceThread, Operation, QueueFullError


class Recorder:
    """An operation that records its batches, and waits until the test lets it continue."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.may_go, self.began = threading.Event(), threading.Event()

    def __call__(self, items: Sequence[Any]) -> list[Any]:
        self.began.set()
        assert self.may_go.wait(30)
        self.batches.append(list(items))
        if "bad" in items:
            raise ValueError("a bad item")
        return [f"<{item}>" for item in items]


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    thread = DeviceThread(batch=4, queue_limit=10)
    yield thread
    thread.end()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def blocked(device: DeviceThread, recorder: Recorder) -> Any:
    """Occupy the device with a first request; return its future."""
    first = device.submit(Operation(recorder), ["first"])
    assert recorder.began.wait(30)
    return first


def test_waiting_requests_are_batched_and_large_ones_are_divided(device: DeviceThread, recorder: Recorder) -> None:
    first = blocked(device, recorder)
    large = device.submit(Operation(recorder), list("ABCDE"))
    small = [device.submit(Operation(recorder), [name]) for name in "xy"]
    recorder.may_go.set()
    assert large.result(30) == ["<A>", "<B>", "<C>", "<D>", "<E>"]
    assert [future.result(30) for future in [first, *small]] == [["<first>"], ["<x>"], ["<y>"]]
    assert recorder.batches == [["first"], ["A", "B", "x", "y"], ["C", "D", "E"]]


def test_another_operation_is_another_batch(device: DeviceThread, recorder: Recorder) -> None:
    blocked(device, recorder)

    def other(items: Sequence[Any], times: int) -> list[Any]:
        recorder.batches.append(list(items))
        return [item * times for item in items]

    futures = [device.submit(Operation(other, (times,)), [name]) for times, name in ((2, "a"), (3, "b"), (2, "c"))]
    recorder.may_go.set()
    assert [future.result(30) for future in futures] == [["aa"], ["bbb"], ["cc"]]
    assert recorder.batches[1:] == [["a", "c"], ["b"]]


def test_an_error_affects_only_its_request(device: DeviceThread, recorder: Recorder) -> None:
    blocked(device, recorder)
    good, bad, last = (device.submit(Operation(recorder), [name]) for name in ("good", "bad", "last"))
    recorder.may_go.set()
    assert good.result(30) == ["<good>"]
    assert last.result(30) == ["<last>"]
    with pytest.raises(ValueError, match="a bad item"):
        bad.result(30)
    assert device.submit(Operation(recorder), ["after"]).result(30) == ["<after>"]


def test_the_queue_is_bounded_and_cancelled_requests_leave_it(device: DeviceThread, recorder: Recorder) -> None:
    blocked(device, recorder)
    waiting = device.submit(Operation(recorder), ["w"] * 8)
    with pytest.raises(QueueFullError, match=r"9 texts .*10"):
        device.submit(Operation(recorder), ["x"] * 2)
    last = device.submit(Operation(recorder), ["y"])
    before = device.waiting
    assert before == 10, "control: so many may wait, with the one that is computed"
    assert waiting.cancel()
    assert device.waiting == before - 8
    kept = device.submit(Operation(recorder), ["x"] * 3)
    recorder.may_go.set()
    assert kept.result(30) == ["<x>"] * 3
    assert last.result(30) == ["<y>"]
    assert ["w"] * 4 not in recorder.batches


def test_an_empty_queue_accepts_any_size_and_shutdown_waits(recorder: Recorder) -> None:
    thread = DeviceThread(batch=4, queue_limit=10)
    recorder.may_go.set()
    future = thread.submit(Operation(recorder), ["x"] * 25)
    thread.end()
    assert future.result(0) == ["<x>"] * 25
    with pytest.raises(QueueFullError, match="the server is shutting down"):
        thread.submit(Operation(recorder), ["x"])
