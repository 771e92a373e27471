"""Save and restore with Orbax; the only file that imports it.

A checkpoint holds `params`, `progress` (optimiser state, step) and, in its metadata, a digest of every leaf: Orbax
reads a data file with a flipped byte without complaint, so what was restored is compared with what was saved. A seal
over digests, step and metrics shows whether the numbers that choose the best one are those that were measured. The best
checkpoint (by a validation metric) and the last one are kept.
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

from jaxret.storage import read_json, sha256_json

Tree = Any

CRITERION = "criterion"  # beside a checkpoint's metrics: the name of the one that it is compared by
_REMEDY = "delete the folder and continue from another checkpoint"


class CheckpointError(ValueError):
    """A checkpoint is missing, does not fit the model, or is damaged."""


def _leaf_digest(leaf: jax.Array) -> jax.Array:
    """64 bits of a leaf as uint32 [2]: integer sums, so the result is the same on any mesh.

    The first sum weighs each word with an odd number that depends on its place, so a change of one word always changes
    it; the second scrambles words first, against changes that cancel out.
    """
    if leaf.dtype.itemsize == 4:
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    elif leaf.dtype.itemsize == 2:
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32)
    else:
        words = leaf.astype(jnp.uint32)  # bool and bytes
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    weight = (2 * place + 1) * jnp.uint32(0x9E3779B1)
    scrambled = (words ^ (words >> 15)) * jnp.uint32(0x85EBCA6B)
    scrambled = (scrambled ^ (scrambled >> 13) ^ place) * jnp.uint32(0xC2B2AE35)
    scrambled = scrambled ^ (scrambled >> 16)
    return jnp.stack([jnp.sum(words * weight, dtype=jnp.uint32), jnp.sum(scrambled, dtype=jnp.uint32)])


def path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as "a/b/0"."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


@jax.jit
def _digests(tree: Tree) -> dict[str, jax.Array]:
    return {path_name(path): _leaf_digest(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def digests(tree: Tree) -> dict[str, str]:
    """Leaf path -> 16 hex digits. The same values on one device and on many."""
    return {name: np.asarray(value).tobytes().hex() for name, value in _digests(tree).items()}


def _seal(step: int, metrics: Mapping[str, Any] | None, leaves: Mapping[str, str]) -> str:
    return sha256_json({"step": step, "metrics": metrics, "digests": leaves})


def digest(tree: Tree) -> str:
    """One short hex string for a whole tree of arrays; what shards and results name as their checkpoint."""
    return sha256_json(digests(tree))[:16]


class Checkpoints:
    """The checkpoints of one run, in `<workdir>/checkpoints/<step>/`.

    best_metric: name of the validation metric that chooses the best, unless a checkpoint was saved with a `criterion`
    of its own; less_is_better: those of which less is. Checkpoints are compared with those of the newest one's
    criterion, as values of two metrics say nothing about each other. Without a metric only the last checkpoint is
    kept, and it is also the best. writing: clears away what an interrupted save left; not for those who read while
    another process may be saving. Raises CheckpointError naming the first that is damaged.
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
        self._saving: int | None = None  # the step of a save that nobody waited for yet
        self.half_written = sorted(path.name for path in self.directory.glob("*.orbax-checkpoint-tmp*"))
        if writing and jax.process_index() == 0:
            for name in self.half_written:  # Orbax leaves some of them
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
        """The name of the metric by which a checkpoint is compared with others."""
        return str(metrics.get(CRITERION, self._metric))

    def _rank(self, metrics: Mapping[str, Any]) -> float:
        criterion = self._criterion(metrics)
        value = float(metrics[criterion])
        return -value if criterion in self._less_is_better else value

    def _require_sealed(self, folder: Path) -> None:
        """Raises CheckpointError unless step, metrics and digests are as they were saved."""
        try:
            written, metrics = read_json(folder / "_CHECKPOINT_METADATA")["custom_metadata"], None
            if (folder / "metrics").exists():
                metrics = read_json(folder / "metrics" / "metrics")
            sound = "seal" not in written or written["seal"] == _seal(int(folder.name), metrics, written["digests"])
            if metrics is not None and self._metric:  # an older checkpoint has no seal, but must have a rank
                self._rank(metrics)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not folder.exists():  # superseded meanwhile by the process that trains
                return
            raise CheckpointError(f"{folder} is damaged: its metadata cannot be read ({error!r}); {_REMEDY}") from error
        if not sound:
            raise CheckpointError(
                f"{folder} is damaged: its metadata, or {folder}/metrics, is not what was saved; {_REMEDY}"
            )

    def prune(self) -> list[int]:
        """Deletes the checkpoints that are neither best nor last; their steps. Only process 0 does.

        They get the name of an unfinished save first, which the next start removes: a process that was killed between
        the deletions of two files would else leave what looks like a damaged checkpoint.
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
        """The step of the newest checkpoint, None if there is none."""
        latest = self._checkpointer.latest
        return None if latest is None else int(latest.step)

    def best(self) -> int | None:
        """The step of the best checkpoint, of equal ones the newest (the one Orbax keeps); the last one where nothing
        was measured."""
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
        """Starts an asynchronous save; the arrays are copied to the host before it returns. criterion: which of the
        metrics says how good it is, if not `best_metric`. Raises CheckpointError if the save before it failed."""
        self.wait()
        items = {"params": params, "progress": progress}
        values: dict[str, Any] | None = {k: float(v) for k, v in metrics.items()} if metrics else None
        if values and criterion:
            values[CRITERION] = criterion
        found = digests(items)
        custom = {"digests": found, "seal": _seal(step, values, found)}
        with self._reported(step):
            self._checkpointer.save_checkpointables_async(
                step, items, metrics=values, custom_metadata=custom, force=True
            )
        self._saving = step

    def holds(self, step: int, name: str) -> bool:
        """Whether a checkpoint has an array of this name, as "progress/step". Its metadata was read at the start."""
        metadata = read_json(self.directory / str(step) / "_CHECKPOINT_METADATA")["custom_metadata"]
        return name in metadata.get("digests", {})

    def poll(self) -> None:
        """Raises CheckpointError if the save under way has failed; does not wait for it."""
        if self._saving is not None and not self._checkpointer.is_saving_in_progress():
            self.wait()

    @contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise CheckpointError(f"{self.directory}/{step} could not be saved: {error}") from error

    def restore(self, step: int, params: Tree, progress: Tree | None = None) -> tuple[Tree, Tree]:
        """Reads (params, progress) of a step onto the shapes, types and shardings of the abstract trees given.

        `progress=None` leaves the optimiser on disk. Raises CheckpointError naming each leaf that is missing, has
        another shape, or is not what was saved.
        """
        wanted = {"params": params} if progress is None else {"params": params, "progress": progress}
        folder = self.directory / str(step)
        if step not in [c.step for c in self._checkpointer.checkpoints]:
            have = ", ".join(str(c.step) for c in self._checkpointer.checkpoints) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; it has: {have}")
        try:
            metadata = self._checkpointer.checkpointables_metadata(step)
            shapes = {name: metadata.metadata[name] for name in wanted}
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise CheckpointError(f"{folder} is damaged: its metadata cannot be read ({error!r}); {_REMEDY}") from error
        for name, found in shapes.items():
            if found is None:
                raise CheckpointError(f"{folder} is damaged: {folder}/{name} cannot be read; {_REMEDY}")
        self._require_same_shapes(wanted, shapes, folder)
        restored = self._load(step, wanted, (metadata.custom_metadata or {}).get("digests", {}))
        return restored["params"], restored.get("progress")

    def check(self, step: int) -> None:
        """Reads every array of a step. Raises CheckpointError naming those that are not what was saved."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        try:
            metadata = self._checkpointer.checkpointables_metadata(step)
            stored = {name: tree for name, tree in metadata.metadata.items() if name in ("params", "progress")}
            wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), stored)
        except Exception as error:  # Orbax and TensorStore raise many kinds
            folder = self.directory / str(step)
            raise CheckpointError(f"{folder} is damaged: its metadata cannot be read ({error!r}); {_REMEDY}") from error
        self._load(step, wanted, (metadata.custom_metadata or {}).get("digests", {}))

    def _load(self, step: int, wanted: Tree, saved: Mapping[str, str]) -> Tree:
        """The arrays of a step. Raises CheckpointError naming those whose digests are not the saved ones."""
        folder = self.directory / str(step)
        try:
            restored = self._checkpointer.load_checkpointables(step, wanted)
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be read ({error.__cause__ or error}); {_REMEDY}") from error
        damaged = [name for name, value in digests(restored).items() if saved.get(name) != value]
        if damaged:
            raise CheckpointError(
                f"{folder} is damaged: {', '.join(damaged[:5])} ({len(damaged)} in all) differ from what was saved; "
                + _REMEDY
            )
        return restored

    def _require_same_shapes(self, wanted: Tree, stored: Tree, folder: Path) -> None:
        def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
            return {path_name(p): tuple(leaf.shape) for p, leaf in jax.tree_util.tree_leaves_with_path(tree)}

        need, have = shapes(wanted), shapes(stored)
        problems = [
            f"{name} is {have.get(name, 'absent')} there and {need.get(name, 'absent')} in this model"
            for name in sorted(need.keys() | have.keys())
            if need.get(name) != have.get(name)
        ]
        if problems:
            shown = "; ".join(problems[:5])
            raise CheckpointError(f"{folder} does not fit the config: {shown} ({len(problems)} differences)")

    def wait(self) -> None:
        """Blocks until the save under way is on disk, and what it supersedes is not. Raises CheckpointError if it
        fails."""
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
            if kind is None:  # else what ended the block is what must be told
                raise
