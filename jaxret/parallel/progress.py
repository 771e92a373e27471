"""Progress of long work on standard error, and the lines that a job prints: one process draws one bar at a time.

On a terminal and in a notebook there is a bar, from a second on. In a file or a pipe there is a line every ten seconds,
with the time, also while nothing is finished, as when a program is compiled. Nested work has lines of its own while the
outer work makes no progress.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, TypeVar

from tqdm import tqdm

from jaxret.parallel.first_process import is_first_process
from jaxret.parallel.metrics_file import report_progress

T = TypeVar("T")

DELAY = 1.0  # seconds of work that nothing is shown of
INTERVAL = 10.0  # seconds between the lines of a file
_PLURALS = {"batch": "batches", "query": "queries"}

_settings = {"quiet": False}
_stack: list[Progress] = []  # work that is shown, the outermost first; it alone has a bar


def be_quiet() -> None:
    """Show no more progress and print no more lines of jobs in this process; results and errors remain."""
    _settings["quiet"] = True


@contextlib.contextmanager
def hide_prints() -> Iterator[None]:
    """Drop what a library prints to standard output within the block, if `be_quiet` was called."""
    with contextlib.redirect_stdout(io.StringIO()) if _settings["quiet"] else contextlib.nullcontext():
        yield


def job_log(shown: bool) -> Callable[[str], None]:
    """Return a function that prints a line, in the first process and if progress is shown."""
    return print_line if shown else lambda _: None


def print_line(text: str) -> None:
    """Print a line above the bar, in the first process; without delay, so that the log of a job in the background has
    it."""
    if not _settings["quiet"] and is_first_process():
        tqdm.write(text)
        sys.stdout.flush()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose output is not a terminal; without importing it."""
    ipython: Any = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def _bar_class() -> type[tqdm[Any]]:
    """Return the bar of notebooks where there are widgets to draw it, else the one of text."""
    if in_notebook() and importlib.util.find_spec("ipywidgets"):
        from tqdm.notebook import tqdm_notebook

        return tqdm_notebook
    return tqdm


class Progress:
    """Counts finished parts of some work, and shows them while the block runs.

    Attributes:
        done: parts that are finished.
    """

    def __init__(self, name: str, total: int | None = None, unit: str = "text", start: int = 0, shown: bool = True):
        """Show nothing yet. name: of the work. total: parts; None: not known. shown: whether it is shown at all."""
        self.name, self.total, self.unit, self.done = name, total, unit, start
        self._first, self._note = start, ""
        self._visible = shown and not _settings["quiet"]
        self._bar: tqdm[Any] | None = None
        self._lines = 0
        self._end, self._mutex = threading.Event(), threading.RLock()

    def __enter__(self) -> Progress:
        self._start_time = self._next = self._last_update = time.monotonic()
        self._terminal = sys.stderr.isatty() or in_notebook()
        self._visible = self._visible and not (self._terminal and _stack)
        if self._visible:
            _stack.append(self)
            self._next += DELAY if self._terminal else INTERVAL
            if not self._terminal:
                threading.Thread(target=self._write_while_waiting, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._end.set()
        if self in _stack:
            _stack.remove(self)
        if self._bar is not None:
            self._bar.close()
        elif self._lines:
            self._write_line("in")

    def update(self, count: int = 1) -> None:
        """Add to the finished parts."""
        self.done += count
        report_progress(self.name, self.unit, self.done, self.total)
        if not self._visible:
            return
        now = self._last_update = time.monotonic()
        if self._bar is None and now < self._next:
            return
        if self._bar is None and not is_first_process():
            self._visible = False
        elif self._terminal:
            self._draw(count)
        else:
            with self._mutex:
                self._next += INTERVAL * (1 + (now - self._next) // INTERVAL)
                if all(now - outer._last_update >= INTERVAL for outer in _stack[: _stack.index(self)]):
                    self._write_line("for")

    def _write_while_waiting(self) -> None:
        """Write a line for every ten seconds in which no part is finished, unless work inside this one does so."""
        while not self._end.wait(INTERVAL):
            with self._mutex:
                now = time.monotonic()
                if self._end.is_set() or now < self._next or _stack[-1] is not self or not is_first_process():
                    continue
                self._next = now + INTERVAL
                self._write_line("for")

    def note(self, text: str) -> None:
        """Set what stands behind the numbers, as the loss."""
        self._note = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def _draw(self, count: int) -> None:
        if self._bar is None:
            large = (self.total or 0) > 100_000
            self._bar = _bar_class()(
                total=self.total, initial=self._first, desc=self.name, unit=self.unit, unit_scale=large, leave=False
            )
            self._bar.start_t -= time.monotonic() - self._start_time
            self._bar.set_postfix_str(self._note, refresh=False)
            count = self.done - self._first
        self._bar.update(count)

    def _write_line(self, how: str) -> None:
        """Write "2026-01-31 12:00:00 encode: 1,024 of 4,096 texts (25%) for 0:01:00, 17.1 text/s, 0:03:00 left"."""
        seconds = time.monotonic() - self._start_time
        rate = (self.done - self._first) / max(seconds, 1e-9)
        parts = [f"{self.name}: {self.done:,}"]
        if self.total:
            parts[0] += f" of {self.total:,}"
        parts[0] += f" {_PLURALS.get(self.unit, self.unit + 's')}"
        parts[0] += f" ({self.done / self.total:.0%})" if self.total else ""
        parts[0] += f" {how} {tqdm.format_interval(seconds)}"
        if rate:
            parts.append(f"{rate:,.3g} {self.unit}/s" if rate < 1000 else f"{rate:,.0f} {self.unit}/s")
        if self.total and rate and how == "for":
            parts.append(f"{tqdm.format_interval((self.total - self.done) / rate)} left")
        if self._note:
            parts.append(self._note)
        self._lines += 1
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {', '.join(parts)}\n"
        print(line, end="", file=sys.stderr, flush=True)  # one write: other threads write lines, too


def with_progress(
    items: Iterable[T], name: str, total: int | None = None, unit: str = "text", shown: bool = True
) -> Iterator[T]:
    """Yield the items, and show how many of them there were.

    Args:
        name: of the work, in one or two words.
        total: number of items; None: not known.
        unit: an item, in one word.
        shown: whether progress is shown.
    """
    with Progress(name, total, unit, shown=shown) as progress:
        for item in items:
            yield item
            progress.update()
