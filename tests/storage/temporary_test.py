"""A temporary folder is deleted with its owner, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.pipeline import REPOSITORY

FORKED = """
import os, sys
from jaxret.storage.temporary import TemporaryFolder
folder = TemporaryFolder()
path, child = folder.path, os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
print(path.is_dir())
del folder
print(path.exists())
ended = TemporaryFolder()
print(ended.path)
"""


def test_a_temporary_folder_goes_with_its_owner_and_not_with_a_forked_child(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    program = [sys.executable, "-c", FORKED]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=True)
    after_fork, after_deletion, path = done.stdout.splitlines()
    assert (after_fork, after_deletion) == ("True", "False")
    assert path.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "deleted at the end of the process"
