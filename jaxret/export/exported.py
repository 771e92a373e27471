"""Reads an exported retriever: encoder files, `head.safetensors` (parameters of head and pooling), and jaxret.json
(the config keys that determine vectors)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.heads.head import Side
from jaxret.models.model import parameter_shapes
from jaxret.models.peft_files import EXPORT
from jaxret.models.retriever_model import encoder_config, make_retriever_model
from jaxret.parallel.mesh import make_mesh
from jaxret.runs.added_keys import complete_config
from jaxret.runs.embedder import Embedder
from jaxret.runs.run import Run, config_json, load_tokenizer, make_embedder
from jaxret.storage.atomic import read_json, write_json
from jaxret.storage.foreign_files import read_settings, read_tensors, write_tensors

HEAD, CONFIG = "head.safetensors", EXPORT
_VECTOR_KEYS = ("task", "encoder", "head", "pooling", "normalize", "tokens", "encode")  # keys that determine vectors


def write_head(run: Run, out: Path, base: bool = False) -> list[str]:
    """Write head and config into the folder of the encoder's files. Return the parameter names in `head.safetensors`.

    With `base`, the files have adapters, and the config names the base in the run's config, with the digest of its
    weights.
    """
    head = {name: part for name, part in run.params.items() if not name.endswith("encoder")}
    flat = traverse_util.flatten_dict(jax.device_get(head), sep="/")
    write_tensors(out / HEAD, flat)
    keys = (*_VECTOR_KEYS, "lora") if base else _VECTOR_KEYS
    config = {name: value for name, value in config_json(run.config).items() if name in keys}
    if base:
        config["encoder"]["sha256"] = read_json(run.workdir.data)["start"].get("weights", "")
    else:
        config["encoder"] |= {"layers": 0, "checkpoint": "", "sha256": ""}  # the files have only the run's layers
    write_json(out / CONFIG, config)
    return sorted(flat)


@dataclass(frozen=True)
class Exported:
    """An exported retriever, which encodes texts on one device."""

    config: ConfigDict
    tokenizer: TextTokenizer
    embedder: Embedder = field(repr=False)

    def queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return an array of vectors [V,D] float32 for each query."""
        return list(self.embedder(self.tokenizer.queries(texts), "query"))

    def passages(self, texts: Sequence[str], titles: Sequence[str] = ()) -> list[np.ndarray]:
        """Return an array of vectors [V,D] float32 for each passage."""
        pairs = zip(texts, titles or [""] * len(texts), strict=True)
        passages = [Passage(str(number), text, title) for number, (text, title) in enumerate(pairs)]
        return list(self.embedder(self.tokenizer.passages(passages), "passage"))


def read_export(folder: str | Path) -> Exported:
    """Open an export of `jaxret export --to=hf`.

    Raises FileNotFoundError for a folder without jaxret.json, and ValueError for files that do not fit together.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}; `jaxret export --to=hf` writes it")
    config = ConfigDict(complete_config(read_settings(folder / CONFIG)))
    if "lora" in config:
        raise ValueError(
            f"{folder} is an export of --to=peft, adapters without their base. jaxret train reads them as "
            "lora.adapters; --to=hf exports the merged encoder"
        )
    sides: tuple[Side, ...] = ("query", "passage")
    folders = {"encoder": folder} if config.encoder.tied else {f"{side}_encoder": folder / side for side in sides}
    shapes = encoder_config(config, next(iter(folders.values())))
    retriever = make_retriever_model(config, shapes)
    params: dict[str, Any] = traverse_util.unflatten_dict(read_tensors(folder / HEAD), sep="/")
    params |= {name: load_pretrained(path, ("pooler",), shapes)[1] for name, path in folders.items()}
    shapes_expected = traverse_util.flatten_dict(parameter_shapes(retriever), sep="/")
    shapes_read = traverse_util.flatten_dict(params, sep="/")
    keys = shapes_expected.keys() | shapes_read.keys()
    if odd := [key for key in keys if np.shape(shapes_read.get(key)) != np.shape(shapes_expected.get(key))]:
        raise ValueError(f"{folder / HEAD} does not fit {folder / CONFIG}: {', '.join(sorted(odd))}")
    tokenizer = load_tokenizer(config, next(iter(folders.values())), retriever)
    mesh = make_mesh(1, jax.local_devices()[:1])
    return Exported(config, tokenizer, make_embedder(retriever, params, mesh, tokenizer, config))
