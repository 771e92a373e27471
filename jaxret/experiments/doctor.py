"""Check whether this machine can run jaxret: packages, devices, backends, disks (`jaxret doctor`).

Every check is a function of the values that it examines; `checks_of_machine` passes the values of this machine.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxret.models.encoders.attention import attend
from jaxret.models.encoders.fused import ATTENTION_PLATFORMS
from jaxret.models.encoders.layers import Compute, Dropout
from jaxret.models.encoders.layout import TokenLayout
from jaxret.parallel.chips import find_chip
from jaxret.parallel.events import emit
from jaxret.search.backends.select import BACKENDS, select_backend
from jaxret.search.vectors.self_check import self_check
from jaxret.storage.atomic import cache_folder, temporary_path
from jaxret.storage.buckets.address import is_bucket_address
from jaxret.storage.buckets.mounted_bucket import file_system
from jaxret.storage.buckets.working_copy import shown_path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers", "numpy")
FAISS = ("faiss-cpu", "faiss-gpu")
GPU_FILES, TPU_FILES = ("/dev/nvidia0", "/dev/kfd"), ("/dev/accel0", "/dev/vfio/0")
SPACE = 10 * 10**9  # bytes that a disk should have free: a corpus of a million passages has 3 GB of vectors
MEMORY = 4 * 10**9  # bytes that should be available: training BERT-base takes 2 GB for parameters and moments
PRODUCT_SECONDS = 0.5  # time for which a product is repeated
ATTENTION_ERROR = 0.02  # largest difference between attention kernels in bfloat16
NOT_AVAILABLE = "not available"  # first words of the value if this machine lacks the checked part
_LAST_PORT = 65535
NETWORK_SYSTEMS = ("fuse", "nfs", "cifs", "9p", "lustre")


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str  # the checked part
    value: str  # the result
    problem: str = ""  # why work fails or is slow, and the remedy; "" if nothing is wrong
    fatal: bool = False  # whether work fails

    @property
    def mark(self) -> str:
        """ "ok", "note" or "FAIL"."""
        return "FAIL" if self.fatal else "note" if self.problem else "ok"


def check_packages(versions: Mapping[str, str], faiss_problem: str = "") -> Iterator[Check]:
    """Yield checks of the installed packages. `versions` is distribution -> version; `faiss_problem` says why FAISS
    cannot be imported."""
    yield Check("Python", f"{platform.python_version()} on {platform.platform()}")
    missing_packages = [name for name in PACKAGES if name not in versions]
    value = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    problem = f"{', '.join(missing_packages)} missing; pip install -r requirements.txt" if missing_packages else ""
    yield Check("packages", value, problem, bool(missing_packages))
    if "jax" in versions and versions["jax"] != versions.get("jaxlib", versions["jax"]):
        problem = f"jax and jaxlib must have the same version; pip install --upgrade jaxlib=={versions['jax']}"
        yield Check("jaxlib", f"jax {versions['jax']}, jaxlib {versions['jaxlib']}", problem)
    builds = [name for name in FAISS if name in versions]
    value, problem = ", ".join(f"{name} {versions[name]}" for name in builds) or "not installed", ""
    if len(builds) > 1:
        problem = "the two overwrite each other; pip uninstall faiss-cpu faiss-gpu, then install one of them"
    elif not builds:
        problem = "XLA searches; approximate indexes are not available; pip install 'jaxret[faiss]'"
    elif faiss_problem:
        problem = f"it cannot be imported ({faiss_problem}); pip install --force-reinstall {value.split()[0]}"
    yield Check("FAISS", value, problem, bool(problem and builds))


def check_backend() -> Check | None:
    """Return a failed check if JAX has no devices, else None."""
    try:
        jax.local_devices()
    except (AssertionError, RuntimeError) as error:
        platforms = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        cause = (str(error).splitlines() or ["no such device"])[0]
        remedy = "unset JAX_PLATFORMS, or install JAX for it: requirements-gpu.txt, requirements-tpu.txt"
        return Check("devices", platforms, f"JAX has no device ({cause}); {remedy}", fatal=True)
    return None


def _faiss_problem() -> str:
    try:
        importlib.import_module("faiss")
    except ImportError as error:
        return " ".join(str(error).split())
    return ""


def check_devices(backend: str, kinds: list[str], exists: Callable[[str], bool] = os.path.exists) -> Check:
    """Return a check of JAX's devices. It fails if JAX uses the CPU although files of accelerators exist."""
    value = f"{len(kinds)} x {kinds[0]} ({backend})"
    environments = {"GPU": "requirements-gpu.txt in a fresh environment", "TPU": "requirements-tpu.txt"}
    for files, name in ((GPU_FILES, "GPU"), (TPU_FILES, "TPU")) if backend == "cpu" else ():
        if any(map(exists, files)):
            remedy = f"pip install -r {environments[name]}, or unset JAX_PLATFORMS"
            return Check("devices", value, f"there is a {name} that JAX does not use; {remedy}", fatal=True)
    if backend != "cpu" and find_chip(kinds[0]) is None:
        return Check("devices", value, "mfu is not printed; add the rates of this chip to jaxret/parallel/chips.py")
    return Check("devices", value)


