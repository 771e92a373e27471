"""A restored state equals the saved one on any mesh, or restoring raises an error."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from jaxret.parallel.mesh import make_mesh, shardings
from jaxret.storage import checkpoint as storage_checkpoint
from jaxret.storage.checkpoint import CheckpointError, Checkpoints, leaf_digests, tree_digest
from tests.pipeline import environment, resources

RANDOM = np.random.default_rng(0)
HOST = {
    "encoder": {
        "layers": {"kernel": RANDOM.standard_normal((3, 64, 32), np.float32)},
        "embeddings": {"word": {"embedding": RANDOM.standard_normal((99, 32), np.float32)}},
        "norm": {"bias": RANDOM.standard_normal(32, np.float32)},
    }
}
PROGRESS = {"step": np.int32(7), "healthy": np.array(True), "opt_state": {"mu": RANDOM.standard_normal(5, np.float32)}}


def placed(tree: Any, fsdp: int = 1, devices: int = 8) -> Any:
    tree = jax.tree.map(jnp.asarray, tree)
    return jax.device_put(tree, shardings(make_mesh(fsdp, jax.devices()[:devices]), tree))


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def same(one: Any, two: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def saved(folder: Path, steps: int = 1) -> Path:
    with Checkpoints(folder) as checkpoints:
        for step in range(1, steps + 1):
            checkpoints.save(step, placed(HOST, fsdp=2), placed(PROGRESS))
    return folder


def data_files(folder: Path) -> list[Path]:
    return sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_round_trip_onto_another_mesh(tmp_path: Path) -> None:
    saved(tmp_path)
    for fsdp, devices in ((4, 8), (1, 1)):
        want = abstract(placed(HOST, fsdp, devices))
        with Checkpoints(tmp_path) as checkpoints:
            params, progress = checkpoints.restore(1, want, abstract(placed(PROGRESS, devices=devices)))
            assert checkpoints.params_digest(1) == tree_digest(params), (
                "the digest is the same without the progress, and on any mesh"
            )
        assert same(params, HOST)
        assert same(progress, PROGRESS)
        assert jax.tree.map(lambda a, b: a.sharding == b.sharding, params, want) == jax.tree.map(lambda _: True, want)
    assert not same(params, jax.tree.map(lambda x: x + np.float32(1e-6), HOST))  # control: small differences count


def test_the_optimizer_may_stay_on_disk(tmp_path: Path) -> None:
    with Checkpoints(saved(tmp_path)) as checkpoints:
        params, progress = checkpoints.restore(1, abstract(placed(HOST)))
    assert same(params, HOST)
    assert progress is None


def test_the_last_is_kept(tmp_path: Path) -> None:
    saved(tmp_path, steps=3)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.last() == checkpoints.best() == 3
    assert [p.name for p in tmp_path.iterdir()] == ["3"]


@pytest.mark.table
@pytest.mark.parametrize(("less_is_better", "best"), [((), 4), (("nll", "RR@10"), 1)])
def test_the_best_and_the_last_are_kept(less_is_better: tuple[str, ...], best: int, tmp_path: Path) -> None:
    values = [0.1, 0.5, 0.3, 0.5, 0.2]  # the best value occurs twice: the newer one is kept
    with Checkpoints(tmp_path, "RR@10", less_is_better) as checkpoints:
        assert checkpoints.last() is checkpoints.best() is None
        for step, value in enumerate(values, 1):
            checkpoints.save(step, placed(HOST), placed(PROGRESS), {"RR@10": value, "nll": 1.0})
            checkpoints.wait()
            assert checkpoints.last() == step
    with Checkpoints(tmp_path, "RR@10", less_is_better) as checkpoints:  # as another process opens the folder
        assert (checkpoints.best(), checkpoints.last()) == (best, 5)
        params, _ = checkpoints.restore(best, abstract(placed(HOST)))
        assert same(params, HOST)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({str(best), "5"})


def test_values_of_two_metrics_are_never_compared(tmp_path: Path) -> None:
    """When another metric begins to select, all earlier checkpoints are out, however good they are; also if an old file
    does not record the metric. A process that opens the folder later gets the same result."""
    measured = [  # nll, average rank, the selecting metric, the best step then
        (0.2, 9.0, None, 1),
        (0.3, 8.0, "nll", 1),
        (0.1, 7.0, "nll", 3),
        (0.9, 5.0, "average_rank", 4),
        (0.05, 6.0, "average_rank", 4),
        (0.8, 4.0, "average_rank", 6),
    ]
    less = ("nll", "average_rank")
    for step, (nll, rank, criterion, best) in enumerate(measured, 1):
        with Checkpoints(tmp_path, "nll", less) as checkpoints:
            metrics = {"nll": nll, "average_rank": rank}
            checkpoints.save(step, placed(HOST), placed(PROGRESS), metrics, criterion)
            checkpoints.wait()
            assert checkpoints.best() == best
        with Checkpoints(tmp_path, "nll", less, writing=False) as checkpoints:
            assert checkpoints.best() == best
    assert sorted(p.name for p in tmp_path.iterdir()) == ["6"]


def test_values_measured_on_different_passages_are_never_compared(tmp_path: Path) -> None:
    for step, (nll, measured_on, best) in enumerate([(0.1, "few", 1), (0.7, "many", 2), (0.6, "many", 3)], 1):
        with Checkpoints(tmp_path, "nll", ("nll",)) as checkpoints:
            checkpoints.save(step, placed(HOST), placed(PROGRESS), {"nll": nll}, "nll", measured_on)
            checkpoints.wait()
            assert checkpoints.best() == best
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3"]


def test_a_flipped_byte_is_never_restored_silently(tmp_path: Path) -> None:
    """Each of eight bytes of the largest file is flipped: each flip gives an error, where Orbax alone would return
    other values."""
    saved(tmp_path)
    path = data_files(tmp_path / "1" / "params")[-1]
    whole = path.read_bytes()
    assert len(whole) > 1000
    messages = []
    for place in np.linspace(len(whole) * 0.05, len(whole) * 0.95, 8).astype(int).tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with Checkpoints(tmp_path) as checkpoints:
            try:
                params, _ = checkpoints.restore(1, abstract(placed(HOST)))
            except CheckpointError as error:
                messages.append(str(error))
            else:
                assert same(params, HOST)  # no array depends on the flipped byte
    assert len(messages) >= 4
    for message in messages:
        assert str(tmp_path / "1") in message
        assert "is damaged" in message or "cannot be read" in message
    path.write_bytes(whole)
    with Checkpoints(tmp_path) as checkpoints:
        assert same(checkpoints.restore(1, abstract(placed(HOST)))[0], HOST)


def test_a_missing_data_file(tmp_path: Path) -> None:
    saved(tmp_path)
    data_files(tmp_path / "1" / "params")[-1].unlink()
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=r"cannot be read|is damaged"):
        checkpoints.restore(1, abstract(placed(HOST)))


def test_a_missing_step(tmp_path: Path) -> None:
    with Checkpoints(saved(tmp_path, 2)) as checkpoints, pytest.raises(CheckpointError, match="step 1; it has: 2"):
        checkpoints.restore(1, abstract(placed(HOST)))
    with Checkpoints(tmp_path / "new") as checkpoints, pytest.raises(CheckpointError, match="step 1; it has: none"):
        checkpoints.restore(1, abstract(placed(HOST)))


def test_every_leaf_that_does_not_fit_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    want = abstract(placed(HOST))
    encoder = want["encoder"]
    bias = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=encoder["norm"]["bias"].sharding)
    wrong = [
        ({**encoder, "norm": {"bias": bias}}, r"params/encoder/norm/bias is \(32,\) there and \(16,\) in this model"),
        ({**encoder, "extra": {"bias": bias}}, r"params/encoder/extra/bias is absent there and \(16,\) in this model"),
        ({k: v for k, v in encoder.items() if k != "norm"}, r"encoder/norm/bias is \(32,\) there and absent in this"),
    ]
    with Checkpoints(tmp_path) as checkpoints:
        for tree, message in wrong:
            with pytest.raises(CheckpointError, match=message):
                checkpoints.restore(1, {"encoder": tree})


def test_digests_do_not_depend_on_the_mesh() -> None:
    everything = {
        **HOST,
        "half": HOST["encoder"]["norm"]["bias"].astype(jnp.bfloat16),  # type: ignore[index]
        "flags": np.array([True, False]),
    }
    on_one = leaf_digests(placed(everything, devices=1))
    assert on_one == leaf_digests(placed(everything)) == leaf_digests(placed(everything, fsdp=4))
    assert tree_digest(placed(HOST, devices=1)) == tree_digest(placed(HOST, fsdp=2))
    assert set(on_one) == {"encoder/layers/kernel", "encoder/embeddings/word/embedding", "encoder/norm/bias"} | {
        "half",
        "flags",
    }


def test_arrays_of_one_cpu_are_digested_without_a_program_or_a_copy() -> None:
    """XLA held two arrays of a leaf's size for the digest, and each start traced and loaded its program."""
    leaf = jax.device_put(np.arange(3 << 20, dtype=np.float32), jax.devices()[0])
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: events.append(event))
    storage_checkpoint._leaf_digests.clear_cache()  # type: ignore[attr-defined]
    tracemalloc.start()
    digests = leaf_digests({"x": leaf})
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not [event for event in events if "compile" in event]
    assert largest < leaf.nbytes // 10
    assert digests == leaf_digests({"x": jax.device_put(leaf, shardings(make_mesh(), {"x": leaf})["x"])})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_a_digest_depends_on_every_bit_and_position(dtype: str) -> None:
    size = {"float32": 4, "bfloat16": 2, "int32": 4, "bool": 1}[dtype]
    leaf = RANDOM.integers(0, 2 if dtype == "bool" else 256, 16 * size, np.uint8)
    one = jax.jit(lambda tree: tree)({"x": jnp.asarray(leaf.view(jnp.dtype(dtype)))})
    seen = {tree_digest(one)}
    changes = 1
    for word in range(16):
        for bit in range(1 if dtype == "bool" else 8 * size):
            other = leaf.copy()
            other[word * size + bit // 8] ^= 1 << bit % 8
            if word % 5 == 0:
                seen.add(tree_digest({"x": jnp.asarray(other.view(jnp.dtype(dtype)))}))
                changes += 1
    assert len(seen) == changes
    reverse = leaf.view(jnp.dtype(dtype))[::-1]
    assert tree_digest({"x": jnp.asarray(reverse)}) not in seen
    assert tree_digest({"y": one["x"]}) not in seen


def test_digests_on_a_mesh_depend_on_every_shard() -> None:
    sharding = NamedSharding(make_mesh(), P("data"))
    zeros = np.zeros(64, np.float32)
    changed = zeros.copy()
    actual = {tree_digest({"x": jax.device_put(zeros, sharding)})}
    for i in range(0, 64, 7):
        changed[:] = 0
        changed[i] = 1
        actual.add(tree_digest({"x": jax.device_put(changed, sharding)}))
    assert len(actual) == 11


@contextmanager
def a_full_disk(limit: int = 2000) -> Iterator[None]:
    """Limit the size of files to `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_and_step(opened: Checkpoints) -> None:
    """Save as in training: one save, then steps without a save."""
    opened.save(1, placed(HOST), placed(PROGRESS))
    end = time.monotonic() + 60
    while time.monotonic() < end:
        opened.poll(all_processes=True)
        time.sleep(0.01)


def test_a_failed_save_is_raised_before_the_next_save(tmp_path: Path) -> None:
    message = rf"{tmp_path}/1 could not be saved: .+"
    with Checkpoints(tmp_path) as opened, a_full_disk(), pytest.raises(CheckpointError, match=message):
        save_and_step(opened)
    with Checkpoints(tmp_path) as opened:
        assert opened.last() is None
        assert opened.half_written
        opened.save(1, placed(HOST), placed(PROGRESS))
    with Checkpoints(tmp_path) as opened:
        assert (opened.last(), opened.half_written) == (1, [])


def with_metrics(folder: Path, values: list[float]) -> Path:
    with Checkpoints(folder, "RR@10") as checkpoints:
        for step, value in enumerate(values, 1):
            checkpoints.save(step, placed(HOST), placed(PROGRESS), {"RR@10": value, "nll": 1.0})
    return folder


def test_superseded_checkpoints_are_deleted(tmp_path: Path) -> None:
    """A process was killed after a save, before it deleted the superseded checkpoints."""
    with_metrics(tmp_path / "run", [0.5, 0.1])
    shutil.copytree(with_metrics(tmp_path / "other", [0.1, 0.2, 0.3]) / "3", tmp_path / "run" / "3")
    for name in ("4.orbax-checkpoint-tmp", ".unfinished"):
        (tmp_path / "run" / name).mkdir()
    with Checkpoints(tmp_path / "run", "RR@10", writing=False) as checkpoints:
        assert checkpoints.half_written == ["4.orbax-checkpoint-tmp"]
    with Checkpoints(tmp_path / "run", "RR@10") as checkpoints:
        assert checkpoints.prune() == [2]
        assert (checkpoints.best(), checkpoints.last()) == (1, 3)
        assert checkpoints.prune() == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1", "3"]


def test_checkpoints_in_use_are_kept(tmp_path: Path) -> None:
    in_use = {1}
    with Checkpoints(tmp_path, "RR@10", in_use=lambda: in_use) as checkpoints:
        for step, value in enumerate([0.1, 0.2, 0.5, 0.3], 1):
            checkpoints.save(step, placed(HOST), placed(PROGRESS), {"RR@10": value})
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best()) == ([1, 3, 4], 3)
        in_use.clear()  # the vectors were deleted
        assert checkpoints.prune() == [1]


METADATA, METRICS = "1/_CHECKPOINT_METADATA", "1/metrics/metrics"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (METRICS, lambda text: text.replace("0.5", "0.4")),  # another checkpoint would be the best
        (METRICS, lambda text: text.replace("RR@10", "RR@11")),
        (METRICS, lambda text: "[]"),
        (METRICS, lambda text: "{"),
        (METRICS, lambda text: ""),
        (METRICS, lambda text: None),
        (METADATA, lambda text: "{"),
        (METADATA, lambda text: "[]"),
        (METADATA, lambda text: "{}"),
        (METADATA, lambda text: text.replace('"seal": "', '"seal": "0')),
        (METADATA, lambda text: text.replace('"digests": {', '"digests": [], "x": {')),
        (METADATA, lambda text: None),
    ],
)
def test_a_changed_metric_is_detected(name: str, change: Any, tmp_path: Path) -> None:
    with_metrics(tmp_path, [0.5, 0.45])
    before = (tmp_path / name).read_text()
    after = change(before)
    assert after != before
    (tmp_path / name).unlink()
    if after is not None:
        (tmp_path / name).write_text(after)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/1 is damaged: .* delete the folder"):
        Checkpoints(tmp_path, "RR@10")


def test_a_renamed_checkpoint_is_an_error(tmp_path: Path) -> None:
    (with_metrics(tmp_path, [0.5]) / "1").rename(tmp_path / "7")
    with pytest.raises(CheckpointError, match="/7 is damaged"):
        Checkpoints(tmp_path, "RR@10")


def test_every_flipped_bit_of_the_metrics_is_detected(tmp_path: Path) -> None:
    path = with_metrics(tmp_path, [0.5, 0.45]) / METRICS
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        path.write_bytes(whole[: place // 8] + bytes([whole[place // 8] ^ 1 << place % 8]) + whole[place // 8 + 1 :])
        with pytest.raises(CheckpointError, match="/1 is damaged"):
            Checkpoints(tmp_path, "RR@10")


@pytest.mark.parametrize("file", ["_METADATA", "_sharding", "manifest.ocdbt", "array_metadatas/process_0"])
def test_a_damaged_list_of_arrays_names_the_folder(file: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "1" / "params" / file).write_text("{")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"/1 (is damaged|cannot be read)"):
            checkpoints.check(1)
        if file == "manifest.ocdbt":  # a reader of arrays has the contents of the other files from the model
            with pytest.raises(CheckpointError, match=r"/1 (is damaged|cannot be read)"):
                checkpoints.restore(1, abstract(placed(HOST)))


@pytest.mark.exhaustive
def test_a_kill_while_a_superseded_checkpoint_is_deleted(tmp_path: Path) -> None:
    """It is killed at each file: the rest is not a checkpoint, and the next writer removes it."""
    program = (
        "import os, sys; from jaxret.storage.checkpoint import Checkpoints; unlink, n = os.unlink, 0\n"
        "def killed(*a, **k):\n    global n; n += 1\n    unlink(*a, **k); n == int(sys.argv[2]) and os._exit(9)\n"
        "os.unlink = killed; Checkpoints(sys.argv[1]).prune()\n"
    )
    saved(tmp_path / "whole", steps=2)
    shutil.copytree(saved(tmp_path / "first") / "1", tmp_path / "whole" / "1")
    for place in (1, 2, 5):
        folder = tmp_path / str(place)
        shutil.copytree(tmp_path / "whole", folder)
        command = [sys.executable, "-c", program, str(folder), str(place)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 9, done.stderr
        with Checkpoints(folder) as checkpoints:
            assert checkpoints.last() == 2
        assert [p.name for p in folder.iterdir()] == ["2"]


NAMES = ["run[1]", "seed=[1,2]", "a*b", "a?b", "[!a]", "two\nlines", "{0}", "x" * 255, "ünï'\"%20 -"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    """A sibling folder has a name that this name would match as a pattern."""
    sibling = name.translate({ord("*"): "x", ord("?"): "x"}).replace("[1]", "1")
    for folder in dict.fromkeys((sibling, name)):
        saved(tmp_path / folder / "checkpoints", steps=2)
    with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2]
        params, progress = checkpoints.restore(2, abstract(placed(HOST)), abstract(placed(PROGRESS)))
        assert same(params, HOST)
        assert same(progress, PROGRESS)
        checkpoints.check(2)
    moved = (tmp_path / name).rename(tmp_path / "moved")
    with Checkpoints(moved / "checkpoints") as checkpoints:
        assert same(checkpoints.restore(2, abstract(placed(HOST)))[0], HOST)
    assert [path.name for path in (moved / "checkpoints").iterdir()] == ["2"]


def test_a_message_has_the_path_that_the_user_gave(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run[1]")
    (folder / "1" / "params" / "manifest.ocdbt").write_text("{")
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.check(1)
    assert str(folder / "1") in str(error.value)
    assert "/proc" not in str(error.value)


@pytest.mark.parametrize("file", ["params/manifest.ocdbt", "progress/d", "_CHECKPOINT_METADATA", "metrics/metrics"])
def test_a_save_is_read_back_before_the_one_before_is_deleted(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax reports a completed save, but a file is missing."""
    with_metrics(tmp_path, [0.5])
    wait = ocp.training.Checkpointer.wait

    def losing(self: Any) -> None:
        wait(self)
        for path in (tmp_path / ".unfinished").glob(f"*/{file}"):
            path.rename(tmp_path.parent / f"lost-{time.monotonic_ns()}")

    monkeypatch.setattr(ocp.training.Checkpointer, "wait", losing)
    checkpoints = Checkpoints(tmp_path, "RR@10")
    checkpoints.save(2, placed(HOST), placed(PROGRESS), {"RR@10": 0.9, "nll": 1.0})
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/2 could not be saved"):
        checkpoints.wait()
    monkeypatch.undo()
    with checkpoints:
        assert checkpoints.steps() == [1]
        assert same(checkpoints.restore(1, abstract(placed(HOST)))[0], HOST)
    with Checkpoints(tmp_path, "RR@10") as checkpoints:
        assert checkpoints.half_written == ["2"]
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["1"]


def test_a_checkpoint_is_flushed_before_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of Orbax and TensorStore, and every folder, is flushed. Control: some were not flushed by them."""
    fsync, rename, flushed = os.fsync, os.rename, set()
    events: list[tuple[str, set[int], set[int]]] = []

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def renamed(one: Any, other: Any, **more: Any) -> None:
        if Path(other).name.isdigit() and Path(other).parent == tmp_path:
            inodes = {path.stat().st_ino for path in (Path(one), *Path(one).rglob("*"))}
            events.append((Path(other).name, inodes, set(flushed)))
        rename(one, other, **more)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    saved(tmp_path, steps=2)
    assert [name for name, _, _ in events] == ["1", "2"]
    for _, inodes, synced in events:
        assert len(inodes) > 20
        assert inodes <= synced
    assert tmp_path.stat().st_ino in flushed


LEAKED = 100_000  # bytes that a save or a restore may leave: half of it is TensorStore's (docs/upstream.md)


def require_no_growth(before: tuple[int, int, int], times: int, what: str) -> None:
    """Fail if this process has more open files, threads or memory than `before`."""
    files, threads, memory = (now - then for now, then in zip(resources(), before, strict=True))
    assert files <= 2, f"{files} open files more after {times} {what}"
    assert threads <= 2, f"{threads} threads more after {times} {what}"
    assert memory <= 30 * 2**20 + LEAKED * times, f"{memory:,} bytes more after {times} {what}"


def saves_and_restores(folder: Path, count: int) -> None:
    """Save `count` times in one process, then open and restore `count` times."""
    params, progress = placed(HOST, devices=1), placed(PROGRESS, devices=1)
    warm, before = count // 2, (0, 0, 0)  # pools of threads grow at the beginning, more slowly on a busy machine
    with Checkpoints(folder) as checkpoints:
        for step in range(count):
            if step == warm:
                before = resources()
            checkpoints.save(step, params, progress)
            checkpoints.wait()
        require_no_growth(before, count - warm, "saves")
    for number in range(count):
        if number == warm:
            before = resources()
        with Checkpoints(folder, writing=False) as checkpoints:
            checkpoints.restore(count - 1, abstract(params))
    require_no_growth(before, count - warm, "restores")


@pytest.mark.daily("run[1]")
@pytest.mark.slow
@pytest.mark.faults(31)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", [pytest.param("run", marks=pytest.mark.exhaustive), "run[1]"])
def test_saving_often_leaves_no_descriptor_thread_or_memory(name: str, tmp_path: Path) -> None:
    saves_and_restores(tmp_path / name, 40)


@pytest.mark.exhaustive
@pytest.mark.faults(31)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_saving_500_times_leaves_no_descriptor_thread_or_memory(tmp_path: Path) -> None:
    saves_and_restores(tmp_path, 500)


def test_a_damaged_newest_checkpoint_is_not_among_those_of_a_writer(tmp_path: Path) -> None:
    """Its metadata is empty, as after a power cut. A reader refuses it; training resumes from the checkpoint before."""
    with_metrics(tmp_path, [0.5, 0.1])
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text("")
    with pytest.raises(CheckpointError, match="/2 is damaged"):
        Checkpoints(tmp_path, "RR@10", writing=False)
    with Checkpoints(tmp_path, "RR@10") as checkpoints:
        assert (checkpoints.last(), checkpoints.best(), [*checkpoints.damage]) == (1, 1, [2])
        assert checkpoints.set_aside(2) == tmp_path / "damaged-2"
        checkpoints.save(2, placed(HOST), placed(PROGRESS), {"RR@10": 0.1, "nll": 1.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "damaged-2"]
    with Checkpoints(tmp_path, "RR@10", writing=False) as checkpoints:
        assert (checkpoints.last(), checkpoints.best()) == (2, 1)


@pytest.mark.slow
def test_a_damaged_checkpoint_without_a_whole_one_before_is_an_error(tmp_path: Path) -> None:
    (saved(tmp_path) / "1" / "_CHECKPOINT_METADATA").write_text("")
    with pytest.raises(CheckpointError, match="/1 is damaged"):
        Checkpoints(tmp_path)
