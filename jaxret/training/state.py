"""Where a run's state comes from: pre-trained weights, another run, or a checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from jaxret.checkpoint import Checkpoints
from jaxret.contract import require_equal
from jaxret.distributed import replicated, shardings
from jaxret.models.encoders.pretrained import Params, load_pretrained, resolve, stores_mlm_head, verify_weights
from jaxret.models.retriever import Retriever, with_pretrained
from jaxret.runs.run import open_run
from jaxret.training.begin import Job, Texts
from jaxret.training.step import TrainState


def place(leaf: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array whose shards are copies: the training step gives its arrays' memory away, so no two shards, and
    no two encoders made from the same weights, may share it. Each shard is cut on the host."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def first_state(job: Job, texts: Texts, optimizer: optax.GradientTransformation) -> TrainState:
    """A new run's state: from the weights of its encoder, or from the run that it starts from; only here are they read.

    Raises ContractError if the run to start from is another model, ValueError for weights that do not fit.
    """
    config, source = job.config, job.config.train.start_from
    if not source:
        return init_state(config, job.mesh, job.retriever, load_weights(job), optimizer)
    other = open_run(source)
    remedy = "train.start_from must name a run with the same encoder, head, pooling and lengths."
    require_equal(other.contract, texts.contract, f"{source}/contract.json", "this run", remedy)
    return state_of(job.mesh, jax.device_get(other.params), optimizer)


def load_weights(job: Job) -> Params:
    """The pre-trained weights, in the shapes of the run's encoder; says if an MLM head had to be drawn."""
    config, encoder = job.config, job.retriever.module.config
    directory = resolve(config.encoder.checkpoint, config.encoder.download)
    if config.encoder.sha256:
        verify_weights(directory, config.encoder.sha256)
    if getattr(encoder, "mlm_head", False) and not stores_mlm_head(directory):
        job.say(f"{directory} has no MLM head: a new one is drawn, whose output matrix is the pre-trained word table")
    return load_pretrained(directory, config.encoder.ignore, encoder, config.seed.init)[1]


def init_state(
    config: ConfigDict, mesh: Mesh, retriever: Retriever, pretrained: Params, optimizer: optax.GradientTransformation
) -> TrainState:
    """A new run's state: encoders from the pre-trained weights, everything else drawn; no device ever holds an
    unsharded copy."""
    key = jax.random.key(config.seed.init)
    shapes = jax.eval_shape(retriever.init, key)
    places = shardings(mesh, shapes)

    def drawn(key: jax.Array) -> Params:
        return {name: part for name, part in retriever.init(key).items() if not name.endswith("encoder")}

    rest = jax.jit(drawn, out_shardings={n: places[n] for n in shapes if not n.endswith("encoder")})(key)
    return state_of(mesh, with_pretrained({**shapes, **rest}, pretrained), optimizer)


def state_of(mesh: Mesh, params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A new run's state around the parameters given, which may lie anywhere."""
    params = jax.tree.map(place, params, shardings(mesh, params))
    opt_places = shardings(mesh, jax.eval_shape(optimizer.init, params))
    opt_state = jax.jit(optimizer.init, out_shardings=opt_places)(params)
    scalars = jax.device_put((jnp.int32(0), jnp.array(True)), replicated(mesh))
    return TrainState(params, opt_state, *scalars)


def restore_state(
    checkpoints: Checkpoints, step: int, mesh: Mesh, retriever: Retriever, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state of a checkpoint, placed on this mesh."""

    def shapes(key: jax.Array) -> TrainState:
        params = retriever.init(key)
        return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.array(True))

    abstract = jax.eval_shape(shapes, jax.random.key(0))
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        shardings(mesh, abstract),
    )
    rest = {"opt_state": placed.opt_state, "step": placed.step, "healthy": placed.healthy}
    params, rest = checkpoints.restore(step, placed.params, rest)
    return TrainState(params, rest["opt_state"], rest["step"], rest["healthy"])
