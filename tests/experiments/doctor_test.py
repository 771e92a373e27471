"""The checks of a machine: each problem is reported with its remedy, and the exit status says whether jobs will
fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxret.experiments import doctor
from jaxret.experiments.doctor import (
    PACKAGES,
    check_attention,
    check_coordinator,
    check_devices,
    check_folder,
    check_load,
    check_memory,
    check_packages,
    check_product,
    product_rate,
)
from tests.pipeline import REPOSITORY, environment, run_script

INSTALLED = dict.fromkeys(PACKAGES, "1.0") | {"faiss-cpu": "1.15"}


def jaxret_doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxret", "doctor", *flags]
    return subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_this_machine_as_a_process(tmp_path: Path) -> None:
    result = jaxret_doctor(f"--workdir={tmp_path}", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    checks = {check["name"]: check for check in map(json.loads, result.stdout.splitlines())}
    assert checks["product"]["mark"] == "ok"
    assert "agrees with float64" in checks["search by xla"]["value"]
    assert checks["workdir"]["value"].startswith(f"{tmp_path}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_failed_check_sets_the_exit_status() -> None:
    result = jaxret_doctor("--coordinator=no.such.host.invalid:1234")
    assert result.returncode == 1
    assert "FAIL  coordinator: no.such.host.invalid:1234\n      this machine does not know the host" in result.stdout


@pytest.mark.slow
def test_a_platform_without_devices_is_one_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    result = jaxret_doctor()
    assert result.returncode == 1, result.stderr
    assert "FAIL  devices: JAX_PLATFORMS=cuda\n      JAX has no device" in result.stdout
    assert "unset JAX_PLATFORMS" in result.stdout
    assert "caches: " in result.stdout, "the other checks still run"
    searched = run_script("-m", "jaxret", "probe", "data", "--workdir=run", "--model=package:no_such_package/x")
    assert "unexpected" not in searched.stderr


def test_packages_that_do_not_fit_are_named() -> None:
    assert [check.mark for check in check_packages(INSTALLED)] == ["ok", "ok", "ok"]
    both = list(check_packages(INSTALLED | {"faiss-gpu": "1.15"}))[-1]
    assert (both.fatal, "pip uninstall faiss-cpu faiss-gpu" in both.problem) == (True, True)
    other = next(check for check in check_packages(INSTALLED | {"jaxlib": "0.9"}) if check.name == "jaxlib")
    assert "must have the same version" in other.problem
    without = {name: version for name, version in INSTALLED.items() if name not in ("optax", "faiss-cpu")}
    marks = {check.name: check.mark for check in check_packages(without)}
    assert (marks["packages"], marks["FAISS"]) == ("FAIL", "note")
    assert "'jaxret[faiss]'" in next(check.problem for check in check_packages(without) if check.name == "FAISS")
    (broken,) = [check for check in check_packages(INSTALLED, "libcudart.so.12: not here") if check.name == "FAISS"]
    assert (broken.mark, "cannot be imported (libcudart.so.12" in broken.problem) == ("FAIL", True)


def test_an_accelerator_that_is_not_used_is_named() -> None:
    assert check_devices("cpu", ["cpu"], lambda _: False).mark == "ok"
    unused = check_devices("cpu", ["cpu"], lambda file: file == "/dev/nvidia0")
    assert (unused.mark, "requirements-gpu.txt" in unused.problem) == ("FAIL", True)
    assert "requirements-tpu.txt" in check_devices("cpu", ["cpu"], lambda file: file == "/dev/accel0").problem
    assert check_devices("gpu", ["NVIDIA H100 80GB HBM3"]).mark == "ok"
    assert check_devices("gpu", ["NVIDIA of tomorrow"]).mark == "note"


def test_a_busy_or_small_machine_is_noted() -> None:
    assert [check_load(4, 0.5).mark, check_load(4, 3.0).mark] == ["ok", "note"]
    assert [check_memory(10**11).mark, check_memory(10**9).mark, check_memory(None).mark] == ["ok", "note", "ok"]


def test_products_in_fewer_bits_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_product(0.01).mark == "ok"
    assert product_rate("bfloat16", 64, 0.0) > 0
    matmul = jnp.matmul
    rounded = lambda x, y, **_: matmul(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)).astype(jnp.float32)  # noqa: E731
    monkeypatch.setattr(doctor.jnp, "matmul", rounded)
    assert check_product(0.01).mark == "FAIL"


@pytest.mark.slow
def test_a_kernel_is_compared_with_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = check_attention("tpu", interpret=True)
    assert (check.name, check.mark) == ("attention flash", "ok")
    assert not list(check_attention("cpu"))
    monkeypatch.setattr(doctor, "ATTENTION_ERROR", 0.0)
    (check,) = check_attention("tpu", interpret=True)
    assert check.mark == "FAIL"
    (check,) = check_attention("tpu")  # there is no TPU here, and the kernel is not interpreted
    assert (check.mark, check.value) == ("FAIL", "cannot be computed")


def test_folders_are_checked(tmp_path: Path) -> None:
    assert check_folder("workdir", tmp_path / "not/yet/there").mark in ("ok", "note")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert check_folder("workdir", tmp_path / "file").mark == "FAIL"


def test_addresses_are_checked() -> None:
    assert check_coordinator("127.0.0.1:1234").mark == "ok"
    for wrong in ("localhost", "localhost:99999", "localhost:0"):
        problem = "it must be HOST:PORT, such as 10.0.0.2:1234, with a port up to 65535"
        assert check_coordinator(wrong).problem == problem
