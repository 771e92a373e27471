"""Batches come in order, whichever thread makes them; only the time that the device waits is counted as waiting."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from jaxret.training import prefetch as module
from jaxret.training.prefetch import BATCHES_AHEAD, Prefetcher
from jaxret.types import Batch, Tokens


def batch(step: int) -> Batch:
    tokens = Tokens(np.full((1, 1), step), np.ones((1, 1), bool))
    return Batch(tokens, tokens, np.zeros(1, int), np.full(1, step), np.zeros((1, 1), int))


def step_of(made: Batch) -> int:
    return int(made.passage_ids[0])


def test_batches_come_in_order_from_another_thread() -> None:
    makers: list[str] = []

    def make(step: int) -> Batch:
        makers.append(threading.current_thread().name)
        return batch(step)

    with Prefetcher(make, 3, 9) as feed:
        assert [step_of(feed.take(step)) for step in range(3, 9)] == list(range(3, 9))
    assert makers == ["prefetch"] * 6
    with (
        Prefetcher(batch, 3, 9) as feed,
        pytest.raises(AssertionError, match=r"4 .*requested, .*3"),
    ):
        feed.take(4)


def test_prefetching_is_bounded() -> None:
    taken, ahead, full = [0], [], threading.Event()

    def make(step: int) -> Batch:
        ahead.append(step - taken[0])
        if step == BATCHES_AHEAD - 1:
            full.set()
        return batch(step)

    with Prefetcher(make, 0, 50) as feed:
        assert full.wait(60), "it makes batches before they are taken"
        for step in range(50):
            feed.take(step)
            taken[0] = step + 1
    assert max(ahead) <= BATCHES_AHEAD  # counts the step whose batch is being taken, too


@pytest.mark.parametrize("error", [ValueError("row 7"), KeyboardInterrupt()])
def test_an_error_comes_with_the_batch_that_has_it(error: BaseException) -> None:
    def make(step: int) -> Batch:
        if step == 2:
            raise error
        return batch(step)

    with Prefetcher(make, 0, 5) as feed:
        assert [step_of(feed.take(step)) for step in range(2)] == [0, 1]
        with pytest.raises(type(error)) as raised:
            feed.take(2)
    assert raised.value is error


def test_leaving_ends_the_thread() -> None:
    def running() -> bool:
        return any(thread.name == "prefetch" for thread in threading.enumerate())

    for taken in (0, 1, 5):
        with Prefetcher(batch, 0, 5) as feed:
            for step in range(taken):
                feed.take(step)
            assert running() or taken == 5
        assert not running()
    with pytest.raises(KeyError), Prefetcher(batch, 0, 10**9):
        raise KeyError
    assert not running()


class Clock:
    """A clock that the test advances; `read` is set when the time is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.read = 0.0, threading.Event()
        monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        self.read.set()
        return self.now


def test_waiting_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def make(step: int) -> Batch:
        clock.read.wait(60)  # waits until the step waits for this batch
        clock.now += 6
        return batch(step)

    feed = Prefetcher(make, 0, 1)
    clock.read.clear()
    with feed:
        feed.take(0)
        clock.now += 2  # the time of a computation
        assert feed.wait_share() == 6 / 8
        assert feed.wait_share() == 0.0


def test_batches_made_during_computation_add_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, go = Clock(monkeypatch), threading.Event()

    def make(step: int) -> Batch:
        assert go.wait(60)
        return batch(step)

    class Running:
        """An array that is ready after 10 seconds, during which the batch is made."""

        waited_for = 0

        def block_until_ready(self) -> None:
            self.waited_for += 1
            go.set()
            clock.now += 10
            while not feed._ready:
                pass

    running: Any = Running()
    with Prefetcher(make, 0, 2) as feed:
        feed.take(0, running)
        assert (running.waited_for, feed.wait_share()) == (1, 0.0)
        while not feed._ready:
            pass
        feed.take(1, running)
        assert running.waited_for == 1, "with a batch ready, the host does not wait for the device"