def check_load(cores: int, load: float) -> Check:
    """Return a check of the cores of this process and the machine's load."""
    problem = "other processes run, so measured times are not reliable; end these processes, or measure later"
    return Check("CPU", f"{cores} cores, load {load:.1f}", problem if load > cores / 2 else "")


def check_memory(available: int | None) -> Check:
    """Return a check of the available memory in bytes; None if it is unknown."""
    if available is None:
        return Check("memory", "not known on this system")
    value = f"{available / 1e9:.1f} GB available"
    small = "little for training; a smaller train.batch_size, or train.chunk_size, needs less"
    return Check("memory", value, small if available < MEMORY else "")


def product_rate(dtype: str, size: int, seconds: float) -> float:
    """Return the GFLOP/s of products of matrices [size,size]: exact float32, or bfloat16 with float32 sums."""
    x = jnp.ones((size, size), dtype)
    precision = "highest" if dtype == "float32" else None
    multiply = jax.jit(partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32))
    multiply(x, x).block_until_ready()
    count, start = 0, time.perf_counter()
    while (duration := time.perf_counter() - start) < seconds or not count:
        multiply(x, x).block_until_ready()
        count += 1
    return 2 * size**3 * count / max(duration, 1e-9) / 1e9


def check_product(seconds: float = PRODUCT_SECONDS) -> Check:
    """Return a check of matrix products: their speed, and their difference from float64."""
    size = 512
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, size, size), dtype=np.float32)
    multiply = jax.jit(lambda x, y: jnp.matmul(x, y, precision="highest"))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = float(np.abs(np.asarray(multiply(a, b)) - exact).max() / np.abs(exact).max())
    value = f"{product_rate('float32', size, seconds):,.0f} GFLOP/s of float32, largest error {error:.0e}"
    if error < 1e-5:
        return Check("product", value)
    problem = "products are less exact than float32; unset NVIDIA_TF32_OVERRIDE and JAX_DEFAULT_MATMUL_PRECISION"
    return Check("product", value, problem, fatal=True)


def check_backends() -> Iterator[Check]:
    """Yield a check of every search backend, which compares it with float64 if it is installed."""
    for name, kind in BACKENDS.items():
        if (problem := kind.available()) is not None:
            yield Check(f"search by {name}", f"{NOT_AVAILABLE}: {problem}")
            continue
        backend = select_backend(name)
        try:
            self_check(backend)
        except RuntimeError as error:
            yield Check(f"search by {name}", backend.description, str(error), fatal=True)
        else:
            yield Check(f"search by {name}", f"{backend.description}: agrees with float64")


