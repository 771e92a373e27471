"""Run every comparison with a peer, and say whether the machine was idle: make bench

python bench/all.py --out=runs/bench.json                          all, 7 to 20 minutes on two cores
python bench/all.py --only=search,late --short                     some, with small sizes
python bench/all.py --out=NEW.json --compare=OLD.json              and print what became slower (exit status 1)

Each script is a process. In a round, all systems take turns, so that other jobs hardly change a ratio to a peer; before
each round, a fixed piece of work on all cores measures whether the machine is idle. OUT has the seconds of all rounds,
CPU, cores, load, versions, commit and calibrations. --compare compares the ratios to peers, round by round: a case is
slower if its median ratio grew by more than 5 %, and the lower quartile of the new ratios is above the upper quartile
of the old ones. Data: Python's documentation, as in `jaxret demo`, and random vectors.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.rounds import can_import, cores  # noqa: E402

PACKAGES = (
    "jax", "jaxlib", "numpy", "scipy", "faiss-cpu", "torch", "transformers", "peft", "sentence-transformers",
    "onnxruntime", "pyseismic-lsr",
)  # fmt: skip
LEAST_SHARE = 0.9  # the share of the cores that an idle machine gives
MOST_SECONDS = 1.15  # relative to the fastest calibration
MARGIN = 1.05  # a median ratio that grew by less has not changed


@dataclass(frozen=True)
class Script:
    """A script of bench/: the modules of its peers, and arguments for the full and the short run. {folder} is a new
    folder."""

    needs: tuple[str, ...]
    full: str
    short: str


SCRIPTS = {
    "train_step": Script(
        ("torch", "transformers"),
        "--rounds=8 --cases full ragged",
        "--rounds=3 --queries=4 --length=32 --cases full",
    ),
    "lora": Script(
        ("torch", "transformers", "peft"),
        "--layers=10 --rounds=8",
        "--layers=1 --queries=2 --length=16 --rounds=3",
    ),
    "encode": Script(
        ("torch", "onnx", "onnxruntime"),
        "--texts=1000 --rounds=5",
        "--texts=128 --length=32 --tokens=256 --rounds=3",
    ),
    "search": Script(
        ("faiss",),
        "--rows=200000 --queries=128 --rounds=6",
        "--rows=2000 --queries=16 --k=10 --dimension=64 --rounds=3",
    ),
    "search_one": Script(
        ("faiss",),
        "--rows=200000 --queries=1 --k=10,100 --rounds=30",
        "--rows=2000 --queries=1 --k=10 --dimension=64 --rounds=5",
    ),
    "late": Script((), "--rounds=9 --systems=xla", "--documents=200 --queries=1 --rounds=5 --systems=xla"),
    "sparse": Script(("scipy",), "--rows=20000,100000", "--rows=1000 --queries=8 --rounds=3"),
    "question": Script((), "--folder={folder} --rounds=10", "--folder={folder} --passages=500 --questions=10"),
    "serve": Script(
        ("sentence_transformers", "starlette", "uvicorn"),
        "--folder={folder}",
        "--folder={folder} --requests=40 --rounds=3 --clients=1,8",
    ),
}
FILES = {"search_one": "search"}  # scripts that run twice, with their file


def cpu() -> str:
    """Return the processor's name, with family and model if the system shows them."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        values = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", info.read_text(), re.MULTILINE))
        if "model name" in values:
            return f"{values['model name']}, family {values.get('cpu family')}, model {values.get('model')}"
    return platform.processor() or platform.machine()


def commit() -> str:
    """Return the commit of this repository; with "+" if files are changed; "" outside of git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    installed = {
        distribution.metadata["Name"]: distribution.version for distribution in importlib.metadata.distributions()
    }
    return {name: installed[name] for name in PACKAGES if name in installed}


def run_script(name: str, short: bool) -> tuple[dict[str, Any] | None, int]:
    """Return the cases and calibrations of a script (None if it wrote none), and its exit status, which is not 0 if a
    limit of the script was exceeded."""
    script = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (script.short if short else script.full).format(folder=f"{folder}/made").split()
        out = Path(folder) / "results.json"
        command = [sys.executable, str(REPOSITORY / "bench" / f"{FILES.get(name, name)}.py"), *arguments]
        print(f"$ python bench/{FILES.get(name, name)}.py {' '.join(arguments)}", flush=True)
        status = subprocess.run([*command, f"--json={out}"], cwd=REPOSITORY).returncode
        if status or not out.exists():
            print(f"FAILED: {name} ended with status {status}", flush=True)
        return json.loads(out.read_text()) if out.exists() else None, status


def ratios(results: dict[str, Any]) -> dict[tuple[str, ...], np.ndarray]:
    """Return the seconds of each system divided by those of each peer, for each round, by (script, case, system,
    peer)."""
    return {
        (name, case["case"], system, peer): np.divide(seconds, of_peer)
        for name, script in results["scripts"].items()
        for case in script["cases"]
        for system, seconds in case["ours"].items()
        for peer, of_peer in case["peers"].items()
    }


def became_slower(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a line for each case that became slower by more than the noise."""
    before, after = ratios(old), ratios(new)
    lines = []
    for key in before.keys() & after.keys():
        was, now = np.median(before[key]), np.median(after[key])
        if now > MARGIN * was and np.percentile(after[key], 25) > np.percentile(before[key], 75):
            script, case, system, peer = key
            lines.append(f"{script}, {case}: {system} takes {now:.2f} times as long as {peer}; it was {was:.2f}")
    return sorted(lines)


