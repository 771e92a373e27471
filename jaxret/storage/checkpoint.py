"""Save and restore checkpoints: on disks with Orbax, in buckets with files of each process (`array_files`).

A checkpoint contains `params`, `progress` (optimizer state, step) and, in its metadata, a digest of every leaf. Orbax
does not detect a flipped byte in a data file, so restored arrays are verified by these digests. A seal over digests,
step and metrics detects changes of the numbers that choose the best checkpoint. The best checkpoint (by a validation
metric), the last one and those in use are preserved.

A save is written to `<directory>/.unfinished/<step>`. After it was flushed to disk and a sample was read back, it is
renamed to `<directory>/<step>`, and older checkpoints are deleted. In a bucket, each process uploads its files in the
background, and process 0 then adds the files of all processes to the run at once.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxret.parallel.events import emit
from jaxret.parallel.mesh import path_name
from jaxret.parallel.processes import agreement, any_process, gather_texts, wait_for_all
from jaxret.storage.array_files import ArrayFiles, ArrayWriter, has_array_files
from jaxret.storage.atomic import read_json, sha256_json, sync, sync_tree
from jaxret.storage.buckets.bucket_folder import StoredFile
from jaxret.storage.buckets.working_copy import WorkingCopy, copy_of, publish
from jaxret.storage.orbax_files import OrbaxAlias, OrbaxFiles, OrbaxWriter
from jaxret.types import Tree

CRITERION = "criterion"  # key in a checkpoint's metrics: name of the metric that ranks it
MEASURED_ON = "measured_on"  # key in a checkpoint's metrics: digest of the data on which this metric was measured
REMEDY = "delete the folder and continue from another checkpoint"
_UNFINISHED = ".unfinished"  # folder of the saves that are not checkpoints yet
_DAMAGED = "damaged-"  # prefix of a checkpoint that was set aside
_LOOKS = 5  # attempts to read the same list of checkpoints from a bucket in all processes
_SAMPLE_BYTES = 64 << 20  # size of the largest leaf that is read back
_DIGEST_WORDS = 1 << 15  # words that NumPy digests at a time: they fit into a core's cache, and malloc keeps the memory


class CheckpointError(ValueError):
    """A checkpoint is missing, does not fit the model, or is damaged."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint cannot be read, or differs from what was saved."""


@jax.jit  # traced once for all leaves of a shape
def _leaf_digest(leaf: jax.Array) -> jax.Array:
    """Return a digest of a leaf, uint32 [2]. It consists of integer sums, so it is the same on any mesh.

    The first sum weights each word by an odd number that depends on its index, so a change of one word always changes
    it. The second sum mixes the bits of each word first, so that several changes do not cancel.
    """
    if leaf.dtype.itemsize == 4:
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    elif leaf.dtype.itemsize == 2:
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32)
    else:
        words = leaf.astype(jnp.uint32)  # bool and bytes
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    weight = (2 * index + 1) * jnp.uint32(0x9E3779B1)
    hashed_words = (words ^ (words >> 15)) * jnp.uint32(0x85EBCA6B)
    hashed_words = (hashed_words ^ (hashed_words >> 13) ^ index) * jnp.uint32(0xC2B2AE35)
    hashed_words = hashed_words ^ (hashed_words >> 16)
    return jnp.stack([jnp.sum(words * weight, dtype=jnp.uint32), jnp.sum(hashed_words, dtype=jnp.uint32)])


@jax.jit
def _leaf_digests(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _leaf_digest(leaf) for name, leaf in leaves.items()}


def _is_on_host(leaf: Any) -> bool:
    """Return whether a whole leaf is in the host's memory, so that NumPy reads it without a copy."""
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable and [device.platform for device in leaf.devices()] == ["cpu"]
    return True


