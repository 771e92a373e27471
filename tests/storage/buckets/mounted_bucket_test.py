"""A folder on a mounted bucket is recognized in the table of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxret.runs import lock
from jaxret.runs.lock import hold_folder
from jaxret.storage.buckets.mounted_bucket import describe_mounted_bucket, mounted_bucket


def write_mounts(path: Path, folder: Path) -> Path:
    octal = str(folder / "a bucket").replace(" ", "\\040")
    path.write_text(f"/dev/vda / ext4 rw 0 0\nruns {octal} fuse.gcsfuse rw 0 0\nx {octal}/disk ext4 rw 0 0\n")
    return path


def test_the_innermost_mount_decides(tmp_path: Path) -> None:
    mounts = write_mounts(tmp_path / "mounts", tmp_path)
    assert mounted_bucket(tmp_path / "a bucket" / "runs" / "mlr", mounts) == "gcsfuse"
    for folder in ("a bucket/disk/mlr", "a bucket2", "."):
        assert not mounted_bucket(tmp_path / folder, mounts)
    assert not mounted_bucket(tmp_path, tmp_path / "none"), "a system without this table"


def test_a_job_warns_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mounts = write_mounts(tmp_path / "mounts", tmp_path)
    monkeypatch.setattr(lock, "describe_mounted_bucket", lambda folder: describe_mounted_bucket(folder, mounts))
    for folder in ("a bucket/mlr", "mlr"):
        with hold_folder(tmp_path / folder, "training"):
            pass
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "a bucket/mlr is on a bucket that is mounted by gcsfuse: renames copy" in lines[0]
