"""Meshes, the placement of parameters, batches over devices, and two real processes against one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxret.data.formats import Corpus
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.shard_set import open_shards
from jaxret.parallel import mesh as mesh_module
from jaxret.parallel import processes
from jaxret.parallel.mesh import Program, make_mesh, row_sharding, shard_batch, shardings
from jaxret.parallel.processes import REQUIREMENTS, initialize_distributed, require_platform
from jaxret.parallel.rendezvous import RendezvousError
from jaxret.runs.run import open_run
from jaxret.training.loop import train
from tests.pipeline import (
    CLOCKS,
    REPOSITORY,
    command,
    free_address,
    tiny_config,
    together,
    train_arguments,
    write_data,
    write_encoder,
)
from tests.tiny import DUAL_ENCODER, I3, SELF_CONTRASTIVE, make_batch, make_retriever, run_steps
from tests.training.tensor_test import write_divisible_model


def test_meshes() -> None:
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1}
    assert dict(make_mesh(2).shape) == {"data": 4, "fsdp": 2}
    assert dict(make_mesh(0).shape) == {"data": 1, "fsdp": 8}, "0 stands for all devices"
    assert dict(make_mesh(1, jax.devices()[:3]).shape) == {"data": 3, "fsdp": 1}


@pytest.mark.parametrize("fsdp", [-1, 3, 16])
def test_fsdp_must_divide_the_devices(fsdp: int) -> None:
    with pytest.raises(ValueError, match=rf"mesh.fsdp .*{fsdp}; .*devices, 8"):
        make_mesh(fsdp)


def test_parameters_are_placed_by_the_rules() -> None:
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


def test_a_projection_to_the_vocabulary_is_split() -> None:
    params = jax.eval_shape(make_retriever(I3).init, jax.random.key(0))
    head = shardings(make_mesh(2), params)["passage_head"]
    assert head["vocabulary"]["kernel"].spec == P("fsdp", None)
    assert head["vocabulary_dense"]["kernel"].spec == P()


def test_the_first_matching_rule_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = ((r"kernel$", P("fsdp")), (r"a/kernel$", P(None, "fsdp")), (r"", P()))
    tree = {"a": {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(3)}}
    monkeypatch.setattr(mesh_module, "PARAMETER_RULES", rules)
    assert shardings(make_mesh(2), tree)["a"]["kernel"].spec == P("fsdp")
    assert shardings(make_mesh(2), tree)["a"]["bias"].spec == P()
    monkeypatch.setattr(mesh_module, "PARAMETER_RULES", (rules[1], rules[0], rules[2]))
    assert shardings(make_mesh(2), tree)["a"]["kernel"].spec == P(None, "fsdp")


def test_a_size_that_fsdp_does_not_divide_is_named() -> None:
    tree = {"layers": {"output": {"kernel": jnp.zeros((2, 6, 4))}}}
    with pytest.raises(ValueError, match=r"layers/output/kernel \(2, 6, 4\): 6 is not divisible by mesh.fsdp = 4"):
        shardings(make_mesh(4), tree)
    assert shardings(make_mesh(2), tree)["layers"]["output"]["kernel"].spec == P(None, "fsdp", None)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_shard_batch_splits_rows_over_all_devices_and_loses_none(fsdp: int) -> None:
    mesh, batch = make_mesh(fsdp), make_batch(8, 2)
    actual = shard_batch(mesh, batch)
    for leaf, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(batch), strict=True):
        assert leaf.sharding == row_sharding(mesh)
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {expected.shape[0] // 8}
        np.testing.assert_array_equal(leaf, expected)


def test_program_counts_shapes() -> None:
    double = Program(lambda x: 2 * x)
    for size in (2, 2, 3, 2, 3):
        np.testing.assert_array_equal(double(jnp.ones(size)), np.full(size, 2.0))
    assert double.count == 2


def test_one_process_needs_no_coordinator() -> None:
    initialize_distributed()
    assert jax.process_count() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1",), r"--coordinator=host:1 .*--num_processes=1 .*--process_id=0: .*process"),
        (("host:1", 2, 2), "--num_processes=2 and --process_id=2: every process needs"),
        (("host:1", 2, -1), "every process needs"),
        (("", 2, 0), "--num_processes=2 and --process_id=0 need --coordinator=HOST:PORT"),
        (("auto", 1, 1), "need --coordinator=HOST:PORT"),
        (("host", 2, 0), "--coordinator=host must be HOST:PORT"),
        (("host:port", 2, 0), "must be HOST:PORT"),
        (("host:1", 2, 0, 0), "--initialization_timeout=0 must be at least 1 second"),
    ],
)
def test_incomplete_settings_of_several_hosts(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        initialize_distributed(*arguments)


def test_an_unreachable_coordinator() -> None:
    address = free_address()
    with pytest.raises(RendezvousError, match=f"no process 0 at {address} within 1 s"):
        initialize_distributed(address, 2, 1, timeout=1)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_missing_processes() -> None:
    """The scripts end with one sentence and nothing else, where JAX would abort with a dump. Each of the two waits for
    another job."""
    first, second = free_address(), free_address()
    train = ["--config=configs/base.py", "--workdir=nowhere", f"--config.mesh.coordinator={first}"]
    train += ["--config.mesh.num_processes=3", "--config.mesh.initialization_timeout=1"]
    encode = ["--workdir=nowhere", "--corpus=x", f"--coordinator={second}", "--num_processes=3", "--process_id=1"]
    done = together(command("train.py", *train), command("encode.py", *encode, "--initialization_timeout=1"))
    assert done[0] == (1, "", f"error: processes 1, 2 of 3 did not come to {first} within 1 s\n")
    assert done[1] == (1, "", f"error: no process 0 at {second} within 1 s (Connection refused)\n")


SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "host[3-4]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(("hosts", "devices"), [(2, None), (1, [1])])
def test_auto_under_slurm(hosts: int, devices: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only task of a host has all of its devices, although JAX itself would give each task one."""
    settings = SLURM | {"SLURM_STEP_NUM_NODES": str(hosts), "SLURM_LOCALID": str(2 - hosts)}
    for name, value in {**settings, "JAX_COORDINATOR_PORT": "8476"}.items():
        monkeypatch.setenv(name, value)
    assert processes.slurm_task() == ("host3:8476", 2, 1, devices)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("node7,other3", "node7"),
        ("node[007-009,12],other3", "node007"),
        ("node[3,5]", "node3"),
        ("rack1-node[12]", "rack1-node12"),
        ("rack-1,rack-2", "rack-1"),
    ],
)
def test_the_first_host_of_a_slurm_step(hosts: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ports are those that JAX itself would choose: jobs with consecutive ids have different ones."""
    for name, value in {**SLURM, "SLURM_STEP_NODELIST": hosts, "SLURM_LOCALID": "0", "SLURM_JOB_ID": "4097"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JAX_COORDINATOR_PORT", raising=False)
    assert processes.slurm_task()[0] == f"{first}:61441"
    monkeypatch.setenv("SLURM_JOB_ID", "4095")
    assert processes.slurm_task()[0] == f"{first}:65535"


def test_which_process_is_a_task_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variables of srun are set. A shell in `salloc` has only some of them, and processes of an mpirun inside a
    task do not count."""
    for name, value in {**SLURM, "SLURM_LOCALID": "0"}.items():
        assert not processes.under_slurm()
        monkeypatch.setenv(name, value)
    assert processes.under_slurm()
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1:34911")
    assert not processes.under_slurm()


TASK = """
from jaxret.parallel.processes import initialize_distributed
initialize_distributed("auto")
import jax
print(jax.process_index(), jax.process_count(), jax.config.read("jax_cuda_visible_devices"))
"""


@pytest.mark.daily("1-devices1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "devices"), [pytest.param(2, ["all", "all"], marks=pytest.mark.exhaustive), (1, ["0", "1"])]
)
def test_two_tasks_under_slurm(hosts: int, devices: list[str]) -> None:
    step = SLURM | {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": str(hosts)}
    step["JAX_COORDINATOR_PORT"] = free_address().rpartition(":")[2]
    tasks = [step | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i * (2 - hosts))} for i in range(2)]
    settings = [[f"{name}={value}" for name, value in task.items()] for task in tasks]
    done = together(*(["env", *each, sys.executable, "-c", TASK] for each in settings))
    actual = [(status, output.split()) for status, output, _ in done]
    assert actual == [(0, [str(i), "2", devices[i]]) for i in range(2)], done


