"""Where a run's state comes from: pre-trained weights, or a checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.checkpoint import Checkpoints
from jaxret.distributed import replicated, shardings
from jaxret.models.pretrained import Params
from jaxret.models.retriever import Retriever, with_pretrained
from jaxret.training.step import TrainState


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
    # Not aliased: the step gives the arrays' memory away, and tied copies must not share it.
    params = jax.tree.map(lambda leaf, place: jax.device_put(leaf, place, may_alias=False), params, places)
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
