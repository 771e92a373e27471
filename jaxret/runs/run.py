"""A run's folder as the tools after training see it: config, tokenizer, contract, checkpoints.

The folder is complete in itself: the encoder's shapes and tokenizer are copied into it, so encoding and search do not
need the place that training started from.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.checkpoint import CheckpointError, Checkpoints, digest
from jaxret.contract import ContractError, require_equal
from jaxret.data.tokenizer import TextTokenizer
from jaxret.distributed import make_mesh, shardings
from jaxret.models.encoders.pretrained import Params
from jaxret.models.retriever import Retriever, build_retriever, encoder_config
from jaxret.runs.embedder import Embedder
from jaxret.storage import atomic_write, read_json, write_json

LESS_IS_BETTER = ("nll", "average_rank")  # of the metrics of validation
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)


def config_json(config: ConfigDict) -> dict[str, Any]:
    """The config as JSON would give it back: tuples are lists."""
    return json.loads(json.dumps(config.to_dict()))


def make_contract(config: ConfigDict, retriever: Retriever, tokenizer: TextTokenizer) -> dict[str, Any]:
    """What training, encoding and search must agree on for vectors to be comparable."""
    return {
        "text": tokenizer.markers,
        "tokenizer": tokenizer.digest,
        "query_length": tokenizer.query_length,
        "passage_length": tokenizer.passage_length,
        **retriever.contract(),
    }


def load_tokenizer(config: ConfigDict, directory: Path, retriever: Retriever) -> TextTokenizer:
    """The tokenizer in `directory`, with the config's lengths. Raises ValueError if the head cannot do with it."""
    tokenizer = TextTokenizer.load(directory, config.tokens.query_length, config.tokens.passage_length)
    try:
        retriever.module.head.check_tokenizer(tokenizer)
    except ValueError as error:
        raise ValueError(f"{error} (tokenizer of {directory})") from error
    return tokenizer


def is_new(workdir: Path, config: ConfigDict, contract: dict[str, Any]) -> bool:
    """Whether the folder holds no run yet; if it does, it must be the same run.

    Raises ContractError with both values if it is another. How many devices a run uses (mesh.*) may change.
    """
    path = workdir / "config.json"
    if not path.exists():
        return True
    wanted, found = config_json(config), read_json(path)
    for tree in (wanted, found):
        tree.pop("mesh", None)
    remedy = "To resume the run use its config; to start another choose another --workdir."
    require_equal(found, wanted, str(path), "the config given", remedy)
    path = workdir / "contract.json"
    require_equal(read_json(path), contract, str(path), "this run", remedy)
    return False


def create(workdir: Path, config: ConfigDict, encoder_directory: Path, contract: dict[str, Any]) -> None:
    """Writes config.json, contract.json and encoder/."""
    if jax.process_index() != 0:
        return
    for name in ("config.json", *_TOKENIZER_FILES):
        source = encoder_directory / name
        if source.exists():
            with atomic_write(workdir / "encoder" / name, "wb") as file, open(source, "rb") as original:
                shutil.copyfileobj(original, file)
    write_json(workdir / "contract.json", contract)
    write_json(workdir / "config.json", config_json(config))  # last: with it, the folder is a run


@dataclass
class Run:
    """A trained retriever, opened for encoding or search."""

    workdir: Path
    config: ConfigDict
    retriever: Retriever
    tokenizer: TextTokenizer
    params: Params
    contract: dict[str, Any]
    checkpoint: dict[str, Any]  # {"step", "digest"}
    mesh: Mesh

    def embedder(self) -> Embedder:
        """Text -> vectors, with this run's parameters."""
        return Embedder(
            retriever=self.retriever,
            params=self.params,
            mesh=self.mesh,
            pad_id=self.tokenizer.pad_id,
            max_lengths={"query": self.tokenizer.query_length, "passage": self.tokenizer.passage_length},
            tokens_per_batch=self.config.encode.tokens_per_batch,
        )


def open_run(workdir: str | Path, checkpoint: str = "best") -> Run:
    """Opens a run at its `best` or `last` checkpoint, or at the step given.

    Raises FileNotFoundError if the folder is no run, CheckpointError if it has no such checkpoint, and ContractError
    if its files were changed since training.
    """
    workdir = Path(workdir)
    if not (workdir / "config.json").exists():
        raise FileNotFoundError(f"{workdir} is no run: it has no config.json; train.py --workdir={workdir} makes one")
    config = ConfigDict(read_json(workdir / "config.json"))
    try:
        retriever = build_retriever(config, encoder_config(config, workdir / "encoder"))
        tokenizer = load_tokenizer(config, workdir / "encoder", retriever)
        contract = make_contract(config, retriever, tokenizer)
    except AttributeError as error:
        if not isinstance(error.__context__, KeyError):  # how ml_collections says that a key is missing
            raise
        missing = str(error).strip("\"'")
        raise ContractError(
            f"{workdir}/config.json has no key {missing!r}: another version of jaxret made the run; open it with that"
        ) from error
    stored = read_json(workdir / "contract.json")
    require_equal(stored, contract, str(workdir / "contract.json"), f"the files in {workdir}", "Restore the files.")
    devices = jax.local_devices()
    mesh = make_mesh(math.gcd(config.mesh.fsdp, len(devices)), devices)  # there may be fewer than in training
    abstract = jax.eval_shape(retriever.init, jax.random.key(0))
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings(mesh, abstract),
    )
    with open_checkpoints(workdir, config) as checkpoints:
        step = choose_checkpoint(checkpoints, checkpoint, workdir)
        params, _ = checkpoints.restore(step, placed)
    return Run(workdir, config, retriever, tokenizer, params, contract, {"step": step, "digest": digest(params)}, mesh)


def open_checkpoints(workdir: Path, config: ConfigDict, writing: bool = False) -> Checkpoints:
    """The checkpoints of a run, with its rule for which is best."""
    metric = config.validation.metric if config.data.dev else None
    return Checkpoints(workdir / "checkpoints", metric, maximize=metric not in LESS_IS_BETTER, writing=writing)


def choose_checkpoint(checkpoints: Checkpoints, name: str, workdir: Path) -> int:
    """ "best", "last" or a step -> a step."""
    if name in ("best", "last"):
        step = checkpoints.best() if name == "best" else checkpoints.last()
        if step is None:
            raise CheckpointError(f"{workdir} has no checkpoint yet; train.py --workdir={workdir} continues the run")
        return step
    if not name.isdigit():
        raise CheckpointError(f"checkpoint is {name!r}; it must be best, last, or a step")
    return int(name)
