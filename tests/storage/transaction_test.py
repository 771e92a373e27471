"""A folder is there whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxret.storage.transaction import new_folder
from tests.pipeline import REPOSITORY


def test_it_is_there_at_the_end(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a" / "out").exists()
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["out", "file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_what_failed(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(tmp_path / "out") as folder:  # noqa: PT012
        (folder / "file").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match=r"is there already"), new_folder(tmp_path):
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
