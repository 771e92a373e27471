"""Where a run's state comes from: pre-trained weights, another run, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from jaxret.checkpoint import Checkpoints, digest
from jaxret.contract import require_equal
from jaxret.distributed import replicated, shardings
from jaxret.models.encoders.pretrained import Params, find, load_pretrained, resolve, stores_mlm_head, weights_digest
from jaxret.models.model import Model
from jaxret.models.retriever import with_pretrained
from jaxret.runs.run import open_model
from jaxret.training.begin import Job, Texts
from jaxret.training.step import Rule, TrainState, make_rule, new_state


def place(leaf: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array whose shards are copies: the training step gives its arrays' memory away, so no two shards, and
    no two encoders made from the same weights, may share it. Each shard is cut on the host."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def first_state(
    job: Job, texts: Texts, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """A new run's state: from the weights of its encoder, or from the run that it starts from; only here are they read.
    And what data.json says of them: {"start": digest of the file, or step and digest of the checkpoint}.

    Raises ContractError if the run to start from is another model, or, in a run that has begun, if the weights are
    others than it began with; ValueError for weights that do not fit.
    """
    config, source = job.config, job.config.train.start_from
    if not source:
        directory = resolve(config.encoder.checkpoint, config.encoder.download)
        head = job.model.stored_head(find(config.encoder.checkpoint, config.encoder.download))
        start = {"weights": weights_digest(directory, config.encoder.sha256)}
        start |= {"head": digest(head)} if head else {}
        require_same_start(job, start, f"{directory}/model.safetensors")
        weights = load_weights(job, directory)
        return init_state(config, job.mesh, job.model, weights, optimizer, head), {"start": start}
    other = open_model(source, job.task.name, job.task.build)
    remedy = "train.start_from must name a run with the same encoder, head, pooling and lengths."
    require_equal(other.contract, texts.contract, f"{source}/contract.json", "this run", remedy)
    require_same_start(job, other.checkpoint, f"the best checkpoint of {source}")
    return state_of(job.mesh, jax.device_get(other.params), optimizer, make_rule(config)), {"start": other.checkpoint}


def require_same_start(job: Job, start: Mapping[str, Any], name: str) -> None:
    """Raises ContractError unless a run that has begun, but has no checkpoint yet, began with this. One of an older
    jaxret does not say with what."""
    recorded = job.recorded.get("start") if job.begun else None
    if recorded:
        remedy = "Restore the weights that the run began with, or choose another --workdir."
        require_equal({"start": recorded}, {"start": start}, str(job.workdir.data), name, remedy)


def load_weights(job: Job, directory: Path) -> Params:
    """The pre-trained weights, in the shapes of the run's encoder; says if an MLM head had to be drawn."""
    config, encoder = job.config, job.model.module.config
    if getattr(encoder, "mlm_head", False) and not stores_mlm_head(directory):
        job.say(f"{directory} has no MLM head: a new one is drawn, whose output matrix is the pre-trained word table")
    return load_pretrained(directory, config.encoder.ignore, encoder, config.seed.init)[1]


def init_state(
    config: ConfigDict,
    mesh: Mesh,
    model: Model,
    pretrained: Params,
    optimizer: optax.GradientTransformation,
    head: Params | None = None,
) -> TrainState:
    """A new run's state: encoders from the pre-trained weights, and heads from `head`, everything else drawn; no device
    ever holds an unsharded copy."""
    key = jax.random.key(config.seed.init)
    shapes = jax.eval_shape(model.init, key)
    places = shardings(mesh, shapes)

    def drawn(key: jax.Array) -> Params:
        return {name: part for name, part in model.init(key).items() if not name.endswith("encoder")}

    rest = jax.jit(drawn, out_shardings={n: places[n] for n in shapes if not n.endswith("encoder")})(key)
    params = with_pretrained({**shapes, **rest}, pretrained, head or {})
    return state_of(mesh, params, optimizer, make_rule(config))


def state_of(mesh: Mesh, params: Params, optimizer: optax.GradientTransformation, rule: Rule = Rule()) -> TrainState:
    """A new run's state around the parameters given, which may lie anywhere."""
    params = jax.tree.map(place, params, shardings(mesh, params))

    def others(params: Params) -> TrainState:
        return replace(new_state(params, optimizer, rule), params=None)

    places = shardings(mesh, jax.eval_shape(others, params))
    return replace(jax.jit(others, out_shardings=places)(params), params=params)


def saved(state: TrainState) -> tuple[Params, dict[str, Any]]:
    """What a checkpoint holds: the parameters that are used from then on, and all else. Where there is a moving average
    it is what is used, and the parameters that training goes on with stand beside it as `trained`."""
    progress = {"opt_state": state.opt_state, "step": state.step, "healthy": state.healthy}
    if state.ema is not None:
        progress["trained"] = state.params
    if state.skipped is not None:
        progress["skipped"] = state.skipped
    return state.weights, progress


def restore_state(
    checkpoints: Checkpoints,
    step: int,
    mesh: Mesh,
    model: Model,
    optimizer: optax.GradientTransformation,
    rule: Rule = Rule(),
) -> TrainState:
    """The state of a checkpoint, placed on this mesh. Whether updates may be skipped can have changed since; those that
    were are counted on, because the schedule does not count them."""
    counted = checkpoints.holds(step, "progress/skipped")

    def shapes(key: jax.Array) -> TrainState:
        return new_state(model.init(key), optimizer, replace(rule, skip_nonfinite=int(counted)))

    abstract = jax.eval_shape(shapes, jax.random.key(0))
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        shardings(mesh, abstract),
    )
    weights, rest = checkpoints.restore(step, *saved(placed))
    ema = weights if rule.ema else None
    none_yet = jax.device_put(jnp.int32(0), replicated(mesh))
    skipped = rest.get("skipped", none_yet) if rule.skip_nonfinite or counted else None
    return TrainState(rest.get("trained", weights), rest["opt_state"], rest["step"], rest["healthy"], ema, skipped)
