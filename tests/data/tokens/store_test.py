"""Stores of columns: reading gives what was written, and each store is written once, by one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.errors import DataError
from jaxret.data.tokens import store
from jaxret.data.tokens.store import (
    ColumnWriter,
    StaleError,
    StoreOrigin,
    StringsBuilder,
    open_or_make_store,
    open_store,
    store_root,
)
from jaxret.storage.atomic import StorageError
from jaxret.types import Ragged
from tests.pipeline import REPOSITORY, contents, environment

BLOCKS = [Ragged.from_lists([[5, 6, 7], []]), Ragged.from_lists([]), Ragged.from_lists([[8]])]
TEXTS = ["q1", "", "naïve 東京", "last"]


@pytest.fixture
def origin(tmp_path: Path) -> StoreOrigin:
    (tmp_path / "text").write_text("river stone")
    return StoreOrigin("numbers", (tmp_path / "text",), {"length": 3})


def make(writer: ColumnWriter) -> dict[str, Any]:
    """Write a store with a column of each kind, and return the length of the text."""
    writer.array("table", np.arange(6, dtype=np.int32).reshape(3, 2))
    writer.ragged("rows", BLOCKS)
    writer.strings("texts", StringsBuilder(TEXTS).strings())
    return {"length": len((writer.folder.parents[1] / "text").read_text())}


def never(writer: ColumnWriter) -> dict[str, Any]:
    raise AssertionError("the store is written again")


def quiet(_: str) -> None:
    pass


def test_stored_columns_round_trip(origin: StoreOrigin, tmp_path: Path) -> None:
    made = open_or_make_store(origin, tmp_path / "stores", make, quiet)
    again = open_or_make_store(origin, tmp_path / "stores", never, quiet)
    for actual in (made, again):
        np.testing.assert_array_equal(actual.columns["table"], [[0, 1], [2, 3], [4, 5]])
        rows = actual.ragged("rows")
        assert [row.tolist() for row in rows] == [[5, 6, 7], [], [8]]
        assert list(actual.strings("texts")) == TEXTS
        assert actual.strings("texts")[-2:] == TEXTS[-2:]
        assert actual.facts == {"length": 11}
        assert not rows.flat.flags.owndata, "the file is mapped, not read"
        assert not rows.flat.flags.writeable
        assert rows.padded([2, -1, 0], 2, 9)[0].tolist() == [[8, 9], [9, 9], [5, 6]]
        assert rows.part(1, 3).lengths.tolist() == [0, 1]
        assert rows.take(np.array([2, 0])).flat.tolist() == [8, 5, 6, 7]


def test_columns_are_plain_npy_files(origin: StoreOrigin, tmp_path: Path) -> None:
    folder = open_or_make_store(origin, tmp_path / "stores", make, quiet).folder
    flat, offsets = (np.load(folder / f"rows.{name}.npy") for name in ("flat", "offsets"))
    assert (flat.dtype, offsets.dtype) == (np.int32, np.int64)
    assert (flat.tolist(), offsets.tolist()) == ([5, 6, 7, 8], [0, 3, 3, 4])


def test_empty_columns(origin: StoreOrigin, tmp_path: Path) -> None:
    def nothing(writer: ColumnWriter) -> dict[str, Any]:
        writer.ragged("rows", [])
        writer.strings("texts", StringsBuilder().strings())
        return {}

    actual = open_or_make_store(origin, tmp_path, nothing, quiet)
    assert (len(actual.ragged("rows")), len(actual.strings("texts"))) == (0, 0)


def test_only_changed_text_is_tokenized_again(origin: StoreOrigin, tmp_path: Path) -> None:
    first = open_or_make_store(origin, tmp_path / "stores", make, quiet)
    os.utime(tmp_path / "text", ns=(1, 1))
    assert open_or_make_store(origin, tmp_path / "stores", never, quiet).facts == first.facts
    (tmp_path / "text").write_text("river stones")
    said: list[str] = []
    second = open_or_make_store(origin, tmp_path / "stores", make, said.append)
    assert second.folder == first.folder
    assert second.facts == {"length": 12}
    assert said[0] == f"{tmp_path}/text has changed since it was tokenized: it is tokenized again"
    (tmp_path / "text").write_text("river stonex")  # the size is the same
    with pytest.raises(StaleError, match="text has changed"):
        open_store(origin, tmp_path / "stores")


def test_other_settings_have_another_folder(origin: StoreOrigin, tmp_path: Path) -> None:
    other = StoreOrigin(origin.name, origin.files, {"length": 4})
    first, second = (open_or_make_store(each, tmp_path / "stores", make, quiet) for each in (origin, other))
    assert first.folder != second.folder
    shutil.rmtree(second.folder)
    shutil.copytree(first.folder, second.folder)
    with pytest.raises(StaleError, match="by another version or with"):
        open_store(other, tmp_path / "stores")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("damage", [flip, shorten, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_store_is_made_again(damage: Any, origin: StoreOrigin, tmp_path: Path) -> None:
    folder = open_or_make_store(origin, tmp_path / "stores", make, quiet).folder
    before = contents(folder)
    assert set(before) == {
        *("table.npy", "rows.flat.npy", "rows.offsets.npy", "texts.flat.npy", "texts.offsets.npy", "manifest.json")
    }
    for name in before:
        damage(folder / name)
        said: list[str] = []
        open_or_make_store(origin, tmp_path / "stores", make, said.append)
        assert contents(folder) == before
        if (name, damage) != ("manifest.json", Path.unlink):  # without a manifest, the store never existed
            assert said[0] == f"{folder}/{name} is damaged: it is tokenized again"


def test_an_incomplete_store_is_never_used(
    origin: StoreOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill would leave the folder as it is before one of its files gets its name."""
    replace = os.replace
    left: list[Path] = []

    def replacing(old: Any, new: Any) -> None:
        left.append(tmp_path / f"left-{len(left)}")
        shutil.copytree(tmp_path / "stores", left[-1])
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replacing)
        whole = contents(open_or_make_store(origin, tmp_path / "stores", make, quiet).folder)
    assert len(left) == len(whole)
    for root in left:
        for lease in root.glob(".lease-*"):  # the leases are of this process, which is alive
            shutil.rmtree(lease)
        with pytest.raises(StaleError):
            open_store(origin, root)
        assert contents(open_or_make_store(origin, root, make, quiet).folder) == whole


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from jaxret.data.tokens.store import StoreOrigin, open_or_make_store

