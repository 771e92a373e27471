"""Check whether this machine can train with a config: platform, mesh, batch, precision, attention, memory, checkpoints,
and a bucket (`jaxret doctor --config=NAME --bucket=ADDRESS`).

The training step of the config's longest batch is compiled for the devices of this process. Weights and data are not
read.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from ml_collections import ConfigDict

from jaxret.data.tokens.batches import padded_batch_size
from jaxret.experiments.doctor import Check, available_memory, check_backend, checks_of_machine, product_rate
from jaxret.models.encoders.fused import ATTENTION_PLATFORMS, require_kernel
from jaxret.models.encoders.pretrained import resolve_encoder
from jaxret.models.retriever_model import COMPUTE_DTYPES
from jaxret.parallel.processes import require_platform
from jaxret.plan.advice import memory_changes
from jaxret.plan.programs import (
    AbstractProgram,
    checked_retriever,
    encoder_directory,
    longest_batch,
    training_program,
    with_stated_settings,
)
from jaxret.runs.run import stored_config
from jaxret.runs.workdir import Workdir
from jaxret.storage.buckets.address import is_bucket_address
from jaxret.storage.buckets.bucket import Bucket, BucketError
from jaxret.storage.buckets.working_copy import shown_path
from jaxret.training.train_state import checkpoint_trees, make_update_rule

RATE_SECONDS = 0.3  # time for which a product of a type is repeated
SLOWER = 1.5  # a type is noted if its products take at least this many times as long as the fastest type's
CHECKPOINTS = 3  # number of checkpoints on disk at the same time: the best, the last, and one that is being written


def checks_of_request(
    config: ConfigDict | None, workdir: str = "", coordinator: str = "", bucket: str = ""
) -> Iterator[Check]:
    """Yield the checks of this machine, of a bucket, and of training with a config.

    Args:
        config: the config of the job; None for the config of a run in `workdir`.
        workdir: folder of a run, which need not exist; "" for the current folder.
        coordinator: HOST:PORT of a job's first process; "" for no check.
        bucket: address of a folder in a bucket; "" for `workdir`, if that is in a bucket.
    """
    run = Workdir(workdir or ".")
    encoder = run.encoder if workdir and run.config.exists() else None
    if config is None and encoder:
        config = stored_config(run)
    # The config may exclude devices, so its platform is checked before `check_backend`.
    wrong_platform = check_platform(config) if config else None
    no_devices = check_backend()
    yield from checks_of_machine(workdir, coordinator)
    address = shown_path(workdir)
    if bucket or is_bucket_address(address):
        yield check_bucket(bucket or address)
    if wrong_platform:
        yield wrong_platform  # the other checks of the config would examine the wrong devices
    elif config is not None and not no_devices:
        yield from checks_of_job(config, encoder, workdir)


def checks_of_job(config: ConfigDict, encoder: Path | None = None, workdir: str = "") -> Iterator[Check]:
    """Yield the checks of training with a config on the devices of this process.

    Args:
        config: the config of the job.
        encoder: directory of the encoder of a run that has begun; None for encoder.checkpoint.
        workdir: folder of the run; "" for the current folder.
    """
    devices = jax.local_devices()
    platform = devices[0].platform
    size = 512 if platform == "cpu" else 4096
    yield (mesh := check_mesh(config, len(devices)))
    yield check_batch(config, _all_devices(config, len(devices)) // config.mesh.tensor)
    rates = {name: product_rate(name, size, RATE_SECONDS) for name in COMPUTE_DTYPES}
    yield check_precision(config.encoder.dtype, rates)
    yield check_attention_choice(config.encoder.attention, platform)
    if encoder is None:
        yield check_encoder(config.encoder.checkpoint, config.encoder.download)
    program = None if mesh.fatal else _step_program(config, encoder, devices)
    if isinstance(program, Check):
        yield program
    elif program is not None:
        yield check_step_memory(config, program, devices)
        yield check_checkpoints(config, program, workdir)


def _all_devices(config: ConfigDict, local: int) -> int:
    """Return the number of devices of all processes of a job, if each process has `local` devices."""
    return local * max(config.mesh.num_processes, 1)


def check_platform(config: ConfigDict) -> Check | None:
    """Return a failed check if JAX's devices are not of the platform in mesh.platform, else None."""
    try:
        require_platform(config.mesh.platform, "mesh.platform")
    except ValueError as error:
        return Check("platform", config.mesh.platform, str(error), fatal=True)
    except (AssertionError, RuntimeError):  # JAX has no devices, which `check_backend` reports
        pass
    return None


