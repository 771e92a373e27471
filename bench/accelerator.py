"""Compare `jaxret plan` with this machine, in at most ten minutes: make accelerator

python bench/accelerator.py --out=runs/accelerator                     a GPU machine or a TPU host
python bench/accelerator.py --out=runs/accelerator --small             a rehearsal; the default on a CPU

Each part is a process with a time limit, so that the others run even if one hangs or dies. The parts: devices and
search backends against float64 (`jaxret doctor`), fused attention against plain in values and gradients, a training
step, a batch of encoding and an exact search, each compared with its plan, FAISS, torch and sentence-transformers where
these are installed, and two processes compared with one. Nothing is downloaded: weights are random, in published
shapes; the peers are compared on MiniLM. OUT/report.md has one row per measurement with a verdict, OUT/values.json has
the numbers. The exit status is 1 if a verdict is not "ok", "skipped" or "not compared".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

LIMITS = {  # seconds
    "doctor": 60, "attention": 80, "train": 110, "encode": 70, "search": 90, "peers": 80, "processes": 110
}  # fmt: skip
RESULT = "result: "  # a line of a part's output that begins so has a Row as JSON
PEERS = {  # scripts of bench/ and their arguments on a GPU
    "train_step": "--cases full ragged --rounds=4 --queries=128 --dtype=bfloat16",
    "encode": "--texts=2000 --rounds=3 --dtype=bfloat16",
}
LEAST_USE = 0.3  # a share of the full rate of products; a smaller one is reported
ATTENTION_ERROR = 0.01  # in bfloat16, of values and gradients, relative to the largest of each: 2.6 of its steps
LOSS_ERROR = 1e-3  # the relative error of two processes against one, in bfloat16
SCORE_ERROR = 1e-5  # the error of exact scores, relative to the largest
NO_PLAN = "not compared"  # the verdict on a time for which there is no plan


@dataclass(frozen=True)
class Row:
    """A row of the report. verdict: "ok"; "skipped"; NO_PLAN for a time that cannot be compared; or a sentence about
    the problem."""

    what: str
    planned: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Size:
    """Shapes of all parts: a config, changes of its keys, and the number of vectors to search."""

    config: str
    changes: dict[str, Any]
    passages: int
    queries: int
    lengths: tuple[int, ...]  # lengths of texts for attention


LARGE = Size("mlr", {}, 1_000_000, 1024, (128, 512, 2048))
SMALL = Size(
    "mlr",
    {
        "encoder.checkpoint": "",  # set by `small_encoder`
        "head.mlr.chosen": (1, 2),
        "train.batch_size": 4,
        "tokens.passage_length": 16,
        "tokens.query_length": 16,
        "encode.tokens_per_batch": 64,
    },
    2000,
    32,
    (128,),
)


SMALL_ENCODER = {
    "model_type": "bert",
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}


def small_size(out: Path) -> Size:
    """Return the sizes of a rehearsal; write the config.json of its encoder into a folder of `out`."""
    folder = out / "encoder"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL_ENCODER, indent=2) + "\n")
    return replace(SMALL, changes={**SMALL.changes, "encoder.checkpoint": str(folder.absolute())})


def emit(row: Row) -> None:
    print(RESULT + json.dumps(asdict(row)), flush=True)


def seconds_of(run: Callable[[], Any], least: float = 3.0) -> float:
    """Return the median seconds of a call, over at least three calls and `least` seconds, after one that compiles."""
    import jax

    jax.block_until_ready(run())
    times: list[float] = []
    while len(times) < 3 or sum(times) < least:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def topology_here() -> str:
    """Return the topology of this machine's devices for --topology; "" for chips with unknown rates."""
    import jax

    from jaxret.parallel.chips import find_chip

    devices = jax.devices()
    chip = find_chip(devices[0].device_kind)
    if chip is None:
        return ""
    coordinates = [device.coords for device in devices] if chip.platform == "tpu" else [(len(devices) - 1,)]
    grid = [max(axis) + 1 for axis in zip(*coordinates, strict=True)]
    while len(grid) > 1 and grid[-1] == 1 and chip.name in ("v5e", "v6e"):  # planes have two axes
        grid.pop()
    return f"{chip.name}:{'x'.join(map(str, grid))}"


