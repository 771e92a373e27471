"""A folder is complete or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxret.storage.transaction import new_folder
from tests.pipeline import REPOSITORY


def test_the_folder_exists_after_success(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a" / "out").exists()
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["out", "file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_transaction_leaves_no_files(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(tmp_path / "out") as folder:  # noqa: PT012
        (folder / "file").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match=r"exists already"), new_folder(tmp_path):
        pass
    assert (tmp_path / "file").read_text() == "x"


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from jaxret.storage.transaction import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'file').write_text('x'); print('there', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert child.stdout
    assert child.stdout.readline() == b"there\n"
    assert len(list(tmp_path.iterdir())) == 1
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_folder_made_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="made by another job meanwhile"), new_folder(tmp_path / "out") as folder:  # noqa: PT012
        (folder / "file").write_text("x")
        with new_folder(tmp_path / "out") as other:
            (other / "file").write_text("y")
    assert (tmp_path / "out" / "file").read_text() == "y"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_flushed_before_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, flushed = os.fsync, set()

    def noted(descriptor: int) -> None:
        assert not (tmp_path / "out").exists() or os.fstat(descriptor).st_ino == tmp_path.stat().st_ino
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    with new_folder(tmp_path / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
    assert {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))} <= flushed
