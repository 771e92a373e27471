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
    parameter_specs,
    row_parts,
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
    mesh: Mesh  # the devices
    chunk_size: int = 0  # rows (a query with its passages) that are encoded at the same time; 0: all
    reduce_dtype: Any = jnp.float32  # type in which gradients are added up over devices
    from_copies: bool = False  # whether `copies` made the parameters
    # parameters of a teacher, which have no gradient; None: the loss reads no teacher
    teacher_params: Params | None = None

    @abstractmethod
    def __call__(
        self,
        params: Params,
        batch: BatchT,
        key: jax.Array,
        batch_number: jax.Array | int | None = None,
        train: bool = True,
    ) -> LossTerms:
        """Return the loss of a batch and its terms.

        Args:
            params: parameters of the model.
            batch: the batch of all devices.
            key: the key of dropout.
            batch_number: number of the batch in the run, for terms that change with the epoch; None: without annealing.
            train: whether there is dropout.
        """

    @abstractmethod
    def hidden_states(self, params: Params, batch: BatchT) -> Iterator[tuple[str, HiddenStates]]:
        """Yield (name, hidden states) of each encoder, to find the first layer that is not finite."""

    def with_teacher(self: ObjectiveT, params: Params | None) -> ObjectiveT:
        """Return the objective with other parameters of the teacher."""
        return replace(self, teacher_params=params)

    def chunks(self, rows: int) -> int:
        """Return the number of passes in which each device encodes its part of `rows`."""
        return count_chunks(rows, self.chunk_size, row_parts(self.mesh))

    def bins(self, rows: int) -> int:
        """Return the number of separately encoded parts of a batch: the chunks of all devices."""
        return row_parts(self.mesh) * self.chunks(rows)

    def padding(self, batch: BatchT) -> Any:
        """Return the number of tokens that encoders compute per real token."""
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
        """Call `compute(model, params, inputs, key)` on each device with its rows, and return the results of all rows.

        Args:
            compute: the computation of one device.
            params: all parameters; `ParameterGatherer` gathers the parts that other devices hold.
            inputs: arrays whose first axis is rows.
            key: the key of dropout, the same on all devices.
            repeated: whether `compute` uses layers several times; the parameters are then gathered once.
        """
        gatherer = self.gatherer(at_once=repeated or self.from_copies)
        unrolled = is_one_cpu(self.mesh) and self.model.compute.recompute == "none"
        model: Any = self.model.with_gatherer(gatherer).with_compute(unrolled=unrolled)

        def body(params: Params, inputs: InputsT, key: jax.Array) -> Result:
            if self.from_copies:
                gathered_params = map_with_names(lambda name, x: x if gatherer.in_scan(name) else x[0], params)
            else:
                gathered_params = gatherer.gather_at_entry(params)
            return compute(model, gathered_params, inputs, key)

        specs = self.copies_specs(params) if self.from_copies else parameter_specs(self.mesh, params)
        sharded_compute = jax.shard_map(body, mesh=self.mesh, in_specs=(specs, P(ROW_AXES), P()), out_specs=P(ROW_AXES))
        return sharded_compute(params, inputs, key)

    def gatherer(self, at_once: bool) -> ParameterGatherer:
        """Return the object that gathers the parameters of layers; `at_once` gathers all before the first layer."""
        compute = self.model.compute
        frozen = compute.adapters is not None
        return ParameterGatherer.of(self.mesh, compute.dtype, self.reduce_dtype, at_once=at_once, frozen=frozen)

    def copies_specs(self, params: Params) -> Any:
        """Return the partition specs of the parameters that `copies` returns, for shard_map."""
        gatherer, axes = self.gatherer(at_once=True), split_axes(self.mesh)

        def spec(name: str, _: Any) -> P:
            if gatherer.in_scan(name):
                return parameter_spec(name, axes)
            return P(ROW_AXES, *parameter_spec(name, [axis for axis in axes if axis == TENSOR]))

        return map_with_names(spec, params)

    def copies(self, params: Params) -> Params:
        """Return a complete copy of each parameter for every device, [devices, ...]. Parameters that layers gather in a
        scan stay split.

        The gradient of this function adds up the gradients of the copies. An objective with `from_copies` can therefore
        be called several times, while parameters and gradients are sent once.
        """
        gatherer = self.gatherer(at_once=True)

        def copy(params: Params) -> Params:
            gathered_params = gatherer.gather_at_entry(params)
            return map_with_names(lambda name, x: x if gatherer.in_scan(name) else x[None], gathered_params)

        specs, copies_specs = parameter_specs(self.mesh, params), self.copies_specs(params)
        return jax.shard_map(copy, mesh=self.mesh, in_specs=(specs,), out_specs=copies_specs)(params)


def number_rows(tokens: Tokens) -> Tokens:
    """Return the texts of a device with their row numbers in the batch of all devices, on which dropout masks depend.
    It is called inside `on_devices`."""
    if tokens.rows is not None:
        return tokens
    count = len(tokens.ids)
    return replace(tokens, rows=jax.lax.axis_index(ROW_AXES) * count + jnp.arange(count))
