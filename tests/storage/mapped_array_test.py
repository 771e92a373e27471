"""Mapped arrays: opened by several threads, and from damaged files."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.storage.mapped_array import map_array


def test_one_thread_reads_a_header_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 fails once in thousands of headers, so the test counts the threads in np.load."""
    np.save(tmp_path / "a.npy", np.arange(3))
    load, reading, most = np.load, [], []

    def slow(*arguments: Any, **options: Any) -> np.ndarray:
        reading.append(1)
        most.append(len(reading))
        time.sleep(0.005)
        array = load(*arguments, **options)
        reading.pop()
        return array

    monkeypatch.setattr(np, "load", slow)
    with ThreadPoolExecutor(8) as threads:
        assert [array.sum() for array in threads.map(map_array, [tmp_path / "a.npy"] * 16)] == [3] * 16
    assert most == [1] * 16


def test_a_mapped_array_cannot_be_written(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        map_array(tmp_path / "a.npy")[0] = 1


def test_a_file_shorter_than_its_header_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(1000))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="mmap length"):
        map_array(path)
