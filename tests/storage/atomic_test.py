"""A file is complete or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxret.storage.atomic import (
    StorageError,
    atomic_write,
    read_json,
    read_with_digest,
    require_disk_path,
    require_file_path,
    require_writable_disk,
    sha256_file,
    sha256_json,
    sha256_json_lists,
    with_digest,
    write_json,
)
from jaxret.storage.unfinished import remove_leftovers


def test_a_reader_sees_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    with atomic_write(path) as file:
        file.write("old\n")
    with atomic_write(path) as file:
        file.write("new\n")
        file.flush()
        assert path.read_text() == "old\n"
    assert path.read_bytes() == b"new\n"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_write(path, "wb") as file:  # noqa: PT012
        file.write(b"half of")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.bin"]


def test_json_round_trip(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None], "a": {"text": "naïve → 雪"}}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert "雪" in text
    assert text.index('"a"') < text.index('"b"')
    assert text.endswith("}\n")


def test_nan_is_no_json_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"loss": 1.0}


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 1,\n "b": }\n')
    with pytest.raises(ValueError, match=r"x\.json:2: not valid JSON"):
        read_json(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1,\n "b": "\xba"}', r"x\.json:2: not valid JSON \(the byte 0xba is not UTF-8\)"),
        ("{}".encode("utf-16"), r"x\.json:1: not valid JSON \(the byte 0xff"),
        (b"\xef\xbb\xbf{}", r"x\.json:1: not valid JSON"),
        (b"", r"x\.json:1: not valid JSON"),
        (b"[" * 200_000, r"x\.json: not valid JSON \(nested too deeply\)"),
        (b'{"a":' * 200_000, r"x\.json: not valid JSON \(nested too deeply\)"),
        (b"1" * 10_000, r"x\.json: .*JSON \(a number .*digits\)"),
        (b'{"text": "a", "n": 1, "text": "b"}', r"x\.json: .*JSON \(.*'text' .*twice\)"),
    ],
)
def test_every_error_names_the_file(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as refused:
        read_json(path)
    assert "\n" not in str(refused.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_json, sha256_file):
        with pytest.raises(ValueError, match=r"/pipe .*pipe; .*needed"):
            read(tmp_path / "pipe")


def test_a_shell_does_not_replace_a_tilde_inside_of_a_word() -> None:
    """--workdir=~/runs made a folder "~" in the current folder."""
    for path in ("~", "~/runs/a"):
        with pytest.raises(ValueError, match="home folder"):
            require_disk_path(path)
    for path in ("./~/runs", "runs/~", "~old", "a~"):
        require_disk_path(path)


def test_file_and_rename_are_flushed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "x", []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        synced = os.fstat(descriptor)
        kind = "folder" if os.path.samestat(synced, tmp_path.stat()) else f"file of {synced.st_size} bytes"
        done.append(f"fsync {kind}")
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        done.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    with atomic_write(path) as file:
        file.write("five\n")
    assert done == ["fsync file of 5 bytes", "replace", "fsync folder"]


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "the disk reports an input/output error"),
    ],
)
def test_disk_errors_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, cause: str
) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*(("builtins.open", refuse) if call == "open" else (f"os.{call}", refuse)))
    with pytest.raises(StorageError) as message, atomic_write(path) as file:
        file.write("new")
    monkeypatch.undo()
    assert str(message.value) == f"{path} cannot be written: {cause}"
    assert message.value.errno == number
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_numpys_short_write(tmp_path: Path) -> None:
    """The error of np.save names neither the file nor the cause. A new process may only write 4 KiB."""
    program = (
        "import sys; import numpy as np; from jaxret.storage.atomic import atomic_write\n"
        "with atomic_write(sys.argv[1], 'wb') as file: np.save(file, np.zeros(1600))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x.npy")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert done.stderr.splitlines()[-1] == (
        f"jaxret.storage.atomic.StorageError: {tmp_path}/x.npy cannot be written: the disk took only a part of it: "
        "full, or a quota or limit"
    )
    assert not list(tmp_path.iterdir())


def test_errors_of_other_files_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing, atomic_write(tmp_path / "x", "wb"):
        (tmp_path / "other").read_bytes()
    assert not isinstance(missing.value, StorageError)
    with pytest.raises(OSError, match="not gzipped") as other, atomic_write(tmp_path / "x", "wb"):
        raise OSError("not gzipped")
    assert not isinstance(other.value, StorageError)


def test_an_unwritable_folder_is_an_error_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable_disk(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match=rf"{place} .*written: .*folder"):
            require_writable_disk(place)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=rf"{tmp_path} .*written: .*disk"):
        require_writable_disk(tmp_path)


def test_only_leftovers_of_atomic_write_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leftover comes from a killed atomic_write; other names are similar."""
    killed = (
        "import os, sys; from jaxret.storage.atomic import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file: file.write('half'); file.flush(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "ids.txt")])
    (leftover,) = (p.name for p in tmp_path.iterdir())
    kept = [
        ".ids.txt.tmp",
        "ids.txt.0123456789abcdef01234567.tmp",
        ".x.0123456789abcdef0123456g.tmp",
        ".x.0123456789abcdef01234567.tmp2",
    ]
    for name in kept:
        (tmp_path / name).touch()
    (tmp_path / ".folder.0123456789abcdef01234567.tmp").mkdir()
    (tmp_path / ".link.0123456789abcdef01234567.tmp").symlink_to(tmp_path / "ids.txt")
    before = {p.name for p in tmp_path.iterdir()}
    assert remove_leftovers(tmp_path, age=3600) == []  # a young file may belong to another process that still writes
    os.utime(tmp_path / leftover, (0, time.time() - 3601))
    assert remove_leftovers(tmp_path, age=3600) == [leftover]
    (tmp_path / leftover).touch()
    assert remove_leftovers(tmp_path) == [leftover]
    assert {p.name for p in tmp_path.iterdir()} == before - {leftover}
    assert remove_leftovers(tmp_path / "absent") == []


def test_digests(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "x").write_bytes(data)
    assert sha256_file(tmp_path / "x") == hashlib.sha256(data).hexdigest()
    assert sha256_json({"a": 1, "b": [2]}) == sha256_json({"b": [2], "a": 1})
    different = [{"a": 1, "b": [3]}, {"a": "1", "b": [2]}, {"a": 1, "b": 2}, {"a": 1}]
    assert len({sha256_json(value) for value in different} | {sha256_json({"a": 1, "b": [2]})}) == 5


def test_a_digest_of_streamed_lists() -> None:
    lists: list[list[Any]] = [["naïve 東京", '"', ""], [], [["a", "b"], []], [{"b": 1, "a": 2.5}, None, -3]]
    assert sha256_json_lists(iter(items) for items in lists) == sha256_json(lists)
    assert sha256_json_lists([]) == sha256_json([])
    assert sha256_json_lists(lists[::-1]) != sha256_json(lists)  # control: the order matters
    with pytest.raises(ValueError, match="not JSON compliant"):
        sha256_json_lists([[float("nan")]])


def test_edited_sealed_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, with_digest({"rows": 3}))
    assert read_with_digest(path) == {"rows": 3}
    path.write_text(path.read_text().replace("3", "4", 1))
    with pytest.raises(ValueError, match=r"x\.json: damaged"):
        read_with_digest(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json: .*\(a JSON .*expected, .*list\)"):
        read_with_digest(path)


def test_a_pipe_or_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"--out=.*device or a pipe"):
        require_file_path(path, "--out")
    with pytest.raises(StorageError, match="a device or a pipe"), atomic_write(path) as file:
        file.write("x")
    assert path.is_fifo()
