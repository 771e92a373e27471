"""Meshes, where parameters lie, batches over devices, and two real processes against one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxret import distributed
from jaxret.distributed import Program, by_row, initialize, make_mesh, shard_batch, shardings
from tests.tiny import SELF_CONTRASTIVE, make_batch, make_retriever, run_steps

REPOSITORY = Path(__file__).resolve().parents[1]


def test_meshes() -> None:
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1}
    assert dict(make_mesh(2).shape) == {"data": 4, "fsdp": 2}
    assert dict(make_mesh(1, jax.devices()[:3]).shape) == {"data": 3, "fsdp": 1}


@pytest.mark.parametrize("fsdp", [0, -1, 3, 16])
def test_fsdp_must_divide_the_devices(fsdp: int) -> None:
    with pytest.raises(ValueError, match=rf"mesh.fsdp is {fsdp}; it must divide the number of devices, 8"):
        make_mesh(fsdp)


def test_parameters_lie_where_the_rules_say() -> None:
    retriever = make_retriever(SELF_CONTRASTIVE)
    params = jax.eval_shape(retriever.init, jax.random.key(0))
    places = shardings(make_mesh(2), {"params": params, "opt_state": {"mu": params}, "step": jnp.int32(0)})
    for tree in (places["params"], places["opt_state"]["mu"]):
        encoder = tree["encoder"]
        assert encoder["layers"]["attention"]["query"]["kernel"].spec == P(None, "fsdp", None)
        assert encoder["layers"]["output"]["kernel"].spec == P(None, "fsdp", None)
        assert encoder["embeddings"]["word"]["embedding"].spec == P(None, "fsdp")
        assert encoder["layers"]["output"]["bias"].spec == P()
        assert encoder["embeddings"]["norm"]["scale"].spec == P()
    assert places["step"].spec == P()


def test_the_first_matching_rule_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = ((r"kernel$", P("fsdp")), (r"a/kernel$", P(None, "fsdp")), (r"", P()))
    tree = {"a": {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(3)}}
    monkeypatch.setattr(distributed, "PARAMETER_RULES", rules)
    assert shardings(make_mesh(2), tree)["a"]["kernel"].spec == P("fsdp")
    assert shardings(make_mesh(2), tree)["a"]["bias"].spec == P()
    monkeypatch.setattr(distributed, "PARAMETER_RULES", (rules[1], rules[0], rules[2]))
    assert shardings(make_mesh(2), tree)["a"]["kernel"].spec == P(None, "fsdp")


def test_a_size_that_fsdp_does_not_divide_is_named() -> None:
    tree = {"layers": {"output": {"kernel": jnp.zeros((2, 6, 4))}}}
    with pytest.raises(ValueError, match=r"layers/output/kernel \(2, 6, 4\): 6 is not divisible by mesh.fsdp = 4"):
        shardings(make_mesh(4), tree)
    assert shardings(make_mesh(2), tree)["layers"]["output"]["kernel"].spec == P(None, "fsdp", None)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_shard_batch_splits_rows_over_all_devices_and_loses_none(fsdp: int) -> None:
    mesh, batch = make_mesh(fsdp), make_batch(8, 2)
    found = shard_batch(mesh, batch)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(batch), strict=True):
        assert leaf.sharding == by_row(mesh)
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {expected.shape[0] // 8}
        np.testing.assert_array_equal(leaf, expected)


def test_program_counts_shapes() -> None:
    double = Program(lambda x: 2 * x)
    for size in (2, 2, 3, 2, 3):
        np.testing.assert_array_equal(double(jnp.ones(size)), np.full(size, 2.0))
    assert double.count == 2


def test_one_process_needs_no_coordinator() -> None:
    initialize()
    assert jax.process_count() == 1


WORKER = """
import json, sys
from jaxret.distributed import initialize
rank, coordinator = int(sys.argv[1]), sys.argv[2]
initialize(coordinator, num_processes=2, process_id=rank)
import jax
from tests.tiny import SELF_CONTRASTIVE, run_steps
assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 4, 8)
print(json.dumps(run_steps(SELF_CONTRASTIVE, fsdp=2)))
"""


def two_processes() -> list[Any]:
    """What each of two processes with four devices prints."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{found.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(REPOSITORY)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), coordinator],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.slow
def test_two_processes_are_one() -> None:
    """Loss and gradient norm of three steps with dropout, each process holding half of the rows."""
    expected = run_steps(SELF_CONTRASTIVE, fsdp=2)
    first, second = two_processes()
    assert first == second, "both processes see the same global metrics"
    assert len(expected) == len(first) == 3
    for found, wanted in zip(first, expected, strict=True):
        for name in ("loss", "gradient_norm"):
            assert abs(found[name] - wanted[name]) <= 2e-6 * wanted[name]
    assert abs(expected[0]["loss"] - expected[1]["loss"]) > 1e-3, "control: another step, another loss"
