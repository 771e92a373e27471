"""Profile a training step, an encoding, a search and a start: python bench/profiles.py train

python bench/profiles.py train              a step of MiniLM: XLA's operations, then Python's functions
python bench/profiles.py encode             2,000 passages
python bench/profiles.py search             128 questions over 200,000 random vectors
python bench/profiles.py start              `jaxret search --query`, a new process: imports by package, then functions

Operations come from XLA's profile (`jax.profiler`). Their seconds exclude the operations that they call, and their
names have no numbers; they run on several threads, so their sum may exceed the elapsed time. Functions come from
cProfile, imports from `python -X importtime`. A profiler slows the program down: compare the rows of a table, not two
tables.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.rounds import cores  # noqa: E402

Rows = dict[str, tuple[int, float]]  # calls and seconds, by name


def own_seconds(events: Iterable[Any]) -> Rows:
    """Return calls and own seconds of the operations of one thread, excluding operations within them."""
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    around: list[tuple[str, float]] = []  # operations that have not ended: name, end
    for event in sorted(events, key=lambda event: (event.start_ns, -event.duration_ns)):
        while around and around[-1][1] <= event.start_ns:
            around.pop()
        name = re.sub(r"(\.\d+)+$", "", event.name)
        counts[name] += 1
        seconds[name] += event.duration_ns / 1e9
        if around:
            seconds[around[-1][0]] -= event.duration_ns / 1e9
        around.append((name, event.start_ns + event.duration_ns))
    return {name: (counts[name], seconds[name]) for name in counts}


def operations(act: Callable[[], Any]) -> Rows:
    """Return calls and own seconds of XLA's operations during `act`."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            act()
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    total: Rows = {}
    for line in (line for plane in data.planes for line in plane.lines):
        of_line = own_seconds(event for event in line.events if "hlo_op" in dict(event.stats))
        for name, (count, seconds) in of_line.items():
            before = total.get(name, (0, 0.0))
            total[name] = before[0] + count, before[1] + seconds
    return total


def functions(act: Callable[[], Any]) -> Rows:
    """Return calls and own seconds of Python's functions during `act`."""
    profile = cProfile.Profile()
    profile.runcall(act)
    return rows_of(pstats.Stats(profile))


def rows_of(stats: pstats.Stats) -> Rows:
    """Return calls and own seconds by function."""
    entries: Any = vars(stats)["stats"]
    return {f"{short(file)}:{line} {name}": (calls, own) for (file, line, name), (_, calls, own, *_) in entries.items()}


def short(path: str) -> str:
    """Return a path below site-packages or the repository."""
    return re.sub(r"^.*(site-packages|lib/python3\.\d+)/", "", path).removeprefix(f"{REPOSITORY}/")


def imports(text: str) -> Rows:
    """Return modules and seconds by package, from the output of `python -X importtime`."""
    total: Rows = {}
    for own, module in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s*([\w.]+)", text, re.MULTILINE):
        package = module.partition(".")[0]
        before = total.get(package, (0, 0.0))
        total[package] = before[0] + 1, before[1] + int(own) / 1e6
    return total


def print_rows(title: str, rows: Rows, most: int) -> None:
    """Print the rows with the most seconds."""
    total = sum(seconds for _, seconds in rows.values())
    print(f"\n{title}: {total:.3f} s\n{'calls':>10}{'seconds':>10}{'share':>8}")
    for name, (count, seconds) in sorted(rows.items(), key=lambda row: -row[1][1])[:most]:
        print(f"{count:>10,}{seconds:>10.3f}{seconds / total:>8.1%}  {name}")


def training_step(folder: Path) -> Callable[[], Any]:
    """Return a training step of bench/train_step.py."""
    from bench.train_step import Work, make_ours
    from jaxret.demo.demo import write_data

    arguments = argparse.Namespace(
        data=str(write_data(folder).pairs), store=str(folder / "tokens"), model="", dtype="float32", length=128,
        queries=32, dropout=True, threads=cores(), device="cpu",
    )  # fmt: skip
    work = Work.of(arguments)
    (step, _), batch = make_ours(work, arguments), work.batch("full", 0, packed=True)
    return lambda: step(batch)


def encoding(folder: Path) -> Callable[[], Any]:
    """Return the encoding of 2,000 passages from strings to vectors, as in bench/encode.py."""
    from bench.encode import make_ours
    from jaxret.demo.python_docs import load_docstrings

    arguments = argparse.Namespace(length=256, dtype="float32", device="cpu", tokens=0)
    tokenizer, embedder, _ = make_ours(arguments)
    passages = load_docstrings()[0][:2000]
    return lambda: embedder(tokenizer.passages(passages), "passage")


def searching(folder: Path) -> Callable[[], Any]:
    """Return the search for 128 questions over 200,000 vectors, as in bench/search.py."""
    import numpy as np

    from bench.search import ours

    random = np.random.default_rng(0)
    passages, queries = (random.standard_normal((count, 384), dtype=np.float32) for count in (200_000, 128))
    search = ours("auto", passages)
    return lambda: search(queries, 1000)


def profile_start(folder: Path, most: int) -> None:
    """Print the imports and functions of `jaxret search --query`, in a process with a full cache."""
    import jaxret
    from bench.question import MODEL, draw

    retriever = jaxret.Retriever.from_model(MODEL, folder / "run")
    draw(retriever, folder, 10_000)
    arguments = ["-m", "jaxret", "search", f"--workdir={folder / 'run'}", "--query=how do I sort a list?"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(folder / "cache")}
    # Python writes bytecode, like for a user.
    environment |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}

    def run(*options: str) -> str:
        command = [sys.executable, *options, *arguments]
        process = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return process.stderr

    run()  # fills the cache of compiled programs
    for _ in range(3):
        begin, before = time.perf_counter(), os.times()
        run()
        after = os.times()
        busy = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"jaxret search --query: {time.perf_counter() - begin:.2f} s, {busy:.2f} s of processors")
    print_rows("imports by package", imports(run("-X", "importtime")), most)
    run("-m", "cProfile", "-o", str(folder / "profile"))
    print_rows("functions, imports included", rows_of(pstats.Stats(str(folder / "profile"))), most)


PARTS = {"train": training_step, "encode": encoding, "search": searching}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "start"])
    parser.add_argument("--rows", type=int, default=20, help="of a table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.part == "start":
            profile_start(Path(folder), arguments.rows)
            return
        act = PARTS[arguments.part](Path(folder))
        act()  # the first call compiles
        begin = time.perf_counter()
        act()
        print(f"{arguments.part}: {time.perf_counter() - begin:.3f} s")
        print_rows("XLA's operations", operations(act), arguments.rows)
        print_rows("Python's functions", functions(act), arguments.rows)


if __name__ == "__main__":
    main()
