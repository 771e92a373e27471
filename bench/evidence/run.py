"""Try the papers' claims on real questions with small models. The command may be killed at any time.

python bench/evidence/run.py --data=FOLDER --workdir=runs/evidence     starts, or continues
python bench/evidence/run.py --table                                   prints the table in docs/evidence.md

Results are in bench/evidence/results.json, and every run's values in bench/evidence/values/. FOLDER has the data sets
of SOURCES and TEXTS. bench/evidence/claims.py has the runs and the claims: every claim is tried with the first seed,
then with the second, and so on; a run that several claims need is trained once. Each step is a process with a folder. A
step that fails is reported, has a log, and is tried again at the next start. A run with stored values is not trained
again, unless another step reads from its folder.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.evidence.claims import CLAIMS, COMMON, STEPS, Claim, Train
from bench.evidence.steps import (
    MEASURES,
    SOURCES,
    Work,
    copy_encoder,
    make,
    make_data,
    missing_data,
    needs,
    passages_of,
    read_values,
)
from bench.evidence.table import judged, row_of, to_markdown
from jaxret.data.formats import JudgementSource
from jaxret.storage.atomic import read_json, sha256_file, sha256_json, write_json
from jaxret.storage.lockfile import FolderLock

RESULTS = Path(__file__).with_name("results.json")


def order(claims: Sequence[Claim], seeds: int) -> Iterator[tuple[int, Claim]]:
    """Yield (seed, claim): every claim with the first seed, then with the second; a claim begins `later` turns
    later."""
    for turn in range(1, seeds + max(claim.later for claim in claims) + 1):
        for claim in claims:
            if 1 <= turn - claim.later <= seeds:
                yield turn - claim.later, claim


def attempt(work: Work, name: str, seed: int, failed: dict[str, str], command: Sequence[str]) -> bool:
    """Run a step after the steps that it reads from; return whether it has a result.

    Args:
        work: the folders of steps.
        name, seed: the step. Nothing is done if it has a result, or is in `failed`.
        failed: folder name -> reason, for this start; new failures are added.
        command: the process that runs a step; its name and seed are appended.
    """
    if work.result(name, seed).exists():
        return True
    path = work.path(name, seed)
    if path.name in failed:
        return False
    if not all([attempt(work, one, seed, failed, command) for one in needs(name)]):
        failed[path.name] = "a step that it needs failed"
        return False
    log = work.folder / "logs" / f"{path.name}.log"
    log.parent.mkdir(exist_ok=True)
    print(f"{time.strftime('%F %T')} {path.name}", flush=True)
    with log.open("a") as file:
        status = subprocess.run([*command, name, str(seed)], stdout=file, stderr=file, env=environment(work)).returncode
    if work.result(name, seed).exists():
        return True
    lines = log.read_text(errors="replace").strip().splitlines()
    failed[path.name] = f"status {status}: {lines[-1][:300] if lines else 'nothing was printed'}"
    print(f"{path.name} failed, {failed[path.name]}; all of it: {log}", flush=True)
    return False


def environment(work: Work) -> dict[str, str]:
    """Return the environment of a step: a compilation cache, one thread for the math library, huge pages as in the
    Makefile."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(work.folder / "compiled"),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    return {**settings, **os.environ}


def collect(work: Work, seeds: int, failed: Mapping[str, str]) -> dict[str, Any]:
    """Return the contents of bench/evidence/results.json, computed from the stored values.

    They have a row for each claim, from the seeds of both its runs, and the means of every run.
    """
    rows, runs = [], {}
    for claim in CLAIMS:
        names = claim.baseline, claim.treated
        complete = [seed for seed in range(1, seeds + 1) if all(work.measured(name, seed).exists() for name in names)]
        runs_of = [work.path(name, seed).name for seed in complete for name in names]
        row = row_of(claim, *paired(work, claim, complete), runs_of)
        rows.append({**row, "paper": claim.paper, "claim": claim.says})
    for name, seed in itertools.product([n for n, s in STEPS.items() if isinstance(s, Train)], range(1, seeds + 1)):
        if work.measured(name, seed).exists():
            with np.load(work.measured(name, seed)) as done:
                means = {measure: round(float(done[f"mean {measure}"]), 5) for measure in MEASURES}
                runs[work.path(name, seed).name] = {**means, "processor_seconds": int(done["processor_seconds"])}
    return {"data": work.data, "common": COMMON, "rows": judged(rows), "runs": runs, "failed": dict(failed)}


def paired(work: Work, claim: Claim, seeds: Sequence[int]) -> tuple[dict[int, list[np.ndarray]], list[str]]:
    """Return seed -> (baseline, treated) values of the same ids, and the passage of each value."""
    files = {seed: [work.measured(name, seed) for name in (claim.baseline, claim.treated)] for seed in seeds}
    pairs = {seed: [read_values(one, claim.measure) for one in pair] for seed, pair in files.items()}
    ids = {digest: len(values) for pair in pairs.values() for digest, values in pair}
    if len(ids) > 1:
        raise ValueError(f"{claim.baseline} and {claim.treated} have {claim.measure} of different ids")
    groups = [passages_of(work, claim.measure, digest, count) for digest, count in ids.items()]
    return {seed: [values for _, values in pair] for seed, pair in pairs.items()}, groups[0] if groups else []


def work_through(work: Work, seeds: int, results: Path, command: Sequence[str]) -> None:
    """Run the steps without values. Results are written first, from the stored values, and after every attempt."""
    failed: dict[str, str] = {}
    write_json(results, collect(work, seeds, failed))
    for seed, claim in order(CLAIMS, seeds):
        for name in (claim.baseline, claim.treated):
            if not work.measured(name, seed).exists():
                attempt(work, name, seed, failed, command)
                write_json(results, collect(work, seeds, failed))


def results_so_far(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {"rows": [], "failed": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help=f"folder with {', '.join(SOURCES)}, nq-qed, medquad, debian-packages")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of --results, and do nothing else")
    parser.add_argument("--step", nargs=2, metavar=("NAME", "SEED"), help="make one step, here")
    arguments = parser.parse_args()
    if arguments.table and not arguments.results.is_file():
        parser.error(f"--results={arguments.results}: there is no such file")
    if arguments.table:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head`
        print(to_markdown(results_so_far(arguments.results), CLAIMS))
        return
    if not arguments.data or not arguments.workdir:
        parser.error("--data and --workdir are needed")
    if problem := missing_data(arguments.data):
        parser.error(problem)
    folder = arguments.workdir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_data(arguments.data.resolve(), folder / "data")
    copy_encoder(folder / "minilm")
    files = sorted(path for path in (folder / "data").rglob("*") if path.is_file())
    results = arguments.results.resolve()
    judged = JudgementSource.open(folder / "data" / "questions", "test").read()
    answers = {one.query_id: one.passage_id for one in judged}
    work = Work(folder, sha256_json([sha256_file(path) for path in files]), results.with_name("values"), answers)
    if arguments.step:
        make(work, arguments.step[0], int(arguments.step[1]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the process of the step ends, too
    command = [sys.executable, __file__, f"--data={arguments.data}", f"--workdir={folder}", f"--results={results}"]
    lock = FolderLock(folder, "working through claims")
    try:
        work_through(work, arguments.seeds, results, [*command, "--step"])
    finally:
        lock.release()
    print(to_markdown(results_so_far(results), CLAIMS))


if __name__ == "__main__":
    main()