@pytest.mark.slow
def test_auto_without_a_known_platform() -> None:
    """It runs in a new process, because JAX detects the platform only before its first array."""
    code = "from jaxret.parallel.processes import initialize_distributed as start; start('auto')"
    ((status, _, message),) = together([sys.executable, "-c", code])
    assert status == 1
    assert "ValueError: --coordinator=auto: neither a TPU pod nor a task of srun was detected" in message


def test_a_missing_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform in ("", "cpu"):
        require_platform(platform, "mesh.platform")
    actual = r"mesh.platform is 'gpu', but JAX \(JAX_PLATFORMS is cpu\) reports: 8 of cpu \(cpu\)"
    with pytest.raises(ValueError, match=rf"{actual}. A GPU needs its driver and .* from requirements-gpu.txt"):
        require_platform("gpu", "mesh.platform")
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(ValueError, match=r"is 'tpu', but JAX reports: 8 of cpu .* requirements-tpu.txt"):
        require_platform("tpu", "mesh.platform")
    with pytest.raises(ValueError, match=r"--platform .*'cuda'; .*empty"):
        require_platform("cuda", "--platform")
    for file in REQUIREMENTS.values():
        assert (REPOSITORY / file).is_file()


WORKER = """
import json, sys
from jaxret.parallel.processes import initialize_distributed
rank, coordinator = int(sys.argv[1]), sys.argv[2]
initialize_distributed(coordinator, num_processes=2, process_id=rank)
import jax
from jaxret.runs.run import open_run
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.shard_set import open_shards
from jaxret.training.loop import train
from tests.pipeline import REPOSITORY, command, environment, tiny_config, train_arguments, write_data, write_encoder
from tests.tiny import DUAL_ENCODER, I3, SELF_CONTRASTIVE, run_steps
assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 4, 8)
packed = run_steps(DUAL_ENCODER, fsdp=8, packed=True)
print(json.dumps(run_steps(SELF_CONTRASTIVE, fsdp=2) + run_steps(DUAL_ENCODER, fsdp=8) + packed))
"""


