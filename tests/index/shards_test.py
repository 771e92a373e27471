"""Shards are complete or absent, have the same bytes after any interruption, and damage is detected."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.index import shards as shards_module
from jaxret.index.shard_set import open_shards
from jaxret.index.shards import Shard, ShardError, ShardWriter, plan_shards, with_digest
from jaxret.runs.mismatch import ContractError
from jaxret.storage.atomic import read_json, sha256_file, write_json
from jaxret.types import Ragged

ROWS, PER_SHARD, V, D = 25, 10, 2, 6
FINGERPRINT = {"contract": {"family": "mlr", "layers": (12, 11)}, "checkpoint": {"step": 10, "sha256": "ab"}}
VECTORS = np.random.default_rng(0).standard_normal((ROWS, V, D), dtype=np.float32)
IDS = [f"passage-{i}é" for i in range(ROWS)]


def writer(folder: Path, **changes: Any) -> ShardWriter:
    arguments: dict[str, Any] = {"total_rows": ROWS, "rows_per_shard": PER_SHARD, "fingerprint": FINGERPRINT}
    return ShardWriter(folder, **(arguments | changes))


def write_pending(to: ShardWriter, dtype: Any = np.float32) -> list[int]:
    pending = to.pending()
    for shard in pending:
        part = slice(shard.start, shard.stop)
        to.write(shard, VECTORS[part].astype(dtype), IDS[part])
    return [shard.index for shard in pending]


def finished(folder: Path, dtype: Any = np.float32) -> Path:
    to = writer(folder)
    write_pending(to, dtype)
    to.finish()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip_byte(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_plan_covers_every_row_once_and_the_last_shard_is_short() -> None:
    plan = plan_shards(ROWS, PER_SHARD)
    assert plan == [Shard(0, 3, 0, 10), Shard(1, 3, 10, 20), Shard(2, 3, 20, 25)]
    assert [shard.rows for shard in plan_shards(20, 10)] == [10, 10]
    assert plan_shards(3, 10) == [Shard(0, 1, 0, 3)]
    for total, size in ((0, 10), (10, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            plan_shards(total, size)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shards_round_trip(dtype: str, tmp_path: Path) -> None:
    shards = open_shards(finished(tmp_path, dtype))
    expected = VECTORS.astype(dtype)
    assert (shards.total_rows, shards.vectors_per_row, shards.dimension) == (ROWS, V, D)
    assert shards.manifest.dtype == dtype
    assert shards.fingerprint == {
        "contract": {"family": "mlr", "layers": [12, 11]},
        "checkpoint": {"step": 10, "sha256": "ab"},
    }
    parts = list(shards)
    assert [first for first, _ in parts] == [0, 10, 20]
    assert all(isinstance(vectors, np.memmap) for _, vectors in parts)
    np.testing.assert_array_equal(np.concatenate([vectors for _, vectors in parts]), expected)
    assert parts[0][1].dtype == np.dtype(dtype)
    rows = [24, 3, 10, 3, 9]
    assert shards.ids(np.array(rows)) == [IDS[i] for i in rows]
    assert shards.ids(range(ROWS)) == IDS
    assert shards.ids([]) == []


def test_files_are_named_as_documented(tmp_path: Path) -> None:
    kinds = {
        f"{kind}-0000{i}-of-00003.{end}"
        for i in range(3)
        for kind, end in (("vectors", "npy"), ("ids", "txt"), ("shard", "json"))
    }
    assert set(contents(finished(tmp_path))) == kinds | {"manifest.json"}


@pytest.mark.parametrize("steps", range(9))
def test_killed_between_any_two_files_and_resumed_gives_the_same_bytes(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard has three files; the process dies before file number `steps` gets its final name."""
    expected = contents(finished(tmp_path / "uninterrupted"))
    folder = tmp_path / "killed"
    replace = os.replace
    done: list[str] = []

    def dying_replace(source: str, target: str) -> None:
        if len(done) == steps:
            raise KeyboardInterrupt
        done.append(str(target))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying_replace)
        with pytest.raises(KeyboardInterrupt):
            write_pending(writer(folder))
    (folder / ".vectors-00001-of-00003.npy.1.tmp").write_bytes(b"left over")  # a killed process cannot clean up
    (folder / ".shard-00001-of-00003.json.1.tmp").write_bytes(b"{")
    resumed = writer(folder)
    assert write_pending(resumed) == list(range(steps // 3, 3))
    resumed.finish()
    assert {name: data for name, data in contents(folder).items() if not name.startswith(".")} == expected
    open_shards(folder)


def test_writing_in_another_order_by_two_writers_gives_the_same_bytes(tmp_path: Path) -> None:
    expected = contents(finished(tmp_path / "one"))
    first, second = writer(tmp_path / "two"), writer(tmp_path / "two")
    for to, index in ((second, 2), (first, 0)):
        shard = to.shards[index]
        to.write(shard, VECTORS[shard.start : shard.stop], IDS[shard.start : shard.stop])
        with pytest.raises(ShardError, match=r"00001-of-00003.*run encode again"):
            to.finish()
    assert [shard.index for shard in first.pending()] == [1]
    write_pending(first)
    assert second.finish() == first.finish()
    assert contents(tmp_path / "two") == expected


@pytest.mark.parametrize("name", ["vectors-00001-of-00003.npy", "ids-00001-of-00003.txt"])
def test_a_flipped_byte_is_detected_and_repaired(name: str, tmp_path: Path) -> None:
    expected = contents(finished(tmp_path))
    flip_byte(tmp_path / name)
    with pytest.raises(ShardError, match=rf"{name} \(rows 10 to 19\): damaged.*run encode again"):
        open_shards(tmp_path)
    open_shards(tmp_path, verify=False)  # control: sizes and shapes do not show the damage
    again = writer(tmp_path)
    assert write_pending(again) == [1]
    assert not (tmp_path / "manifest.json").exists()  # the manifest is absent until all shards are complete
    again.finish()
    assert contents(tmp_path) == expected


@pytest.mark.parametrize("name", ["vectors-00002-of-00003.npy", "ids-00002-of-00003.txt"])
def test_missing_and_short_files_are_detected_without_digests(name: str, tmp_path: Path) -> None:
    path = finished(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError, match=rf"{name} \(rows 20 .*24\): [0-9]+ .*[0-9]+ .*written"):
        open_shards(tmp_path, verify=False)
    path.unlink()
    with pytest.raises(ShardError, match=rf"{name} \(rows 20 .*24\) .*exist"):
        open_shards(tmp_path, verify=False)
    assert [shard.index for shard in writer(tmp_path).pending()] == [2]


def test_a_broken_header_is_detected_without_digests(tmp_path: Path) -> None:
    flip_byte(finished(tmp_path) / "vectors-00000-of-00003.npy", 0)
    with pytest.raises(ShardError, match=r"vectors-00000-of-00003.npy: cannot be read"):
        open_shards(tmp_path, verify=False)


def test_another_array_of_the_same_size_is_detected_without_digests(tmp_path: Path) -> None:
    np.save(finished(tmp_path) / "vectors-00000-of-00003.npy", VECTORS[:10].reshape(10, D, V))
    with pytest.raises(ShardError, match=r"holds float32 \[10, 6, 2\], its manifest says float32 \[10, 2, 6\]"):
        open_shards(tmp_path, verify=False)


def test_an_unfinished_or_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"manifest.json .*nothing .*encoded"):
        open_shards(tmp_path)
    to = writer(tmp_path)
    to.write(to.shards[0], VECTORS[:10], IDS[:10])
    with pytest.raises(ShardError, match=r"not finished; run encode again"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "ragged"},
        {"total_rows": 45},
        {"total_rows": 10**12},
        {"total_rows": 10**12, "rows_per_shard": 4 * 10**11},
        {"total_rows": "25"},
        {"dimension": 7},
        {"dtype": "float16"},
        {"shards": None},
        {"shards": [1, 2, 3]},
        {"fingerprint": []},
    ],
)
@pytest.mark.parametrize("digest", ["as written", "of the change", "none"])
def test_a_manifest_that_contradicts_itself_is_an_error(digest: str, change: dict[str, Any], tmp_path: Path) -> None:
    """The error comes before a list of 10^11 shards is made."""
    path = finished(tmp_path) / "manifest.json"
    wrong = read_json(path) | change
    if digest != "as written":
        del wrong["sha256"]
    write_json(path, with_digest(wrong) if digest == "of the change" else wrong)
    with pytest.raises(ShardError, match=r"manifest.json: .*run encode again") as caught:
        open_shards(tmp_path, verify=False)
    assert ("damaged" in str(caught.value)) == (digest != "of the change")


