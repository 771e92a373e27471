"""Progress of long work on standard error, and the lines that a job prints.

A terminal or a notebook has a bar, which appears after a second (in a notebook at once, if a program is compiled
first); a process shows one bar at a time. A file or a pipe gets a line with the time every ten seconds. They also show
work of which no part is finished, such as while a program is compiled. Nested work has its own lines while the outer
work makes no progress.
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
from typing import TYPE_CHECKING, Any, TypeVar

from jaxret.parallel.first_process import is_first_process
from jaxret.parallel.metrics_file import report_progress

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

DELAY = 1.0  # seconds until a bar is shown
LINE_INTERVAL = 10.0  # seconds between lines in a file or pipe
COMPILATION = "compiling"  # what the first part of a device's work waits for
_PLURALS = {"batch": "batches", "query": "queries"}

_settings = {"quiet": False}
_stack: list[Progress] = []  # visible work, the outermost first; only the outermost work has a bar


def be_quiet() -> None:
    """Show no progress and print no lines of jobs in this process from now on. Results and errors are still printed."""
    _settings["quiet"] = True


@contextlib.contextmanager
def hide_prints() -> Iterator[None]:
    """Discard text that a library prints to standard output in this block, if `be_quiet` was called."""
    with contextlib.redirect_stdout(io.StringIO()) if _settings["quiet"] else contextlib.nullcontext():
        yield


def job_log(progress: bool) -> Callable[[str], None]:
    """Return a function that prints a line in the first process, or does nothing if `progress` is False."""
    return print_line if progress else lambda _: None


def print_line(text: str) -> None:
    """Print a line above the bar in the first process. It is flushed, so that the log of a background job has it at
    once."""
    if not _settings["quiet"] and is_first_process():
        if "tqdm" in sys.modules:  # a bar may be on the screen
            from tqdm import tqdm

            tqdm.write(text)
        else:
            print(text)
        sys.stdout.flush()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose output is not a terminal. Does not import
    IPython."""
    ipython: Any = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def _bar_class() -> type[tqdm[Any]]:
    """Return tqdm's class for notebooks if it can draw widgets, else its class for text."""
    if in_notebook() and importlib.util.find_spec("ipywidgets"):
        from tqdm.notebook import tqdm_notebook

        return tqdm_notebook
    from tqdm import tqdm  # the import takes a hundredth of a second, which most commands do not need

    return tqdm


class Progress:
    """Counts finished parts of some work (`done`), and shows them while the block runs."""

    def __init__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "text",
        start: int = 0,
        progress: bool = True,
        cause: str = "",
    ):
        """Prepare the count; nothing is shown yet.

        Args:
            name: name of the work, in one or two words.
            total: number of parts; None: unknown.
            unit: name of a part, in one word.
            start: number of parts that are finished already.
            progress: whether progress is shown.
            cause: what the first part waits for, which is the note until this part is finished.
        """
        self.name, self.total, self.unit, self.done = name, total, unit, start
        self._first, self._note, self._cause = start, cause, cause
        self._visible = progress and not _settings["quiet"]
        self._bar: tqdm[Any] | None = None
        self._lines = 0
        self._end, self._mutex = threading.Event(), threading.RLock()

    def __enter__(self) -> Progress:
        self._start_time = self._next = self._last_update = time.monotonic()
        self._terminal = sys.stderr.isatty() or in_notebook()
        self._visible = self._visible and not (self._terminal and _stack)
        if self._visible:
            _stack.append(self)
            self._next += DELAY if self._terminal else LINE_INTERVAL
            show = self._draw_while_waiting if self._terminal else self._write_while_waiting
            if not in_notebook():
                threading.Thread(target=show, name="progress", daemon=True).start()
            elif self._cause and is_first_process():
                self._draw()  # now, because widgets belong to the thread of a cell, which then waits
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
        """Add `count` finished parts."""
        self.done += count
        report_progress(self.name, self.unit, self.done, self.total)
        if self._cause and self._note == self._cause:
            self.note("")
        if not self._visible:
            return
        clock = self._last_update = time.monotonic()
        if self._bar is None and clock < self._next:
            return
        if self._bar is None and not is_first_process():
            self._visible = False
        elif self._terminal:
            with self._mutex:
                self._draw()
        else:
            with self._mutex:
                self._next += LINE_INTERVAL * (1 + (clock - self._next) // LINE_INTERVAL)
                if all(clock - outer._last_update >= LINE_INTERVAL for outer in _stack[: _stack.index(self)]):
                    self._write_line("for")

    def _draw_while_waiting(self) -> None:
        """Draw the bar after a second without a finished part."""
        if not self._end.wait(DELAY):
            with self._mutex:
                if self._bar is None and not self._end.is_set() and is_first_process():
                    self._draw()

    def _write_while_waiting(self) -> None:
        """Write a line for every ten seconds without a finished part, unless nested work writes lines."""
        while not self._end.wait(LINE_INTERVAL):
            with self._mutex:
                clock = time.monotonic()
                if self._end.is_set() or clock < self._next or _stack[-1] is not self or not is_first_process():
                    continue
                self._next = clock + LINE_INTERVAL
                self._write_line("for")

    def note(self, text: str) -> None:
        """Set the text after the numbers, such as the loss."""
        self._note = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def _draw(self) -> None:
        if self._bar is None:
            large = (self.total or 0) > 100_000
            self._bar = _bar_class()(
                total=self.total, initial=self._first, desc=self.name, unit=self.unit, unit_scale=large, leave=False
            )
            self._bar.start_t -= time.monotonic() - self._start_time
            self._bar.set_postfix_str(self._note)
        self._bar.update(self.done - self._bar.n)

    def _write_line(self, preposition: str) -> None:
        """Write "2026-01-31 12:00:00 encode: 1,024 of 4,096 texts (25%) for 0:01:00, 17.1 text/s, 0:03:00 left"."""
        from tqdm import tqdm

        seconds = time.monotonic() - self._start_time
        rate = (self.done - self._first) / max(seconds, 1e-9)
        parts = [f"{self.name}: {self.done:,}"]
        if self.total:
            parts[0] += f" of {self.total:,}"
        parts[0] += f" {_PLURALS.get(self.unit, self.unit + 's')}"
        parts[0] += f" ({self.done / self.total:.0%})" if self.total else ""
        parts[0] += f" {preposition} {tqdm.format_interval(seconds)}"
        if rate:
            parts.append(f"{rate:,.3g} {self.unit}/s" if rate < 1000 else f"{rate:,.0f} {self.unit}/s")
        if self.total and rate and preposition == "for":
            parts.append(f"{tqdm.format_interval((self.total - self.done) / rate)} left")
        if self._note:
            parts.append(self._note)
        self._lines += 1
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {', '.join(parts)}\n"
        print(line, end="", file=sys.stderr, flush=True)  # one call, because other threads write lines, too


def with_progress(
    items: Iterable[T], name: str, total: int | None = None, unit: str = "text", progress: bool = True
) -> Iterator[T]:
    """Yield the items, and show how many were used.

    Args:
        name: name of the work, in one or two words.
        total: number of items; None: unknown.
        unit: name of an item, in one word.
        progress: whether progress is shown.
    """
    with Progress(name, total, unit, progress=progress) as bar:
        for item in items:
            yield item
            bar.update()