@pytest.mark.exhaustive
def test_two_processes_equal_one() -> None:
    """Loss and gradient norm of three steps with dropout, each process with half of the rows; also with parameters
    split over both and gathered layer by layer, and with packed texts, which are padded in the single process."""
    expected = run_steps(SELF_CONTRASTIVE, fsdp=2) + 2 * run_steps(DUAL_ENCODER, fsdp=1)
    address = free_address()
    done = together(*([sys.executable, "-c", WORKER, str(rank), address] for rank in range(2)))
    assert [status for status, _, _ in done] == [0, 0], done
    first, second = (json.loads(output.splitlines()[-1]) for _, output, _ in done)
    assert first == second, "both processes see the same global metrics"
    assert len(expected) == len(first) == 9
    for actual, target in zip(first, expected, strict=True):
        for name in ("loss", "gradient_norm"):
            assert abs(actual[name] - target[name]) <= 2e-6 * target[name]
    assert abs(expected[0]["loss"] - expected[1]["loss"]) > 1e-3, "control: another step has another loss"


def logged(workdir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


MORE = {"train__accumulate": 2, "train__skip_nonfinite": 1, "optimizer__ema": 0.5}
ADAPTERS = {"lora__rank": 2, "lora__alpha": 4.0, "optimizer__learning_rate": 1e-2, "encoder__recompute": "layer"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("write", "more", "mesh"),
    [
        pytest.param(write_encoder, MORE, {}, id="whole"),
        pytest.param(write_encoder, ADAPTERS, {"mesh__fsdp": 8}, id="adapters, base split over both"),
        pytest.param(
            write_divisible_model,
            {**ADAPTERS, "head__token": "last"},
            {"mesh__fsdp": 4, "mesh__tensor": 2},
            id="layers of a language model shared by two devices each",
        ),
    ],
)
def test_two_processes_train_stop_resume_and_encode(
    write: Callable[[Path], Path], more: dict[str, Any], mesh: dict[str, int], tmp_path: Path
) -> None:
    """The scripts run as on two hosts that share a folder. One process gets a signal, and both save the same step.
    Metrics and vectors equal those of one uninterrupted process, with all options of a step."""
    encoder, data = write(tmp_path / "encoder"), write_data(tmp_path / "data")
    more = {**more, "validation__corpus": str(data)}
    options: dict[str, Any] = {"train__steps": 40, "train__checkpoint_every": 10, **more}
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    train(tiny_config(encoder, data, **options), alone, progress=False)
    encode_corpus(open_run(alone), Corpus.open(data), progress=False)

    def training() -> list[list[str]]:
        job = {"mesh__coordinator": free_address(), "mesh__num_processes": 2, **mesh}
        each = [train_arguments(encoder, data, shared, **options, **job, mesh__process_id=rank) for rank in range(2)]
        return [command("train.py", *arguments) for arguments in each]

    def stop(workers: list[subprocess.Popen[str]]) -> None:
        while not (shared / "checkpoints" / "10").exists() and all(worker.poll() is None for worker in workers):
            time.sleep(0.001)  # pause between two looks at the files
        workers[1].send_signal(signal.SIGTERM)

    stopped = together(*training(), stop=stop)
    assert [status for status, _, _ in stopped] == [143, 143], stopped
    reached = max(int(p.name) for p in (shared / "checkpoints").iterdir() if p.name.isdigit())
    assert 10 <= reached < 40, "it was stopped in the middle of the run"
    resumed = together(*training())
    assert [status for status, _, _ in resumed] == [0, 0], resumed
    actual, expected = logged(shared), logged(alone)
    assert [line.keys() for line in actual] == [line.keys() for line in expected]
    for line, target in zip(actual, expected, strict=True):
        for name, value in target.items():
            assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-4), (line["step"], name)
    assert any("validation/nDCG@10" in line for line in expected)

    address = free_address()
    flags = [f"--workdir={shared}", f"--corpus={data}", f"--coordinator={address}", "--num_processes=2"]
    encoded = together(*(command("encode.py", *flags, f"--process_id={rank}") for rank in range(2)))
    assert [status for status, _, _ in encoded] == [0, 0], encoded
    assert any("passages are in" in output for _, output, _ in encoded)
    whole, parts = (open_shards(workdir / "embeddings" / "data") for workdir in (alone, shared))
    rows = range(whole.total_rows)
    assert parts.ids(rows) == whole.ids(rows)
    assert len(parts.shards) > 2
    shared_vectors, own_vectors = (np.concatenate([vectors for _, vectors in shards]) for shards in (parts, whole))
    np.testing.assert_allclose(shared_vectors, own_vectors, atol=1e-3)
    assert np.abs(np.diff(own_vectors[:, 0], axis=0)).max() > 0.05, "control: rows differ by more than the tolerance"