def check_mesh(config: ConfigDict, local: int) -> Check:
    """Return a check of mesh.tensor and mesh.fsdp with the devices of all processes, if each has `local` devices."""
    devices, tensor = _all_devices(config, local), config.mesh.tensor
    if tensor < 1 or local % tensor:
        problem = f"mesh.tensor is {tensor}; it must divide the number of devices of a process, {local}"
        return Check("mesh", f"{devices} devices", problem, fatal=True)
    devices //= tensor
    fsdp = config.mesh.fsdp or devices
    groups = f"{devices} device{'s' if devices > 1 else ''}" if tensor == 1 else f"{devices} x {tensor} devices"
    value = f"{groups}, parameters {f'split over {fsdp}' if fsdp > 1 else 'whole on each'}"
    if fsdp < 1 or devices % fsdp:
        divisors = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        problem = f"mesh.fsdp is {fsdp}; it must divide the number of devices: set it to one of {divisors}"
        return Check("mesh", value, problem, fatal=True)
    return Check("mesh", value)


def check_batch(config: ConfigDict, devices: int) -> Check:
    """Return a check of the batch, whose queries are divided between the devices."""
    batch, chunk = config.train.batch_size, config.train.chunk_size
    rows = padded_batch_size(batch, devices)
    negatives = config.data.negatives if config.task == "retrieval" else 0
    value = f"{batch} queries" + (f" with {negatives} negatives each" if negatives else "")
    value += f", {rows // devices} on each device" + (f", {chunk} at a time" if 0 < chunk < batch else "")
    remedy = f"use train.batch_size={rows}, or a smaller multiple of {devices}"
    return Check("batch", value, f"{rows - batch} of {rows} rows are empty; {remedy}" if rows != batch else "")


def check_precision(dtype: str, rates: Mapping[str, float]) -> Check:
    """Return a check of encoder.dtype; `rates` is type -> GFLOP/s on this machine."""
    if dtype not in rates:
        problem = f"encoder.dtype is {dtype!r}; it must be one of {', '.join(rates)}"
        return Check("precision", dtype, problem, fatal=True)
    value = f"{dtype}; products here: " + ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in rates.items())
    best = max(rates, key=lambda name: rates[name])
    effect = "it rounds operands of products" if best == "bfloat16" else "it is also more exact"
    problem = f"{best} is {rates[best] / rates[dtype]:.1f} times as fast here; use encoder.dtype={best} ({effect})"
    return Check("precision", value, problem if rates[best] > SLOWER * rates[dtype] else "")


def check_attention_choice(attention: str, platform: str) -> Check:
    """Return a check of encoder.attention with JAX's platform."""
    if attention not in ATTENTION_PLATFORMS:
        problem = f"encoder.attention is {attention!r}; it must be one of {', '.join(ATTENTION_PLATFORMS)}"
        return Check("attention", attention, problem, fatal=True)
    try:
        require_kernel(attention, platform)
    except ValueError:
        hardware = ATTENTION_PLATFORMS[attention].upper()
        problem = f"its kernel needs a {hardware}, but JAX runs on a {platform.upper()}; use encoder.attention=plain"
        return Check("attention", attention, problem, fatal=True)
    kernels = [name for name, hardware in ATTENTION_PLATFORMS.items() if hardware == platform]
    note = f"; the fused kernel of a {platform.upper()} is {kernels[0]}" if kernels else ""
    return Check("attention", attention + note)


def check_encoder(checkpoint: str, download: bool) -> Check:
    """Return a check of encoder.checkpoint: its files must be on this machine, or may be downloaded later."""
    if not checkpoint:
        return Check("encoder", "random weights")
    try:
        return Check("encoder", str(resolve_encoder(checkpoint)))
    except (FileNotFoundError, ValueError) as error:
        if download:
            return Check("encoder", f"{checkpoint}, to be downloaded (encoder.download)")
        return Check("encoder", checkpoint, str(error), fatal=True)


