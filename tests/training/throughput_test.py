"""Throughput in a run's log: tokens counted by masks, FLOPs by the trace, and a clock that the tests set."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxret.parallel import chips, flops
from jaxret.parallel.mesh import make_mesh, shard_batch
from jaxret.training import throughput
from jaxret.training.loop import train
from jaxret.training.step import make_train_step
from jaxret.training.throughput import TIMED, ThroughputMeter, countable_step, ideal_seconds
from jaxret.training.train_state import UpdateRule, new_state
from tests.pipeline import tiny_config, write_data, write_encoder
from tests.tiny import DUAL_ENCODER, WITHOUT_DROPOUT, make_batch, make_objective
from tests.training.step_test import Trainer, stacked


def test_rates_cover_the_time_since_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 2.0)  # two seconds between any two readings
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    batch = make_batch(8, 2)
    real = int(batch.queries.mask.sum() + batch.passages.mask.sum())
    padded = batch.queries.ids.size + batch.passages.ids.size
    assert padded > real
    measured = ThroughputMeter(lambda _: 0.3)
    for steps in (4, 2):
        for _ in range(steps):
            measured.add(batch, jnp.int32(real))
        rates = measured.read()
        assert rates == pytest.approx(dict(zip(TIMED, (2 / steps, steps * real / 2, steps * padded / 2, steps * 0.15))))
    assert set(ThroughputMeter().read()) == set(TIMED) - {"mfu"}


@pytest.mark.daily("2")
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_tokens_of_a_step_are_those_of_all_devices(accumulate: int) -> None:
    trainer = Trainer("dual_encoder", "8x1", UpdateRule(accumulate=accumulate))
    batch = make_batch(8, 2) if accumulate == 1 else stacked(0, 1)
    _, values = trainer.step(trainer.state, shard_batch(trainer.mesh, batch, stacked=accumulate > 1))
    assert int(values["real_tokens"]) == batch.queries.mask.sum() + batch.passages.mask.sum()


@pytest.mark.exhaustive
def test_flops_are_counted_once_per_shape_without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is that of all devices, twice as many for two batches, and does not include recomputation."""
    monkeypatch.setitem(chips.DEVICE_KINDS, "cpu", "h100")
    counted: list[Any] = []

    def counting(traced: Any) -> flops.Flops:
        counted.append(traced)
        return flops.count_flops(traced)

    monkeypatch.setattr(throughput, "count_flops", counting)
    seconds = {}
    for accumulate in (1, 2):
        trainer = Trainer("dual_encoder", "8x1", UpdateRule(accumulate=accumulate))
        batch = shard_batch(
            trainer.mesh, stacked(*range(accumulate)) if accumulate > 1 else make_batch(8, 2), accumulate > 1
        )
        ideal = ideal_seconds(trainer.step, trainer.state, 8, "cpu")
        assert ideal is not None
        trainer.step(trainer.state, batch)
        programs = trainer.step.count
        seconds[accumulate] = ideal(batch)
        assert ideal(batch) == seconds[accumulate]
        assert (trainer.step.count, programs) == (1, 1)
    assert len(counted) == 2
    assert seconds[2] == pytest.approx(2 * seconds[1], rel=1e-6)
    products = flops.count_flops(trainer.step.trace(trainer.state, batch))
    rates = chips.CHIPS["h100"].rates
    assert seconds[2] == pytest.approx(sum(n / rates[kind.precision] for kind, n in products.items()) / 8)
    again = {flops.ProductKind(kind.part, "recomputation", kind.precision): n for kind, n in products.items()}
    monkeypatch.setattr(throughput, "count_flops", lambda _: products | again)
    assert ideal_seconds(trainer.step, trainer.state, 8, "cpu")(batch) == seconds[2]  # type: ignore[misc]
    assert ideal_seconds(trainer.step, trainer.state, 8, "NVIDIA H100 PCIe") is None


@pytest.mark.daily("cudnn")
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flash", pytest.param("cudnn", marks=pytest.mark.exhaustive)])
def test_attention_kernels_do_not_change_the_count(attention: str) -> None:
    """Products that a kernel recomputes do not count, and its hidden products do."""
    overrides = DUAL_ENCODER | {"encoder.dtype": "bfloat16", "encoder.attention_dropout": 0.0}
    mesh, optimizer = make_mesh(devices=jax.devices()[:1]), optax.sgd(0.1)

    def counted(kind: str) -> flops.Flops:
        objective = make_objective(overrides | {"encoder.attention": kind}, mesh, WITHOUT_DROPOUT)
        params = jax.eval_shape(objective.model.init, jax.random.key(0))
        state = jax.eval_shape(lambda params: new_state(params, optimizer, UpdateRule()), params)
        rest = optimizer, state, jax.random.key(0)
        step = make_train_step(objective, *rest)
        return flops.count_flops(countable_step(step, objective, *rest).trace(state, make_batch(8)))

    plain = counted("plain")
    assert sum(plain.values()) > 0
    assert counted(attention) == plain


@pytest.mark.daily("True")
@pytest.mark.slow
@pytest.mark.parametrize("chip_is_known", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_every_line_of_the_log_has_rates(chip_is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if chip_is_known:
        monkeypatch.setitem(chips.DEVICE_KINDS, jax.devices()[0].device_kind, "h100")
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    config = tiny_config(encoder, data, train__steps=2, data__dev="")
    assert train(config, tmp_path / "run", progress=False).programs == 1
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        assert {*TIMED} & line.keys() == ({*TIMED} if chip_is_known else {*TIMED[:-1]})
        assert all(math.isfinite(line[name]) and line[name] > 0 for name in TIMED if name in line)
        assert line["padded_tokens_per_second"] >= line["tokens_per_second"]
        assert "real_tokens" not in line
