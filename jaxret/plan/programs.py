"""The programs that a plan is about, with abstract arguments: shapes and shardings, no weights, no data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from jaxret.chips import Topology
from jaxret.data.batches import places
from jaxret.distributed import by_row, make_mesh, shardings
from jaxret.models.encoders.pretrained import find, resolve
from jaxret.models.heads import stated
from jaxret.models.heads.head import Side
from jaxret.models.retriever import BiEncoder, build_retriever, encoder_config
from jaxret.retrieval.backends import SCORES_BYTES
from jaxret.retrieval.best import few_sizes, power_of_two
from jaxret.retrieval.dense import BLOCK_ROWS, QUERY_ROWS
from jaxret.retrieval.devices import ROWS as CELLS
from jaxret.retrieval.devices import lay_out, platform_of, search_cells
from jaxret.retrieval.lists import documents_at_once, search_lists
from jaxret.retrieval.pieces import rows_at_once
from jaxret.retrieval.precision import Compressed, find_precision
from jaxret.runs.adopt import adopt
from jaxret.runs.embedder import Embedder, padded_length, plan_batches
from jaxret.training.check import check, check_model
from jaxret.training.optimizers import make_optimizer
from jaxret.training.retrieving import make_objective
from jaxret.training.step import make_rule, make_train_step, new_state
from jaxret.types import Batch, Packing, Tokens

ENCODERS = Path(__file__).with_name("encoders")  # config.json of the checkpoints that configs/ name
SAME_SHAPES = {
    name: "bert-base-uncased"
    for name in (
        "Luyu/condenser",
        "Luyu/co-condenser-wiki",
        "Luyu/co-condenser-marco",
        "Shitao/RetroMAE",
        "Shitao/RetroMAE_MSMARCO",
    )
}


@dataclass(frozen=True)
class Shapes:
    """The largest batch of a step. positives: known ones of a query at most; pseudo: tokens of a pseudo-query. Packed:
    (rows, width) of every chunk of a device; JSON makes lists of them."""

    queries: int
    documents: int
    query_length: int
    passage_length: int
    positives: int = 1
    pseudo: int = 0
    packed_queries: Sequence[int] | None = None
    packed_passages: Sequence[int] | None = None

    def computed(self, bins: int) -> int:
        """Tokens of all the encoders' rows, where a batch is encoded in `bins` parts."""
        if self.packed_queries and self.packed_passages:
            return bins * (math.prod(self.packed_queries) + math.prod(self.packed_passages))
        return self.queries * self.query_length + self.documents * self.passage_length


class Planned(NamedTuple):
    """A program, and what it is called with. state: the bytes of one device by kind, of arguments that stay there."""

    program: Any  # Program, or a jitted function: it has `trace`
    arguments: tuple[Any, ...]
    state: dict[str, int]


def encoder_directory(name: str) -> tuple[Path, str]:
    """Where the config.json of encoder.checkpoint is, and what to say of it: a plan needs shapes, not weights.

    Raises FileNotFoundError if it is neither at hand nor one of those known here.
    """
    try:
        directory = resolve(name, weights=False)
        return directory, f"{directory / 'config.json'}"
    except FileNotFoundError as error:
        known = ENCODERS / SAME_SHAPES.get(name, name)
        if (known / "config.json").is_file():
            return known, f"the published shapes of {name}, known to jaxret; {name} itself is not on this machine"
        raise FileNotFoundError(
            f"{error}. A plan needs no weights: a folder with its config.json is enough, as encoder.checkpoint=FOLDER"
        ) from error


def as_stated(config: ConfigDict) -> ConfigDict:
    """The config as training would have it: with what the encoder's directory says of it, if that is at hand."""
    name = config.encoder.checkpoint
    try:
        return adopt(config, stated(find(name)), name)[0]
    except FileNotFoundError:
        return config


def retriever_of(config: ConfigDict, directory: Path) -> BiEncoder:
    """Raises ValueError for settings that do not fit the encoder, and for what is no retriever."""
    if config.task != "retrieval":
        raise ValueError(f"task is {config.task!r}; what is planned is a retriever: task='retrieval'")
    return build_retriever(config, encoder_config(config, directory))


def checked(config: ConfigDict, directory: Path) -> BiEncoder:
    """The retriever of a config that could be trained. Raises ValueError as training would at its start."""
    whole = ConfigDict(config.to_dict())
    whole.data.train = whole.data.train or "not given"  # a plan can do without
    check(whole)
    retriever = retriever_of(whole, directory)
    check_model(whole, retriever)
    return retriever


