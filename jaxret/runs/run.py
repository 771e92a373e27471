"""A run's folder as the tools after training see it: config, tokenizer, contract, checkpoints.

The folder is complete in itself: the encoder's shapes and tokenizer are copied into it, so resuming, encoding and
search do not need the place that training started from.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.checkpoint import CheckpointError, Checkpoints, digest
from jaxret.contract import ContractError
from jaxret.data.tokenizer import TOKENIZER_FILES, TextTokenizer
from jaxret.distributed import make_mesh, shardings
from jaxret.models.encoders.fused import require_kernel
from jaxret.models.encoders.pretrained import Params
from jaxret.models.model import Model
from jaxret.models.retriever import BiEncoder, build_retriever, encoder_config
from jaxret.runs.contract import make_contract, require_same, understood
from jaxret.runs.embedder import Embedder, Programs
from jaxret.runs.seal import check_seal, write_sealed
from jaxret.runs.upgrade import upgrade
from jaxret.runs.workdir import Workdir
from jaxret.storage import atomic_write, read_json, sweep, write_json

LESS_IS_BETTER = ("nll", "average_rank")  # of the metrics of validation


def config_json(config: ConfigDict) -> dict[str, Any]:
    """The config as JSON would give it back: tuples are lists."""
    return json.loads(json.dumps(config.to_dict()))


def load_tokenizer(config: ConfigDict, directory: Path, model: Model) -> TextTokenizer:
    """The tokenizer in `directory`, with the config's lengths and prompts. Raises ValueError if the model cannot do
    with it."""
    tokens = config.tokens
    tokenizer = TextTokenizer.load(
        directory,
        tokens.query_length,
        tokens.passage_length,
        query_prompt=tokens.query_prompt,
        passage_prompt=tokens.passage_prompt,
        title_separator=tokens.title_separator,
        **model.text_options(),
    )
    try:
        model.check_tokenizer(tokenizer)
    except ValueError as error:
        raise ValueError(f"{error} (tokenizer of {directory})") from error
    known, words = tokenizer.backend.get_vocab_size(), model.module.config.vocab_size
    if known > words:  # a lookup outside the table gives some other word's row, or NaN
        raise ValueError(f"the tokenizer of {directory} knows {known} words, but its encoder has {words} embeddings")
    return tokenizer


def create(
    workdir: Workdir,
    config: ConfigDict,
    encoder: Path,
    contract: Mapping[str, Any],
    data: Any,
    stated: Mapping[str, Any] | None = None,
) -> None:
    """Makes the folder a run: the encoder's config and tokenizer, what its directory stated of the config, if anything,
    contract.json, data.json, and last config.json."""
    sweep(workdir.encoder)  # of a start that was killed
    for name in ("config.json", *TOKENIZER_FILES):
        if (encoder / name).exists():
            with atomic_write(workdir.encoder / name, "wb") as file, open(encoder / name, "rb") as original:
                shutil.copyfileobj(original, file)
    if stated:
        write_json(workdir.stated, stated)
    values = {workdir.contract: contract, workdir.data: data, workdir.config: config_json(config)}
    write_sealed(workdir, values)


def recorded_statement(workdir: Workdir) -> dict[str, Any]:
    """What the directory of a run's encoder stated of its config; {} if nothing. Raises ContractError if a file of the
    run is damaged or was edited."""
    if not workdir.stated.exists():
        return {}
    check_seal(workdir)
    return read_json(workdir.stated)


@dataclass(frozen=True)
class Run:
    """A trained retriever, opened for encoding or search. `config` and `contract` say the lengths that it is used
    with."""

    workdir: Workdir
    config: ConfigDict
    retriever: BiEncoder
    tokenizer: TextTokenizer
    params: Params = field(repr=False)
    contract: dict[str, Any]
    checkpoint: dict[str, Any]  # {"step", "digest"}
    mesh: Mesh
    compiled: Programs = field(default_factory=dict, repr=False, compare=False)

    def embedder(self, unpooled: bool = False) -> Embedder:
        """Text -> vectors, with this run's parameters; all embedders of a run share their programs. unpooled: a
        passage's vectors are those that the head gives."""
        retriever = self.retriever.unpooled() if unpooled else self.retriever
        return make_embedder(retriever, self.params, self.mesh, self.tokenizer, self.config, self.compiled)

    def understands(self, contract: Mapping[str, Any]) -> bool:
        """Whether a contract that shards hold, perhaps an older one, says the same as this run's."""
        try:
            return understood(contract, self.contract, self.tokenizer.digest) == self.contract
        except (ValueError, AttributeError, KeyError, TypeError):
            return False

    def require_same_vectors(self, contract: Mapping[str, Any], name: str, remedy: str) -> None:
        """Raises ContractError with both values unless the contract in `name` is this run's; how long texts may be is
        each side's own."""
        here = f"the model in {self.workdir}"
        require_same(contract, self.contract, self.tokenizer.digest, name, here, remedy, lengths=False)