def test_a_changed_provenance_is_detected(tmp_path: Path) -> None:
    path = finished(tmp_path) / "manifest.json"
    good = path.read_bytes()
    # The checkpoint's digest changes, which no computation uses.
    path.write_bytes(good.replace(b'"sha256": "ab"', b'"sha256": "aa"'))
    with pytest.raises(ShardError, match=r"manifest.json: damaged"):
        open_shards(tmp_path)
    path.write_bytes(good)
    open_shards(tmp_path)


def damaged(good: bytes, random: np.random.Generator, kind: str) -> bytes:
    """Flip one bit; or replace or remove one value of the tree, with a matching digest or without one."""
    if kind == "flip":
        data = bytearray(good)
        data[random.integers(len(data))] ^= 1 << random.integers(8)
        return bytes(data)
    tree = json.loads(good)
    tree.pop("sha256", None)
    node, key = tree, random.choice(sorted(tree))
    while isinstance(node[key], dict | list) and node[key] and random.random() < 0.8:
        node = node[key]
        key = random.choice(sorted(node)) if isinstance(node, dict) else int(random.integers(len(node)))
    values: Any = [None, -1, 0, 2**70, 1.5, "", "x", "\ud800", [], {}, [[]], True, "fixed", "ragged"]
    if random.random() < 0.3:
        del node[key]
    else:
        node[key] = values[random.integers(len(values))]
    try:
        return json.dumps(with_digest(tree) if kind == "sealed edit" else tree).encode()
    except ValueError:  # half of a surrogate pair has no digest
        return json.dumps(tree).encode()