def check_attention(backend: str, interpret: bool = False) -> Iterator[Check]:
    """Yield a check that compares the fused attention kernel of a platform with plain attention. With `interpret`, XLA
    runs the kernel, so that any device can."""
    for name in (name for name, device in ATTENTION_PLATFORMS.items() if device == backend):
        query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 128, 4, 64), jnp.bfloat16)
        query = query / 8
        mask = jnp.arange(128) < jnp.array([[128], [77]])
        drop = Dropout(0.0, TokenLayout(mask)).bind({})
        compute = Compute(jnp.bfloat16, attention=name, interpret=interpret)
        try:
            output = attend(query, key, value, mask, drop, compute=compute)
        except Exception as error:
            yield Check(f"attention {name}", "cannot be computed", f"{error}; use encoder.attention=plain", fatal=True)
            continue
        plain = attend(query, key, value, mask, drop)
        difference = float(jnp.abs(jnp.where(mask[..., None], output - plain, 0)).max())
        problem = "" if difference <= ATTENTION_ERROR else "it differs too much; use encoder.attention=plain"
        yield Check(f"attention {name}", f"differs from plain by {difference:.1e}", problem, bool(problem))


def check_folder(name: str, folder: Path) -> Check:
    """Return a check of a folder to which jobs write: free space, permissions, locks, and renaming of directories."""
    ancestor = folder
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    probe = temporary_path(ancestor / "doctor")
    try:
        free = shutil.disk_usage(ancestor).free
        probe.mkdir()
        with open(probe / "file", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write("x")
            file.flush()
            os.fsync(file.fileno())
        new_probe = temporary_path(ancestor / "doctor")
        os.rename(probe, new_probe)
        probe = new_probe
    except OSError as error:
        return Check(name, str(folder), f"{error.strerror} ({ancestor}); choose another folder", fatal=True)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    kind = file_system(ancestor)
    value = f"{folder}: {free / 1e9:,.0f} GB free" + (f", {kind}" if kind.startswith(NETWORK_SYSTEMS) else "")
    problem = "little space for checkpoints and vectors; free some space, or choose another folder"
    return Check(name, value, problem if free < SPACE else "")


def check_coordinator(address: str) -> Check:
    """Return a check of a coordinator's address, HOST:PORT, whose host must be known. Nothing is sent to it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        problem = f"it must be HOST:PORT, such as 10.0.0.2:1234, with a port up to {_LAST_PORT}"
        return Check("coordinator", address, problem, fatal=True)
    try:
        numeric = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        problem = f"this machine does not know the host ({error.strerror}); give its address, such as 10.0.0.2:1234"
        return Check("coordinator", address, problem, fatal=True)
    return Check("coordinator", f"{address} is {numeric}")


def available_memory() -> int | None:
    """Return the bytes of memory that a new process can have; None if the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def checks_of_machine(workdir: str = "", coordinator: str = "") -> Iterator[Check]:
    """Yield all checks of this machine, of a run's folder, and of a coordinator's address if it is given."""
    versions = {
        name: distribution.version for distribution in metadata.distributions() if (name := distribution.name.lower())
    }
    yield from check_packages(versions, _faiss_problem())
    no_devices = check_backend()
    backend = "" if no_devices else jax.default_backend()
    yield no_devices or check_devices(backend, [device.device_kind for device in jax.local_devices()])
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    yield check_load(cores, os.getloadavg()[0])
    yield check_memory(available_memory())
    if backend:
        yield check_product()
        yield from check_backends()
        yield from check_attention(backend)
    yield check_folder("caches", cache_folder(""))
    yield check_folder("working copy" if is_bucket_address(shown_path(workdir)) else "workdir", Path(workdir or "."))
    if coordinator:
        yield check_coordinator(coordinator)


def report_check(check: Check) -> None:
    """Print a check with its problem, if any, and emit its event."""
    print(f"{check.mark:<4}  {check.name}: {check.value}", flush=True)
    if check.problem:
        print(f"      {check.problem}")
    emit("check", name=check.name, value=check.value, problem=check.problem, fatal=check.fatal, mark=check.mark)
