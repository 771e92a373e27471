"""Checkpoints in Orbax's files: Orbax writes them, and TensorStore, its storage library, reads them.

Orbax's own reader has barriers: if one process of a job found a damaged array, the others would wait for it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import tensorstore

from jaxret.parallel.mesh import path_name
from jaxret.types import Tree

_READERS = 8  # threads that read one array each


class OrbaxFiles:
    """The arrays of a checkpoint.

    Args:
        folder: path of the checkpoint, as `OrbaxAlias` gives it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def shapes(self, names: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of arrays by their names. Raises ValueError with the name of an array that cannot be read.

        TensorStore reads them, because Orbax's reader of metadata keeps some kilobytes for each array until the process
        ends.
        """
        context, shapes = tensorstore.Context(), {}
        for name in names:
            try:
                shapes[name] = self._open(name, context).shape
            except ValueError as error:  # TensorStore raises no other errors
                raise ValueError(f"{name.partition('/')[0]} cannot be read") from error
        return shapes

    def read(self, name: str) -> Any:
        """Return an array. Orbax's reader is not used, because all processes would have to call it."""
        return self._open(name, tensorstore.Context()).read().result()

    def _open(self, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
        item, _, leaf = name.partition("/")
        base = {"driver": "file", "path": f"{self._folder / item}/"}
        store = {"driver": "ocdbt", "base": base, "path": f"{leaf.replace('/', '.')}/"}
        return tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, context=context).result()

    def load(self, abstract: Tree) -> Tree:
        """Return arrays with the shapes, dtypes and shardings of an abstract tree; a device reads only its part.

        Raises ValueError for an array that cannot be read, or has another dtype.
        """
        context = tensorstore.Context()

        def read(item: tuple[tuple[Any, ...], jax.ShapeDtypeStruct]) -> jax.Array:
            path, leaf = item
            name = path_name(path)
            array = self._open(name, context)
            if array.dtype.numpy_dtype != leaf.dtype:
                raise ValueError(f"{name} is {array.dtype.name} there, and {leaf.dtype} in this model")
            parts: dict[str, Any] = {}  # parts of this process; several devices may have the same part

            def part(index: tuple[slice, ...]) -> Any:
                if str(index) not in parts:
                    parts[str(index)] = array[index].read().result()
                return parts[str(index)]

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: part(index or ()))

        leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
        with ThreadPoolExecutor(_READERS, "checkpoint") as readers:
            return jax.tree_util.tree_unflatten(structure, list(readers.map(read, leaves)))

    def load_all(self, device: jax.Device) -> Tree:
        """Return all arrays on a device, as a tree of items. Orbax reads them, so that all its files are checked."""
        from orbax.checkpoint import v1 as ocp

        sharding = jax.sharding.SingleDeviceSharding(device)
        metadata = dict(ocp.checkpointables_metadata(self._folder).metadata)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            {name: tree for name, tree in metadata.items() if name in ("params", "progress")},
        )
        return ocp.load_checkpointables(self._folder, abstract)


class OrbaxWriter:
    """Writes checkpoints in the background, one at a time, into folders of their steps.

    Args:
        folder: the parent folder, as `OrbaxAlias` gives it.
    """

    def __init__(self, folder: Path) -> None:
        from orbax.checkpoint import v1 as ocp  # the import takes a sixth of a second; a search does not need it

        self._checkpointer = ocp.training.Checkpointer(
            folder, preservation_policy=ocp.training.preservation_policies.PreserveAll()
        )
        self._response: Any = None

    def save(self, step: int, items: Tree, metrics: Mapping[str, Any] | None, custom: Mapping[str, Any]) -> None:
        """Start to write the checkpoint of a step. `wait` raises the errors of the background.

        Args:
            step: number of the step, which names the folder.
            items: trees of arrays by their names.
            metrics: metrics of the step; None: there are none.
            custom: further JSON values to store with the arrays.
        """
        self._response = self._checkpointer.save_checkpointables_async(
            step, items, metrics=metrics, custom_metadata=custom, force=True
        )

    def is_saving(self) -> bool:
        """Return whether a save is running."""
        return self._checkpointer.is_saving_in_progress()

    def wait(self) -> None:
        """Wait for the save. Raises its error."""
        try:
            self._checkpointer.wait()
        finally:  # ends the thread and the event loop that Orbax starts for each save; raises the same error again
            with contextlib.suppress(Exception):
                self._response.result()

    def close(self) -> None:
        """End the threads."""
        self._checkpointer.close()


class OrbaxAlias:
    """A path to a folder that has no *, ? and [, which Orbax would read as a pattern.

    The path uses an open descriptor of the folder, so it is valid until the process ends. Raises ValueError on systems
    without such paths.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._descriptor = folder, -1
        self._plain = glob.escape(str(folder)) == str(folder)
        if not self._plain and sys.platform != "linux":
            raise ValueError(f"{folder} holds one of * ? [, which Orbax cannot read here; choose another folder")

    @property
    def path(self) -> Path:
        """Return the path; the folder must exist."""
        if self._plain:
            return self._folder
        if self._descriptor < 0:
            self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        return Path(f"/proc/self/fd/{self._descriptor}")

    def with_own_path(self, message: object) -> str:
        """Return a message with the folder's own path."""
        text = str(message)
        return text if self._descriptor < 0 else text.replace(str(self.path), str(self._folder))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