def _host_digest(leaf: np.ndarray) -> np.ndarray:
    """Return `_leaf_digest` of an array in the host's memory.

    It is computed without XLA, which on CPUs needs two more arrays of the same size, and time to trace and load a
    program.
    """
    flat = np.ascontiguousarray(leaf).reshape(-1)
    words = flat.view({4: np.uint32, 2: np.uint16}[flat.itemsize]) if flat.itemsize in (2, 4) else flat
    digest, first = np.zeros(2, np.uint32), np.arange(_DIGEST_WORDS, dtype=np.uint32)
    first_weights = (2 * first + 1) * np.uint32(0x9E3779B1)
    for start in range(0, len(words), _DIGEST_WORDS):
        block = words[start : start + _DIGEST_WORDS].astype(np.uint32, copy=False)
        weights = first_weights[: len(block)] + np.uint32(2 * start * 0x9E3779B1 & 0xFFFFFFFF)
        hashed_words = block >> 15
        hashed_words ^= block
        hashed_words *= np.uint32(0x85EBCA6B)
        hashed_words ^= hashed_words >> 13
        hashed_words ^= first[: len(block)] + np.uint32(start & 0xFFFFFFFF)
        hashed_words *= np.uint32(0xC2B2AE35)
        hashed_words ^= hashed_words >> 16
        digest += np.array([np.einsum("i,i->", block, weights), np.sum(hashed_words, dtype=np.uint32)])
    return digest


