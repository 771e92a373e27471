"""Invalid input, and valid input at its limits: the error names the line, or every row is in the result."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.data.formats import Corpus
from jaxret.data.records import Query
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.shard_set import open_shards
from jaxret.runs.run import Run, open_run
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_json, sha256_file, with_digest, write_json
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.scripts import refusal, run, why
from tests.pipeline import ONE_DEVICE, REPOSITORY, WORDS, command, environment


@pytest.fixture(scope="module")
def opened(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    workdir = tmp_path_factory.mktemp("data") / "run"
    shutil.copytree(tiny.run, workdir, ignore=shutil.ignore_patterns("embeddings"))
    return open_run(workdir)


def line(identifier: str, text: str, title: str = "") -> str:
    return json.dumps({"_id": identifier, "title": title, "text": text})


GOOD = [line(f"d{i}", f"{WORDS[i % len(WORDS)]} {WORDS[i // len(WORDS)]}") for i in range(40)]


def write(folder: Path, lines: Iterable[str | bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.jsonl"
    path.write_bytes(b"".join(x.encode() + b"\n" if isinstance(x, str) else x for x in lines))
    return path


def encoded(opened: Run, corpus: Path, name: str, on_error: str = "error") -> tuple[list[str], np.ndarray]:
    """Return (ids, vectors) of an encoded corpus."""
    folder = encode_corpus(opened, Corpus.open(corpus), name, EncodeOptions(on_error=on_error), progress=False).folder
    shards = open_shards(folder)
    return shards.ids(range(shards.total_rows)), np.concatenate([vectors for _, vectors in shards])


@pytest.mark.faults(8)
def test_duplicate_ids(opened: Run, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    corpus = write(tmp_path / "twice", [*GOOD[:7], line("d2", "another"), *GOOD[7:]])
    done = run("encode.py", f"--workdir={tiny.run}", f"--corpus={corpus}", "--name=twice")
    message = refusal(done)
    trials.count(f"{corpus}:8" in message and "d2" in message and "3" in message, done.output, detected=True)
    trials.count(not (tiny.run / "embeddings" / "twice").exists(), "something was written")
    ids, _ = encoded(opened, corpus, "twice", "skip")
    trials.count(ids == [f"d{i}" for i in range(40)], f"skip gives {ids}")
    queries = tmp_path / "queries.jsonl"
    queries.write_text(f"{line('q', 'river')}\n{line('q', 'stone')}\n")
    done = run("search.py", f"--workdir={tiny.run}", f"--queries={queries}", "--corpus=data")
    trials.count(f"{queries}:2" in refusal(done), done.output, detected=True)


@pytest.mark.faults(9)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite(value: float, opened: Run, tmp_path: Path, trials: Trials) -> None:
    """If the model computes them, the error names the passage; if they are in the files, with right digests, it names
    the row."""
    word = opened.tokenizer.backend.token_to_id("thunder")
    table = opened.params["encoder"]["embeddings"]["word"]["embedding"]
    params = jax.tree.map(lambda leaf: leaf, opened.params)
    params["encoder"]["embeddings"]["word"]["embedding"] = jnp.asarray(table).at[word, 0].set(value)
    broken = dataclasses.replace(opened, params=params, program_cache={})
    corpus = write(tmp_path, [line(f"d{i}", "river stone") for i in range(12)] + [line("seven", "loud thunder")])
    message = why(lambda: encode_corpus(broken, Corpus.open(corpus), f"broken{value}", progress=False))
    trials.count("seven" in message and "12" in message, f"encode: {message}", detected=True)

    ids, vectors = encoded(opened, corpus, f"edited{value}")
    folder = opened.workdir / "embeddings" / f"edited{value}"
    vectors[12, 0, 3] = value
    path = folder / "vectors-00002-of-00003.npy"
    np.save(path, vectors[10:])
    reseal(folder, "00002-of-00003")
    message = why(lambda: Searcher(opened, folder, SearchOptions("xla")).search([Query("q", "river")], 3))
    trials.count("12" in message and ("NaN" in message or "infinity" in message), f"search: {message}", detected=True)
    assert len(ids) == 13


def reseal(folder: Path, suffix: str, **totals: Any) -> None:
    """Update manifest and sidecar for changed files, as an attacker would."""
    entry = read_json(folder / f"shard-{suffix}.json")
    manifest = read_json(folder / "manifest.json")
    for kind in ("vectors", "ids", "offsets"):
        for path in folder.glob(f"{kind}-{suffix}.*"):
            described = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            entry[kind] = described
            manifest["shards"][int(suffix[:5])][kind] = described
    manifest |= totals
    for path, value in ((folder / f"shard-{suffix}.json", entry), (folder / "manifest.json", manifest)):
        write_json(path, with_digest({key: entry for key, entry in value.items() if key != "sha256"}))


@pytest.mark.faults(10)
def test_weights_and_losses_that_are_not_finite(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """Training stops with the place of the value, and saves nothing of it."""
    for value, steps in ((np.nan, 4), (np.inf, 4), (np.nan, 0)):
        encoder = tmp_path / f"encoder{value}{steps}"
        shutil.copytree(tiny.encoder, encoder)
        tensors = load_file(encoder / "model.safetensors")
        name = next(name for name in tensors if name.endswith("word_embeddings.weight"))
        tensors[name] = tensors[name].copy()
        tensors[name][50, 1] = value
        save_file(tensors, encoder / "model.safetensors", metadata={"format": "pt"})
        workdir = tmp_path / f"run{value}{steps}"
        done = run("train.py", *tiny.training(workdir, encoder__checkpoint=str(encoder), train__steps=steps))
        message = refusal(done)
        trials.count(
            "word" in message and not saved(workdir), f"{value} for {steps} steps: {done.output}", detected=True
        )
    workdir = tmp_path / "fast"
    done = run("train.py", *tiny.training(workdir, optimizer__learning_rate=1e30, optimizer__warmup_steps=0))
    message = refusal(done)
    named = "step" in message and "checkpoint" in message and all(finite(workdir, step) for step in saved(workdir))
    trials.count(named, done.output, detected=True)


def saved(workdir: Path) -> list[int]:
    return [int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]


def finite(workdir: Path, step: int) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(open_run(workdir, str(step)).params))


DEEP = "[" * 200_000 + "]" * 200_000
BAD: dict[str, bytes] = {
    "latin-1": b'{"_id": "b", "text": "caf\xe9"}\n',
    "utf-16": '{"_id": "b", "text": "a"}'.encode("utf-16") + b"\n",
    "surrogate": b'{"_id": "b", "text": "\\ud800 x"}\n',
    "half an object": b'{"_id": "b", "text": "a\n',
    "a list": b'["b", "a"]\n',
    "a number": b"7\n",
    "nested": b'{"_id": "b", "text": ' + DEEP.encode() + b"}\n",
    "digits": b'{"_id": "b", "text": ' + b"9" * 10_000 + b"}\n",
    "NaN for a text": b'{"_id": "b", "text": NaN}\n',
    "a number for an id": b'{"_id": 7, "text": "a"}\n',
    "no text": b'{"_id": "b"}\n',
    "no id": b'{"text": "a"}\n',
    "white space in an id": b'{"_id": "a b", "text": "a"}\n',
    "an empty id": b'{"_id": "", "text": "a"}\n',
    "NUL in an id": b'{"_id": "a\\u0000b", "text": "a"}\n',
    "a key twice": b'{"_id": "b", "text": "a", "text": "c"}\n',
    "raw NUL": b'{"_id": "b", "text": "a\x00c"}\n',
}


@pytest.mark.faults(11)
def test_bad_lines(opened: Run, tmp_path: Path, trials: Trials) -> None:
    expected = encoded(opened, write(tmp_path / "good", GOOD), "good")
    for number, (what, bad) in enumerate(BAD.items()):
        corpus = write(tmp_path / str(number), [*GOOD[:4], bad, *GOOD[4:]])
        message = why(lambda: encode_corpus(opened, Corpus.open(corpus), f"bad{number}", progress=False))  # noqa: B023
        trials.count(f"{corpus}:5" in message, f"{what}: {message[:300]!r}", detected=True)
        ids, vectors = encoded(opened, corpus, f"bad{number}", "skip")
        trials.count(ids == expected[0] and np.array_equal(vectors, expected[1]), f"{what}, skipped: {len(ids)} rows")
    whole = b"".join(x.encode() + b"\n" for x in GOOD)
    for what, content in {
        "byte order mark": b"\xef\xbb\xbf" + whole,
        "CRLF": whole.replace(b"\n", b"\r\n"),
        "no line end": whole[:-1],
        "blank lines": whole.replace(b"\n", b"\n\n"),
    }.items():
        ids, vectors = encoded(opened, write(tmp_path / what, [content]), what.replace(" ", "-"))
        trials.count(ids == expected[0] and np.array_equal(vectors, expected[1]), f"{what}: other rows")


@pytest.mark.faults(11)
def test_bad_questions(tiny: Tiny, trials: Trials) -> None:
    for question in (" ", os.fsdecode(b"\xff"), "\t"):
        done = run("search.py", f"--workdir={tiny.run}", f"--query={question}", "--corpus=data")
        trials.count(bool(refusal(done)), f"--query={question!r}: {done.output}", detected=True)


@pytest.mark.faults(12)
@pytest.mark.parametrize("text", ["", "   ", "\u00a0\u3000", "\\n\\t"])
def test_empty_texts(text: str, opened: Run, tmp_path: Path, trials: Trials) -> None:
    raw = f'{{"_id": "empty", "title": "", "text": "{text}"}}'
    corpus, name = write(tmp_path, [*GOOD[:6], raw, *GOOD[6:]]), f"empty{len(text)}"
    message = why(lambda: encode_corpus(opened, Corpus.open(corpus), name, progress=False))
    trials.count(f"{corpus}:7" in message and "empty" in message, message, detected=True)
    ids, _ = encoded(opened, corpus, f"{name}-skip", "skip")
    trials.count(len(ids) == len(GOOD) and "empty" not in ids, f"skip: {len(ids)} rows")
    ids, vectors = encoded(opened, corpus, f"{name}-keep", "keep")
    trials.count(ids.index("empty") == 6 and len(ids) == 41, f"keep: {len(ids)} rows of 41")
    trials.count(bool(np.isfinite(vectors).all()), "keep: not finite")


# The kernel counts the memory that a process had before it became another program, and a child begins with its
# parent's: so a small process starts the script.
MEASURED = """
import os, sys
child = os.fork()
if not child:
    os.execv(sys.argv[2], sys.argv[2:])
