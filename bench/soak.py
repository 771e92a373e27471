"""Use all parts together for an hour, and check every answer: python bench/soak.py --folder=/tmp/soak --minutes=60

Two processes run for the whole time: `jaxret serve`, and one with an open `jaxret.Index`, which it refreshes. Half of
the --clients use the first over HTTP, half are threads of the second. Meanwhile the corpus changes (`jaxret encode
--append`, `--delete`), approximate indexes of it are built and opened, and a training run is resumed; every second job
and twenty trainings are killed with -9 and repeated. Every answer is compared with a product of all vectors in numpy,
for each state that the corpus may have had then; the parameters of the training are compared with those of an
uninterrupted one.

The model is a random BERT (2 layers, 32 wide; MLR with three vectors) and the corpus has 1,000 passages, so that two
cores suffice, also on a busy machine. Prints a table. The exit status is 1 after a wrong answer, an error, or growth of
memory, descriptors or threads.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

PASSAGES, QUESTIONS = 1000, 100
BATCH = 10  # passages that are appended or deleted at a time
CHANGES = 600  # the most changes of the corpus
COLOURS = ("red", "blue", "green")
KILLS = 20  # kills of the training
INDEX = "soak"  # it searches all of its eight lists, so its candidates are complete
TOLERANCE = 1e-4  # the error of a score: the last bits of a vector depend on its batch
SECONDS = 5.0  # between two samples of a process
GROWTH_MIB, GROWTH_SHARE = 24, 0.05  # growth of memory from the first quarter to the last
GROWTH_OPEN = 4  # growth of the number of descriptors, or of threads
SERVER = "jaxret serve"
ENVIRONMENT = {
    "PYTHONPATH": str(REPOSITORY),
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "JAXRET_DEBUG": "",
}


Found = tuple[str, float, str, str]  # id, score, title, text


class WrongAnswerError(Exception):
    """An answer that is right in no state of the corpus."""


# The corpus, its states, and the right answers


class World:
    """All passages that the corpus will ever have, in its folder, and the right answers in each of its states. State n
    is that after n changes, which depend only on n."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with np.load(folder / "world.npz") as file:
            self.scores = np.array(file["scores"])  # [questions, passages], of all passages
            self.query_vectors = np.array(file["query_vectors"])
        self.records = [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()]
        self.questions: list[str] = json.loads((folder / "questions.json").read_text())
        self.number = {record["_id"]: row for row, record in enumerate(self.records)}
        self.colours = np.array([COLOURS.index(record["metadata"]["colour"]) for record in self.records])
        # Numbers of changes that have begun, and that have ended.
        self._counts = np.memmap(folder / "changes", np.int64, "r+", shape=(2,))

    @property
    def begun(self) -> int:
        """Return the number of changes that have begun: no process can see a later state."""
        return int(self._counts[0])

    @begun.setter
    def begun(self, number: int) -> None:
        self._counts[0] = number

    @property
    def ended(self) -> int:
        """Return the number of changes that have ended: an index that is opened now sees no earlier state."""
        return int(self._counts[1])

    @ended.setter
    def ended(self, number: int) -> None:
        self._counts[1] = number

    @cached_property
    def states(self) -> list[np.ndarray]:
        """Return the passages of each state."""
        alive = np.zeros(len(self.records), bool)
        alive[:PASSAGES] = True
        states = [alive]
        for rows, adds in map(self.change, range(CHANGES)):
            alive = alive.copy()
            alive[rows] = adds
            states.append(alive)
        return states

    def change(self, number: int) -> tuple[np.ndarray, bool]:
        """Return the rows of `records` that a change appends (True) or deletes. Half of the appended passages are new;
        the others are the first half of those that the previous change deleted."""
        first = PASSAGES + number // 2 * BATCH
        if number % 2:  # some of the oldest, and some of the last append
            old, half = number // 2 * (BATCH // 2) % (PASSAGES // 2), BATCH // 2
            return np.r_[old : old + half, first : first + half], False
        return np.arange(first, first + BATCH), True

    def require_right(self, question: int, k: int, hits: Sequence[Found], states: range, colour: str = "") -> None:
        """Raise WrongAnswerError for a ranking that is right in none of these states.

        Args:
            question: number of the question.
            k: number of requested passages.
            hits: the ranking.
            states: states that the corpus may have had.
            colour: colour of the searched passages; "" for all.
        """
        problems = [self._problem(question, k, hits, state, colour) for state in states]
        if all(problems):
            raise WrongAnswerError(f"question {question}, k {k}, states {states}: {problems[-1]}")

    def _problem(self, question: int, k: int, hits: Sequence[Found], state: int, colour: str) -> str:
        present = self.states[state]
        if colour:
            present = present & (self.colours == COLOURS.index(colour))
        scores = np.where(present, self.scores[question], -np.inf)
        best = np.sort(scores)[::-1][: min(k, int(present.sum()))]
        if len(hits) != len(best) or len({key for key, *_ in hits}) != len(hits):
            return f"{len(hits)} hits with {len({key for key, *_ in hits})} ids, and {len(best)} are right"
        for rank, ((key, score, title, text), right) in enumerate(zip(hits, best, strict=True)):
            record = self.records[self.number[key]]
            if not present[self.number[key]]:
                return f"{key} at rank {rank} is not in state {state}"
            if max(abs(score - right), abs(score - scores[self.number[key]])) > TOLERANCE:
                return f"{key} at rank {rank} has {score}; {scores[self.number[key]]} is its score, {right} the rank's"
            if (title, text) != (record["title"], record["text"]):
                return f"{key} has the text {text!r}"
        return ""


