"""Array files to which each process writes its own parts: they can be read on any mesh, and damage is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxret.parallel.mesh import make_mesh
from jaxret.storage.array_files import ArrayFiles, ArrayWriter
from jaxret.storage.atomic import read_json, sha256_json, write_json
from jaxret.storage.checkpoint import Checkpoints, DamagedCheckpointError, leaf_digests


def arrays() -> dict[str, Any]:
    """Arrays of several types: whole on each device, split by rows, by columns, and by both."""
    mesh = make_mesh(fsdp=2)
    values: dict[str, tuple[Any, P]] = {
        "scalar": (np.int32(7), P()),
        "whole": (np.arange(5, dtype=np.float32), P()),
        "rows": (np.arange(48, dtype=np.float32).reshape(16, 3), P("data")),
        "columns": (np.arange(48).reshape(3, 16).astype(jnp.bfloat16), P(None, "fsdp")),
        "both": (np.arange(64, dtype=np.uint8).reshape(8, 8), P("data", "fsdp")),
        "empty": (np.zeros((0, 4), np.float32), P()),
    }
    placed = {name: jax.device_put(value, NamedSharding(mesh, spec)) for name, (value, spec) in values.items()}
    return {"params": placed, "progress": {"deep": {"step": placed["scalar"]}}}


def save(folder: Path, items: Any) -> dict[str, Path]:
    """Save the items as step 5, and return the files by name."""
    shared: dict[str, Path] = {}

    def share(step: int, files: Mapping[str, Path]) -> None:
        assert step == 5
        shared.update(files)

    writer = ArrayWriter(folder, share)
    writer.save(5, items, {"loss": 0.5}, {"seal": "x"})
    writer.wait()
    writer.close()
    return shared


@pytest.mark.parametrize("spec", [P(), P("data"), P("fsdp")])
def test_arrays_are_restored_on_another_mesh(tmp_path: Path, spec: P) -> None:
    items = arrays()
    files = save(tmp_path, items)
    assert set(files) == {"arrays-0.bin", "arrays-0.json", "metrics/metrics", "_CHECKPOINT_METADATA"}
    assert all(path == tmp_path / "5" / name for name, path in files.items())
    assert files["arrays-0.bin"].stat().st_size < 900, "an array that is on several devices is written once"
    stored = ArrayFiles(tmp_path / "5")
    shapes = stored.shapes(["params/rows", "progress/deep/step"])
    assert shapes == {"params/rows": (16, 3), "progress/deep/step": ()}
    mesh = make_mesh(fsdp=8)

    def target(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        fits = leaf.ndim and leaf.shape[0] % 8 == 0
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec if fits else P()))

    restored = stored.load(jax.tree.map(target, items))
    for old, new in zip(jax.tree.leaves(items), jax.tree.leaves(restored), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))
    everything = stored.load_all(jax.devices()[0])
    assert everything["progress"]["deep"]["step"].shape == ()


def test_parts_of_several_processes_are_joined_and_missing_parts_are_errors(tmp_path: Path) -> None:
    files = save(tmp_path, arrays())
    table, other = read_json(files["arrays-0.json"]), {}
    for name in ("params/rows", "params/both"):  # as if another process had written half of the parts
        dtype, shape, *parts = table[name]
        table[name], other[name] = [dtype, shape, *parts[::2]], [dtype, shape, *parts[1::2]]
    write_json(files["arrays-0.json"], table)
    write_json(tmp_path / "5" / "arrays-1.json", other)
    (tmp_path / "5" / "arrays-1.bin").write_bytes(files["arrays-0.bin"].read_bytes())
    abstract = {
        "params": {"rows": jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=NamedSharding(make_mesh(), P()))}
    }
    rows = ArrayFiles(tmp_path / "5").load(abstract)["params"]["rows"]
    np.testing.assert_array_equal(np.asarray(rows), np.arange(48, dtype=np.float32).reshape(16, 3))
    (tmp_path / "5" / "arrays-1.json").unlink()
    with pytest.raises(ValueError, match="parts of params/rows are missing"):
        ArrayFiles(tmp_path / "5").load(abstract)
    with pytest.raises(ValueError, match="params/none is missing"):
        ArrayFiles(tmp_path / "5").shapes(["params/none"])


def test_a_save_that_fails_in_the_background_raises(tmp_path: Path) -> None:
    def refuse(step: int, files: Mapping[str, Path]) -> None:
        raise OSError("the bucket is gone")

    writer = ArrayWriter(tmp_path, refuse)
    writer.save(5, arrays(), None, {})
    with pytest.raises(OSError, match="the bucket is gone"):
        writer.wait()
    writer.close()


def test_a_damaged_list_and_another_type_are_errors(tmp_path: Path) -> None:
    files = save(tmp_path, arrays())
    leaf = jax.ShapeDtypeStruct((16, 3), jnp.int32, sharding=NamedSharding(make_mesh(), P()))
    with pytest.raises(ValueError, match=r"params/rows .*float32 .*int32 .*model"):
        ArrayFiles(tmp_path / "5").load({"params": {"rows": leaf}})
    table = files["arrays-0.json"].read_text()
    for damage in (table.replace("float32", "floau32"), "[1]", '{"params/rows": 3}'):
        files["arrays-0.json"].write_text(damage)
        with pytest.raises(ValueError, match=r"arrays-0\.json is damaged"):
            ArrayFiles(tmp_path / "5")


def test_a_list_without_one_of_the_arrays_is_damaged(tmp_path: Path) -> None:
    items = arrays()
    digests = leaf_digests(items)
    files = save(tmp_path, items)
    seal = sha256_json({"step": 5, "metrics": {"loss": 0.5}, "digests": digests})
    write_json(files["_CHECKPOINT_METADATA"], {"custom_metadata": {"digests": digests, "seal": seal}})
    Checkpoints(tmp_path, writing=False).check(5)
    table = read_json(files["arrays-0.json"])
    del table["params/whole"]
    write_json(files["arrays-0.json"], table)
    with pytest.raises(DamagedCheckpointError, match="params/whole"):
        Checkpoints(tmp_path, writing=False).check(5)
