"""One bar on a terminal, lines in a file, and nothing for short work."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from jaxret.parallel import progress
from jaxret.parallel.progress import COMPILATION, Progress, print_line, with_progress
from tests.pipeline import REPOSITORY, environment, free_address, together


class Clock:
    """A clock that the test advances."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "_settings", {"quiet": False})
    return clock


def test_a_file_has_a_line_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("encode", 400, "passage", start=100) as bar:
        for _ in range(25):
            clock.seconds += 1
            bar.note("loss 0.5")
            bar.update(10)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^[0-9-]{10} [0-9:]{8} ", "", line) for line in lines] == [
        "encode: 200 of 400 passages (50%) for 00:10, 10 passage/s, 00:20 left, loss 0.5",
        "encode: 300 of 400 passages (75%) for 00:20, 10 passage/s, 00:10 left, loss 0.5",
        "encode: 350 of 400 passages (88%) in 00:25, 10 passage/s, loss 0.5",
    ]
    assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d encode", line) for line in lines)


def test_a_file_has_lines_while_nothing_is_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines appear during the compilation of a first step, for example; but not for work around other work that shows
    progress."""
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.05)
    text, deadline = "", time.monotonic() + 60
    with Progress("train", 9, "step"), Progress("inner", 5, "text", cause=COMPILATION) as inner:
        while text.count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
            text += capsys.readouterr().err
        inner.update()
    assert "compiling" not in capsys.readouterr().err.splitlines()[-1]
    first = re.sub(r"^[0-9-]{10} [0-9:]{8} ", "", text.splitlines()[0])
    assert first == "inner: 0 of 5 texts (0%) for 00:00, compiling"
    assert "train" not in text


def test_short_work_is_not_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in with_progress(range(5), "read"):
        clock.seconds += 1.9
    assert capsys.readouterr() == ("", "")


def test_nested_work_prints_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", 6, "step") as outer:
        for seconds in (11, 4, 1):
            for _ in with_progress(range(3), "validate", 3, "batch"):
                clock.seconds += seconds
            outer.update()
        for _ in with_progress(range(3), "read"):  # a separate line would also come every ten seconds
            clock.seconds += 11
            outer.update()
    lines = [re.sub(r"^[0-9-]{10} [0-9:]{8} |,.*", "", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "validate: 1 of 3 batches (33%) for 00:11",
        "validate: 2 of 3 batches (67%) for 00:22",
        "validate: 3 of 3 batches (100%) for 00:33",
        "validate: 3 of 3 batches (100%) in 00:33",
        "train: 1 of 6 steps (17%) for 00:33",
        "validate: 3 of 3 batches (100%) for 00:12",
        "validate: 3 of 3 batches (100%) in 00:12",
        "train: 2 of 6 steps (33%) for 00:45",
        "train: 4 of 6 steps (67%) for 00:59",
        "train: 5 of 6 steps (83%) for 01:10",
        "train: 6 of 6 steps (100%) for 01:21",
        "train: 6 of 6 steps (100%) in 01:21",
    ]
    with Progress("search", 1, "step") as after:
        clock.seconds += 11
        after.update()
    assert " search: 1 of 1 steps" in capsys.readouterr().err


def test_quiet_prints_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    print_line("said")
    assert capsys.readouterr().out == "said\n"
    progress.be_quiet()
    print_line("not said")
    with Progress("encode", 2) as bar:
        clock.seconds += 11
        bar.update()
    assert capsys.readouterr() == ("", "")


TERMINAL = """
import time
from jaxret.parallel.progress import Progress, with_progress
with Progress("outer", 4, "step") as outer:
    for _ in range(4):
        for _ in with_progress(range(3), "inner"):
            time.sleep(0.2)
        outer.update()
for _ in with_progress(range(3), "short"):
    time.sleep(0.01)
with Progress("first", 2, "step", cause="compiling") as first:
    time.sleep(2)
    first.update()
    time.sleep(0.2)
    first.update()
"""


def test_a_terminal_shows_one_temporary_bar() -> None:
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    command = [sys.executable, "-c", TERMINAL]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=terminal)
    os.set_blocking(screen, False)
    text = ""
    while more := _read(screen):
        text += more.decode()
    os.close(terminal)
    os.close(screen)
    assert (done.returncode, done.stdout) == (0, b"")
    assert "outer: " in text
    assert "inner" not in text
    assert "short" not in text
    waiting, _, ready = text.rpartition("compiling")
    assert re.search("first:.* 0/2", waiting)
    assert re.search("first:.* 2/2", ready)
    assert "\n" not in text  # the bar is redrawn in its line
    assert text.endswith(" \r")  # the bar is erased at the end


def _read(screen: int) -> bytes:
    try:
        return os.read(screen, 4096)
    except BlockingIOError:  # everything has been read
        return b""


JOB = """
import time
from jaxret.parallel import progress
from jaxret.parallel.processes import from_first_process, initialize_distributed
progress.LINE_INTERVAL = 0.1
initialize_distributed("{address}", 2, {process})
print("own", from_first_process("hello"))
progress.print_line("said")
with progress.Progress("work", 3) as bar:
    for _ in range(3):
        time.sleep(0.2)
        bar.update()
"""


def test_only_one_process_prints_and_gloo_is_silent() -> None:
    address = free_address()
    commands = ([sys.executable, "-c", JOB.format(address=address, process=process)] for process in range(2))
    (status, out, err), (other_status, other_out, other_err) = together(*commands)
    assert (status, other_status) == (0, 0), (err, other_err)
    assert (out, other_out) == ("own hello\nsaid\n", "own hello\n")
    assert " work: 3 of 3 texts" in err
    assert other_err == ""


def test_a_notebook_has_a_bar(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook's standard error is no terminal, but is displayed like one."""
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1))
    console = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    for ipython, drawn in ((kernel, True), (console, False)):
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        with Progress("encode", 400, "passage") as bar:
            clock.seconds += 1.5
            bar.update(100)
        shown = capsys.readouterr().err
        assert ("| 0/400 [" in shown) is drawn
        with Progress("encode", 400, "passage", cause=COMPILATION):
            assert ("compiling" in capsys.readouterr().err) is drawn
        capsys.readouterr()
