"""Where a run's state comes from: pre-trained weights, or a checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from jaxret.checkpoint import Checkpoints
from jaxret.distributed import replicated, shardings
from jaxret.models.encoders.pretrained import Params
from jaxret.models.retriever import Retriever, with_pretrained
from jaxret.training.step import TrainState


def place(leaf: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array whose shards are copies: the training step gives its arrays' memory away, so no two shards, and
    no two encoders made from the same weights, may share it. Each shard is cut on the host."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


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
    params = with_pretrained({**shapes, **rest}, pretrained)
    params = jax.tree.map(place, params, places)
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
