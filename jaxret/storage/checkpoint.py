"""Save and restore with Orbax; the only file that imports it.

A checkpoint holds `params`, `progress` (optimiser state, step) and, in its metadata, a digest of every leaf: Orbax does
not detect a flipped byte in a data file, so restored arrays are verified by these digests. A seal over digests, step
and metrics detects changes of the numbers that choose the best checkpoint. The best checkpoint (by a validation metric)
and the last one are preserved.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxret.parallel.mesh import path_name
from jaxret.storage.atomic import read_json, sha256_json

Tree = Any

CRITERION = "criterion"  # key in a checkpoint's metrics: name of the metric that ranks it
_REMEDY = "delete the folder and continue from another checkpoint"


class CheckpointError(ValueError):
    """A checkpoint is missing, does not fit the model, or is damaged."""


def _leaf_digest(leaf: jax.Array) -> jax.Array:
    """64 bits of a leaf as uint32 [2]: integer sums, so the result is the same on any mesh.

    The first sum weights each word by an odd number that depends on its index, so a change of one word always changes
    the sum; the second one mixes the bits of each word first, so that several changes do not cancel.
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
    scrambled = (words ^ (words >> 15)) * jnp.uint32(0x85EBCA6B)
    scrambled = (scrambled ^ (scrambled >> 13) ^ index) * jnp.uint32(0xC2B2AE35)
    scrambled = scrambled ^ (scrambled >> 16)
    return jnp.stack([jnp.sum(words * weight, dtype=jnp.uint32), jnp.sum(scrambled, dtype=jnp.uint32)])