def or_error(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the error that a user may see."""
    try:
        return call()
    except (ShardError, ContractError) as error:
        return error


FUZZ = [("flip", 250), ("sealed edit", 50), ("edit", 50)]


@pytest.mark.parametrize("layout", ["fixed", "ragged"])
def test_no_damage_to_a_manifest_goes_unnoticed(layout: str, tmp_path: Path) -> None:
    """Either the search is the same, or a ShardError names the file."""
    (write_ragged if layout == "ragged" else finished)(tmp_path)
    path = tmp_path / "manifest.json"
    good, random = path.read_bytes(), np.random.default_rng(0)
    expected = open_shards(tmp_path)
    refused = 0
    for kind, number in FUZZ:
        for _ in range(number):
            path.write_bytes(damaged(good, random, kind))
            shards = or_error(lambda: open_shards(tmp_path, verify=False))
            if isinstance(shards, ValueError):
                assert str(tmp_path) in str(shards)
                refused += 1
                continue
            assert shards.shards == expected.shards
            assert shards.ids(range(shards.total_rows)) == expected.ids(range(shards.total_rows))
            for (_, mine), (_, theirs) in zip(shards, expected, strict=True):
                left, right = ((x.flat, x.offsets) if layout == "ragged" else (x,) for x in (mine, theirs))
                assert all(map(np.array_equal, left, right))
            assert kind != "flip" or shards.manifest == expected.manifest  # the origin of the vectors is the same, too
    assert refused > 250


def test_no_damage_to_a_sidecar_goes_unnoticed(tmp_path: Path) -> None:
    """Either the shard is written again, or an error names the file; at the end, the files are the same as before."""
    expected = contents(finished(tmp_path))
    path = tmp_path / "shard-00001-of-00003.json"
    random, seen = np.random.default_rng(0), set()

    def written() -> list[int]:
        again = writer(tmp_path)
        done = write_pending(again)
        again.finish()
        return done

    for kind, number in FUZZ:
        for _ in range(number // 2):
            path.write_bytes(damaged(expected[path.name], random, kind))
            done = or_error(written)
            if isinstance(done, ValueError):
                assert str(path) in str(done)
                assert kind != "flip"
            else:
                seen.add(len(done))
            (tmp_path / "manifest.json").write_bytes(expected["manifest.json"])
            path.write_bytes(expected[path.name])
            assert contents(tmp_path) == expected
    assert seen == {1}


@pytest.mark.parametrize("keep", ["sidecars", "manifest"])
def test_another_fingerprint_or_plan_is_an_error_with_both_values(keep: str, tmp_path: Path) -> None:
    finished(tmp_path)
    for path in tmp_path.glob("shard-*.json") if keep == "manifest" else [tmp_path / "manifest.json"]:
        path.unlink()
    other = {**FINGERPRINT, "checkpoint": {"step": 20, "sha256": "cd"}}
    with pytest.raises(
        ContractError, match=r"fingerprint.checkpoint.step: 20 in .*, 10 in (?s:.*)Delete .* another name"
    ):
        writer(tmp_path, fingerprint=other)
    with pytest.raises(ContractError, match=r"rows_per_shard: 5 in .*, 10 in "):
        writer(tmp_path, rows_per_shard=5)
    writer(tmp_path)  # control: an equal fingerprint, also with tuples, is accepted


def test_a_broken_sidecar_means_the_shard_is_written_again(tmp_path: Path) -> None:
    expected = contents(finished(tmp_path))
    for broken in (b"{", b"[]", b"{}", expected["shard-00000-of-00003.json"]):
        (tmp_path / "shard-00001-of-00003.json").write_bytes(broken)
        again = writer(tmp_path)
        assert write_pending(again) == [1]
        again.finish()
        assert contents(tmp_path) == expected


def test_finished_shards_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path)
    hashed: list[str] = []
    real = shards_module.sha256_file

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(shards_module, "sha256_file", counting)
    again = writer(tmp_path)
    assert again.pending() == []
    again.finish()
    assert len(hashed) == len(set(hashed)) == 6


def test_a_shard_whose_second_writing_failed_is_pending_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = writer(tmp_path)
    write_pending(to)

    def full_disk(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(shards_module, "write_json", full_disk)
        with pytest.raises(OSError, match="no space"):
            to.write(to.shards[0], VECTORS[10:20], IDS[:10])
    assert [shard.index for shard in to.pending()] == [0]


def test_wrong_vectors_and_ids_are_refused(tmp_path: Path) -> None:
    to = writer(tmp_path)
    shard = to.shards[1]
    vectors, ids = VECTORS[10:20], IDS[10:20]
    with pytest.raises(ValueError, match=r"needs vectors \[10,V,D\], got \[9, 2, 6\]"):
        to.write(shard, vectors[:9], ids)
    with pytest.raises(ValueError, match=r"got \[10, 6\]"):
        to.write(shard, vectors[:, 0], ids)
    with pytest.raises(ValueError, match=r"float64.*float32, float16"):
        to.write(shard, vectors.astype(np.float64), ids)
    with pytest.raises(ValueError, match="10 rows, but 9 ids"):
        to.write(shard, vectors, ids[:9])
    for bad in ("two words", "", "line\nbreak"):
        with pytest.raises(ValueError, match="row 13 has the id"):
            to.write(shard, vectors, [*ids[:3], bad, *ids[4:]])
    broken = vectors.copy()
    broken[4, 1, 2] = np.nan
    with pytest.raises(ValueError, match=r"passage 'passage-14é' \(row 14\) has a NaN"):
        to.write(shard, broken, ids)
    broken[4, 1, 2] = 3e38
    with pytest.raises(ValueError, match=r"\(row 14\) .*too large"):  # no search could compute with it
        to.write(shard, broken, ids)
    with np.errstate(over="ignore"):
        too_large = (vectors * 1e6).astype(np.float16)
    with pytest.raises(ValueError, match=r"\(row 10\) has .*try float32"):
        to.write(shard, too_large, ids)
    assert contents(tmp_path) == {}


def test_shards_of_different_shape_cannot_be_finished(tmp_path: Path) -> None:
    to = writer(tmp_path)
    for shard in to.pending():
        part = slice(shard.start, shard.stop)
        to.write(shard, VECTORS[part, : 1 if shard.index == 2 else V], IDS[part])
    with pytest.raises(ShardError, match=r"vectors-00002-of-00003.npy: float32 \[5, 1, 6\] fixed, but the first shard"):
        to.finish()


def ragged(rows: int, seed: int = 0) -> Ragged:
    generator = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(generator.integers(1, 6, rows))])
    return Ragged(generator.standard_normal((int(offsets[-1]), 3)).astype(np.float32), offsets)


def write_ragged(folder: Path) -> tuple[Ragged, ShardWriter]:
    lists, writer = ragged(7), ShardWriter(folder, 7, 3, {"made": "here"})
    for shard in writer.pending():
        part = np.arange(shard.start, shard.stop)
        writer.write(shard, lists.take(part), [f"p{i}" for i in part])
    writer.finish()
    return lists, writer


def test_lists_of_vectors_round_trip(tmp_path: Path) -> None:
    lists, writer = write_ragged(tmp_path)
    assert not writer.pending()
    shards = open_shards(tmp_path)
    assert (shards.ragged, shards.dimension, shards.total_rows) == (True, 3, 7)
    seen = 0
    for first, block in shards:
        for i in range(len(block)):
            np.testing.assert_array_equal(block[i], lists[first + i])
            seen += 1
    assert seen == 7
    with pytest.raises(ValueError, match="has lists of vectors"):
        _ = shards.vectors_per_row


@pytest.mark.parametrize("name", ["vectors-00001-of-00003.npy", "offsets-00001-of-00003.npy"])
def test_a_damaged_list_is_detected_and_repaired(name: str, tmp_path: Path) -> None:
    write_ragged(tmp_path)
    flip_byte(tmp_path / name)
    with pytest.raises(ShardError, match=name):
        open_shards(tmp_path)
    assert [shard.index for shard in ShardWriter(tmp_path, 7, 3, {"made": "here"}).pending()] == [1]


@pytest.mark.parametrize("wrong", ["reversed", "first", "last", "one less", "float", "empty row"])
def test_wrong_offsets_are_detected_without_digests(wrong: str, tmp_path: Path) -> None:
    """Only the offsets are wrong, so that no other check can report it."""
    write_ragged(tmp_path)
    path = tmp_path / "offsets-00001-of-00003.npy"
    offsets = np.load(path)
    changed = {
        "reversed": offsets[::-1],
        "first": np.append(offsets[0] + 1, offsets[1:]),
        "last": np.append(offsets[:-1], offsets[-1] + 1),
        "one less": offsets[:-1],
        "float": offsets.astype(np.float64),
        "empty row": np.concatenate([offsets[:2], offsets[1:2], offsets[3:]]),
    }[wrong]
    assert (np.diff(changed) > 0).all() == (wrong not in ("reversed", "empty row"))
    np.save(path, changed)
    manifest = read_json(tmp_path / "manifest.json")
    manifest["shards"][1]["offsets"]["bytes"] = path.stat().st_size
    write_json(
        tmp_path / "manifest.json", with_digest({key: value for key, value in manifest.items() if key != "sha256"})
    )
    with pytest.raises(ShardError, match=r"\(rows 3 .*5\): .*\d+ vectors .*3"):
        open_shards(tmp_path, verify=False)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy warns before it refuses 2^62
@pytest.mark.parametrize("count", [2**33, 2**40, 2**62])
@pytest.mark.parametrize("kind", ["offsets", "vectors"])
def test_a_header_with_a_huge_shape_allocates_nothing(kind: str, count: int, tmp_path: Path) -> None:
    write_ragged(tmp_path)
    path = tmp_path / f"{kind}-00000-of-00003.npy"
    header = {"descr": "<i8" if kind == "offsets" else "<f4", "fortran_order": False, "shape": (count,)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(64))
    manifest = read_json(tmp_path / "manifest.json")
    manifest["shards"][0][kind] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    del manifest["sha256"]
    write_json(tmp_path / "manifest.json", with_digest(manifest))
    with pytest.raises(ShardError, match=rf"{kind}-00000-of-00003.npy: cannot be read"):
        open_shards(tmp_path)


@pytest.mark.parametrize(("first", "last"), [(1, 5), (0, 4)])
def test_offsets_are_written_only_if_they_cover_all_vectors(first: int, last: int, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 2, 3, {})
    lists = Ragged(np.ones((5, 3), np.float32), np.array([first, 2, last]))
    with pytest.raises(ValueError, match=rf"offsets .*{first} .*{last}, .*0 .*5"):
        writer.write(writer.pending()[0], lists, ["a", "b"])
    # Control: offsets that fit are written.
    writer.write(writer.pending()[0], Ragged(lists.flat, np.array([0, 2, 5])), ["a", "b"])


def test_the_device_of_a_shard_is_recorded_and_not_compared(tmp_path: Path) -> None:
    for devices in (8, 4):
        to = writer(tmp_path, made_on={"devices": devices})
        shard = to.pending()[0]
        to.write(shard, VECTORS[shard.start : shard.stop], IDS[shard.start : shard.stop])
    write_pending(writer(tmp_path))
    manifest = writer(tmp_path).finish()
    assert [entry.get("made_on") for entry in manifest.shards] == [{"devices": 8}, {"devices": 4}, None]


def test_a_row_without_vectors_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 2, 3, {})
    empty = Ragged(np.ones((2, 3), np.float32), np.array([0, 2, 2]))
    with pytest.raises(ValueError, match=r"passage 'b' \(row 1\) has no vector"):
        writer.write(writer.pending()[0], empty, ["a", "b"])
    nan = Ragged(np.array([[1, 1, 1], [1, np.nan, 1]], np.float32), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match=r"passage 'b' \(row 1\) has a NaN"):
        writer.write(writer.pending()[0], nan, ["a", "b"])


def test_the_second_of_two_writers_with_other_settings_is_refused(tmp_path: Path) -> None:
    """Both found an empty folder. The second one to write is refused, and overwrites nothing."""
    others = {"text": ShardWriter(tmp_path, 7, 3, {"text": "b"}), "rows_per_shard": ShardWriter(tmp_path, 7, 4, {})}
    first = ShardWriter(tmp_path, 7, 3, {"text": "a"})
    shard = first.shards[0]
    first.write(shard, np.ones((3, 1, 4), np.float32), ["a", "b", "c"])
    with pytest.raises(ContractError, match=r"fingerprint\.text: 'b' .*encoded .*'a'"):
        others["text"].has(others["text"].shards[0], verify=False)
    with pytest.raises(ContractError, match=r"rows_per_shard: 4 .*encoded .*3"):
        others["rows_per_shard"].finish()
    assert first.has(shard)


def test_the_settings_of_a_folder_are_recorded_before_the_first_shard(tmp_path: Path) -> None:
    """The first job's settings are recorded until shards have them, or until that job fails."""
    first, other = (ShardWriter(tmp_path, 7, 3, {"text": text}) for text in "ab")
    assert not first.is_announced()
    first.announce()
    assert first.is_announced()
    for act in (
        other.is_announced,
        other.announce,
        other.require_same,
        lambda: ShardWriter(tmp_path, 7, 3, {"text": "b"}),
    ):
        with pytest.raises(ContractError, match=r"fingerprint\.text: 'b' in what .* 'a' in .*begun\.json"):
            act()
    other.withdraw_announcement()  # only the job that announced can withdraw it
    assert first.is_announced()
    first.withdraw_announcement()
    other.announce()
    other.write(other.shards[0], np.ones((3, 1, 4), np.float32), ["a", "b", "c"])
    other.withdraw_announcement()
    assert (tmp_path / "begun.json").exists()


def test_a_suspended_writer_removes_no_finished_files(tmp_path: Path) -> None:
    """It wakes up while it writes a shard of a folder that is finished now."""
    before = contents(finished(tmp_path))
    work, shard = tmp_path / "lost", Shard(0, 3, 0, 10)
    with pytest.raises(FileNotFoundError):
        writer(tmp_path).write(shard, VECTORS[:10], IDS[:10], work)
    assert contents(tmp_path) == before
    work.mkdir()
    writer(tmp_path).write(shard, VECTORS[:10], IDS[:10], work)  # control: with the folder `work`, the writer succeeds
    assert not (tmp_path / "manifest.json").exists()


def test_one_header_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads compare digests, but Python's parser, which reads headers, is not safe in threads."""
    load, inside, most = np.load, [], []

    def slowly(*arguments: Any, **more: Any) -> Any:
        inside.append(arguments)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return load(*arguments, **more)

    folder = finished(tmp_path)
    monkeypatch.setattr(np, "load", slowly)
    open_shards(folder)
    assert most == [1, 1, 1]
