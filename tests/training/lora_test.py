"""LoRA: adapters and head are trained, while the base does not change and is in no checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.lora import ADAPTER, BASE, make_adapters, merge_adapters, with_adapters
from jaxret.models.partition import divide_parameters, join_parameters
from jaxret.parallel.mesh import make_mesh, shard_batch
from jaxret.plan.hlo import arrays, collectives, parse_hlo
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_run
from jaxret.storage.checkpoint import Checkpoints
from jaxret.training.loop import train
from jaxret.training.optimizers import check_parameters, make_optimizer
from jaxret.training.starting_weights import init_state
from jaxret.training.step import make_train_step
from jaxret.training.train_state import TrainState, checkpoint_trees, make_update_rule, restore_state
from tests.pipeline import tiny_config, write_data, write_encoder
from tests.tiny import (
    BERT,
    GEMMA,
    I3,
    LLAMA,
    MODERNBERT,
    OPTIMIZER,
    T5,
    WITHOUT_DROPOUT,
    make_batch,
    make_config,
    make_objective,
    make_params,
    make_retriever,
    make_tokens,
    relative_error,
)
from tests.training.frozen_test import FIRST_MOMENT, paths
from tests.training.reading_test import collectives as traffic

LORA: dict[str, Any] = {
    "lora.rank": 2,
    "lora.alpha": 4.0,
    "lora.base_dtype": "float32",
    "encoder.tied": True,
    "loss.temperature": 4.0,
}
LAST: dict[str, Any] = {"head.token": "last"}


class Run:
    """Three training steps with adapters on a mesh."""

    def __init__(
        self,
        settings: dict[str, Any],
        devices: int = 1,
        fsdp: int = 1,
        steps: int = 3,
        encoder: Any = WITHOUT_DROPOUT,
        tensor: int = 1,
    ) -> None:
        settings = LORA | settings | OPTIMIZER
        config, mesh = make_config(settings), make_mesh(fsdp, jax.devices()[:devices], tensor)
        self.rule = make_update_rule(config)
        objective = make_objective(settings, mesh, encoder, config.train.chunk_size)
        self.objective = dataclasses.replace(objective, model=with_adapters(objective.model, config.lora))
        self.optimizer, _ = make_optimizer(config.optimizer, total_steps=10)
        plain = make_retriever({key: value for key, value in settings.items() if "lora" not in key}, encoder)
        self.base = jax.tree.map(np.array, make_params(plain))["encoder"]
        self.state = init_state(config, mesh, self.objective.model, self.base, self.optimizer)
        self.start = jax.device_get(self.state.weights)
        self.program = make_train_step(self.objective, self.optimizer, self.state, jax.random.key(9), self.rule)
        self.metrics: list[dict[str, Any]] = []
        for seed in range(steps):
            self.state, metrics = self.program(self.state, self.batch(seed))
            self.metrics.append(jax.device_get(metrics))

    def batch(self, seed: int) -> Any:
        pseudo = self.objective.model.module.head.pseudo_query_length()
        batch = make_batch(8, 2, seed, pseudo_queries=bool(pseudo))
        if (count := self.rule.accumulate) > 1:
            batch = jax.tree.map(lambda x: np.stack([x] * count), batch)
        return shard_batch(self.objective.mesh, batch, stacked=self.rule.accumulate > 1)


def test_only_adapters_are_trained_and_saved(tmp_path: Path) -> None:
    run = Run({"optimizer.ema": 0.5})
    trained, base = divide_parameters(run.start, BASE)
    assert paths(base) == {f"encoder/{path}" for path in paths(run.base)}
    assert paths(run.state.params) == paths(trained)
    assert len(paths(trained)) == 2 * 6, "six dense layers have A and B"
    assert {path.partition(FIRST_MOMENT)[2] for path in paths(run.state.opt_state) if FIRST_MOMENT in path} == paths(
        trained
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.state.frozen["encoder"]), run.base)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), jax.device_get(run.state.params), trained)
    assert min(jax.tree.leaves(moved)) > 1e-5
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, *checkpoint_trees(run.state, run.rule))
        checkpoints.wait()
        assert not checkpoints.holds(3, "params/encoder/layers/attention/query/kernel")
        assert checkpoints.holds(3, "params/encoder/layers/attention/query/lora_a")
        arguments = run.objective.mesh, run.objective.model, run.optimizer, run.rule
        restored = restore_state(checkpoints, 3, *arguments, base={"encoder": run.base})
    for field in dataclasses.fields(TrainState):
        if field.name in ("params", "opt_state", "ema", "frozen"):
            ours, theirs = getattr(restored, field.name), getattr(run.state, field.name)
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
def test_new_adapters_change_nothing_and_are_initialized_as_in_peft() -> None:
    run = Run({}, steps=0)
    head, tokens = run.objective.model, make_tokens(4, 6)
    plain = make_retriever({"encoder.tied": True}, WITHOUT_DROPOUT)
    ours = head.encode(run.start, tokens, "passage").vectors
    theirs = plain.encode({"encoder": run.base}, tokens, "passage").vectors
    np.testing.assert_array_equal(ours, theirs)
    a = run.start["encoder"]["layers"]["output"]["lora_a"]
    assert a.shape == (BERT.num_layers, BERT.intermediate_size, 2)
    assert 0.9 * BERT.intermediate_size**-0.5 < np.abs(a).max() <= BERT.intermediate_size**-0.5
    assert not np.array_equal(a[0], a[1]), "each layer draws other numbers"


@pytest.mark.daily("bert")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "encoder"),
    [
        pytest.param({}, WITHOUT_DROPOUT, id="bert"),
        pytest.param(LAST, LLAMA, marks=pytest.mark.exhaustive, id="llama"),
        pytest.param(LAST, GEMMA, marks=pytest.mark.exhaustive, id="gemma"),
        pytest.param({"head.token": "mean"}, T5, marks=pytest.mark.exhaustive, id="t5"),
        pytest.param({}, MODERNBERT, marks=pytest.mark.exhaustive, id="modernbert"),
    ],
)
def test_merged_weights_give_the_vectors_of_adapters(settings: dict[str, Any], encoder: Any) -> None:
    """The adapters are drawn: at the start of training, they change nothing."""
    run = Run(settings, encoder=encoder, steps=0)
    config = make_config(LORA | settings)
    adapters = make_adapters(config.lora, encoder)
    assert adapters is not None
    drawn, _ = divide_parameters(make_params(run.objective.model), BASE)
    weights = join_parameters(drawn, divide_parameters(run.start, BASE)[1])
    merged = jax.tree.map(jnp.asarray, merge_adapters(jax.device_get(weights), adapters.scaling))
    plain, tokens = make_retriever(settings | {"encoder.tied": True}, encoder), make_tokens(4, 6)
    ours = jax.jit(lambda p: run.objective.model.encode(p, tokens, "passage").vectors)(weights)
    encode = jax.jit(lambda p: plain.encode(p, tokens, "passage").vectors)
    np.testing.assert_allclose(encode(merged), ours, rtol=1e-5, atol=1e-5)
    before = encode({"encoder": run.base})
    assert np.abs(before - ours).max() > 1e-3, "control: the adapters change the vectors"


@pytest.mark.daily("plain")
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"train.chunk_size": 4, "train.accumulate": 2}, id="chunks"),
        pytest.param({"lora.dropout": 0.3}, marks=pytest.mark.exhaustive, id="dropout"),
        pytest.param({"encoder.recompute": "layer"}, marks=pytest.mark.exhaustive, id="recompute"),
        pytest.param(I3, marks=pytest.mark.exhaustive, id="i3"),
    ],
)
def test_eight_devices_equal_one(settings: dict[str, Any]) -> None:
    one, many = Run(settings), Run(settings, 8, 4)
    assert relative_error(jax.device_get(one.state.params), jax.device_get(many.state.params)) < 1e-5
    for ours, theirs in zip(one.metrics, many.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.daily("plain")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "times"),
    [
        pytest.param({}, 2, marks=pytest.mark.exhaustive, id="plain"),  # each side is gathered once and kept
        # Each side is gathered once forward and once backward.
        pytest.param({"encoder.recompute": "layer"}, 4, id="recompute"),
        # Each of two chunks of a side is gathered three times. Of two layers, the last is gathered only twice, because
        # its result is not needed again.
        pytest.param({"encoder.recompute": "layer", "train.chunk_size": 4}, 2 * 2 * 2.5, id="chunks"),
        pytest.param({"encoder.recompute": "layer", "train.accumulate": 3}, 4 * 3, id="accumulate"),
    ],
)
def test_the_base_is_gathered_in_the_loop_over_layers(settings: dict[str, Any], times: float) -> None:
    """The base is gathered in bfloat16, its tables once."""
    low = {"lora.base_dtype": "bfloat16", "encoder.dtype": "bfloat16"}
    run = Run(low | settings, 4, 4, steps=0)
    program = run.program.trace(run.state, run.batch(0)).jaxpr.jaxpr
    frozen = jax.tree_util.tree_leaves_with_path(run.state.frozen)
    tables, kernels = (
        sum(2 * leaf.size for path, leaf in frozen if path[-1].key == name) for name in ("embedding", "kernel")
    )
    gathered = {kind: count for kind, count in traffic(program).items() if kind[0] == "all_gather"}
    assert gathered == {("all_gather", "bfloat16"): tables + times * kernels}


@pytest.mark.slow
def test_adapters_of_other_layers_stay_zero() -> None:
    """The control is that adapters of the chosen layer change."""
    run = Run({"lora.layers": (2,), "optimizer.weight_decay": 0.1})
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(run.state.params)):
        if path[-1].key == "lora_b":
            assert np.array_equal(leaf[0], np.zeros_like(leaf[0]))
            assert np.abs(leaf[1]).max() > 1e-5


@pytest.mark.slow
def test_adapters_have_dropout() -> None:
    kept, dropped = (Run({"lora.dropout": rate}, steps=3) for rate in (0.0, 0.3))
    assert kept.metrics[0]["loss"] == pytest.approx(dropped.metrics[0]["loss"], rel=1e-6), "B is zero at first"
    assert kept.metrics[2]["loss"] != pytest.approx(dropped.metrics[2]["loss"], rel=1e-4)


@pytest.mark.slow
def test_no_gradient_of_the_base_is_sent() -> None:
    run = Run({"lora.base_dtype": "bfloat16", "encoder.dtype": "bfloat16"}, 8, 4, steps=0)
    assert run.state.frozen["encoder"]["layers"]["output"]["kernel"].dtype == jnp.bfloat16
    module = parse_hlo(run.program.trace(run.state, run.batch(0)).lower().compile().as_text())
    operations = collectives(module, 8)
    assert not [op for op in operations if "reduce-scatter" in op.kind or "all-to-all" in op.kind]
    assert [op for op in operations if "all-gather" in op.kind], "control: the base is split and gathered"
    stacks = {leaf.shape for leaf in jax.tree.leaves(run.state.frozen) if len(leaf.shape) == 3}
    shapes = {shape for _, _, instruction in module.instructions() for _, shape in arrays(instruction.shape)}
    assert not stacks & shapes, "no device has the whole kernels of several layers"
    assert {(depth, inputs // 4, outputs) for depth, inputs, outputs in stacks} <= shapes, (
        "control: each device has parts of them"
    )


@pytest.mark.exhaustive
def test_kernels_and_tables_of_the_base_are_rounded_and_nothing_else() -> None:
    run = Run({"lora.base_dtype": "bfloat16"}, steps=1)
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.state.frozen):
        large = path[-1].key in ("kernel", "embedding")
        assert leaf.dtype == (jnp.bfloat16 if large else jnp.float32)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(run.state.params))
    exact = Run({}, steps=1)
    assert run.metrics[0]["loss"] == pytest.approx(exact.metrics[0]["loss"], rel=0.05)


@pytest.mark.slow
def test_a_run_resumes_opens_and_refuses_another_base(tmp_path: Path) -> None:
    """The control for the resumption is an uninterrupted run."""
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data")
    keys = {"lora__rank": 2, "lora__alpha": 4.0, "data__dev": "", "optimizer__decay": "none"}
    whole = tiny_config(tmp_path / "encoder", tmp_path / "data", **keys)
    half = tiny_config(tmp_path / "encoder", tmp_path / "data", **keys | {"train__steps": 3})
    train(whole, tmp_path / "whole", progress=False)
    train(half, tmp_path / "run", progress=False)
    again = train(whole, tmp_path / "run", progress=False)
    assert (again.resumed_from, again.step) == (3, 6)
    opened, straight = open_run(tmp_path / "run"), open_run(tmp_path / "whole")
    assert opened.checkpoint["digest"] == straight.checkpoint["digest"]
    assert paths(opened.params) == {f"encoder/{path}" for path in paths(opened.params["encoder"])}
    assert not divide_parameters(opened.params, ADAPTER)[1], "the adapters are merged"
    sizes = {name: sum(f.stat().st_size for f in (tmp_path / name).rglob("*") if f.is_file()) for name in ("run",)}
    assert sizes["run"] < 3 * 2**20
    shutil.move(tmp_path / "encoder", tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"jaxret train again with .*encoder.checkpoint"):
        open_run(tmp_path / "run")
    whole.encoder.checkpoint = str(tmp_path / "moved")
    whole.encoder.sha256 = "0" * 64
    with pytest.raises(ValueError, match=r"encoder.sha256 .* 0000"):
        train(whole, tmp_path / "run", progress=False)
    whole.encoder.sha256 = ""
    train(whole, tmp_path / "run", progress=False)
    assert open_run(tmp_path / "run").checkpoint == opened.checkpoint
    weights = next((tmp_path / "moved").rglob("model.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    for use in (lambda: open_run(tmp_path / "run"), lambda: train(whole, tmp_path / "run", progress=False)):
        with pytest.raises(ContractError, match=r"(?s)base\.weights.*fit only that base"):
            use()
    shutil.rmtree(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"holds adapters .*encoder"):
        open_run(tmp_path / "run")


def test_weight_decay_shrinks_adapters() -> None:
    """The gradient is 0, so only weight decay changes adapters. PyTorch's AdamW decays PEFT's adapters, too."""
    config = make_config({"optimizer.weight_decay": 0.5, "optimizer.learning_rate": 0.1, "optimizer.decay": "none"})
    config.optimizer.warmup_steps = 0
    params = {"encoder": {"layers": {"query": {name: jnp.ones((2, 3, 3)) for name in ("lora_a", "lora_b")}}}}
    optimizer, _ = make_optimizer(config.optimizer, 10)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for update in jax.tree.leaves(updates):
        np.testing.assert_allclose(update, -0.05, rtol=1e-6)


def test_lamb_is_refused() -> None:
    config = make_config(LORA | {"optimizer.name": "lamb"})
    model = with_adapters(make_retriever({"encoder.tied": True}, WITHOUT_DROPOUT), config.lora)
    with pytest.raises(ValueError, match=r"optimizer.name is 'lamb' and lora.rank 2.*Set optimizer.name='adamw'"):
        check_parameters(config, model)
    config.optimizer.name = "adamw"
    check_parameters(config, model)


def test_a_new_mlm_head_would_not_be_trained(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data")
    keys = {"lora__rank": 2, "data__dev": "", "head__name": "splade", "train__steps": 0}
    config = tiny_config(tmp_path / "encoder", tmp_path / "data", **keys)
    with pytest.raises(ValueError, match=r"encoder .*MLM .*lora.rank 2"):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.table
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora.rank": -1}, "lora.rank is -1"),
        ({"lora.alpha": 0.0}, "lora.alpha is 0.0"),
        ({"lora.dropout": 1.0}, "lora.dropout is 1.0"),
        ({"lora.base_dtype": "int8"}, r"lora.base_dtype .*'int8'; .*bfloat16, float32"),
        ({"lora.targets": ()}, "lora.targets is empty"),
        ({"lora.targets": ("q_proj",)}, "'q_proj', .*no dense layer.*query.*all-linear"),
        ({"lora.targets": ("query,key",)}, r"written as \('query', 'key'\)$"),
        ({"lora.targets": ("encoder.layer.0.output.dense",)}, "1 of 2 layers.*lora.layers"),
        ({"lora.layers": (0, 2)}, r"lora.layers .*\(0, 2\); .*encoder .*1 .*2"),
        ({"lora.targets": ("(",)}, "is not a regular expression"),
    ],
)
def test_bad_settings_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_adapters(make_config(LORA | keys).lora, BERT)