def make_embedder(
    retriever: BiEncoder,
    params: Params,
    mesh: Mesh,
    tokenizer: TextTokenizer,
    config: ConfigDict,
    compiled: Programs | None = None,
) -> Embedder:
    """The embedder of a run that is opened, and of one that is trained."""
    return Embedder(
        retriever=retriever,
        params=params,
        mesh=mesh,
        pad_id=tokenizer.pad_id,
        max_lengths={"query": tokenizer.query_length, "passage": tokenizer.passage_length},
        tokens_per_batch=config.encode.tokens_per_batch,
        compiled={} if compiled is None else compiled,
    )


def stored_config(workdir: Workdir) -> ConfigDict:
    """The config of a run, as this jaxret spells it. Raises FileNotFoundError if the folder is no run, ContractError
    if one of its files is damaged or was edited."""
    if not workdir.config.exists():
        raise FileNotFoundError(
            f"{workdir} is no run (it has no config.json); jaxret train --workdir={workdir} makes one"
        )
    check_seal(workdir)
    for path in (workdir.contract, workdir.encoder / "config.json"):  # of an older run: a newer one has a seal
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; restore it")
    config = read_json(workdir.config)
    if not isinstance(config, dict):
        raise ContractError(f"{workdir.config} is damaged: it holds no config; restore it")
    return ConfigDict(upgrade(config))


def open_run(
    workdir: str | os.PathLike[str],
    checkpoint: str = "best",
    query_length: int | None = None,
    passage_length: int | None = None,
    tokens_per_batch: int | None = None,
    attention: str | None = None,
) -> Run:
    """Opens a run at its `best` or `last` checkpoint, or at the step given. Lengths, batches and what computes
    attention may be others than in training.

    Raises FileNotFoundError if the folder is no run, CheckpointError if it has no such checkpoint, ContractError if its
    files were changed since training, ValueError for a length that the encoder cannot have, and for an attention that
    does not run here.
    """
    opened = open_model(
        workdir, "retrieval", build_retriever, checkpoint, query_length, passage_length, tokens_per_batch, attention
    )
    assert isinstance(opened.model, BiEncoder)
    return Run(
        workdir=opened.workdir,
        config=opened.config,
        retriever=opened.model,
        tokenizer=opened.tokenizer,
        params=opened.params,
        contract=opened.contract,
        checkpoint=opened.checkpoint,
        mesh=opened.mesh,
    )


# What each task calls its models, and which verbs use them.
USES = {
    "retrieval": "a retriever: encode and search use it",
    "reranking": "a reranker: rerank uses it",
    "pretraining": "the pre-training of an encoder, which is in its folder model: encoder.checkpoint takes it",
}


def config_of_task(workdir: Workdir, task: str) -> ConfigDict:
    """The config of a run of a task. Raises what `stored_config` does, and ValueError for a run of another."""
    config = stored_config(workdir)
    if config.task != task:
        raise ValueError(f"{workdir} is {USES.get(config.task, config.task)}; {USES[task].partition(':')[0]} is needed")
    return config


@dataclass(frozen=True)
class Opened:
    """A model of a run with its parameters, and what belongs to it."""

    workdir: Workdir
    config: ConfigDict
    model: Model
    tokenizer: TextTokenizer
    params: Params = field(repr=False)
    contract: dict[str, Any]
    checkpoint: dict[str, Any]
    mesh: Mesh


