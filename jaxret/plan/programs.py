"""The programs of plans with abstract arguments: shapes and shardings instead of weights and data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from jaxret.data.tokens.batches import padded_batch_size
from jaxret.models.encoders.pretrained import find_model, resolve_encoder
from jaxret.models.heads import read_model_keys
from jaxret.models.lora import with_adapters
from jaxret.models.model import parameter_shapes
from jaxret.models.retriever_model import RetrieverModel, encoder_config, make_retriever_model
from jaxret.parallel.chips import Topology
from jaxret.parallel.mesh import make_mesh, row_sharding, shardings
from jaxret.runs.embedder import Embedder, padded_length, plan_batches
from jaxret.runs.from_sentence_transformers import apply_settings
from jaxret.search.backends.accelerators import ROW_AXIS, plan_cells, platform_of, search_cells
from jaxret.search.backends.late_interaction import passages_of_tile, search_lists
from jaxret.search.backends.precision import Compressed, find_precision
from jaxret.search.backends.top_k import power_of_two, rounded_size
from jaxret.search.backends.xla_backend import SCORES_BYTES
from jaxret.search.vectors.single_vector import BLOCK_ROWS, QUERY_ROWS
from jaxret.search.vectors.streaming import rows_at_once
from jaxret.training.config_check import check_config, check_retrieval
from jaxret.training.optimizers import make_optimizer
from jaxret.training.step import make_train_step
from jaxret.training.tasks.retrieval import make_retrieval_objective
from jaxret.training.train_state import make_update_rule, new_state
from jaxret.types import Batch, Packing, Tokens

ENCODERS = Path(__file__).with_name("encoders")  # config.json of the checkpoints in configs/
SAME_SHAPES = {  # checkpoint -> checkpoint with the same config.json
    name: "bert-base-uncased"
    for name in (
        "Luyu/condenser",
        "Luyu/co-condenser-wiki",
        "Luyu/co-condenser-marco",
        "Shitao/RetroMAE",
        "Shitao/RetroMAE_MSMARCO",
        "Shitao/RetroMAE_MSMARCO_distill",
        "Shitao/RetroMAE_MSMARCO_finetune",
    )
}


@dataclass(frozen=True)
class Shapes:
    """The shapes of the largest batch of a step."""

    queries: int
    documents: int  # number of passages
    query_length: int
    passage_length: int
    positives: int = 1  # largest number of known positives of a query
    pseudo: int = 0  # tokens of a pseudo-query
    packed_queries: Sequence[int] | None = None  # (rows, width) for every chunk of a device; None: not packed
    packed_passages: Sequence[int] | None = None  # (rows, width) of packed passages, in the same way

    def computed_tokens(self, bins: int) -> int:
        """Return the number of tokens that encoders compute for a batch in `bins` parts."""
        if self.packed_queries and self.packed_passages:
            return bins * (math.prod(self.packed_queries) + math.prod(self.packed_passages))
        return self.queries * self.query_length + self.documents * self.passage_length


class AbstractProgram(NamedTuple):
    """A program and its abstract arguments."""

    program: Any  # an object with `trace`: a Program or a jitted function
    arguments: tuple[Any, ...]
    state: dict[str, int]  # bytes by kind of the arguments that stay on one device


def encoder_directory(name: str) -> tuple[Path, str]:
    """Return the folder with the config.json of encoder.checkpoint, and a description of the folder.

    Raises FileNotFoundError if the file is neither on this machine nor in ENCODERS.
    """
    try:
        directory = resolve_encoder(name, weights=False)
        return directory, f"{directory / 'config.json'}"
    except FileNotFoundError as error:
        folder = ENCODERS / SAME_SHAPES.get(name, name)
        if (folder / "config.json").is_file():
            return folder, f"the published shapes of {name}, which jaxret knows; {name} is not on this machine"
        remedy = "A plan needs no weights: set encoder.checkpoint to a folder with its config.json"
        raise FileNotFoundError(f"{error}. {remedy}") from error


def with_stated_settings(config: ConfigDict) -> ConfigDict:
    """Return the config with the settings of the encoder's directory, if it is on this machine, as in training."""
    name = config.encoder.checkpoint
    try:
        return apply_settings(config, read_model_keys(find_model(name)), name)[0]
    except FileNotFoundError:
        return config


