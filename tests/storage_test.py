"""Files that are either whole or not there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jaxret.storage import atomic_write, read_json, sha256_file, sha256_json, write_json


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
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


def test_digests(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "x").write_bytes(data)
    assert sha256_file(tmp_path / "x") == hashlib.sha256(data).hexdigest()
    assert sha256_json({"a": 1, "b": [2]}) == sha256_json({"b": [2], "a": 1})
    different = [{"a": 1, "b": [3]}, {"a": "1", "b": [2]}, {"a": 1, "b": 2}, {"a": 1}]
    assert len({sha256_json(value) for value in different} | {sha256_json({"a": 1, "b": [2]})}) == 5