@jax.jit
def _digests(tree: Tree) -> dict[str, jax.Array]:
    return {path_name(path): _leaf_digest(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def leaf_digests(tree: Tree) -> dict[str, str]:
    """Return a digest of 16 hex digits per leaf path, the same on one device and on many."""
    return {name: np.asarray(value).tobytes().hex() for name, value in _digests(tree).items()}


def _seal(step: int, metrics: Mapping[str, Any] | None, leaves: Mapping[str, str]) -> str:
    return sha256_json({"step": step, "metrics": metrics, "digests": leaves})


def tree_digest(tree: Tree) -> str:
    """Return a digest of 16 hex digits of a whole tree of arrays, by which shards and results name a checkpoint."""
    return sha256_json(leaf_digests(tree))[:16]


class Checkpoints:
    """The checkpoints of one run, in `<workdir>/checkpoints/<step>/`.

    Checkpoints are ranked by the criterion of the newest one; those with another criterion are not compared, as values
    of different metrics are not comparable. Without a metric only the last checkpoint is preserved, and it is also the
    best.

    Args:
        directory: Folder of the checkpoints.
        best_metric: Validation metric that ranks checkpoints saved without a `criterion`.
        less_is_better: Metrics for which a lower value is better.
        writing: Whether to delete what an interrupted save left. Not while another process may be saving.

    Raises:
        CheckpointError: A checkpoint is damaged; the message names the first one.
    """

    def __init__(
        self,
        directory: str | Path,
        best_metric: str | None = None,
        less_is_better: Collection[str] = (),
        writing: bool = True,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._metric, self._less_is_better = best_metric, less_is_better
        self._saving: int | None = None  # step of the save that runs in the background
        self.half_written = sorted(path.name for path in self.directory.glob("*.orbax-checkpoint-tmp*"))
        if writing and jax.process_index() == 0:
            for name in self.half_written:  # Orbax does not delete all of them
                shutil.rmtree(self.directory / name, ignore_errors=True)
        for path in self.directory.glob("*"):
            if path.name.isdigit():
                self._require_sealed(path)
        self._checkpointer = ocp.training.Checkpointer(
            self.directory,
            preservation_policy=ocp.training.preservation_policies.PreserveAll(),  # `prune` deletes
            cleanup_tmp_directories=writing,
        )

    def _criterion(self, metrics: Mapping[str, Any]) -> str:
        """Return the name of the metric that ranks a checkpoint."""
        return str(metrics.get(CRITERION, self._metric))

    def _rank(self, metrics: Mapping[str, Any]) -> float:
        criterion = self._criterion(metrics)
        value = float(metrics[criterion])
        return -value if criterion in self._less_is_better else value

    def _require_sealed(self, folder: Path) -> None:
        """Raise CheckpointError unless step, metrics and digests match the seal."""
        try:
            written, metrics = read_json(folder / "_CHECKPOINT_METADATA")["custom_metadata"], None
            if (folder / "metrics").exists():
                metrics = read_json(folder / "metrics" / "metrics")
            sound = written["seal"] == _seal(int(folder.name), metrics, written["digests"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not folder.exists():  # the training process has just deleted it
                return
            raise CheckpointError(f"{folder} is damaged: its metadata cannot be read ({error!r}); {_REMEDY}") from error
        if not sound:
            raise CheckpointError(
                f"{folder} is damaged: its metadata, or {folder}/metrics, is not what was saved; {_REMEDY}"
            )

    def prune(self) -> list[int]:
        """Delete the checkpoints that are neither best nor last, and return their steps. Only process 0 does.

        They are first renamed to unfinished saves, which the next start removes: otherwise a process killed in the
        middle of a deletion would leave a checkpoint that looks damaged.
        """
        if jax.process_index() != 0:
            return []
        superseded = [c.step for c in self._checkpointer.checkpoints if c.step not in (self.best(), self.last())]
        for step in superseded:
            doomed = (self.directory / str(step)).rename(self.directory / f"{step}.orbax-checkpoint-tmp")
            shutil.rmtree(doomed)
        if superseded:
            self._checkpointer.reload()
        return superseded

    def last(self) -> int | None:
        """Return the step of the newest checkpoint, or None."""
        latest = self._checkpointer.latest
        return None if latest is None else int(latest.step)

    def best(self) -> int | None:
        """Return the step of the best checkpoint, of equal ones the newest; without measurements, the last one."""
        measured = {c.step: c.metrics for c in self._checkpointer.checkpoints if self._metric and c.metrics}
        if not measured:
            return self.last()
        newest = self._criterion(measured[max(measured)])
        ranks = {step: self._rank(m) for step, m in measured.items() if self._criterion(m) == newest}
        return int(max(ranks, key=lambda step: (ranks[step], step)))

    def save(
        self,
        step: int,
        params: Tree,
        progress: Tree,
        metrics: Mapping[str, float] | None = None,
        criterion: str | None = None,
    ) -> None:
        """Start an asynchronous save; the arrays are copied to the host before it returns.

        Args:
            step: Step of the checkpoint.
            params: Parameters.
            progress: Optimiser state and step.
            metrics: Validation metrics.
            criterion: Metric that ranks this checkpoint; None: `best_metric`.

        Raises:
            CheckpointError: The previous save failed.
        """
        self.wait()
        items = {"params": params, "progress": progress}
        values: dict[str, Any] | None = {k: float(v) for k, v in metrics.items()} if metrics else None
        if values and criterion:
            values[CRITERION] = criterion
        leaves = leaf_digests(items)
        custom = {"digests": leaves, "seal": _seal(step, values, leaves)}
        with self._reported(step):
            self._checkpointer.save_checkpointables_async(
                step, items, metrics=values, custom_metadata=custom, force=True
            )
        self._saving = step

    def holds(self, step: int, name: str) -> bool:
        """Return whether a checkpoint has an array of this name, e.g. "progress/step"."""
        metadata = read_json(self.directory / str(step) / "_CHECKPOINT_METADATA")["custom_metadata"]
        return name in metadata.get("digests", {})

    def poll(self) -> None:
        """Raise CheckpointError if the current save has failed, without waiting for it."""
        if self._saving is not None and not self._checkpointer.is_saving_in_progress():
            self.wait()

    @contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types
            raise CheckpointError(f"{self.directory}/{step} could not be saved: {error}") from error

    def restore(self, step: int, params: Tree, progress: Tree | None = None) -> tuple[Tree, Tree]:
        """Read (params, progress) of a step with the shapes, types and shardings of the given abstract trees.

        `progress=None` leaves the optimiser on disk. Raises CheckpointError naming each leaf that is missing, has
        another shape, or fails verification.
        """
        abstract = {"params": params} if progress is None else {"params": params, "progress": progress}
        folder = self.directory / str(step)
        if step not in [c.step for c in self._checkpointer.checkpoints]:
            have = ", ".join(str(c.step) for c in self._checkpointer.checkpoints) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; it has: {have}")
        try:
            metadata = self._checkpointer.checkpointables_metadata(step)
            shapes = {name: metadata.metadata[name] for name in abstract}
        except Exception as error:  # Orbax and TensorStore raise many types
            raise CheckpointError(f"{folder} is damaged: its metadata cannot be read ({error!r}); {_REMEDY}") from error
        for name, metadata_tree in shapes.items():
            if metadata_tree is None:
                raise CheckpointError(f"{folder} is damaged: {folder}/{name} cannot be read; {_REMEDY}")
        self._require_same_shapes(abstract, shapes, folder)
        restored = self._load(step, abstract, (metadata.custom_metadata or {}).get("digests", {}))
        return restored["params"], restored.get("progress")

    def check(self, step: int) -> None:
        """Read every array of a step. Raises CheckpointError naming the arrays that fail verification."""
        device_sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        try:
            metadata = self._checkpointer.checkpointables_metadata(step)
            stored = {name: tree for name, tree in metadata.metadata.items() if name in ("params", "progress")}
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device_sharding), stored
            )
        except Exception as error:  # Orbax and TensorStore raise many types
            folder = self.directory / str(step)
            raise CheckpointError(f"{folder} is damaged: its metadata cannot be read ({error!r}); {_REMEDY}") from error
        self._load(step, abstract, (metadata.custom_metadata or {}).get("digests", {}))

    def _load(self, step: int, abstract: Tree, saved: Mapping[str, str]) -> Tree:
        """Return the arrays of a step. Raises CheckpointError naming arrays whose digests are not the saved ones."""
        folder = self.directory / str(step)
        try:
            restored = self._checkpointer.load_checkpointables(step, abstract)
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be read ({error.__cause__ or error}); {_REMEDY}") from error
        damaged = [name for name, value in leaf_digests(restored).items() if saved.get(name) != value]
        if damaged:
            raise CheckpointError(
                f"{folder} is damaged: {', '.join(damaged[:5])} ({len(damaged)} in all) differ from what was saved; "
                + _REMEDY
            )
        return restored

    def _require_same_shapes(self, abstract: Tree, stored: Tree, folder: Path) -> None:
        def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
            return {path_name(p): tuple(leaf.shape) for p, leaf in jax.tree_util.tree_leaves_with_path(tree)}

        need, have = shapes(abstract), shapes(stored)
        problems = [
            f"{name} is {have.get(name, 'absent')} there and {need.get(name, 'absent')} in this model"
            for name in sorted(need.keys() | have.keys())
            if need.get(name) != have.get(name)
        ]
        if problems:
            shown = "; ".join(problems[:5])
            raise CheckpointError(f"{folder} does not fit the config: {shown} ({len(problems)} differences)")

    def wait(self) -> None:
        """Wait until the current save is on disk and superseded checkpoints are deleted, or raise CheckpointError."""
        step, self._saving = self._saving, None
        if step is not None:
            with self._reported(step):
                self._checkpointer.wait()
            self.prune()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
            self._checkpointer.close()
        except Exception:
            if kind is None:  # otherwise the block's own exception is raised
                raise
