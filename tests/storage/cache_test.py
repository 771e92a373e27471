"""The cache has limits, and can be listed and emptied."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jaxret.data.tokens import store as stores
from jaxret.data.tokens.store import ColumnWriter, StoreOrigin, open_or_make_store, store_root
from jaxret.storage import cache
from jaxret.storage.cache import cache_entries, clear_cache, trim_cache
from tests.pipeline import run_script


def test_the_least_recently_used_entry_is_deleted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cache._LIMITS, "compiled", 200)
    for number, name in enumerate(("b", "a", "d", "c")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1_000 + number, 1_000 + number))
    os.utime(tmp_path / "b", (5_000, 1_000))  # "b" was read later than the others
    assert [entry.path.name for entry in trim_cache(tmp_path, "compiled")] == ["a", "d"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c"]
    assert trim_cache(tmp_path, "compiled") == []


def folders(root: Path, days: dict[str, float]) -> None:
    """Create folders of 1,000 bytes which were used this many days ago."""
    for name, ago in days.items():
        (root / name).mkdir(parents=True)
        (root / name / "x.npy").write_bytes(bytes(1000))
        os.utime(root / name, (time.time() - 86400 * ago,) * 2)


def test_tokens_that_are_in_use_stay_above_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXRET_TOKENS_GB", "0.000001")
    folders(tmp_path, {"a": 3, "b": 2, "c": 0.5, "d": 0})
    assert [entry.path.name for entry in trim_cache(tmp_path, "tokens")] == ["a", "b"]
    assert [entry.path.name for entry in cache_entries(tmp_path)] == ["c", "d"]
    monkeypatch.setenv("JAXRET_TOKENS_GB", "much")
    with pytest.raises(ValueError, match=r"JAXRET_TOKENS_GB=much: .*number .*gigabytes"):
        trim_cache(tmp_path, "tokens")


def test_a_new_store_makes_room_in_the_cache_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAXRET_TOKENS_GB", "0.000001")
    (tmp_path / "text").write_text("x")

    def make(writer: ColumnWriter) -> dict[str, int]:
        writer.array("numbers", stores.np.arange(10))
        return {}

    for root in (store_root(), tmp_path / "mine"):
        folders(root, {"old": 3})
        said: list[str] = []
        open_or_make_store(StoreOrigin("new", (tmp_path / "text",), {}), root, make, said.append)
        assert (root / "old").exists() == (root == tmp_path / "mine")
        assert any("deleted old (0.0 MB)" in line for line in said) == (root == store_root())
    (kept,) = cache_entries(store_root())
    os.utime(kept.path, (1, 1))
    open_or_make_store(StoreOrigin("new", (tmp_path / "text",), {}), store_root(), make, said.append)
    assert cache_entries(store_root())[0].last_use > 1, "opening a store counts as a use"


def test_the_command_shows_and_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders(tmp_path / "jaxret" / "tokens", {"nq.train-1": 1, "being-made": 0})
    lease = tmp_path / "jaxret" / "tokens" / ".lease-being-made" / "1"
    lease.mkdir(parents=True)
    done = run_script("-m", "jaxret", "cache")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens: 2 tokenized texts, 0.0 MB of at most 32.0 GB" in done.stdout
    monkeypatch.setenv("JAXRET_TOKENS_GB", "0.000000001")
    assert "above the bound: the next job that adds to them" in run_script("-m", "jaxret", "cache").stdout
    monkeypatch.delenv("JAXRET_TOKENS_GB")
    assert "nq.train-1" in done.stdout
    assert [entry.path.name for entry in clear_cache("tokens")] == ["nq.train-1"]
    lease.rmdir()
    assert "deleted 1 tokenized texts" in run_script("-m", "jaxret", "cache", "--clear=all").stdout
    assert cache_entries(tmp_path / "jaxret" / "tokens") == []