def open_model(
    workdir: str | os.PathLike[str],
    task: str,
    build: Callable[[ConfigDict, Any], Model],
    checkpoint: str = "best",
    query_length: int | None = None,
    passage_length: int | None = None,
    tokens_per_batch: int | None = None,
    attention: str | None = None,
) -> Opened:
    """Opens the run of a task; build: its config and the encoder's -> the model. All else as `open_run`."""
    folder = Workdir(workdir)
    config = config_of_task(folder, task)
    if attention is not None:
        config.encoder.attention = attention
    try:
        model = build(config, encoder_config(config, folder.encoder))
        tokenizer = load_tokenizer(config, folder.encoder, model)
    except AttributeError as error:
        if not isinstance(error.__context__, KeyError):  # how ml_collections says that a key is missing
            raise
        missing = str(error).strip("\"'")
        raise ContractError(
            f"{folder}/config.json has no key {missing!r}: another version of jaxret made the run; open it with that"
        ) from error
    contract = make_contract(model, tokenizer, folder.encoder)
    require_stored_contract(folder, contract, tokenizer, "Restore the files.")
    tokenizer = with_lengths(config, model, tokenizer, query_length, passage_length)
    if tokens_per_batch is not None:
        if tokens_per_batch < 1:
            raise ValueError(f"tokens_per_batch is {tokens_per_batch}; it must be at least 1")
        config.encode.tokens_per_batch = tokens_per_batch
    devices = jax.local_devices()
    require_kernel(config.encoder.attention, devices[0].platform)
    mesh = make_mesh(math.gcd(config.mesh.fsdp, len(devices)), devices)  # there may be fewer than in training
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings(mesh, abstract),
    )
    with open_checkpoints(folder, config) as checkpoints:
        step = choose_checkpoint(checkpoints, checkpoint, folder)
        params, _ = checkpoints.restore(step, placed)
    found = {"step": step, "digest": digest(params)}
    return Opened(
        folder, config, model, tokenizer, params, make_contract(model, tokenizer, folder.encoder), found, mesh
    )


def require_stored_contract(
    workdir: Workdir, contract: Mapping[str, Any], tokenizer: TextTokenizer, remedy: str
) -> None:
    """Raises ContractError unless the run's contract.json, perhaps an older one, is the contract given."""
    name, here = str(workdir.contract), f"the files in {workdir}"
    require_same(read_json(workdir.contract), contract, tokenizer.digest, name, here, remedy)


def with_lengths(
    config: ConfigDict, model: Model, tokenizer: TextTokenizer, query: int | None, passage: int | None
) -> TextTokenizer:
    """The tokenizer with other lengths, which the config then says too."""
    for key, length in (("query_length", query), ("passage_length", passage)):
        if length is not None:
            if not 3 <= length <= model.longest:
                raise ValueError(f"{key} is {length}; it must be 3 to {model.longest}, the encoder's positions")
            config.tokens[key] = length
    lengths = {"query_length": config.tokens.query_length, "passage_length": config.tokens.passage_length}
    return replace(tokenizer, **lengths)


def open_checkpoints(workdir: Workdir, config: ConfigDict, writing: bool = False) -> Checkpoints:
    """The checkpoints of a run, with its rule for which is best."""
    metric = config.validation.metric if config.data.dev else None
    return Checkpoints(workdir.checkpoints, metric, LESS_IS_BETTER, writing=writing)


def choose_checkpoint(checkpoints: Checkpoints, name: str, workdir: Workdir) -> int:
    """ "best", "last" or a step -> a step."""
    if name in ("best", "last"):
        step = checkpoints.best() if name == "best" else checkpoints.last()
        if step is None:
            raise CheckpointError(f"{workdir} has no checkpoint yet; jaxret train --workdir={workdir} goes on with it")
        return step
    if not name.isdecimal():
        raise CheckpointError(f"checkpoint is {name!r}; it must be best, last, or a step")
    return int(name)