def retriever_of(config: ConfigDict, directory: Path) -> RetrieverModel:
    """Build the retriever of a config. Raises ValueError for another task, and for settings that do not fit the
    encoder."""
    if config.task != "retrieval":
        raise ValueError(f"task is {config.task!r}; only retrievers can be planned: set task='retrieval'")
    return make_retriever_model(config, encoder_config(config, directory))


def checked_retriever(config: ConfigDict, directory: Path) -> RetrieverModel:
    """Build the retriever of a config with the checks at the start of training. Raises ValueError if a check fails."""
    complete_config = ConfigDict(config.to_dict())
    complete_config.data.train = complete_config.data.train or "not given"  # a plan needs no data
    check_config(complete_config)
    retriever = with_adapters(retriever_of(complete_config, directory), complete_config.lora)
    check_retrieval(complete_config, retriever)
    return retriever


def longest_batch(config: ConfigDict, retriever: RetrieverModel, devices: int = 1) -> Shapes:
    """Return the shapes of the largest batch that the config allows."""
    queries = padded_batch_size(config.train.batch_size, devices)
    pseudo = retriever.module.head.pseudo_query_length() if config.data.pseudo_queries else 0
    documents = queries * (1 + config.data.negatives)
    return Shapes(queries, documents, config.tokens.query_length, config.tokens.passage_length, pseudo=pseudo)


def training_program(config: ConfigDict, directory: Path, shapes: Shapes, devices: Sequence[Any]) -> AbstractProgram:
    """Build the program of a training step.

    Args:
        directory: folder of the encoder.
        shapes: shapes of the largest batch.
        devices: all devices of the mesh.
    """
    mesh = make_mesh(config.mesh.fsdp, list(devices), config.mesh.tensor)
    retriever = checked_retriever(config, directory)
    optimizer, _ = make_optimizer(config.optimizer, 1000)
    rule = make_update_rule(config)
    state = jax.eval_shape(lambda key: new_state(retriever.init(key), optimizer, rule), jax.random.key(0))
    state = abstract_sharded(state, shardings(mesh, state))
    batch = abstract_batch(shapes, row_sharding(mesh, stacked=rule.accumulate > 1), rule.accumulate)
    objective = make_retrieval_objective(config, retriever, mesh)
    if objective.teacher:
        params = parameter_shapes(objective.teacher.model)
        state = replace(state, teacher=abstract_sharded(params, shardings(mesh, params)))
    program = make_train_step(objective, optimizer, state, jax.random.key(0), rule)
    trees = {"parameters": state.params, "moments": state.opt_state}
    trees |= {"moving average": state.ema} if rule.ema else {}
    trees |= {"frozen parameters": state.frozen} if state.frozen else {}
    trees |= {"teacher": state.teacher} if state.teacher else {}
    return AbstractProgram(program, (state, batch), {kind: bytes_on_device(tree) for kind, tree in trees.items()})


def encoding_program(config: ConfigDict, directory: Path, devices: Sequence[Any]) -> AbstractProgram:
    """Build the program that encodes a batch of the longest passages with the encoder in `directory`, on all devices of
    the mesh."""
    mesh = make_mesh(math.gcd(config.mesh.fsdp, len(devices)), list(devices))
    retriever = retriever_of(config, directory)
    params = parameter_shapes(retriever)
    params = abstract_sharded(params, shardings(mesh, params))
    length = config.tokens.passage_length
    embedder = Embedder(retriever, params, mesh, 0, {"passage": length}, config.encode.tokens_per_batch)
    rows = encode_rows(config, length, len(devices))
    tokens = abstract_tokens(rows, min(padded_length(length), length), row_sharding(mesh))
    return AbstractProgram(embedder.program("passage"), (params, tokens), {"parameters": bytes_on_device(params)})