def plan(size: Size, verb: str, *arguments: str) -> dict[str, Any] | None:
    """Return the values of `jaxret plan` for this machine's chips; None if their rates are unknown."""
    topology = topology_here()
    if not topology:
        return None
    changes = [f"--config.{key}={value}" for key, value in size.changes.items()]
    command = [sys.executable, "-m", "jaxret", "plan", verb, f"--config={size.config}", *changes, *arguments]
    variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, f"--topology={topology}", "--json", "--noadvice", "--quiet"],
        cwd=REPOSITORY,
        env=variables,
        capture_output=True,
        text=True,
    )
    if not done.stdout.startswith('{"event": "plan"'):
        raise RuntimeError(f"jaxret plan {verb} failed: {done.stderr.strip()[-500:]}")
    values: dict[str, Any] = json.loads(done.stdout)["plan"]
    return values


def config_of(size: Size) -> Any:
    from jaxret.configs import change_config, load_config

    return change_config(load_config(size.config), size.changes, size.config)


def concrete(abstract: Any, vocabulary: int) -> Any:
    """Return arrays for abstract ones, on their devices, equal in every job: random parameters and token ids, moments
    of zero, no padding; each query's positive is its first passage."""
    import jax
    import jax.numpy as jnp

    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    shapes = [leaf.shape for _, leaf in leaves]
    group = next((shape[0] for name, shape in zip(names, shapes) if "passage_ids" in name), 1) // max(
        next((shape[0] for name, shape in zip(names, shapes) if "positives" in name), 1), 1
    )

    def value(number: int) -> jax.Array:
        name, leaf = names[number], leaves[number][1]
        key = jax.random.fold_in(jax.random.key(0), number)
        if jnp.issubdtype(leaf.dtype, jnp.bool_):
            return jnp.ones(leaf.shape, leaf.dtype)
        if "positives" in name:
            return jnp.broadcast_to((group * jnp.arange(leaf.shape[0])).reshape(-1, *[1] * (leaf.ndim - 1)), leaf.shape)
        if "passage_ids" in name:
            return jnp.arange(leaf.shape[0])
        if ".ids" in name:
            return jax.random.randint(key, leaf.shape, 5, vocabulary)
        if "opt_state" in name or jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)

    where = [leaf.sharding for _, leaf in leaves]
    make = jax.jit(
        lambda: [value(number).astype(leaves[number][1].dtype) for number in range(len(leaves))], out_shardings=where
    )
    return jax.tree_util.tree_unflatten(tree, make())


def program_of(size: Size, verb: str, devices: Sequence[Any]) -> tuple[Any, Any]:
    """Return the program of a training step or of encoding a batch, and its arguments."""
    from jaxret.plan import programs

    config = config_of(size)
    directory, _ = programs.encoder_directory(config.encoder.checkpoint)
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    if verb == "train":
        retriever = programs.retriever_of(config, directory)
        shapes = programs.longest_batch(config, retriever, len(devices))
        planned = programs.training_program(config, directory, shapes, devices)
    else:
        planned = programs.encoding_program(config, directory, devices)
    return planned.program, concrete(planned.arguments, vocabulary)


def most_memory() -> int | None:
    """Return the peak memory of the first device in bytes; None if the device does not count it."""
    import jax

    statistics_of_device = jax.local_devices()[0].memory_stats() or {}
    return statistics_of_device.get("peak_bytes_in_use")


def judge_memory(planned: dict[str, Any] | None, measured: int | None) -> Iterator[Row]:
    """Yield the row of the memory of a program, if it was planned and measured."""
    if planned is None or measured is None:
        return
    memory = planned["memory"]
    at_least = memory["at_least"]
    said = f"{'at least ' if at_least else ''}{memory['total'] / 2**30:.2f} GiB"
    fits = at_least or measured <= 1.05 * memory["total"]
    yield Row("memory of a device", said, f"{measured / 2**30:.2f} GiB", "ok" if fits else "more than planned")


