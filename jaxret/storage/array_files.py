"""Checkpoints for folders in buckets: each process of a job writes its own files, because the processes share no disk.

<folder>/arrays-<process>.bin    the parts of the arrays that the process has, one after another
<folder>/arrays-<process>.json   {name: [dtype, shape, [offset, start, shape of a part], ...]}
         _CHECKPOINT_METADATA    in Orbax's format (from process 0)
         metrics/metrics         in Orbax's format (from process 0)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxret.parallel.mesh import path_name
from jaxret.storage.atomic import read_json, sha256_file, storage_errors, write_json
from jaxret.types import Tree

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class _Part:
    """A part of an array in a file."""

    path: Path
    offset: int  # bytes before the part in the file
    start: tuple[int, ...]  # index of its first element in the array
    shape: tuple[int, ...]

    def copy_into(self, target: np.ndarray, index: Slices) -> int:
        """Copy the elements of the part in `index` of its array to `target`, and return the number of elements."""
        bounds = [
            (max(begin, span.start), min(begin + size, span.stop))
            for begin, size, span in zip(self.start, self.shape, index, strict=True)
        ]
        if any(low >= high for low, high in bounds):
            return 0
        part_index = tuple(
            slice(low - begin, high - begin) for (low, high), begin in zip(bounds, self.start, strict=True)
        )
        target_index = tuple(
            slice(low - span.start, high - span.start) for (low, high), span in zip(bounds, index, strict=True)
        )
        data = np.memmap(self.path, target.dtype, "r", self.offset, self.shape or (1,)).reshape(self.shape)
        target[target_index] = data[part_index]
        return target[target_index].size


@dataclass(frozen=True)
class _Array:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: list[_Part]


def has_array_files(folder: Path) -> bool:
    """Return whether a checkpoint has files of this format."""
    return (folder / "arrays-0.json").exists()


class ArrayFiles:
    """The arrays of a checkpoint; opening reads the lists of them.

    Raises ValueError or OSError for a damaged list of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arrays: dict[str, _Array] = {}
        for path in sorted(folder.glob("arrays-*.json")):
            try:
                self._add(path)
            except (TypeError, AttributeError) as error:  # other JSON values, or an unknown dtype
                raise ValueError(f"{path.name} is damaged ({error})") from error

    def _add(self, path: Path) -> None:
        for name, (dtype, shape, *parts) in read_json(path).items():
            array = self._arrays.setdefault(name, _Array(jax.numpy.dtype(dtype), tuple(shape), []))
            array.parts.extend(
                _Part(path.with_suffix(".bin"), offset, tuple(start), tuple(size)) for offset, start, size in parts
            )

    def shapes(self, names: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of arrays by their names. Raises ValueError with the name of a missing array."""
        if missing_names := [name for name in names if name not in self._arrays]:
            raise ValueError(f"{missing_names[0]} is missing")
        return {name: self._arrays[name].shape for name in names}

    def load(self, abstract: Tree) -> Tree:
        """Return arrays with the shapes, types and shardings of an abstract tree. Only the parts of this process's
        devices are read."""

        def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
            name = path_name(path)
            if self._arrays[name].dtype != leaf.dtype:
                raise ValueError(f"{name} is {self._arrays[name].dtype} in the file, and {leaf.dtype} in this model")
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: self._read(name, index or ()))

        return jax.tree_util.tree_map_with_path(read, abstract)

    def load_all(self, device: jax.Device) -> Tree:
        """Return all arrays on one device, as a tree of dicts. A "/" in an array's name separates the keys of the
        tree."""
        sharding, tree = jax.sharding.SingleDeviceSharding(device), dict[str, Any]()
        for name, array in self._arrays.items():
            *parents, last = name.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return self.load(tree)

    def _read(self, name: str, index: Slices) -> np.ndarray:
        array = self._arrays[name]
        index = tuple(slice(*span.indices(size)[:2]) for span, size in zip(index, array.shape, strict=True))
        values = np.empty([span.stop - span.start for span in index], array.dtype)
        if sum(part.copy_into(values, index) for part in array.parts) != values.size:
            raise ValueError(f"{self._folder}: parts of {name} are missing")
        return values


@dataclass(frozen=True)
class _HostPart:
    """A part of an array in the memory of the host, which is written next."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # shape of the array
    start: list[int]  # index of the part's first element in the array
    data: np.ndarray


class ArrayWriter:
    """Writes checkpoints in the background, one at a time, into a folder for each step.

    `share` is called in the background with the step and the files of a save, by their names in its folder.
    """

    def __init__(self, folder: Path, share: Callable[[int, Mapping[str, Path]], None]) -> None:
        self._folder, self._share = folder, share
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._future: Future[None] | None = None

    def save(self, step: int, items: Tree, metrics: Mapping[str, Any] | None, custom: Mapping[str, Any]) -> None:
        """Start a save of the parts that this process has; they are copied to the host before it returns.

        Args:
            items: arrays, by the name of the item.
            metrics: metrics of validation, if there are any.
            custom: digests and seal, for the metadata.
        """
        copies = [
            _HostPart(name, leaf.dtype, leaf.shape, [span.start or 0 for span in shard.index], np.array(shard.data))
            for name, leaf, shard in _own_parts(items)
        ]
        self._future = self._thread.submit(self._write, step, copies, metrics, custom)

    def is_saving(self) -> bool:
        """Return whether a save is running."""
        return self._future is not None and not self._future.done()

    def wait(self) -> None:
        """Wait for the save. Raises its error."""
        if self._future:
            self._future.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _write(
        self, step: int, copies: Sequence[_HostPart], metrics: Mapping[str, Any] | None, custom: Mapping[str, Any]
    ) -> None:
        folder = self._folder / str(step)
        process, table, digest, offset = jax.process_index(), dict[str, list[Any]](), sha256(), 0
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"arrays-{process}.bin"
        with storage_errors(path), open(path, "wb") as file:
            for part in copies:
                entry = table.setdefault(part.name, [str(part.dtype), list(part.shape)])
                entry.append([offset, part.start, list(part.data.shape)])
                view = np.ascontiguousarray(part.data).reshape(-1).view(np.uint8).data
                file.write(view)
                digest.update(view)
                # The next array begins at a multiple of 16, so that it is aligned when it is mapped.
                padding = -(offset + len(view)) % 16
                file.write(bytes(padding))
                digest.update(bytes(padding))
                offset += len(view) + padding
        if sha256_file(path) != digest.hexdigest():
            raise ValueError(f"{path}, read back, is not what was written")
        write_json(path.with_suffix(".json"), table)
        names = [path.name, f"arrays-{process}.json"]
        if process == 0:
            if metrics:
                (folder / "metrics").mkdir(exist_ok=True)
                write_json(folder / "metrics" / "metrics", metrics)
                names.append("metrics/metrics")
            write_json(folder / "_CHECKPOINT_METADATA", {"custom_metadata": custom})
            names.append("_CHECKPOINT_METADATA")
        self._share(step, {name: folder / name for name in names})


def _own_parts(items: Tree) -> Iterator[tuple[str, jax.Array, Any]]:
    """Yield (name, array, shard) on the devices of this process; among all processes, each part is yielded once."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(items):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                yield path_name(path), leaf, shard