def make_world(folder: Path) -> World:
    """Write a run, its encoded corpus, and the right answers. Everything random depends on one seed."""
    from jaxret.api import Index, Retriever
    from jaxret.data.records import Passage
    from tests.pipeline import untrained_run, words, write_data, write_encoder

    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    records = [
        {
            "_id": f"p{number}",
            "title": f"title {number}",
            "text": words(random, int(random.integers(4, 14))),
            "metadata": {"colour": COLOURS[number % len(COLOURS)]},
        }
        for number in range(PASSAGES + CHANGES // 2 * BATCH)
    ]
    questions = [words(random, int(random.integers(2, 6))) for _ in range(QUESTIONS)]
    write_lines(folder / "all.jsonl", records)
    write_lines(folder / "corpus.jsonl", records[:PASSAGES])
    (folder / "questions.json").write_text(json.dumps(questions))
    untrained_run(folder / "run", folder / "encoder", folder / "data", head__name="mlr", head__mlr__chosen=(1, 2, 3))
    retriever = Retriever.open(folder / "run")
    Index.build(retriever, folder / "corpus.jsonl", progress=False)
    passages = [Passage(str(one["_id"]), str(one["text"]), str(one["title"])) for one in records]
    vectors = np.asarray(retriever.encode_passages(passages), np.float64)
    query_vectors = np.asarray(retriever.encode_queries(questions), np.float64)
    scores = np.einsum("qd,pvd->qpv", query_vectors, vectors).max(2)
    np.savez(folder / "world.npz", scores=scores, query_vectors=query_vectors)
    np.zeros(2, np.int64).tofile(folder / "changes")
    return World(folder)


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# Operations and their outcomes


@dataclass
class Tally:
    """Times and outcomes of the operations of one kind."""

    seconds: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # wrong, refused, error, killed
    said: list[str] = field(default_factory=list)  # the first error sentences


class Record:
    """Times and outcomes of all operations, by kind. Threads share it."""

    def __init__(self) -> None:
        self.kinds: dict[str, Tally] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def operation(self, kind: str, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Count an operation. refusals: errors that are not failures, because they refuse something that is impossible
        now."""
        start, outcome, sentence = time.perf_counter(), "", ""
        try:
            yield
        except WrongAnswerError as wrong:
            outcome, sentence = "wrong", str(wrong)
        except refusals as refused:
            outcome, sentence = "refused", str(refused)
        except Exception as error:  # any error is counted and shown, and the soak continues
            outcome, sentence = "error", f"{type(error).__name__}: {error}"
        self.count(kind, time.perf_counter() - start, outcome, sentence)

    def count(self, kind: str, seconds: float, outcome: str = "", sentence: str = "") -> None:
        with self._lock:
            tally = self.kinds.setdefault(kind, Tally())
            if outcome:
                tally.counts[outcome] += 1
            else:
                tally.seconds.append(seconds)
            if outcome and sentence and len(tally.said) < 3:
                tally.said.append(f"{outcome}: {sentence[:400]}")

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            return {k: [list(t.seconds), dict(t.counts), list(t.said)] for k, t in self.kinds.items()}

    def add_json(self, kinds: dict[str, Any]) -> None:
        for kind, (seconds, counts, said) in kinds.items():
            self.kinds[kind] = Tally(seconds, Counter(counts), said)


def together(tasks: Sequence[Callable[[], None]]) -> None:
    """Run each task in a thread, until all have ended."""
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Clients of the process with an open Index


def hold(folder: Path, clients: int, seconds: float, pause: float) -> None:
    """Search one Index from several threads, and refresh it; write the outcomes to holder.json."""
    from jaxret.api import Index, Retriever
    from jaxret.search.search_options import SearchOptions

    world, record, end = World(folder), Record(), time.monotonic() + seconds
    _ = world.states
    retriever = Retriever.open(folder / "run")
    first = world.ended
    index = Index.open(retriever)
    seen = [range(first, world.begun + 1)]  # states that the index may have; threads replace the whole list item
    indexes = SearchOptions(index=INDEX, index_parameters="nprobe=8")

    def checked(opened: Any, random: np.random.Generator, colour: str, before: Callable[[], int]) -> None:
        questions = random.integers(0, QUESTIONS, int(random.integers(1, 4))).tolist()
        k, earliest = int(random.integers(1, 31)), before()
        rankings = opened.search([world.questions[question] for question in questions], k)
        states = range(earliest, max(seen[0].stop, world.begun + 1))
        for question, hits in zip(questions, rankings, strict=True):
            ranking = [(hit.id, hit.score, hit.title, hit.text) for hit in hits]
            world.require_right(question, k, ranking, states, colour)

    def search(seed: int) -> None:
        random = np.random.default_rng(seed)
        time.sleep(random.random() * pause)
        while time.monotonic() < end:
            if random.random() < 0.02:
                with record.operation("Index: filter, search"):
                    earliest, colour = world.ended, COLOURS[int(random.integers(3))]
                    checked(index.filtered(f"colour:{colour}"), random, colour, lambda: earliest)  # noqa: B023
            elif random.random() < 0.01:
                with record.operation("Index: all rows"):
                    earliest = seen[0].start
                    ids = [key for keys, _ in index.rows() for key in keys]
                    states = [world.states[n] for n in range(earliest, world.begun + 1)]
                    if not any(
                        sorted(ids) == sorted(world.records[r]["_id"] for r in np.flatnonzero(s)) for s in states
                    ):
                        raise WrongAnswerError(f"{len(ids)} ids are those of no state")
            else:
                with record.operation("Index: search"):
                    checked(index, random, "", lambda: seen[0].start)
            time.sleep(random.exponential(pause))

    def refresh() -> None:
        while time.monotonic() < end:
            with record.operation("Index: refresh"):
                earliest = world.ended
                if index.refresh():
                    seen[0] = range(earliest, world.begun + 1)
            time.sleep(3)

    def approximate() -> None:
        random, opened = np.random.default_rng(1), None
        while time.monotonic() < end:
            with record.operation("Index: open an approximate one", (ValueError, FileNotFoundError)):
                earliest = world.ended
                opened = Index.open(retriever, options=indexes), earliest  # it keeps its state during all changes
            if opened:
                with record.operation("Index: search an approximate one"):
                    checked(opened[0], random, "", lambda: opened[1])  # noqa: B023
            time.sleep(4 * pause)

    together([*(lambda seed=seed: search(seed) for seed in range(clients)), refresh, approximate])
    (folder / "holder.json").write_text(json.dumps(record.to_json()))


# Clients of the server


class Client:
    """A client of the server: its connection, and the requests that it sends."""

    def __init__(self, world: World, port: int, record: Record, seed: int) -> None:
        self.world, self.record, self.random = world, record, np.random.default_rng(1000 + seed)
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.corpus = {"name": "corpus", "passages": PASSAGES}

    def run(self, end: float, pause: float) -> None:
        """Send requests until the end."""
        kinds = [self.search, self.filter, self.embed, self.info, self.refuse, self.leave]
        time.sleep(self.random.random() * pause)
        while time.monotonic() < end:
            kind = kinds[int(self.random.choice(len(kinds), p=[0.6, 0.12, 0.12, 0.04, 0.06, 0.06]))]
            with self.record.operation(f"serve: {kind.__doc__}"):
                kind()
            time.sleep(self.random.exponential(pause))
        self.connection.close()

    def ask(self, path: str, body: Any = None, status: int = 200) -> Any:
        """Return the answer as JSON. Another status than expected is an error."""
        sent = {"content-type": "application/json"}
        try:
            self.connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, sent)
            response = self.connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            self.connection.close()
            raise
        if response.status != status:
            raise RuntimeError(f"{path} answers {response.status} {text.decode()[:200]}")
        return json.loads(text)

    def search(self) -> None:
        """search"""
        self._search("")

    def filter(self) -> None:
        """search with a filter"""
        self._search(COLOURS[int(self.random.integers(3))])

    def _search(self, colour: str) -> None:
        questions = self.random.integers(0, QUESTIONS, int(self.random.integers(1, 4))).tolist()
        k = int(self.random.integers(1, 31))
        body: dict[str, Any] = {"queries": [self.world.questions[question] for question in questions], "k": k}
        body |= {"filter": {"colour": colour}} if colour else {}
        answer = self.ask("/search", body)
        corpus = {key: answer["corpus"][key] for key in self.corpus}
        if corpus != self.corpus or not answer["exact"]:
            raise WrongAnswerError(f"the answer is of {answer['corpus']}, exact: {answer['exact']}")
        for question, hits in zip(questions, answer["results"], strict=True):
            ranking = [(hit["id"], hit["score"], hit["title"], hit["text"]) for hit in hits]
            self.world.require_right(question, k, ranking, range(1), colour)

    def embed(self) -> None:
        """vectors"""
        question = int(self.random.integers(QUESTIONS))
        body = {"inputs": self.world.questions[question], "prompt_name": "query", "normalize": False}
        vector = np.array(self.ask("/embed", body))
        difference = np.abs(vector - self.world.query_vectors[question]).max()
        if not difference < TOLERANCE:
            raise WrongAnswerError(f"the vector of question {question} is {difference} off")

    def info(self) -> None:
        """facts"""
        ended = self.world.ended
        (model,) = self.ask("/info")["models"]
        if ended and not model["stale"]:
            raise WrongAnswerError(f"not stale after {ended} changes of the corpus")

    def refuse(self) -> None:
        """a request that is refused"""
        self.ask("/search", {"queries": ["x"], "k": 5000}, 422)

    def leave(self) -> None:
        """a client that does not wait"""
        port = self.connection.port
        gone = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        gone.request("POST", "/search", json.dumps({"queries": ["river stone"] * 20, "k": 100}))
        gone.close()


# Jobs that run at the same time


class Jobs:
    """Commands that run at the same time as the clients; some of them are killed."""

    def __init__(self, world: World, record: Record, seconds: float, kills: int) -> None:
        self.world, self.record, self.kills = world, record, kills
        self.start, self.seconds = time.monotonic(), seconds
        self.killed_trainings = 0
        self.same_parameters = False

    @property
    def end(self) -> float:
        return self.start + self.seconds

    def change_corpus(self, pause: float) -> None:
        """Append and delete in turns, until the end."""
        random = np.random.default_rng(2)
        for number in range(CHANGES):
            if time.monotonic() > self.end:
                return
            rows, adds = self.world.change(number)
            records = [self.world.records[row] for row in rows]
            path = self.world.folder / f"change-{number}"
            if adds:
                flags = [f"--corpus={write_lines(path.with_suffix('.jsonl'), records)}", "--append"]
            else:
                path.write_text("".join(f"{record['_id']}\n" for record in records))
                flags = [f"--delete={path}"]
            self.world.begun = number + 1
            command = ["encode", f"--workdir={self.world.folder / 'run'}", "--name=corpus", *flags]
            self._insist("append" if adds else "delete", command, random)
            self.world.ended = number + 1
            time.sleep(pause)

    def build_indexes(self, pause: float) -> None:
        """Build the approximate index again and again, until the end."""
        random = np.random.default_rng(3)
        command = ["index", f"--workdir={self.world.folder / 'run'}", "--factory=IVF8,Flat", f"--name={INDEX}"]
        while time.monotonic() < self.end:
            self._insist("index", [*command, "--parameters=nprobe=8"], random)
            time.sleep(pause)

    def _insist(self, kind: str, command: Sequence[str], random: np.random.Generator) -> None:
        """Run a command; half of the time, kill it first at a random time."""
        if random.random() < 0.5:
            tally = self.record.kinds.get(f"jaxret {kind}")
            usual = float(np.median(tally.seconds)) if tally and tally.seconds else 10.0
            process = start(command)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(random.uniform(0.2, 1.0) * usual)
            if process.poll() is None:
                process.kill()
                self.record.count(f"jaxret {kind}", 0.0, "killed")
            process.communicate()
        with self.record.operation(f"jaxret {kind}"):
            finish(start(command))

    def train(self) -> None:
        """Train, be killed `kills` times, and compare with an uninterrupted training."""
        whole, killed = self.world.folder / "whole", self.world.folder / "killed"
        with self.record.operation("jaxret train, not killed"):
            finish(start(self._training(whole)))
        random = np.random.default_rng(4)
        for number in range(self.kills):
            time.sleep(max(0.0, self.start + self.seconds * 0.9 * number / self.kills - time.monotonic()))
            before, process = last_step(killed), start(self._training(killed))
            while process.poll() is None and last_step(killed) == before:
                time.sleep(0.05)
            time.sleep(random.exponential(0.2))
            if process.poll() is None:
                process.kill()
                self.killed_trainings += 1
            elif process.returncode:
                self.record.count("jaxret train, resumed", 0.0, "error", process.stderr.read()[-400:])  # type: ignore[union-attr]
            process.communicate()
        with self.record.operation("jaxret train, resumed"):
            finish(start(self._training(killed)))
            if trained(killed) != trained(whole):
                raise WrongAnswerError("the parameters of the killed training are others")
            self.same_parameters = True

    def _training(self, workdir: Path) -> list[str]:
        from tests.pipeline import train_arguments

        keys = {"train__steps": 80 * self.kills, "train__checkpoint_every": 20, "train__log_every": 20}
        keys |= {"validation__batch_size": 8, "validation__pool_size": 16}
        return ["train", *train_arguments(self.world.folder / "encoder", self.world.folder / "data", workdir, **keys)]


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command of jaxret."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxret", *command],
        cwd=REPOSITORY,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command. Raises RuntimeError with its output if it failed."""
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"exit {process.returncode}: {said[-400:]}")


def last_step(workdir: Path) -> int:
    """Return the step of the last checkpoint; 0 for none."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def trained(workdir: Path) -> dict[str, Any]:
    """Return the digests of every array of every checkpoint."""
    steps = sorted((workdir / "checkpoints").iterdir())
    files = [json.loads((step / "_CHECKPOINT_METADATA").read_text()) for step in steps]
    return {step.name: file["custom_metadata"]["digests"] for step, file in zip(steps, files, strict=True)}


# The long-lived processes


@dataclass
class Sample:
    """Memory, descriptors and threads of a process at one time."""

    mib: float  # its own memory, without mapped files
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return Sample(int(status["RssAnon"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))


def watch(processes: dict[str, int], samples: dict[str, list[Sample]], end: float) -> None:
    """Sample processes until the given time, or until they end."""
    while time.monotonic() < end:
        for name, pid in processes.items():
            with contextlib.suppress(OSError, KeyError):  # the process has ended, which its record shows
                samples[name].append(sample(pid))
        time.sleep(SECONDS)


def growth(samples: Sequence[Sample], files: int) -> tuple[Sample, Sample, list[str]]:
    """Return the medians of a process in the first and in the last quarter, and what grew beyond its limit. The first
    tenth is skipped, because programs are compiled and buffers allocated then. files: the number of additional
    descriptors at the end, because the corpus has more files."""
    settled = samples[len(samples) // 10 :]
    quarter = max(1, len(settled) // 4)
    first, last = (
        Sample(*(float(np.median([getattr(one, key) for one in part])) for key in ("mib", "descriptors", "threads")))  # type: ignore[arg-type]
        for part in (settled[:quarter], settled[-quarter:])
    )
    grown = []
    if last.mib > first.mib * (1 + GROWTH_SHARE) + GROWTH_MIB:
        grown.append("memory")
    allowed = {"descriptors": GROWTH_OPEN + files, "threads": GROWTH_OPEN}
    grown += [key for key, more in allowed.items() if getattr(last, key) > getattr(first, key) + more]
    return first, last, grown


# The table


def print_operations(record: Record) -> bool:
    """Print the outcomes of operations; return whether all were right."""
    columns = ("wrong", "error", "refused", "killed")
    head = " | ".join(f"{column:>7}" for column in columns)
    print(f"| {'operation':<40} | {'done':>6} | {head} | {'p50 ms':>8} | {'p99 ms':>8} |")
    print(f"|:{'-' * 40}-|{'|'.join(['-' * 7 + ':', *['-' * 8 + ':'] * 4, *['-' * 9 + ':'] * 2])}|")
    for kind, tally in sorted(record.kinds.items()):
        counts = " | ".join(f"{tally.counts[column]:>7,}" for column in columns)
        p50, p99 = np.percentile(tally.seconds, (50, 99)) * 1000 if tally.seconds else (math.nan, math.nan)
        print(f"| {kind:<40} | {len(tally.seconds):>6,} | {counts} | {p50:>8,.1f} | {p99:>8,.1f} |")
    for kind, tally in record.kinds.items():
        for sentence in tally.said:
            print(f"{kind}: {sentence}")
    return not any(tally.counts["wrong"] + tally.counts["error"] for tally in record.kinds.values())


def print_processes(samples: dict[str, list[Sample]], parts: int) -> bool:
    """Print the resources of the long-lived processes; return whether none grew. parts: the number of parts that were
    appended to the corpus; an exact index maps one file of each, an approximate one two."""
    flat = True
    print(
        f"\n| {'process':<14} | {'MiB, first quarter':>18} | {'last':>8} | {'most':>8} | descriptors | threads | grew |"
    )
    print(f"|:{'-' * 14}-|{'-' * 19}:|{'-' * 9}:|{'-' * 9}:|------------:|--------:|:-----|")
    for name, values in samples.items():
        first, last, grown = growth(values, 0 if name == SERVER else 3 * parts)
        flat &= not grown
        most = max(value.mib for value in values)
        opened = f"{first.descriptors:.0f}, {last.descriptors:.0f}"
        threads = f"{first.threads:.0f}, {last.threads:.0f}"
        row = f"{first.mib:>18.1f} | {last.mib:>8.1f} | {most:>8.1f} | {opened:>11} | {threads:>7}"
        print(f"| {name:<14} | {row} | {', '.join(grown) or 'no':<4} |")
    return flat


def serve(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Start the server; return it and its port when it is ready."""
    with open(folder / "serve.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxret", "serve", str(folder / "run"), "--port=0", "--batch=16"],
            cwd=REPOSITORY,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(line.rpartition(" (")[0].rpartition(":")[2])
    while process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.suppress(OSError):  # it does not listen yet
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process, port
        connection.close()
        time.sleep(0.3)
    raise SystemExit(f"the server ended with status {process.returncode}: {folder / 'serve.log'}")


def soak(folder: Path, clients: int, seconds: float, pause: float, kills: int) -> bool:
    """Run everything, print the table, and return whether all was right.

    Args:
        folder: a new folder.
        clients: the number of all clients.
        seconds: the time during which clients send requests.
        pause: seconds between two questions of a client, on average.
        kills: how often the training is killed.
    """
    world, record = make_world(folder), Record()
    server, port = serve(folder)
    numbers = f"--clients={clients - clients // 2}", f"--minutes={seconds / 60}", f"--pause={pause}"
    holder = subprocess.Popen(
        [sys.executable, __file__, "--hold", f"--folder={folder}", *numbers], env=os.environ | ENVIRONMENT
    )
    jobs = Jobs(world, record, seconds, kills)
    samples: dict[str, list[Sample]] = {SERVER: [], "jaxret.Index": []}
    pids = dict(zip(samples, (server.pid, holder.pid), strict=True))
    try:
        tasks: list[Callable[[], None]] = [
            lambda: jobs.change_corpus(seconds / 60),
            lambda: jobs.build_indexes(seconds / 40),
            jobs.train,
            lambda: watch(pids, samples, jobs.end),
            lambda: record.count("processes of clients", 0.0, "" if holder.wait() == 0 else "error", "jaxret.Index"),
        ]
        for number in range(clients // 2):
            client = Client(world, port, record, number)
            tasks.append(lambda client=client: client.run(jobs.end, pause))  # type: ignore[misc]
        together(tasks)
        server.send_signal(signal.SIGTERM)
        record.count("server ends when it is stopped", 0.0, "" if server.wait(60) == 0 else "error", "jaxret serve")
    finally:
        for process in (server, holder):
            process.kill()
    record.add_json(json.loads((folder / "holder.json").read_text()))
    right = print_operations(record)
    flat = print_processes(samples, (world.ended + 1) // 2)
    print(f"\n{world.ended} changes of the corpus; training killed {jobs.killed_trainings} times, ", end="")
    print(f"parameters {'the same' if jobs.same_parameters else 'NOT the same'} as without")
    return right and flat and jobs.same_parameters and jobs.killed_trainings >= kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/soak-bench"), help="is made, and stays for a look")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between a client's questions, on average")
    parser.add_argument("--kills", type=int, default=KILLS, help="of the training")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)  # the process with the Index
    options = parser.parse_args()
    if options.hold:
        hold(options.folder, options.clients, options.minutes * 60, options.pause)
        return
    right = soak(options.folder, options.clients, options.minutes * 60, options.pause, options.kills)
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