def leaf_digests(tree: Tree) -> dict[str, str]:
    """Return a digest of 16 hex digits per leaf path, the same on one device and on many."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    device_leaves = {name: leaf for name, leaf in leaves.items() if not _is_on_host(leaf)}
    on_devices = _leaf_digests(device_leaves) if device_leaves else {}  # an empty program would also be compiled
    return {
        name: np.asarray(on_devices[name] if name in on_devices else _host_digest(np.asarray(leaf))).tobytes().hex()
        for name, leaf in leaves.items()
    }


def _seal(step: int, metrics: Mapping[str, Any] | None, leaves: Mapping[str, str]) -> str:
    return sha256_json({"step": step, "metrics": metrics, "digests": leaves})


def tree_digest(tree: Tree) -> str:
    """Return a digest of 16 hex digits of a tree of arrays; shards and results identify a checkpoint by it."""
    return _digest_of_leaves(leaf_digests(tree))


def _digest_of_leaves(leaves: Mapping[str, str]) -> str:
    return sha256_json(leaves)[:16]


class Checkpoints:
    """The checkpoints of one run, in `<workdir>/checkpoints/<step>/`.

    Checkpoints are ranked by the criterion of the newest one; checkpoints with another criterion, or with values that
    were measured on other data, are not compared. Without a metric only the last checkpoint is preserved, and it is
    also the best.

    Args:
        directory: folder of the checkpoints.
        best_metric: validation metric that ranks checkpoints saved without a `criterion`.
        less_is_better: metrics for which a lower value is better.
        writing: whether to delete what an interrupted save left. It must be False while another process may be saving.
        in_use: function that returns the steps of other checkpoints that must not be deleted.

    Attributes:
        damage: step -> problem of each damaged checkpoint newer than the newest sound one; filled only with `writing`.
            They are no longer among the checkpoints; `set_aside` renames them.
        half_written: names of the unfinished saves and deletions that were in the folder.

    Raises:
        CheckpointError: a checkpoint is damaged, and it is not the newest, no earlier one is sound, or `writing` is
            False; the message names it.
    """

    def __init__(
        self,
        directory: str | Path,
        best_metric: str | None = None,
        less_is_better: Collection[str] = (),
        writing: bool = True,
        in_use: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._metric, self._less_is_better, self._in_use = best_metric, less_is_better, in_use
        self._copy = copy_of(self.directory)
        if self._copy and jax.process_count() > 1:
            if writing:
                self._refresh_together(self._copy)
            else:
                self._copy.refresh()
        try:
            self._alias = OrbaxAlias(self.directory)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self._saver: OrbaxWriter | ArrayWriter | None = None
        self._current_save: _Save | None = None  # the save that runs in the background
        self._save_files: dict[str, StoredFile] = {}  # files of that save, in the bucket
        leftovers = [*self.directory.glob("*.orbax-checkpoint-tmp*"), *self.directory.glob(f"{_UNFINISHED}/*")]
        self.half_written = sorted(path.name for path in leftovers)
        if writing and jax.process_index() == 0:
            for path in [*leftovers, self.directory / _UNFINISHED]:
                shutil.rmtree(path, ignore_errors=True)
        self._metrics: dict[int, dict[str, Any] | None] = {}  # step of each checkpoint -> its metrics
        self.damage: dict[int, DamagedCheckpointError] = {}
        for path in self.directory.glob("*"):
            if path.name.isdigit():
                try:
                    self._metrics[int(path.name)] = self._sealed_metrics(path)
                except FileNotFoundError:  # the training process has just deleted it
                    continue
                except DamagedCheckpointError as error:
                    self.damage[int(path.name)] = error
        if self.damage and not (writing and max(self._metrics, default=max(self.damage)) < min(self.damage)):
            raise self.damage[min(self.damage)]

    def _refresh_together(self, copy: WorkingCopy) -> None:
        """Fetch the checkpoints that process 0 has published, so that every process has the same ones."""
        wait_for_all()
        for _ in range(_LOOKS):
            copy.refresh()
            if len(set(gather_texts(copy.digest(self.directory)))) == 1:
                return
        raise CheckpointError(f"{self.directory}: another job writes checkpoints of this run; wait for it, or stop it")

    def _criterion(self, metrics: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name of the metric that ranks a checkpoint, and the digest of what it was measured on."""
        return str(metrics.get(CRITERION, self._metric)), str(metrics.get(MEASURED_ON, ""))

    def _rank(self, metrics: Mapping[str, Any]) -> float:
        criterion, _ = self._criterion(metrics)
        value = float(metrics[criterion])
        return -value if criterion in self._less_is_better else value

    def _sealed_metrics(self, folder: Path) -> dict[str, Any] | None:
        """Return the metrics of a checkpoint.

        Raises DamagedCheckpointError unless step, metrics and digests match the seal, FileNotFoundError if the folder
        does not exist.
        """
        try:
            metadata, metrics = read_json(folder / "_CHECKPOINT_METADATA")["custom_metadata"], None
            if (folder / "metrics").exists():
                metrics = read_json(folder / "metrics" / "metrics")
            sound = metadata["seal"] == _seal(int(folder.name), metrics, metadata["digests"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not folder.exists():
                raise FileNotFoundError(folder) from error
            raise DamagedCheckpointError(
                f"{folder} is damaged: its metadata cannot be read ({error!r}); {REMEDY}"
            ) from error
        if not sound:
            raise DamagedCheckpointError(
                f"{folder} is damaged: its metadata, or {folder}/metrics, is not what was saved; {REMEDY}"
            )
        return metrics

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that a run can continue from an earlier one; return its new path.

        With several processes, only the first renames it.
        """
        path = self.directory / f"{_DAMAGED}{step}"
        if jax.process_index() == 0:
            shutil.rmtree(path, ignore_errors=True)
            (self.directory / str(step)).rename(path)
            sync(self.directory)
        self._metrics.pop(step, None)
        return path

    def prune(self) -> list[int]:
        """Delete the checkpoints that are neither best, last nor in use, and return their steps. Only process 0 deletes
        them.

        They are first renamed to unfinished saves, which the next start removes. Otherwise a process that is killed
        during a deletion would leave a checkpoint that looks damaged.
        """
        old_steps = sorted(self._metrics.keys() - {self.best(), self.last()})
        if old_steps:
            in_use = self._in_use()
            old_steps = [step for step in old_steps if step not in in_use]
        for step in old_steps:
            if jax.process_index() == 0:
                folder = (self.directory / str(step)).rename(self.directory / f"{step}.orbax-checkpoint-tmp")
                shutil.rmtree(folder)
            del self._metrics[step]
        return old_steps

    def last(self) -> int | None:
        """Return the step of the newest checkpoint; None if the run has none."""
        return max(self._metrics, default=None)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending."""
        return sorted(self._metrics)

    def best(self) -> int | None:
        """Return the step of the best checkpoint (the newest of equal ones), or of the last one without metrics."""
        metrics_by_step = {step: metrics for step, metrics in self._metrics.items() if self._metric and metrics}
        if not metrics_by_step:
            return self.last()
        newest = self._criterion(metrics_by_step[max(metrics_by_step)])
        ranks = {step: self._rank(m) for step, m in metrics_by_step.items() if self._criterion(m) == newest}
        return max(ranks, key=lambda step: (ranks[step], step))

    def save(
        self,
        step: int,
        params: Tree,
        progress: Tree,
        metrics: Mapping[str, float] | None = None,
        criterion: str | None = None,
        measured_on: str = "",
    ) -> None:
        """Start an asynchronous save; the arrays are copied to the host before the method returns.

        Args:
            step: the training step.
            params: the parameters.
            progress: optimizer state and step.
            metrics: validation metrics, or None.
            criterion: metric that ranks this checkpoint; None: `best_metric`.
            measured_on: digest of the data on which this metric was measured; only checkpoints with the same digest
                are compared.

        Raises:
            CheckpointError: the previous save failed.
        """
        self.wait()
        items = {"params": params, "progress": progress}
        values: dict[str, Any] | None = {name: float(value) for name, value in metrics.items()} if metrics else None
        if values and criterion:
            values[CRITERION] = criterion
        if values and measured_on:
            values[MEASURED_ON] = measured_on
        leaves = leaf_digests(items)
        custom = {"digests": leaves, "seal": _seal(step, values, leaves)}
        names = () if self._copy else (name for tree in items for name in _sample(tree, items[tree]))
        sample = {name: leaves[name] for name in names}  # no sample in a bucket: each process reads its whole file back
        with self._report_errors(step):
            self._open_saver().save(step, items, values, custom)
        self._current_save = _Save(step, values, sample)

    def _open_saver(self) -> OrbaxWriter | ArrayWriter:
        if self._saver is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._copy:
                self._saver = ArrayWriter(self.directory / _UNFINISHED, self._upload)
            else:
                self._saver = OrbaxWriter(self._alias.path / _UNFINISHED)
        return self._saver

    def _upload(self, step: int, files: Mapping[str, Path]) -> None:
        """Upload this process's files of a save to the bucket."""
        assert self._copy
        folder = (self.directory / str(step)).relative_to(self._copy.path).as_posix()
        self._save_files = self._copy.folder.upload({f"{folder}/{name}": path for name, path in files.items()})

    def _files(self, step: int) -> OrbaxFiles | ArrayFiles:
        if self._copy:
            self._copy.fetch_files(self.directory / str(step))  # the parts of other processes
        folder = self._alias.path / str(step)
        return ArrayFiles(folder) if has_array_files(folder) else OrbaxFiles(folder)

    def holds(self, step: int, name: str) -> bool:
        """Return whether a checkpoint has an array of this name, e.g. "progress/step"."""
        return name in self._saved_digests(step)

    def poll(self, all_processes: bool) -> None:
        """Finish the current save if it is done, without waiting for it. Raise CheckpointError if it has failed.

        all_processes: whether every process of the job calls this now. In a bucket, they finish a save together, and
            all raise the error of one.
        """
        if self._current_save is None or self._saver is None:
            return
        done = not self._saver.is_saving()
        if not self._copy or jax.process_count() == 1:
            if done:
                self.wait()
        elif all_processes and not any_process(not done):
            self.wait()

    @contextlib.contextmanager
    def _report_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types
            raise CheckpointError(
                f"{self.directory}/{step} could not be saved: {self._alias.with_own_path(error)}"
            ) from error

    def restore(self, step: int, params: Tree, progress: Tree | None = None) -> tuple[Tree, Tree]:
        """Return (params, progress) of a step with the shapes, dtypes and shardings of abstract trees.

        With `progress=None`, the optimizer state is not read. Raises CheckpointError with the names of leaves that are
        missing, have another shape, or fail verification.
        """
        abstract = {"params": params} if progress is None else {"params": params, "progress": progress}
        with agreement():
            self._require_step(step)
            digests = self._saved_digests(step)
            self._require_same_shapes(step, abstract, digests)
        trees = self._load(step, abstract, digests)
        return trees["params"], trees.get("progress")

    def params_digest(self, step: int) -> str:
        """Return `tree_digest` of the parameters of a step from the saved digests, which `restore` verifies."""
        leaves, prefix = self._saved_digests(step), "params/"
        return _digest_of_leaves(
            {name.removeprefix(prefix): leaves[name] for name in leaves if name.startswith(prefix)}
        )

    def _require_step(self, step: int) -> None:
        if step not in self._metrics:
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; it has: {have}")

    def check(self, step: int) -> None:
        """Read every array of a step. Raises CheckpointError with the names of arrays that fail verification."""
        self._load_all(step)

    def _load_all(self, step: int) -> Tree:
        """Return all arrays of a step on one device. Raises CheckpointError with the names of arrays that fail
        verification."""
        with self._damages(step, "cannot be read"):
            trees = self._files(step).load_all(jax.local_devices()[0])
        return self._verify_digests(step, trees, self._saved_digests(step))

    def write_orbax(self, step: int, folder: Path) -> None:
        """Write a checkpoint to `folder`/`step` in Orbax's files, and read it back.

        Raises CheckpointError if the checkpoint is damaged, or the written files differ from it.
        """
        self._require_step(step)
        arrays, digests, metrics = self._load_all(step), self._saved_digests(step), self._metrics[step]
        writer = OrbaxWriter(folder)
        with self._report_errors(step):
            writer.save(step, arrays, metrics, {"digests": digests, "seal": _seal(step, metrics, digests)})
            writer.wait()
        writer.close()
        Checkpoints(folder, writing=False).check(step)

    def _saved_digests(self, step: int) -> Mapping[str, str]:
        """Return the digest of every array of a step. Raises DamagedCheckpointError."""
        with self._damages(step, "is damaged: its metadata cannot be read"):
            return read_json(self.directory / str(step) / "_CHECKPOINT_METADATA")["custom_metadata"]["digests"]

    def _load(self, step: int, abstract: Tree, digests: Mapping[str, str]) -> Tree:
        """Return the arrays of a step. Raises CheckpointError with the names of arrays whose digests differ from the
        saved ones."""
        with self._damages(step, "cannot be read"), agreement():  # either all processes compute digests, or none
            trees = self._files(step).load(abstract)
        return self._verify_digests(step, trees, digests)

    def _verify_digests(self, step: int, trees: Tree, saved_digests: Mapping[str, str]) -> Tree:
        """Return items unchanged. Raises CheckpointError with the names of arrays whose digests differ from the saved
        ones."""
        digests = {name: None for name in saved_digests if name.partition("/")[0] in trees} | leaf_digests(trees)
        damaged_names = [name for name, value in digests.items() if saved_digests.get(name) != value]
        if damaged_names:
            raise DamagedCheckpointError(
                f"{self.directory / str(step)} is damaged: {', '.join(damaged_names[:5])} ({len(damaged_names)} in all)"
                f" differ from what was saved; {REMEDY}"
            )
        return trees

    @contextlib.contextmanager
    def _damages(self, step: int, problem: str) -> Iterator[None]:
        """Raise DamagedCheckpointError with the problem of a step for any error in the block."""
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types
            cause = self._alias.with_own_path(repr(error.__cause__ or error))
            raise DamagedCheckpointError(f"{self.directory / str(step)} {problem} ({cause}); {REMEDY}") from error

    def _require_same_shapes(self, step: int, abstract: Tree, digests: Mapping[str, str]) -> None:
        """Raise CheckpointError unless the items of a step have the arrays of abstract trees, in their shapes."""
        need = {path_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)}
        folder = self.directory / str(step)
        try:
            have = self._files(step).shapes([name for name in digests if name.partition("/")[0] in abstract])
        except (ValueError, OSError) as error:
            raise DamagedCheckpointError(f"{folder} is damaged: {folder}/{error}; {REMEDY}") from error
        problems = [
            f"{name} is {have.get(name, 'absent')} there and {need.get(name, 'absent')} in this model"
            for name in sorted(need.keys() | have.keys())
            if need.get(name) != have.get(name)
        ]
        if problems:
            summary = "; ".join(problems[:5])
            raise CheckpointError(f"{folder} does not fit the config: {summary} ({len(problems)} differences)")

    def wait(self) -> None:
        """Wait until the current save is a checkpoint and old ones are deleted. Raises CheckpointError if it fails.

        When all processes have written the save, the first one flushes it, reads it back and renames it.
        """
        save, self._current_save = self._current_save, None
        if save is None or self._saver is None:
            return
        with self._report_errors(save.step):
            files: dict[str, StoredFile] = {}
            if self._copy:
                files = self._finish_together(save.step, self._saver)
            else:
                self._saver.wait()
            if jax.process_index() == 0:
                self._publish(save)
                if self._copy:
                    self._copy.include(files)
            elif self._copy:
                shutil.rmtree(self.directory / _UNFINISHED / str(save.step))  # process 0 has made it a checkpoint
        self._metrics[save.step] = save.metrics
        emit("checkpoint", path=self.directory / str(save.step), step=save.step, best=self.best() == save.step)
        self.prune()
        publish(self.directory)

    def _finish_together(self, step: int, saver: OrbaxWriter | ArrayWriter) -> dict[str, StoredFile]:
        """Wait for the uploads of all processes, and return their files. An error of one process is raised in all."""
        error: Exception | None = None
        try:
            saver.wait()
        except Exception as problem:  # raised below, after the other processes have been informed
            error = problem
        report = {"step": step, "error": repr(error) if error else "", "files": self._save_files}
        self._save_files = {}
        reports = [json.loads(text) for text in gather_texts(json.dumps(report, default=vars))]
        if error:
            raise error
        if errors := [report["error"] for report in reports if report["error"]]:
            raise OSError(f"another process of this job could not write its part: {errors[0]}")
        if len({report["step"] for report in reports}) > 1:
            raise OSError(f"the processes of this job save different steps: {[report['step'] for report in reports]}")
        return {
            name: StoredFile(file["sha256"], file["size"], tuple(file["parts"]))
            for report in reports
            for name, file in report["files"].items()
        }

    def _publish(self, save: _Save) -> None:
        """Flush a finished save to disk, read it back, and rename it to the folder of its step."""
        folder = self._alias.path / _UNFINISHED / str(save.step)
        sync_tree(folder)
        if self._sealed_metrics(folder) != save.metrics:
            raise ValueError("its metrics, read back, are not what was written")
        for name, digest in save.sample.items():
            if leaf_digests({name: OrbaxFiles(folder).read(name)}) != {name: digest}:
                raise ValueError(f"{name}, read back, is not what was written")
        folder.rename(self.directory / str(save.step))
        sync(self.directory)
        sync(self.directory.parent)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # After an error, the other processes of a job may never finish this save.
            if kind is None or not self._copy or jax.process_count() == 1:
                self.wait()
            if self._saver:
                self._saver.close()
                with contextlib.suppress(OSError):  # the folder has a failed save, or another process has removed it
                    (self.directory / _UNFINISHED).rmdir()
        except Exception:
            if kind is None:  # otherwise the block's own exception is raised
                raise
        finally:
            self._alias.close()


@dataclass(frozen=True)
class _Save:
    """A save that runs in the background."""

    step: int
    metrics: dict[str, Any] | None
    sample: Mapping[str, str]  # names and digests of the leaves that are read back


def _sample(item: str, tree: Tree) -> set[str]:
    """Return the names of the leaves of an item to read back: the smallest, and the largest below _SAMPLE_BYTES."""
    sizes = {path_name(path): leaf.nbytes for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    names = sorted(sizes, key=lambda name: (sizes[name], name))
    ends = [*names[:1], *[name for name in names if sizes[name] <= _SAMPLE_BYTES][-1:]]
    return {f"{item}/{name}" for name in ends}