_, status, used = os.wait4(child, 0)
with open(sys.argv[1], "w") as file:
    file.write(str(used.ru_maxrss >> 10))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak(folder: Path, *arguments: str) -> tuple[int, str, int]:
    """Return (exit status, output, peak of resident memory in MiB) of encode.py, started as from a shell."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, folder / "peak", *command("encode.py", *arguments)],
        cwd=REPOSITORY,
        env=environment() | ONE_DEVICE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout, int((folder / "peak").read_text())


LIMIT = 1000  # MiB; JAX and its compiler take about 350


@pytest.mark.faults(13)
@pytest.mark.parametrize("what", ["1M tokens", "100 MB of words", "100 MB of one word", "gzip bomb"])
def test_endless_lines(what: str, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """They are truncated and counted, or refused, and are in memory at most twice."""
    corpus = tmp_path / "corpus.jsonl"
    name = what.replace(" ", "-")
    if what == "1M tokens":
        write(tmp_path, [*GOOD[:3], line("long", "river " * 1_000_000)])
    elif what == "gzip bomb":
        corpus = tmp_path / "corpus.jsonl.gz"
        with gzip.open(corpus, "wb", compresslevel=1) as file:
            file.write(b'{"_id": "long", "text": "')
            for _ in range(1500):
                file.write(b"a" * 2**20)
    else:
        with open(corpus, "w") as file:
            file.write('{"_id": "long", "text": "')
            for _ in range(100):
                file.write("river " * 166_666 if "words" in what else "a" * 1_000_000)
            file.write('"}\n')
    status, message, memory = peak(tmp_path, f"--workdir={tiny.run}", f"--corpus={corpus}", f"--name={name}")
    refused = status == 1 and f"{corpus}:" in message and "Traceback" not in message
    trials.count(memory < LIMIT, f"{what}: {memory} MiB")
    trials.count(
        status == 0 if what == "1M tokens" else refused, f"{what}: exit {status} {message[-500:]}", status != 0
    )


@pytest.mark.faults(20)
def test_few_rows(opened: Run, tmp_path: Path, trials: Trials) -> None:
    size = opened.config.encode.shard_rows
    everything = dict(zip(*encoded(opened, write(tmp_path / "all", GOOD), "all")))
    message = why(lambda: encode_corpus(opened, Corpus.open(write(tmp_path / "none", [])), "none", progress=False))
    trials.count("no passage" in message, message, detected=True)
    for rows in (1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 31, 32, 33):
        name = f"rows{rows}"
        ids, vectors = encoded(opened, write(tmp_path / name, GOOD[:rows]), name)
        close = all(np.allclose(vector, everything[i], atol=1e-5) for i, vector in zip(ids, vectors))
        trials.count(ids == [f"d{i}" for i in range(rows)] and close, f"{rows} rows")
        folder = opened.workdir / "embeddings" / name
        for k in (1, rows, rows + 1, 100_000):
            ranking = (
                Searcher(opened, folder, SearchOptions("xla")).search([Query("q", "river stone")], k).rankings["q"]
            )
            trials.count(len({i for i, _ in ranking}) == min(k, rows), f"{rows} rows, k = {k}: {len(ranking)}")
    folder = opened.workdir / "embeddings" / "all"
    for k in (0, -3):
        message = why(lambda: Searcher(opened, folder, SearchOptions("xla")).search([Query("q", "river")], k))  # noqa: B023
        trials.count(f"k is {k}" in message, message, detected=True)
    message = why(lambda: Searcher(opened, folder, SearchOptions("xla")).search([], 3))
    trials.count("no query" in message, message, detected=True)


@pytest.mark.faults(21)
def test_ties(opened: Run, tmp_path: Path, trials: Trials) -> None:
    """Passages with only four texts are ordered by score, then row, for any size of shards and any backend."""
    lines = [line(f"t{i:03}", f"{WORDS[i % 4]} {WORDS[i % 4 + 5]}") for i in range(300)]
    corpus = write(tmp_path, lines)
    questions = [Query(f"q{i}", WORDS[i]) for i in range(6)]
    expected: dict[int, dict[str, list[str]]] = {}
    for rows in (7, 50, 1000):
        config = opened.config.copy_and_resolve_references()
        config.encode.shard_rows = rows
        sized = dataclasses.replace(opened, config=config)
        folder = encode_corpus(sized, Corpus.open(corpus), f"ties{rows}", progress=False).folder
        for backend in backends():
            for k in (1, 10, 75, 76, 300):
                rankings = Searcher(sized, folder, SearchOptions(backend)).search(questions, k).rankings
                order = {key: [i for i, _ in ranking] for key, ranking in rankings.items()}
                by_rule = all(
                    ranking == sorted(ranking, key=lambda pair: (-pair[1], pair[0])) for ranking in rankings.values()
                )
                same = order == expected.setdefault(k, order)
                trials.count(same and by_rule, f"shards of {rows}, {backend}, k = {k}: {'rule' if same else 'order'}")


def backends() -> list[str]:
    try:
        import faiss  # noqa: F401
    except ImportError:
        return ["xla"]
    return ["xla", "faiss-cpu"]