def encode_rows(config: ConfigDict, length: int, devices: int) -> int:
    """Return the number of texts of `length` tokens that all devices encode together."""
    enough = max(config.encode.tokens_per_batch, 8 * devices)
    _, rows, _ = next(plan_batches(np.full(enough, length), config.encode.tokens_per_batch, devices))
    return rows


class SearchLoad(NamedTuple):
    """The size of a search."""

    passages: int = 1_000_000
    queries: int = 1000
    k: int = 100
    precision: str = "float32"  # precision of candidates
    block_passages: int = 1_000_000  # passages that are on the devices at the same time

    def on(self, retriever: RetrieverModel, topology: Topology | None) -> SearchLoad:
        """Return the load of one host of a topology, which searches its part of the passages for all queries."""
        passages = -(-self.passages // (topology.hosts if topology else 1))
        if retriever.vectors_per_passage is None or topology is None:
            return self._replace(passages=passages, block_passages=passages)
        shape = retriever.vectors_per_passage, retriever.dimension
        free = topology.of_host.devices * (topology.chip.memory - SCORES_BYTES)
        block_passages = rows_at_once(passages, shape, find_precision(self.precision), free)
        return self._replace(passages=passages, block_passages=block_passages)


DEFAULT_SEARCH = SearchLoad()


def search_program(
    config: ConfigDict, directory: Path, load: SearchLoad, devices: Sequence[Any], platform: str = ""
) -> AbstractProgram:
    """Build the program of XLA's search of the passages on the devices. For lists of vectors, it searches one block on
    the first device.

    Args:
        directory: folder of the encoder.
        load: passages on the devices, k and precision.
        devices: all devices of the mesh.
        platform: platform of the program, if it is not that of the devices.

    Raises:
        ValueError: vectors are weights of words.
    """
    retriever = retriever_of(config, directory)
    if retriever.sparse:
        raise ValueError("vectors are weights of words, but plan search is only for dense vectors")
    if retriever.vectors_per_passage is None:
        return list_search_program(config, retriever, load, devices[0])
    passages = load.block_passages
    mesh = Mesh(np.array(devices), (ROW_AXIS,), axis_types=(AxisType.Auto,))
    on_all_devices, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(ROW_AXIS))
    shape, precision = (retriever.vectors_per_passage, retriever.dimension), find_precision(load.precision)
    layout = plan_cells(passages, shape, precision, mesh.size, platform or platform_of(mesh))
    abstract_vectors = partial(_abstract_vectors, retriever.dimension, load.precision)
    queries = abstract_vectors(on_all_devices, QUERY_ROWS)
    vectors = abstract_vectors(split, layout.cells, layout.size * layout.width)
    rows = jax.ShapeDtypeStruct((), jnp.int32, sharding=on_all_devices)
    program = StaticProgram(search_cells, (layout, min(rounded_size(load.k), passages), mesh))
    return AbstractProgram(program, (queries, vectors, rows), {"documents": bytes_on_device(vectors)})


