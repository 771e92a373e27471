"""mesh.tensor: devices share the products of each layer of a language model. Eight devices give the results of one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxret.models.encoders.pretrained import save_pretrained
from jaxret.parallel.mesh import make_mesh, parameter_spec, row_parts, shard_batch, shardings
from jaxret.runs.run import open_run
from jaxret.training.config_check import check_tensor
from jaxret.training.loop import train
from tests.pipeline import tiny_config, write_data, write_language_model
from tests.tiny import (
    GEMMA,
    LLAMA,
    MLR,
    WITHOUT_DROPOUT,
    distance,
    make_batch,
    make_objective,
    make_params,
    make_retriever,
    relative_error,
)
from tests.training.lora_test import Run

LAST: dict[str, Any] = {"head.token": "last", "loss.temperature": 4.0, "encoder.tied": True}
QWEN = dataclasses.replace(LLAMA, num_heads=4, num_kv_heads=2, attention_bias=True, mlp_bias=True, model_type="qwen3")
SHARED_KEYS = dataclasses.replace(GEMMA, num_heads=4, num_kv_heads=2)


def write_divisible_model(folder: Path) -> Path:
    """A language model whose number of heads and inner size can be divided by two."""
    write_language_model(folder)
    shapes = dataclasses.replace(QWEN, vocab_size=99, max_positions=40, mlp_bias=False)
    save_pretrained(folder, shapes, make_params(make_retriever(LAST, shapes))["encoder"])
    return folder


def gradient(settings: dict[str, Any], mesh: Any, encoder: Any, chunk_size: int = 0) -> tuple[float, Any]:
    objective = make_objective(settings, mesh, encoder, chunk_size)
    params = make_params(objective.model)
    params = jax.tree.map(jax.device_put, params, shardings(mesh, params))
    compute = jax.jit(jax.value_and_grad(lambda p, b, k: objective(p, b, k).loss))
    value, gradients = compute(params, shard_batch(mesh, make_batch(8)), jax.random.key(1))
    return float(value), jax.device_get(gradients)


@pytest.mark.daily("mlr, recompute")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "encoder", "fsdp", "chunk_size"),
    [
        pytest.param({}, QWEN, 2, 0, id="qwen3"),
        pytest.param({}, SHARED_KEYS, 1, 4, marks=pytest.mark.exhaustive, id="gemma, chunks"),
        pytest.param(
            MLR | {"encoder.recompute": "cheap"}, QWEN, 4, 0, marks=pytest.mark.exhaustive, id="mlr, recompute"
        ),
    ],
)
def test_value_and_gradients_equal_those_of_one_device(
    settings: dict[str, Any], encoder: Any, fsdp: int, chunk_size: int
) -> None:
    """The gradients of every parameter: kernels, biases, norms of heads, tables."""
    one = gradient(LAST | settings, make_mesh(1, jax.devices()[:1]), encoder, chunk_size)
    many = gradient(LAST | settings, make_mesh(fsdp, tensor=2), encoder, chunk_size)
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert distance(many[1], one[1]) < 1e-5


SHARED = {"mesh__tensor": 2, "mesh__fsdp": 2}
SIZES = ((1, 1, 1), (8, 2, 2))  # devices, mesh.fsdp, mesh.tensor


@pytest.mark.daily("two targets")
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"lora.dropout": 0.3, "encoder.recompute": "layer"}, id="dropout"),
        pytest.param(
            {"train.chunk_size": 4, "train.accumulate": 2}, marks=pytest.mark.exhaustive, id="chunks, accumulate"
        ),
        pytest.param({"lora.targets": ("q_proj", "down_proj")}, marks=pytest.mark.exhaustive, id="two targets"),
    ],
)
def test_steps_of_adapters_equal_those_of_one_device(settings: dict[str, Any]) -> None:
    settings = {"head.token": "last"} | settings
    one, many = (Run(settings, devices, fsdp, encoder=QWEN, tensor=tensor) for devices, fsdp, tensor in SIZES)
    assert relative_error(jax.device_get(many.state.params), jax.device_get(one.state.params)) < 1e-5
    for ours, theirs in zip(many.metrics, one.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    kernel = many.state.frozen["encoder"]["layers"]["narrow"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, QWEN.intermediate_size // 4, 16)}


@pytest.mark.daily("begun without the axis")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "first"),
    [
        pytest.param({"data__dev": "", "encoder__layers": 1}, {}, id="begun without the axis"),
        pytest.param(
            {"lora__rank": 2, "lora__alpha": 4.0, "lora__dropout": 0.2, "tokens__packing": True}, SHARED, id="lora"
        ),
        pytest.param({"optimizer__ema": 0.5}, SHARED, marks=pytest.mark.exhaustive, id="full"),
    ],
)
def test_a_run_stops_and_resumes_as_without_the_axis(
    more: dict[str, Any], first: dict[str, int], tmp_path: Path
) -> None:
    """The run has validation, and resumes from a checkpoint of another mesh; its vectors are the same, too."""
    encoder, data = write_divisible_model(tmp_path / "encoder"), write_data(tmp_path / "data")
    more = {**more, "head__token": "last", "optimizer__decay": "none", "train__batch_size": 16}
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    train(tiny_config(encoder, data, **more), alone, progress=False)
    for steps, mesh in ((3, first), (6, SHARED | {"mesh__fsdp": 4})):
        done = train(tiny_config(encoder, data, **more, **mesh, train__steps=steps), shared, progress=False)
    assert (done.resumed_from, done.step) == (3, 6)
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (alone, shared)]
    assert len(lines[0]) == len(lines[1])
    for expected, actual in zip(*lines, strict=True):
        for name in {"loss", "gradient_norm", "validation/average_rank"} & expected.keys():
            assert actual[name] == pytest.approx(expected[name], rel=1e-4), (expected["step"], name)
    assert any("validation/average_rank" in line for line in lines[0]) == ("data__dev" not in more)
    expected, actual = (jax.device_get(open_run(run).params) for run in (alone, shared))
    assert relative_error(actual, expected) < 1e-4


def test_parameters_follow_their_kernels() -> None:
    axes = ("fsdp", "tensor")
    columns = P(None, "fsdp", "tensor")
    assert parameter_spec("encoder/layers/attention/query/kernel", axes) == columns
    assert parameter_spec("opt_state/mu/encoder/layers/gate/kernel", axes) == columns
    assert parameter_spec("encoder/layers/gate/lora_b", axes) == P(None, None, "tensor")
    assert parameter_spec("encoder/layers/gate/lora_a", axes) == P()
    assert parameter_spec("encoder/layers/attention/key/bias", axes) == P(None, "tensor")
    assert parameter_spec("encoder/layers/narrow/kernel", axes) == P(None, ("tensor", "fsdp"), None)
    assert parameter_spec("encoder/layers/narrow/kernel", ("tensor",)) == P(None, "tensor", None)
    assert parameter_spec("encoder/layers/attention/output/lora_a", axes) == P(None, "tensor", None)
    assert parameter_spec("encoder/layers/attention/output/bias", axes) == P()
    assert parameter_spec("encoder/layers/attention/query_norm/scale", axes) == P()
    assert parameter_spec("encoder/word/embedding", axes) == P(None, "fsdp")


def test_meshes_with_a_tensor_axis() -> None:
    assert dict(make_mesh(2, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(0, tensor=4).shape) == {"data": 1, "fsdp": 2, "tensor": 4}, (
        "0 stands for all remaining devices"
    )
    assert row_parts(make_mesh(2, tensor=2)) == 4
    with pytest.raises(ValueError, match=r"mesh.tensor .*3; .*devices, 8"):
        make_mesh(tensor=3)
    with pytest.raises(ValueError, match=r"mesh.fsdp is 4 x mesh.tensor 4; it must divide"):
        make_mesh(4, tensor=4)


@pytest.mark.table
@pytest.mark.parametrize(
    ("encoder", "parts", "message"),
    [
        (WITHOUT_DROPOUT, 2, r"mesh.tensor .*2, .*language"),
        (LLAMA, 2, r"mesh.tensor .*2; .*encoder's num_key_value_heads, 1"),
        (dataclasses.replace(QWEN, intermediate_size=25), 2, "must divide the encoder's intermediate_size, 25"),
        (dataclasses.replace(QWEN, attention_dropout=0.1), 2, r"attention weights, .*0.1"),
    ],
)
def test_layers_that_cannot_be_split_are_refused(encoder: Any, parts: int, message: str) -> None:
    check_tensor(1, encoder)
    check_tensor(2, QWEN)
    with pytest.raises(ValueError, match=r"mesh.tensor is 2 and encoder.attention 'flash'"):
        check_tensor(2, QWEN, "flash")
    with pytest.raises(ValueError, match=message):
        check_tensor(parts, encoder)