def judge_time(name: str, planned: dict[str, Any] | None, seconds: float, unit: str) -> Row:
    """Return a row with the time of a program: its lower bound, and the used share of the full rate."""
    measured = f"{seconds * 1e3:.1f} ms, {unit}"
    if planned is None:
        return Row(name, "rates of this device are not known", measured, NO_PLAN)
    bound = planned["lower_bound"]
    use = bound["arithmetic"] / seconds
    if seconds < bound["seconds"]:
        verdict = "faster than the lower bound, which is therefore wrong"
    else:
        verdict = "ok" if bound["seconds"] / seconds >= LEAST_USE else f"less than {LEAST_USE:.0%} of the lower bound"
    said = f"at least {bound['seconds'] * 1e3:.1f} ms"
    return Row(name, said, f"{measured}, {use:.0%} of the full rate of products", verdict)


def run_doctor(size: Size) -> Iterator[Row]:
    import jax

    from jaxret.experiments.doctor import (
        NOT_AVAILABLE,
        check_attention,
        check_backends,
        check_devices,
        check_product,
    )

    backend = jax.default_backend()
    devices = check_devices(backend, [device.device_kind for device in jax.devices()])
    for check in [devices, check_product(), *check_backends(), *check_attention(backend)]:
        missing = check.value.startswith(NOT_AVAILABLE)
        verdict = check.problem if check.fatal else "skipped" if missing else "ok"
        yield Row(check.name, "agrees with float64" if "search" in check.name else "", check.value, verdict)