def list_search_program(
    config: ConfigDict, retriever: RetrieverModel, load: SearchLoad, device: Any
) -> AbstractProgram:
    """Build the program that searches one block of lists of vectors, for QUERY_ROWS vectors of queries.

    Args:
        load: k and precision.
        device: device with the block.
    """
    sharding = SingleDeviceSharding(device)
    length = padded_length(config.tokens.passage_length)
    _, rows, _ = next(plan_batches(np.full(BLOCK_ROWS, length), BLOCK_ROWS, 1))
    queries = power_of_two(QUERY_ROWS // (config.tokens.query_length if retriever.late_interaction else 1))
    abstract_vectors = partial(_abstract_vectors, retriever.dimension, load.precision, sharding)
    owner = jax.ShapeDtypeStruct((QUERY_ROWS,), jnp.int32, sharding=sharding)
    mask = jax.ShapeDtypeStruct((rows, length), bool, sharding=sharding)
    lists = abstract_vectors(QUERY_ROWS), owner, abstract_vectors(rows, length), mask
    tile_passages = passages_of_tile(rows, length * (QUERY_ROWS + retriever.dimension), device.platform)
    program = StaticProgram(search_lists, (queries, power_of_two(min(load.k, rows)), tile_passages))
    return AbstractProgram(program, lists, {})


def _abstract_vectors(dimension: int, precision: str, sharding: Any, *shape: int) -> Compressed:
    """Return abstract vectors with a shape and a precision."""

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    values = array(*shape, dimension, dtype=find_precision(precision).dtype)
    if precision == "float32":
        return Compressed(values)
    scale = array(*shape) if precision == "int8" else None
    return Compressed(values, scale, array(*shape), array(*shape))


class StaticProgram(NamedTuple):
    """A jitted function with constant last arguments."""

    function: Any
    constants: tuple[Any, ...]

    def trace(self, *arguments: Any) -> Any:
        """Trace the function with these arguments and then the constants."""
        return self.function.trace(*arguments, *self.constants)


def abstract_sharded(tree: Any, shardings: Any) -> Any:
    """Return a tree of abstract arrays with the shapes and types of `tree` and the shardings of a tree of the same
    form."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def abstract_tokens(
    texts: int,
    length: int,
    sharding: NamedSharding,
    leading_axes: tuple[int, ...] = (),
    packed_shape: Sequence[int] | None = None,
) -> Tokens:
    """Return the abstract tokens of texts.

    Args:
        texts, length: sizes of the array.
        sharding: sharding of the rows.
        leading_axes: sizes of the leading axes of stacked batches.
        packed_shape: (rows, width) of packed texts; None: not packed.
    """
    shape = (*leading_axes, texts, length)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in (jnp.int32, jnp.bool_))
    if packed_shape is None:
        return Tokens(ids, mask)
    position = jax.ShapeDtypeStruct(shape[:-1], jnp.int32, sharding=sharding)
    return Tokens(ids, mask, position, Packing(position, *packed_shape))


def abstract_batch(shapes: Shapes, sharding: NamedSharding, count: int = 1) -> Batch:
    """Return the abstract batch of an update, which is `count` stacked batches."""
    leading_axes = (count,) if count > 1 else ()

    def ids(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*leading_axes, *shape), jnp.int32, sharding=sharding)

    tokens = partial(abstract_tokens, sharding=sharding, leading_axes=leading_axes)
    return Batch(
        queries=tokens(shapes.queries, shapes.query_length, packed_shape=shapes.packed_queries),
        passages=tokens(shapes.documents, shapes.passage_length, packed_shape=shapes.packed_passages),
        positives=ids(shapes.queries),
        passage_ids=ids(shapes.documents),
        known_positives=ids(shapes.queries, shapes.positives),
        pseudo_queries=ids(shapes.documents, shapes.pseudo) if shapes.pseudo else None,
    )


def bytes_on_device(tree: Any) -> int:
    """Return the bytes that abstract arrays with shardings take on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def describe_program(
    kind: str, config: ConfigDict, directory: Path, shapes: Shapes | None = None, search: SearchLoad | None = None
) -> dict[str, Any]:
    """Describe a program for `make_program`, as values for JSON.

    Args:
        kind: train, encode or search.
        directory: folder of the encoder.
        shapes: shapes of the largest batch, for training.
        search: load, for a search.
    """
    values = {"kind": kind, "config": config.to_dict(), "directory": str(directory.absolute()), "search": search}
    return {**values, "shapes": asdict(shapes) if shapes else None}


def make_program(job: dict[str, Any], devices: Sequence[Any]) -> AbstractProgram:
    """Build a program for some devices from its description by `describe_program`."""
    config, directory = ConfigDict(job["config"]), Path(job["directory"])
    if job["kind"] == "train":
        return training_program(config, directory, Shapes(**job["shapes"]), devices)
    if job["kind"] == "encode":
        return encoding_program(config, directory, devices)
    return search_program(config, directory, SearchLoad(*job["search"]), devices)