def _step_program(config: ConfigDict, encoder: Path | None, devices: list[jax.Device]) -> AbstractProgram | Check:
    """Return the program of a training step on these devices, or a check that says why it cannot be made."""
    if config.task != "retrieval":
        return Check("memory of a step", f"not computed for task {config.task!r}")
    if config.train.steps == 0:
        return Check("memory of a step", "not computed: train.steps is 0")
    try:
        config = config if encoder else with_stated_settings(config)
        directory = encoder or encoder_directory(config.encoder.checkpoint)[0]
        retriever = checked_retriever(config, directory)
        if config.mesh.coordinator:
            plan = "jaxret plan --config=NAME --topology=... compiles it for chips of several hosts"
            return Check("memory of a step", f"not computed, because only a part of the job's devices is here; {plan}")
        return training_program(config, directory, longest_batch(config, retriever, len(devices)), devices)
    except FileNotFoundError:  # `check_encoder` has reported it
        return Check("memory of a step", "not computed without the encoder's config.json")
    except ValueError as error:
        return Check("settings", "not valid for this encoder and these devices", str(error), fatal=True)


def check_step_memory(config: ConfigDict, program: AbstractProgram, devices: list[jax.Device]) -> Check:
    """Return a check of the memory that the training step, compiled for these devices, needs."""
    try:
        needs = program.program.trace(*program.arguments).lower().compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:  # compilers of TPUs refuse a program that does not fit
        cause = next(iter(str(error).strip().splitlines()), "")
        return Check("memory", "the step cannot be compiled", f"{cause}; {_less_memory(config)}", fatal=True)
    need = needs.argument_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
    need += needs.temp_size_in_bytes + needs.generated_code_size_in_bytes
    if devices[0].platform == "cpu":  # all CPU devices share the machine's memory
        return check_fit(config, need * len(devices), available_memory())
    statistics = devices[0].memory_stats() or {}
    return check_fit(config, need, statistics.get("bytes_limit"))


def check_fit(config: ConfigDict, need: int, usable: int | None) -> Check:
    """Return a check of whether a step fits a device. `need` and `usable` are bytes; None: unknown."""
    value = f"a step of the longest batch needs {need / 1e9:.1f} GB"
    if usable is None:
        return Check("memory of a step", value)
    problem = f"it does not fit; {_less_memory(config)}" if need > usable else ""
    return Check("memory of a step", f"{value}; {usable / 1e9:.1f} GB can be used", problem, bool(problem))


def _less_memory(config: ConfigDict) -> str:
    """Return a remedy: the changes of config keys that reduce the needed memory."""
    changes = [change for change in memory_changes(config, jax.local_device_count()) if len(change) == 1]
    keys = [f"{key}={value}" for change in changes for key, value in change.items()]
    smaller = f"train.batch_size={max(1, config.train.batch_size // 2)}"
    return f"these keys need less memory: {', '.join([*keys, smaller])}; add some to this command (--config.KEY=VALUE)"


def check_checkpoints(config: ConfigDict, program: AbstractProgram, workdir: str) -> Check:
    """Return a check of the free space for checkpoints on the workdir's disk."""
    leaves = jax.tree.leaves(checkpoint_trees(program.arguments[0], make_update_rule(config)))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    folder = Path(workdir or ".").absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    value = f"{size / 1e9:.2f} GB each, {free / 1e9:,.1f} GB free"
    if free >= CHECKPOINTS * size:
        return Check("checkpoints", value)
    demand = f"{CHECKPOINTS} are on disk at the same time, {CHECKPOINTS * size / 1e9:.1f} GB"
    return Check("checkpoints", value, f"{demand}; free some space, or choose another --workdir", fatal=True)


def check_bucket(address: str) -> Check:
    """Return a check of a bucket, which writes an object, replaces it under conditions, and deletes it."""
    try:
        bucket = Bucket(address)
    except ValueError as error:
        return Check("bucket", address, str(error), fatal=True)
    try:
        bucket.probe()
    except BucketError as error:
        problem = (
            f"{error}; the bucket must exist, and the credentials of jobs on this machine need rights to create, read, "
            "replace, list and delete objects in this folder"
        )
        return Check("bucket", address, problem, fatal=True)
    return Check("bucket", f"{address}: objects can be created, replaced if unchanged, and deleted")
