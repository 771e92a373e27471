"""Whether a config fits the devices here, and the rights in a bucket: each problem is reported with its remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from jaxret.configs.base import get_config
from jaxret.experiments import doctor_job
from jaxret.experiments.doctor import Check
from jaxret.experiments.doctor_job import (
    check_attention_choice,
    check_batch,
    check_checkpoints,
    check_encoder,
    check_fit,
    check_mesh,
    check_precision,
    check_step_memory,
    checks_of_job,
    checks_of_request,
)
from tests.pipeline import REPOSITORY, environment, tiny_config, untrained_run, write_data, write_encoder
from tests.storage.buckets.fake_gcs import _Handler
from tests.storage.buckets.servers import gcs_server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("doctor")
    write_encoder(root / "encoder")
    write_data(root / "data")
    untrained_run(root / "run", root / "encoder", root / "data")
    return root


def run_doctor(*flags: str, variables: dict[str, str] | None = None) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit status, the events by name, and the text on standard error."""
    command = [sys.executable, "-m", "jaxret", "doctor", "--json", *flags]
    values = environment() | {k: v for k, v in (variables or {}).items() if k.startswith(("TENSORSTORE", "GCE"))}
    done = subprocess.run(command, cwd=REPOSITORY, env=values, capture_output=True, text=True, timeout=300)
    return done.returncode, {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}, done.stderr


def changed(config: ConfigDict, **keys: Any) -> ConfigDict:
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
    return config


@pytest.mark.exhaustive
def test_a_config_as_a_process(root: Path) -> None:
    flags = (f"--workdir={root}/new", "--config=mlr", f"--config.encoder.checkpoint={root}/encoder")
    short = ("--config.tokens.query_length=12", "--config.tokens.passage_length=24", "--config.head.mlr.chosen=1,3")
    status, checks, text = run_doctor(*flags, *short)
    assert status == 0, text
    assert checks["encoder"]["value"] == f"{root}/encoder"
    assert checks["memory of a step"]["mark"] == checks["checkpoints"]["mark"] == "ok"
    assert "a step of the longest batch needs" in checks["memory of a step"]["value"]
    assert not (root / "new").exists()

    wrong = ("--config.mesh.fsdp=3", "--config.encoder.attention=flash")
    status, checks, _ = run_doctor(*flags, *short, *wrong)
    assert status == 1
    assert {name for name, check in checks.items() if check["fatal"]} == {"mesh", "attention"}


@pytest.mark.exhaustive
def test_the_config_of_a_run_as_a_process(root: Path) -> None:
    status, checks, text = run_doctor(f"--workdir={root}/run")
    assert status == 0, text
    assert checks["batch"]["value"].startswith("8 queries")
    assert "memory of a step" in checks
    assert "encoder" not in checks  # the run has its own encoder


@pytest.mark.slow
def test_memory_of_the_step_is_compared(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int | None]] = []
    config = tiny_config(root / "encoder", root / "data")
    devices = jax.local_devices()[:1]
    monkeypatch.setattr(doctor_job, "available_memory", lambda: 10**12)

    def noted(_: ConfigDict, need: int, usable: int | None) -> Check:
        compared.append((need, usable))
        return Check("", "")

    monkeypatch.setattr(doctor_job, "check_fit", noted)
    for batch in (4, 64):
        program = doctor_job._step_program(changed(config, train__batch_size=batch), None, devices)
        assert not isinstance(program, Check)
        check_step_memory(config, program, devices)
        assert compared[-1][0] > sum(program.state.values())
    (small, usable), (large, _) = compared
    assert (usable, small < large) == (10**12, True)


def test_keys_that_need_less_memory_are_named() -> None:
    config = changed(get_config(), train__batch_size=64)
    check = check_fit(config, 10**10, 10**9)
    assert (check.fatal, "10.0 GB; 1.0 GB" in check.value) == (True, True)
    for key in ("encoder.recompute=layer", "train.chunk_size=8", "mesh.fsdp=8", "encoder.dtype=bfloat16"):
        assert key in check.problem
    assert "train.batch_size=32" in check.problem
    assert [check_fit(config, 10**9, 10**10).mark, check_fit(config, 10**9, None).mark] == ["ok", "ok"]