def run_attention(size: Size) -> Iterator[Row]:
    """Compare fused attention with plain attention: the largest differences of values and gradients, and times."""
    import jax
    import jax.numpy as jnp

    from jaxret.models.encoders.attention import attend
    from jaxret.models.encoders.fused import ATTENTION_PLATFORMS
    from jaxret.models.encoders.layers import Compute, Dropout
    from jaxret.models.encoders.layout import TokenLayout
    from jaxret.models.encoders.window import FAR, WindowMask

    backend = jax.default_backend()
    interpret = backend == "cpu"  # XLA runs the TPU kernel on a CPU
    platform = "tpu" if interpret else backend
    for name in [name for name, needed in ATTENTION_PLATFORMS.items() if needed == platform]:
        for length, causal in [*((length, False) for length in size.lengths), (size.lengths[-1], True)]:
            texts = max(2**14 // length, 2) if not interpret else 2
            query, key, value = jax.random.normal(jax.random.key(0), (3, texts, length, 12, 64), jnp.bfloat16)
            if causal:  # like in a language model, heads share keys
                key, value = key[:, :, ::3], value[:, :, ::3]
            mask = jnp.arange(length) < jnp.linspace(length // 2, length, texts).astype(int)[:, None]
            drop = Dropout(0.0, TokenLayout(mask)).bind({})
            before = WindowMask(mask, jnp.arange(length), jnp.int32(FAR), jnp.int32(0), ((FAR, 0),))

            def total(compute: Compute, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
                output = attend(q / 8, k, v, before if causal else mask, drop, compute=compute)  # noqa: B023
                output = jnp.where(mask[..., None, None], output.reshape(*mask.shape, -1, 64), 0)  # noqa: B023
                return jnp.sum(output.astype(jnp.float32) ** 2), output

            runs = {
                attention: jax.jit(
                    jax.value_and_grad(
                        partial(total, Compute(jnp.bfloat16, attention=attention, interpret=interpret)),
                        argnums=(0, 1, 2),
                        has_aux=True,
                    )
                )
                for attention in (name, "plain")
            }
            results = {attention: run(query, key, value) for attention, run in runs.items()}
            arrays = ([x.astype(jnp.float32) for x in jax.tree.leaves((r[0][1], r[1]))] for r in results.values())
            differences = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(*arrays, strict=True)]
            least = 0.5 if not interpret else 0.0
            times = [seconds_of(partial(run, query, key, value), least) for run in runs.values()]
            verdict = "ok" if max(differences) <= ATTENTION_ERROR else f"differs by more than {ATTENTION_ERROR}"
            yield Row(
                f"attention {name}{', causal' if causal else ''}, {texts} x {length} tokens",
                f"differs from plain by at most {ATTENTION_ERROR} of the largest",
                f"{max(differences):.1e}; {times[0] * 1e3:.2f} ms, plain {times[1] * 1e3:.2f} ms (with gradients)",
                verdict,
            )


def run_train(size: Size) -> Iterator[Row]:
    """Time a training step with the largest batch of the config."""
    import jax

    planned = plan(size, "train")
    program, (state, batch) = program_of(size, "train", jax.devices())
    losses: list[float] = []

    def step() -> Any:
        nonlocal state
        state, metrics = program(state, batch)
        losses.append(float(metrics["loss"]))
        return metrics

    seconds = seconds_of(step)
    queries = batch.queries.ids.shape[0]
    yield judge_time(f"training step of {queries} queries", planned, seconds, f"{queries / seconds:,.0f} queries/s")
    yield from judge_memory(planned, most_memory())
    finite = all(map(math.isfinite, losses))
    yield Row("loss of every step", "finite", f"{losses[0]:.3f} to {losses[-1]:.3f}", "ok" if finite else "not finite")


def run_encode(size: Size) -> Iterator[Row]:
    """Time the encoding of a batch of the longest passages."""
    import jax

    planned = plan(size, "encode")
    program, (params, tokens) = program_of(size, "encode", jax.devices())
    seconds = seconds_of(lambda: program(params, tokens))
    rows, length = tokens.ids.shape
    name = f"encoding {rows} passages of {length} tokens"
    yield judge_time(name, planned, seconds, f"{rows / seconds:,.0f} passages/s")
    yield from judge_memory(planned, most_memory())


def run_search(size: Size) -> Iterator[Row]:
    """Time exact search of random vectors, in every precision of candidates, and compare it with FAISS if it is
    installed."""
    import numpy as np

    from bench.search import ours, peer

    dimension, k = 768, 100
    random = np.random.default_rng(0)
    passages = random.standard_normal((size.passages, dimension), dtype=np.float32)
    passages /= np.linalg.norm(passages, axis=1, keepdims=True)
    queries = random.standard_normal((size.queries, dimension), dtype=np.float32)
    sample = queries[:8].astype(np.float64)
    blocks = (passages[start : start + 100_000].astype(np.float64) for start in range(0, len(passages), 100_000))
    best = -np.sort(-np.concatenate([sample @ block.T for block in blocks], axis=1), axis=1)[:, :k]
    faiss_time = ""
    if importlib.util.find_spec("faiss"):
        index = peer(passages)
        faiss_time = f", FAISS {seconds_of(lambda: index.search(queries, k), 1.0) * 1e3:.1f} ms"
    for precision in ("float32", "bfloat16", "int8"):
        arguments = (f"--passages={size.passages}", f"--queries={size.queries}", f"--k={k}", f"--precision={precision}")
        planned = plan(size, "search", *arguments)
        search = ours(f"xla:{precision}", passages)
        error = float(np.abs(search(queries, k).scores[:8] - best).max() / np.abs(best).max())
        seconds = seconds_of(partial(search, queries, k), 1.0)
        said = f"at least {planned['search_seconds'] * 1e3:.1f} ms" if planned else "rates of this device are not known"
        right = "ok" if planned else f"scores ok, time {NO_PLAN}"
        verdict = right if error <= SCORE_ERROR else "not the scores of float64"
        if planned and verdict == "ok" and planned["search_seconds"] / seconds < LEAST_USE:
            verdict = f"less than {LEAST_USE:.0%} of the lower bound"
        yield Row(
            f"{size.queries} queries on {size.passages:,} x {dimension}, candidates in {precision}",
            said,
            f"{seconds * 1e3:.1f} ms{faiss_time}; scores differ from float64 by {error:.0e}",
            verdict,
        )


def why_no_peer(module: str, backend: str) -> str:
    """Return why a peer cannot be compared on this machine; "" if it can."""
    if not importlib.util.find_spec(module):
        return f"{module} is not installed (pip install -r requirements-bench.txt)"
    if backend not in ("cpu", "gpu"):
        return f"{module} does not run on a {backend} here"
    if backend == "gpu":
        import torch

        return "" if torch.cuda.is_available() else f"torch {torch.__version__} has no CUDA"
    return ""


def run_peers(size: Size) -> Iterator[Row]:
    """Compare MiniLM's training step with torch's, and its encoding with that of sentence-transformers, on the same
    texts."""
    import jax

    from bench.all import SCRIPTS

    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # all systems share the device's memory
    backend = jax.default_backend()
    small = bool(size.changes)
    for name, arguments in PEERS.items():
        if reason := why_no_peer(SCRIPTS[name].needs[0], backend):
            yield Row(f"{name} against its peers", "", reason, "skipped")
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "results.json"
            words = (SCRIPTS[name].short if small else arguments).format(folder=folder).split()
            device = "cuda" if backend == "gpu" else "cpu"
            command = [sys.executable, str(REPOSITORY / "bench" / f"{name}.py"), *words, f"--device={device}"]
            done = subprocess.run([*command, f"--json={out}"], capture_output=True, text=True)
            if done.returncode:
                yield Row(
                    f"{name} against its peers", "", (done.stderr.strip().splitlines() or [""])[-1][:300], "failed"
                )
                continue
            cases = json.loads(out.read_text())["cases"]
        for case in cases:
            ((system, ours),) = case["ours"].items()
            for peer, theirs in case["peers"].items():
                ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
                verdict = "ok" if ratio >= 1 or small else f"slower than {peer}"
                measured = f"{statistics.median(ours) * 1e3:.1f} ms; {peer} takes {ratio:.2f} times as long"
                yield Row(f"{case['case']}: {system} against {peer}", f"not slower than {peer}", measured, verdict)


def run_processes(size: Size) -> Iterator[Row]:
    """Compare two processes with one device each with one process that has both."""
    import jax

    folder = size.changes.get("encoder.checkpoint")
    options = ["--small", f"--out={Path(folder).parent}"] if folder else []
    name, said = "losses of three steps, two processes against one", f"equal to {LOSS_ERROR:.0e}"
    backend, count = jax.default_backend(), len(jax.devices())
    if count < 2 or backend == "tpu":
        reason = "one device" if count < 2 else "the processes of a TPU are its hosts'"
        yield Row(name, said, reason, "skipped")
        return
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def losses(number: int, processes: int) -> subprocess.Popen[str]:
        variables = dict(os.environ)
        visible = "0,1" if processes == 1 else str(number)
        if backend == "cpu":
            variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={2 // processes}"
        else:
            variables["ROCR_VISIBLE_DEVICES" if backend == "rocm" else "CUDA_VISIBLE_DEVICES"] = visible
        job = [f"127.0.0.1:{port}", str(processes), str(number)] if processes > 1 else []
        command = [sys.executable, __file__, *options, "--losses", *job]
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    results: list[list[float]] = []
    for processes in (1, 2):
        started = [losses(number, processes) for number in range(processes)]
        outputs = [process.communicate() for process in started]
        for process, (stdout, stderr) in zip(started, outputs, strict=True):
            if process.returncode:
                yield Row(name, said, stderr.strip()[-300:], "a process failed")
                return
            results.append(json.loads(stdout.splitlines()[-1]))
    error = max(abs(a - b) / abs(a) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    verdict = "ok" if error <= LOSS_ERROR else "they differ"
    yield Row(name, said, f"{', '.join(f'{loss:.4f}' for loss in results[0])}; they differ by {error:.0e}", verdict)


def print_losses(size: Size, job: Sequence[str]) -> None:
    """Print the losses of three steps on two devices, in this process or in two."""
    import jax

    from jaxret.parallel.processes import initialize_distributed

    if job:
        initialize_distributed(job[0], int(job[1]), int(job[2]))
    program, (state, batch) = program_of(size, "train", jax.devices()[:2])
    losses = []
    for _ in range(3):
        state, metrics = program(state, batch)
        losses.append(float(metrics["loss"]))
    print(json.dumps(losses), flush=True)


PARTS: dict[str, Callable[[Size], Iterator[Row]]] = {
    "doctor": run_doctor,
    "attention": run_attention,
    "train": run_train,
    "encode": run_encode,
    "search": run_search,
    "peers": run_peers,
    "processes": run_processes,
}


def run_part(name: str, out: Path, small: bool) -> list[Row]:
    """Run a part in a process; return its rows, and one more if it failed or took too long."""
    command = [sys.executable, __file__, f"--part={name}", f"--out={out}", *(["--small"] if small else [])]
    limit = LIMITS[name] * (4 if small else 1)  # a CPU compiles slowly, and other jobs may use it
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit)
            failure = f"ended with status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            failure = f"not done after {limit} s"
    lines = [line for line in stdout.splitlines() if line.startswith(RESULT)]
    rows = [Row(**json.loads(line.removeprefix(RESULT))) for line in lines]
    if failure:
        last = (stderr.strip().splitlines() or [""])[-1]
        rows.append(Row(name, "", last[:300], failure))
    return rows


def environment() -> dict[str, Any]:
    """Return devices and versions, read in a new process, because a device can have only one user at a time."""
    script = """if True:
        import jax, json, platform
        from importlib import metadata
        names = ("jax", "jaxlib", "flax", "optax", "numpy", "faiss-cpu", "faiss-gpu")
        installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
        devices = jax.devices()
        print(json.dumps({
            "devices": f"{len(devices)} x {devices[0].device_kind}", "backend": jax.default_backend(),
            "python": platform.python_version(), "system": platform.platform(),
            "versions": {name: installed[name] for name in names if name in installed},
        }))
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: JAX finds no device: {done.stderr.strip().splitlines()[-1]}")
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def to_markdown(here: dict[str, Any], rows: Sequence[Row], seconds: float, small: bool) -> str:
    """Return the report."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    lines = [
        f"# {here['devices']}{' (a rehearsal, with small shapes)' if small else ''}",
        "",
        f"`python bench/accelerator.py`, {time.strftime('%F')}, {seconds:.0f} s. Python {here['python']}, {versions}.",
        "",
        "| what | plan | measured | verdict |",
        "|:--|:--|:--|:--|",
        *(f"| {cell(row.what)} | {cell(row.planned)} | {cell(row.measured)} | {cell(row.verdict)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerator"))
    parser.add_argument("--small", action="store_true", help="small shapes: a rehearsal")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them")
    parser.add_argument("--part", choices=PARTS, help="run one, here, and print its rows as JSON")
    parser.add_argument("--losses", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = small_size(arguments.out) if arguments.small else LARGE
    if arguments.losses is not None:
        print_losses(size, arguments.losses)
        return
    if arguments.part:
        for row in PARTS[arguments.part](size):
            emit(row)
        return
    if unknown := set(arguments.parts.split(",")) - set(PARTS):
        parser.error(f"--parts={','.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if arguments.small:
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # only for CPUs
    begin, here = time.monotonic(), environment()
    small = arguments.small or here["backend"] == "cpu"
    print(f"{here['devices']}{': a rehearsal, with small shapes' if small else ''}", flush=True)
    rows: list[Row] = []
    for name in arguments.parts.split(","):
        for row in run_part(name, arguments.out, small):
            rows.append(row)
            print(f"{row.what}: {row.planned or '-'} | {row.measured} | {row.verdict}", flush=True)
    seconds = time.monotonic() - begin
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "report.md").write_text(to_markdown(here, rows, seconds, small))
    values = {**here, "seconds": round(seconds, 1), "small": small, "rows": [asdict(row) for row in rows]}
    (arguments.out / "values.json").write_text(json.dumps(values, indent=2) + "\n")
    print(f"written: {arguments.out / 'report.md'}")
    if any(row.verdict not in ("ok", "skipped") and not row.verdict.endswith(NO_PLAN) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
