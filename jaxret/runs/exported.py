"""What an encoder's files do not say of a run: beside them lie `head.safetensors` (parameters of head and pooling) and
`jaxret.json` (the config of what makes vectors); `read_export` makes vectors of both again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save

from jaxret.data.records import Passage
from jaxret.data.tokenizer import TextTokenizer
from jaxret.distributed import make_mesh
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.heads.head import Side
from jaxret.models.retriever import build_retriever, encoder_config
from jaxret.runs.embedder import Embedder
from jaxret.runs.run import Run, config_json, load_tokenizer, make_embedder
from jaxret.runs.upgrade import upgrade
from jaxret.storage import atomic_write, read_json, write_json

HEAD, CONFIG = "head.safetensors", "jaxret.json"
_GROUPS = ("encoder", "head", "pooling", "normalize", "tokens", "encode")  # of the config: what makes vectors


def write_head(run: Run, out: Path) -> list[str]:
    """Writes what the encoder's files lack into `out`; the names of the parameters, as in `head.safetensors`."""
    own = {name: part for name, part in run.params.items() if not name.endswith("encoder")}
    flat = traverse_util.flatten_dict(jax.device_get(own), sep="/")
    with atomic_write(out / HEAD, "wb") as file:
        file.write(save({name: np.ascontiguousarray(value) for name, value in flat.items()}))
    config = {name: value for name, value in config_json(run.config).items() if name in _GROUPS}
    config["encoder"] |= {"layers": 0, "checkpoint": "", "sha256": ""}  # the encoder here has the run's layers only
    write_json(out / CONFIG, config)
    return sorted(flat)


@dataclass(frozen=True)
class Exported:
    """An exported retriever, for texts on the device that JAX has here."""

    config: ConfigDict
    tokenizer: TextTokenizer
    embedder: Embedder = field(repr=False)

    def queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The vectors [V,D] float32 of each query."""
        return list(self.embedder(self.tokenizer.queries(texts), "query"))

    def passages(self, texts: Sequence[str], titles: Sequence[str] = ()) -> list[np.ndarray]:
        """The vectors [V,D] float32 of each passage."""
        named = zip(texts, titles or [""] * len(texts), strict=True)
        passages = [Passage(str(number), text, title) for number, (text, title) in enumerate(named)]
        return list(self.embedder(self.tokenizer.passages(passages), "passage"))


def read_export(folder: str | Path) -> Exported:
    """Opens what `jaxret export --to=hf` wrote. Raises FileNotFoundError for a folder without `jaxret.json`
    (exports of other kinds have no encoder that is read here), ValueError for files that do not fit each other."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}; `jaxret export --to=hf` writes it")
    config = ConfigDict(upgrade(read_json(folder / CONFIG)))
    sides: tuple[Side, ...] = ("query", "passage")
    folders = {"encoder": folder} if config.encoder.tied else {f"{side}_encoder": folder / side for side in sides}
    shapes = encoder_config(config, next(iter(folders.values())))
    retriever = build_retriever(config, shapes)
    params: dict[str, Any] = traverse_util.unflatten_dict(load_file(folder / HEAD), sep="/")
    params |= {name: load_pretrained(path, (), shapes)[1] for name, path in folders.items()}
    wanted = traverse_util.flatten_dict(jax.eval_shape(retriever.init, jax.random.key(0)), sep="/")
    found = traverse_util.flatten_dict(params, sep="/")
    if odd := [key for key in wanted.keys() | found.keys() if np.shape(found.get(key)) != np.shape(wanted.get(key))]:
        raise ValueError(f"{folder / HEAD} does not fit {folder / CONFIG}: {', '.join(sorted(odd))}")
    tokenizer = load_tokenizer(config, next(iter(folders.values())), retriever)
    mesh = make_mesh(1, jax.local_devices()[:1])
    return Exported(config, tokenizer, make_embedder(retriever, params, mesh, tokenizer, config))
