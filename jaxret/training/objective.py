"""What the loop trains: the loss of a batch as a function of parameters, and how devices share its computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxret.distributed import ROWS, Reader, shardings
from jaxret.models.model import Model, Params
from jaxret.training.grad_cache import count_chunks
from jaxret.training.losses import LossTerms
from jaxret.types import HiddenStates, Tokens

Result = TypeVar("Result")


@dataclass(frozen=True)
class Objective(ABC):
    """The loss of a batch as a function of parameters. A batch is a struct of arrays by row, with `texts`, all that
    encoders compute of it, and `size`, the rows that chunks are counted in."""

    model: Model
    settings: Any  # of the loss
    mesh: Mesh
    chunk_size: int = 0  # rows encoded at a time, a query with its documents; 0: all
    reduce_dtype: Any = jnp.float32  # in which gradients are added up over devices
    from_copies: bool = False  # parameters are given as `copies` makes them

    @abstractmethod
    def __call__(
        self, params: Params, batch: Any, key: jax.Array, step: jax.Array | int | None = None, train: bool = True
    ) -> LossTerms:
        """`step` is for what changes with the epoch. Without `train` there is no dropout and no annealing."""

    @abstractmethod
    def hidden_states(self, params: Params, batch: Any) -> Iterator[tuple[str, HiddenStates]]:
        """(name of an encoder, all its states), to look for the place where one breaks."""

    def chunks(self, rows: int) -> int:
        """How many passes `rows` are encoded in."""
        return count_chunks(rows, self.chunk_size, self.mesh.size)

    def bins(self, rows: int) -> int:
        """How many parts of a batch are encoded on their own: the chunks of all devices."""
        return self.mesh.size * self.chunks(rows)

    def padding(self, batch: Any) -> Any:
        """Tokens that the encoders compute for each real one."""
        bins = self.bins(batch.size)
        return sum(t.computed(bins) for t in batch.texts) / sum(jnp.sum(t.mask) for t in batch.texts)

    def on_devices(
        self,
        own: Callable[[Any, Params, Any, jax.Array], Result],
        params: Params,
        inputs: Any,
        key: jax.Array,
        often: bool,
    ) -> Result:
        """`own(model, params, inputs, key)` on each device, of its own rows; its results are by row. All parameters are
        read as `Reader` says; often: several times in `own`."""
        read = self.reader(at_once=often or self.from_copies)
        model = self.model.reading(read)

        def body(params: Params, inputs: Any, key: jax.Array) -> Result:
            whole = jax.tree.map(lambda x: x[0], params) if self.from_copies else read.entry(params)
            return own(model, whole, inputs, key)

        places = P(ROWS) if self.from_copies else self.specs(params)
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=(places, P(ROWS), P()), out_specs=P(ROWS))
        return mapped(params, inputs, key)

    def reader(self, at_once: bool) -> Reader:
        """at_once: whether layers are used several times, see Reader."""
        return Reader(self.model.compute.dtype, self.reduce_dtype, at_once, self.mesh.shape["fsdp"] > 1)

    def specs(self, params: Params) -> Any:
        """Where the parameters lie, for shard_map."""
        return jax.tree.map(lambda place: place.spec, shardings(self.mesh, params))

    def copies(self, params: Params) -> Params:
        """Every parameter whole, [devices, ...]: each device has its own copy, and their gradients are added up when
        this is differentiated. For an objective with `from_copies`, which can so be called several times while
        parameters and gradients travel once."""
        read = self.reader(at_once=True)

        def own(params: Params) -> Params:
            return jax.tree.map(lambda x: x[None], read.entry(params))

        return jax.shard_map(own, mesh=self.mesh, in_specs=(self.specs(params),), out_specs=P(ROWS))(params)


def numbered(tokens: Tokens) -> Tokens:
    """The texts of a device, inside `on_devices`, with their rows in the whole batch: dropout's masks follow these."""
    if tokens.rows is not None:
        return tokens
    count = len(tokens.ids)
    return replace(tokens, rows=jax.lax.axis_index(ROWS) * count + jnp.arange(count))