def longest_batch(config: ConfigDict, retriever: BiEncoder, devices: int = 1) -> Shapes:
    """The largest that the config allows, for when the data is not at hand."""
    queries = places(config.train.batch_size, devices)
    pseudo = retriever.module.head.pseudo_query_length() if config.data.pseudo_queries else 0
    documents = queries * (1 + config.data.negatives)
    return Shapes(queries, documents, config.tokens.query_length, config.tokens.passage_length, pseudo=pseudo)


def training(config: ConfigDict, directory: Path, shapes: Shapes, devices: Sequence[Any]) -> Planned:
    """The training step."""
    mesh = make_mesh(config.mesh.fsdp, list(devices))
    retriever = checked(config, directory)
    optimizer, _ = make_optimizer(config.optimizer, 1000)
    rule = make_rule(config)
    state = jax.eval_shape(lambda key: new_state(retriever.init(key), optimizer, rule), jax.random.key(0))
    state = placed(state, shardings(mesh, state))
    batch = abstract_batch(shapes, by_row(mesh, stacked=rule.accumulate > 1), rule.accumulate)
    program = make_train_step(make_objective(config, retriever, mesh), optimizer, state, jax.random.key(0), rule)
    there = {"parameters": bytes_on_device(state.params), "moments": bytes_on_device(state.opt_state)}
    if rule.ema:
        there["moving average"] = bytes_on_device(state.ema)
    return Planned(program, (state, batch), there)


def encoding(config: ConfigDict, directory: Path, side: Side, devices: Sequence[Any]) -> Planned:
    """The program that encodes the longest texts."""
    mesh = make_mesh(math.gcd(config.mesh.fsdp, len(devices)), list(devices))
    retriever = retriever_of(config, directory)
    params = jax.eval_shape(retriever.init, jax.random.key(0))
    params = placed(params, shardings(mesh, params))
    length = config.tokens[f"{side}_length"]
    embedder = Embedder(retriever, params, mesh, 0, {side: length}, config.encode.tokens_per_batch)
    rows = encode_rows(config, length, len(devices))
    tokens = abstract_tokens(rows, min(padded_length(length), length), by_row(mesh))
    return Planned(embedder.program(side), (params, tokens), {"parameters": bytes_on_device(params)})


def encode_rows(config: ConfigDict, length: int, devices: int) -> int:
    """Texts of `length` tokens that are encoded at a time, over all devices."""
    enough = max(config.encode.tokens_per_batch, 8 * devices)
    _, rows, _ = next(plan_batches(np.full(enough, length), config.encode.tokens_per_batch, devices))
    return rows


class Asked(NamedTuple):
    """A search: passages of the corpus, and how many of them are on the devices at a time; precision: of candidates."""

    passages: int = 1_000_000
    queries: int = 1000
    k: int = 100
    precision: str = "float32"
    at_once: int = 1_000_000

    def on(self, retriever: BiEncoder, topology: Topology | None) -> Asked:
        """As it would be done on these chips."""
        if retriever.vectors_per_passage is None or topology is None:
            return self._replace(at_once=self.passages)
        shape = retriever.vectors_per_passage, retriever.dimension
        free = topology.devices * (topology.chip.memory - SCORES_BYTES)
        return self._replace(at_once=rows_at_once(self.passages, shape, find_precision(self.precision), free))


ASKED = Asked()


def searching(config: ConfigDict, directory: Path, asked: Asked, devices: Sequence[Any], platform: str = "") -> Planned:
    """XLA's search of what is on the devices; of lists of vectors, of one block on the first of them. platform: whose
    program is meant, where the devices stand for others."""
    retriever = retriever_of(config, directory)
    if retriever.vectors_per_passage is None:
        return searching_lists(config, retriever, asked, devices[0])
    passages = asked.at_once
    mesh = Mesh(np.array(devices), (CELLS,), axis_types=(AxisType.Auto,))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(CELLS))
    shape, precision = (retriever.vectors_per_passage, retriever.dimension), find_precision(asked.precision)
    layout = lay_out(passages, shape, precision, mesh.size, platform or platform_of(mesh))
    compressed = partial(_compressed, retriever.dimension, asked.precision)
    queries = compressed(everywhere, QUERY_ROWS)
    vectors = compressed(split, layout.cells, layout.size * layout.width)
    rows = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    program = Static(search_cells, (layout, min(few_sizes(asked.k), passages), mesh))
    return Planned(program, (queries, vectors, rows), {"documents": bytes_on_device(vectors)})