def make(writer):
    writer.array("table", np.arange(3))
    os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
open_or_make_store(StoreOrigin("numbers", (folder / "text",), {"length": 3}), folder / "stores", make, print)
"""


def test_the_next_process_finishes_after_a_kill(
    origin: StoreOrigin, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=REPOSITORY, env=environment(), timeout=60)
    assert killed.returncode == -signal.SIGKILL
    folder = origin.folder(tmp_path / "stores")
    assert {path.name for path in folder.iterdir()} == {"table.npy"}
    open_or_make_store(origin, tmp_path / "stores", make, quiet)
    assert "which is gone: taken over" in capfd.readouterr().err
    assert list((tmp_path / "stores").iterdir()) == [folder]


def test_one_process_makes_the_store_and_others_wait(origin: StoreOrigin, tmp_path: Path) -> None:
    begun, go, said = threading.Event(), threading.Event(), []

    def slowly(writer: ColumnWriter) -> dict[str, Any]:
        begun.set()
        assert go.wait(60)
        return make(writer)

    def log(line: str) -> None:
        said.append(line)
        go.set()  # the message says that this process waits for the other one

    first = threading.Thread(target=open_or_make_store, args=(origin, tmp_path / "stores", slowly, quiet))
    first.start()
    assert begun.wait(60)
    actual = open_or_make_store(origin, tmp_path / "stores", never, log)
    first.join()
    assert actual.facts == {"length": 11}
    assert len(said) == 1
    assert f"waiting for another process: the tokens of numbers are made by process {os.getpid()} on" in said[0]


def test_after_a_failure_the_next_process_tries(origin: StoreOrigin, tmp_path: Path) -> None:
    """It reports the same mistake, if it makes it again, not the folder that the first process removed."""
    begun, go, failed = threading.Event(), threading.Event(), []

    def failing(writer: ColumnWriter) -> dict[str, Any]:
        begun.set()
        assert go.wait(60)
        raise ValueError("a mistake")

    def first() -> None:
        with pytest.raises(ValueError, match="a mistake"):
            open_or_make_store(origin, tmp_path / "stores", failing, quiet)
        failed.append(True)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(60)
    actual = open_or_make_store(origin, tmp_path / "stores", make, lambda _: go.set())
    thread.join()
    assert failed
    assert actual.facts == {"length": 11}


def test_a_process_that_lost_its_lease_waits_for_the_new_owner(origin: StoreOrigin, tmp_path: Path) -> None:
    """A process sleeps for longer than its lease while it writes the store, and another process writes it: the first
    one's files are dropped, and it uses the other's store."""
    root, calls = tmp_path / "stores", [None]

    def slept(writer: ColumnWriter) -> dict[str, Any]:
        calls.pop()  # a second call raises IndexError
        writer.array("table", np.zeros(2))
        owner = next(root.glob(".lease-*/*/owner.json"))
        owner.write_text(json.dumps({"host": "another-host"}))
        os.utime(owner, (0, 0))
        open_or_make_store(origin, root, make, quiet)
        writer.array("rows", np.zeros(2))
        raise AssertionError("the process continues")

    actual = open_or_make_store(origin, root, slept, quiet)
    assert actual.facts == {"length": 11}
    assert list(root.iterdir()) == [actual.folder]
    np.testing.assert_array_equal(open_store(origin, root).columns["table"], [[0, 1], [2, 3], [4, 5]])


def test_text_changed_during_reading_is_an_error(origin: StoreOrigin, tmp_path: Path) -> None:
    def changing(writer: ColumnWriter) -> dict[str, Any]:
        facts = make(writer)
        (tmp_path / "text").write_text("other")
        return facts

    with pytest.raises(DataError, match=r"text: .*changed .*read"):
        open_or_make_store(origin, tmp_path / "stores", changing, quiet)
    assert not list((tmp_path / "stores").iterdir())


def test_a_failed_store_leaves_no_files(origin: StoreOrigin, tmp_path: Path) -> None:
    def failing(writer: ColumnWriter) -> dict[str, Any]:
        make(writer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_or_make_store(origin, tmp_path / "stores", failing, quiet)
    assert not list((tmp_path / "stores").iterdir())


def test_an_unwritable_folder(origin: StoreOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"; .*another .*data\.store"):
        open_or_make_store(origin, tmp_path / "file" / "stores", make, quiet)
    open_or_make_store(origin, tmp_path / "stores", make, quiet)
    monkeypatch.setattr(store, "Leases", None)  # a finished store is not locked
    open_or_make_store(origin, tmp_path / "stores", never, quiet)


def test_location_of_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_root("here") == tmp_path / "here"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert store_root() == tmp_path / "cache" / "jaxret" / "tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store_root() == tmp_path / "home" / ".cache" / "jaxret" / "tokens"