def require_comparable(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    """Return earlier results. Raises SystemExit for another file, or if they are from another processor, whose ratios
    to peers differ."""
    try:
        old: dict[str, Any] = json.loads(path.read_text())
        of_old = {name: old[name] for name in ("cpu", "cores", "scripts", "versions")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"error: --compare={path}: not results of bench/all.py ({error}); give a file of --out"
        ) from None
    for name in ("cpu", "cores"):
        if of_old[name] != here[name]:
            raise SystemExit(f"error: --compare={path} has {name} {old[name]!r}, and this machine has {here[name]!r}")
    return old


def describe_load(scripts: dict[str, Any]) -> str:
    """Return a sentence that says whether the machine was idle, or how often it was not."""
    calibrations = np.array([pair for script in scripts.values() for pair in script["calibrations"]])
    if not len(calibrations):
        return "no calibration was made"
    seconds, share = calibrations.T
    disturbed = (share < LEAST_SHARE) | (seconds > MOST_SECONDS * seconds.min())
    if not disturbed.any():
        return f"the machine was idle in all {len(share)} calibrations"
    return (
        f"NOT IDLE in {disturbed.sum()} of {len(share)} calibrations: the work got {share.min():.0%} of the cores at "
        f"least, and took up to {seconds.max() / seconds.min():.2f} times as long as at best"
    )


def print_table(results: dict[str, Any]) -> None:
    """Print a row for every case, system and peer."""
    print("\n| script | case | system | median, s | peer | system / peer, median (least to most) |")
    print("|:--|:--|:--|--:|:--|--:|")
    seconds = {
        (name, case["case"], system): np.median(times)
        for name, script in results["scripts"].items()
        for case in script["cases"]
        for system, times in case["ours"].items()
    }
    for (name, case, system, peer), values in ratios(results).items():
        spread = f"{np.median(values):.2f} ({values.min():.2f} to {values.max():.2f})"
        print(f"| {name} | {case} | {system} | {seconds[name, case, system]:.4f} | {peer} | {spread} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"))
    parser.add_argument("--only", default=",".join(SCRIPTS), help="which of them")
    parser.add_argument("--short", action="store_true", help="small sizes and few rounds: a rehearsal")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="results of an earlier run on this machine")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(SCRIPTS):
        parser.error(f"--only={','.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    results: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "cpu": cpu(),
        "cores": cores(),
        "python": platform.python_version(),
        "versions": versions(),
        "short": arguments.short,
        "load_before": os.getloadavg(),
        "scripts": {},
        "failed": {},
    }
    old = require_comparable(arguments.compare, results) if arguments.compare else None
    print(f"{results['cpu']}; {results['cores']} cores, load {results['load_before'][0]:.2f}", flush=True)
    for name in names:
        print(f"\n{name}", flush=True)
        if can_import(*SCRIPTS[name].needs):
            done, status = run_script(name, arguments.short)
            if done:
                results["scripts"][name] = done
            if status or not done:
                results["failed"][name] = status
    results["load_after"] = os.getloadavg()
    print_table(results)
    print(f"\n{describe_load(results['scripts'])}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {arguments.out}")
    if old:
        changed = {name: (old["versions"].get(name), value) for name, value in results["versions"].items()}
        for name, (was, now) in changed.items():
            if was != now:
                print(f"{name}: {was} before, {now} now")
        alone = ratios(old).keys() ^ ratios(results).keys()
        slower = became_slower(old, results)
        print(f"{len(ratios(old).keys() & ratios(results).keys())} ratios compared, {len(alone)} in one file only")
        print("\n".join(f"SLOWER {line}" for line in slower) or "nothing became slower")
        if slower:
            raise SystemExit(1)
    if results["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