def searching_lists(config: ConfigDict, retriever: BiEncoder, asked: Asked, device: Any) -> Planned:
    """Of one block, for as many queries as have QUERY_ROWS vectors: the first of the program's statics."""
    where = SingleDeviceSharding(device)
    length = padded_length(config.tokens.passage_length)
    _, rows, _ = next(plan_batches(np.full(BLOCK_ROWS, length), BLOCK_ROWS, 1))
    queries = power_of_two(QUERY_ROWS // (config.tokens.query_length if retriever.late_interaction else 1))
    compressed = partial(_compressed, retriever.dimension, asked.precision, where)
    owner = jax.ShapeDtypeStruct((QUERY_ROWS,), jnp.int32, sharding=where)
    mask = jax.ShapeDtypeStruct((rows, length), bool, sharding=where)
    lists = compressed(QUERY_ROWS), owner, compressed(rows, length), mask
    at_once = documents_at_once(rows, length * QUERY_ROWS, device.platform)
    return Planned(Static(search_lists, (queries, power_of_two(min(asked.k, rows)), at_once)), lists, {})


def _compressed(dimension: int, precision: str, where: Any, *shape: int) -> Compressed:
    """Vectors of a shape in a precision, abstract."""

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    whole = array(*shape, dimension, dtype=find_precision(precision).dtype)
    if precision == "float32":
        return Compressed(whole)
    scale = array(*shape) if precision == "int8" else None
    return Compressed(whole, scale, array(*shape), array(*shape))


class Static(NamedTuple):
    """A jitted function whose last arguments are no arrays."""

    function: Any
    rest: tuple[Any, ...]

    def trace(self, *arguments: Any) -> Any:
        return self.function.trace(*arguments, *self.rest)


def placed(tree: Any, places: Any) -> Any:
    """Abstract arrays with their shardings."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def abstract_tokens(
    texts: int,
    length: int,
    where: NamedSharding,
    stacked: tuple[int, ...] = (),
    packed: Sequence[int] | None = None,
) -> Tokens:
    """packed: (rows, width)."""
    shape = (*stacked, texts, length)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype, sharding=where) for dtype in (jnp.int32, jnp.bool_))
    if packed is None:
        return Tokens(ids, mask)
    place = jax.ShapeDtypeStruct(shape[:-1], jnp.int32, sharding=where)
    return Tokens(ids, mask, place, Packing(place, *packed))


def abstract_batch(shapes: Shapes, where: NamedSharding, count: int = 1) -> Batch:
    """The batch of an update: several are stacked."""
    stacked = (count,) if count > 1 else ()

    def ids(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*stacked, *shape), jnp.int32, sharding=where)

    return Batch(
        queries=abstract_tokens(shapes.queries, shapes.query_length, where, stacked, shapes.packed_queries),
        documents=abstract_tokens(shapes.documents, shapes.passage_length, where, stacked, shapes.packed_passages),
        positives=ids(shapes.queries),
        document_ids=ids(shapes.documents),
        known_positives=ids(shapes.queries, shapes.positives),
        pseudo_queries=ids(shapes.documents, shapes.pseudo) if shapes.pseudo else None,
    )


def bytes_on_device(tree: Any) -> int:
    """Of abstract arrays with shardings: the bytes of one device's parts."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def job(
    kind: str,
    config: ConfigDict,
    directory: Path,
    shapes: Shapes | None = None,
    asked: Asked | None = None,
) -> dict[str, Any]:
    """What `build` makes a program of, as JSON can hold it."""
    values = {"kind": kind, "config": config.to_dict(), "directory": str(directory.absolute()), "asked": asked}
    return {**values, "shapes": asdict(shapes) if shapes else None}


def build(job: dict[str, Any], devices: Sequence[Any]) -> Planned:
    """The program of a `job` on these devices."""
    config, directory = ConfigDict(job["config"]), Path(job["directory"])
    if job["kind"] == "train":
        return training(config, directory, Shapes(**job["shapes"]), devices)
    if job["kind"] == "encode":
        return encoding(config, directory, "passage", devices)
    return searching(config, directory, Asked(*job["asked"]), devices)
