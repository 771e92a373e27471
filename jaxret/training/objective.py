"""Objectives: the loss of a batch as a function of parameters, and how devices share its computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxret.models.model import ModelT
from jaxret.parallel.mesh import (
    ROW_AXES,
    TENSOR,
    ParameterGatherer,
    is_one_cpu,
    map_with_names,
    parameter_spec,
    row_parts,
    shardings,
    split_axes,
)
from jaxret.training.losses.grad_cache import count_chunks
from jaxret.training.losses.in_batch import LossTerms
from jaxret.types import BatchT, HiddenStates, Params, Tokens

ObjectiveT = TypeVar("ObjectiveT", bound="Objective[Any, Any]")
InputsT = TypeVar("InputsT")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Objective(ABC, Generic[ModelT, BatchT]):
    """The loss of a batch as a function of parameters."""

    model: ModelT  # shapes and computation
    mesh: Mesh
    chunk_size: int = 0  # rows encoded at a time, a query with its passages; 0: all
    reduce_dtype: Any = jnp.float32  # in which gradients are added up over devices
    from_copies: bool = False  # whether parameters are those that `copies` returns
    # parameters of a teacher, which the loss reads and no gradient is taken of; None: it reads none
    teacher_params: Params | None = None

    @abstractmethod
    def __call__(
        self, params: Params, batch: BatchT, key: jax.Array, step: jax.Array | int | None = None, train: bool = True
    ) -> LossTerms:
        """Return the loss of a batch and its terms.

        Args:
            batch: of all devices.
            key: of dropout.
            step: number of the batch, for terms that change with the epoch; None: without annealing.
            train: whether there is dropout.
        """

    @abstractmethod
    def hidden_states(self, params: Params, batch: BatchT) -> Iterator[tuple[str, HiddenStates]]:
        """Yield the name and the states of each encoder, to find the layer where one breaks."""

    def with_teacher(self: ObjectiveT, params: Params | None) -> ObjectiveT:
        return replace(self, teacher_params=params)

    def chunks(self, rows: int) -> int:
        """Return in how many passes `rows` are encoded."""
        return count_chunks(rows, self.chunk_size, row_parts(self.mesh))

    def bins(self, rows: int) -> int:
        """Return how many parts of a batch are encoded on their own: the chunks of all devices."""
        return row_parts(self.mesh) * self.chunks(rows)

    def padding(self, batch: BatchT) -> Any:
        """Return the tokens that encoders compute for each real one."""
        bins = self.bins(batch.size)
        return sum(text.computed_tokens(bins) for text in batch.texts) / sum(jnp.sum(text.mask) for text in batch.texts)

    def on_devices(
        self,
        compute: Callable[[ModelT, Params, InputsT, jax.Array], Result],
        params: Params,
        inputs: InputsT,
        key: jax.Array,
        repeated: bool,
    ) -> Result:
        """Return `compute(model, params, inputs, key)` of each device's rows, by row.

        Args:
            compute: computation of one device.
            params: all parameters, of which `ParameterGatherer` gathers the parts that other devices hold.
            inputs: arrays by row.
            key: of dropout, the same on all devices.
            repeated: whether `compute` uses layers several times; they are then gathered once.
        """
        gatherer = self.gatherer(at_once=repeated or self.from_copies)
        unrolled = is_one_cpu(self.mesh) and self.model.compute.recompute == "none"
        model: Any = self.model.with_gatherer(gatherer).with_compute(unrolled=unrolled)

        def body(params: Params, inputs: InputsT, key: jax.Array) -> Result:
            if self.from_copies:
                whole = map_with_names(lambda name, x: x if gatherer.in_scan(name) else x[0], params)
            else:
                whole = gatherer.gather_at_entry(params)
            return compute(model, whole, inputs, key)

        specs = self.copies_specs(params) if self.from_copies else self.specs(params)
        sharded_compute = jax.shard_map(body, mesh=self.mesh, in_specs=(specs, P(ROW_AXES), P()), out_specs=P(ROW_AXES))
        return sharded_compute(params, inputs, key)

    def gatherer(self, at_once: bool) -> ParameterGatherer:
        """Return how layers gather their parameters; at_once: all before the first layer, see ParameterGatherer."""
        compute = self.model.compute
        frozen = compute.adapters is not None
        return ParameterGatherer.of(self.mesh, compute.dtype, self.reduce_dtype, at_once=at_once, frozen=frozen)

    def specs(self, params: Params) -> Any:
        """Return the partition specs of parameters, for shard_map."""
        return jax.tree.map(lambda sharding: sharding.spec, shardings(self.mesh, params))

    def copies_specs(self, params: Params) -> Any:
        """Return the partition specs of what `copies` returns, for shard_map."""
        gatherer, axes = self.gatherer(at_once=True), split_axes(self.mesh)

        def spec(name: str, _: Any) -> P:
            if gatherer.in_scan(name):
                return parameter_spec(name, axes)
            return P(ROW_AXES, *parameter_spec(name, [axis for axis in axes if axis == TENSOR]))

        return map_with_names(spec, params)

    def copies(self, params: Params) -> Params:
        """Return every parameter whole, [devices, ...]: a copy for each device. Those that layers gather anyway stay
        split.

        Differentiated, the gradients of the copies are added up. An objective with `from_copies` can so be called
        several times while parameters and gradients travel once.
        """
        gatherer = self.gatherer(at_once=True)

        def copy(params: Params) -> Params:
            whole = gatherer.gather_at_entry(params)
            return map_with_names(lambda name, x: x if gatherer.in_scan(name) else x[None], whole)

        specs, of_copies = self.specs(params), self.copies_specs(params)
        return jax.shard_map(copy, mesh=self.mesh, in_specs=(specs,), out_specs=of_copies)(params)


def number_rows(tokens: Tokens) -> Tokens:
    """Return the texts of a device, inside `on_devices`, with their rows in the whole batch: dropout's masks follow
    these."""
    if tokens.rows is not None:
        return tokens
    count = len(tokens.ids)
    return replace(tokens, rows=jax.lax.axis_index(ROW_AXES) * count + jnp.arange(count))