def test_a_mesh_divides_the_devices() -> None:
    assert check_mesh(changed(get_config(), mesh__fsdp=4), 8).mark == "ok"
    check = check_mesh(changed(get_config(), mesh__fsdp=3), 8)
    assert (check.fatal, "set it to one of 1, 2, 4, 8" in check.problem) == (True, True)
    assert check_mesh(changed(get_config(), mesh__fsdp=16, mesh__num_processes=2), 8).mark == "ok"


def test_a_batch_is_divided_between_devices() -> None:
    config = changed(get_config(), train__batch_size=10, train__chunk_size=5)
    assert check_batch(config, 2) == Check("batch", "10 queries with 1 negatives each, 5 on each device, 5 at a time")
    check = check_batch(config, 4)
    assert (check.mark, check.problem) == (
        "note",
        "2 of 12 rows are empty; use train.batch_size=12, or a smaller multiple of 4",
    )


def test_the_quicker_type_is_named() -> None:
    assert check_precision("float32", {"float32": 100.0, "bfloat16": 120.0}).mark == "ok"
    slow = check_precision("bfloat16", {"float32": 100.0, "bfloat16": 20.0})
    assert "float32 is 5.0 times as fast here; use encoder.dtype=float32" in slow.problem
    assert "use encoder.dtype=bfloat16" in check_precision("float32", {"float32": 1.0, "bfloat16": 8.0}).problem
    assert check_precision("float8", {"float32": 1.0}).fatal


def test_a_kernel_of_another_platform_fails() -> None:
    assert [check_attention_choice("plain", "cpu").mark, check_attention_choice("cudnn", "gpu").mark] == ["ok", "ok"]
    assert check_attention_choice("plain", "tpu").value == "plain; the fused kernel of a TPU is flash"
    check = check_attention_choice("flash", "cpu")
    assert (check.fatal, check.problem) == (
        True,
        "its kernel needs a TPU, but JAX runs on a CPU; use encoder.attention=plain",
    )
    assert check_attention_choice("flsh", "cpu").fatal


@pytest.mark.slow
def test_a_missing_encoder_and_contradicting_settings_fail(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_job, "RATE_SECONDS", 0.0)
    assert check_encoder("no/such", download=False).fatal
    assert check_encoder("no/such", download=True).value == "no/such, to be downloaded (encoder.download)"
    config = changed(tiny_config(root / "encoder", root / "data"), tokens__passage_length=4000)
    (check,) = (one for one in checks_of_job(config) if one.name == "settings")
    assert (check.fatal, "tokens.passage_length is 4000" in check.problem) == (True, True)
    other = changed(tiny_config(root / "encoder", root / "data"), mesh__platform="tpu")
    checks = {check.name: check for check in checks_of_request(other)}
    assert (checks["platform"].fatal, "mesh" in checks) == (True, False)


def test_a_disk_without_room_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(root / "encoder", root / "data")
    program = doctor_job._step_program(config, None, jax.local_devices())
    assert not isinstance(program, Check)
    assert check_checkpoints(config, program, str(root / "not/yet")).mark == "ok"
    full = type("Usage", (), {"free": 10})
    monkeypatch.setattr(doctor_job.shutil, "disk_usage", lambda _: full)
    assert check_checkpoints(config, program, "").fatal


class _ReadOnly(_Handler):
    """A server whose bucket "read-only" refuses writes."""

    def _write(self, bucket: str, *rest: Any) -> None:
        if bucket == "read-only":
            return self._reply(403, b'{"error": {"message": "no permission storage.objects.create"}}')
        return super()._write(bucket, *rest)


@pytest.mark.slow
def test_rights_in_a_bucket() -> None:
    script = """
from jaxret.experiments.doctor_job import check_bucket
assert check_bucket("gs://bucket/runs").mark == "ok"
assert "there is no such bucket" in check_bucket("gs://missing/runs").problem
assert "not the address of a folder in a bucket" in check_bucket("runs").problem
"""
    with gcs_server() as (server, variables):
        server.buckets, server.RequestHandlerClass = ("bucket", "read-only"), _ReadOnly
        status, checks, _ = run_doctor("--bucket=gs://read-only/runs", variables=variables)
        assert (status, "no permission" in checks["bucket"]["problem"]) == (1, True)
        assert "need rights to create, read, replace, list and delete objects" in checks["bucket"]["problem"]
        values = environment() | variables
        done = subprocess.run([sys.executable, "-c", script], env=values, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert not server.objects
