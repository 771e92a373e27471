"""sentence-transformers directories in miniature, in the format of its versions 2 to 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from jaxret.storage.atomic import write_json
from tests.pipeline import write_encoder

MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


@dataclass(frozen=True)
class Modules:
    """The modules of a directory and their settings."""

    pooling: Mapping[str, Any] = field(default_factory=lambda: MEAN)
    normalize: bool = False  # whether there is a Normalize module
    similarity: str | None = None
    prompts: Mapping[str, str] | None = None
    transformer: Mapping[str, Any] | None = None  # settings of the Transformer
    settings: Mapping[str, Any] | None = None  # more keys of config_sentence_transformers.json
    encoder: str = ""  # folder of the Transformer
    package: str = "sentence_transformers.models"
    first: str = ""  # class of the first module, instead of the Transformer
    more: Sequence[tuple[str, str]] = ()  # (folder, class) of more modules


def write_modules(folder: Path, **changes: Any) -> Path:
    """Write the encoder of `write_encoder` and modules for it; changes: fields of Modules."""
    modules = Modules(**changes)
    encoder, package, pooling = modules.encoder, modules.package, modules.pooling
    write_encoder(folder / encoder)
    lines = [(encoder, f"{package}.Transformer"), ("1_Pooling", f"{package}.Pooling")]
    if modules.first:
        lines[0] = ("", f"sentence_transformers.{modules.first}")
    lines += [("2_Normalize", f"{package}.Normalize")] * modules.normalize
    lines += [(path, f"sentence_transformers.{kind}") for path, kind in modules.more]
    write_json(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(lines)],
    )
    usual = {"max_seq_length": 16, "do_lower_case": False}
    limits = usual if modules.transformer is None else dict(modules.transformer)
    write_json(folder / encoder / "sentence_bert_config.json", limits)
    old = MEAN if not any(key == "pooling_mode" for key in pooling) else {}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32} | old | dict(pooling))
    settings: dict[str, Any] = {"prompts": dict(modules.prompts or {})}
    settings |= {"similarity_fn_name": modules.similarity} if modules.similarity else {}
    write_json(folder / "config_sentence_transformers.json", settings | dict(modules.settings or {}))
    return folder


def write_pylate(folder: Path, projection: int = 6, **settings: Any) -> Path:
    """A PyLate directory in miniature: the encoder of `write_encoder`, markers as added tokens, a projection."""
    write_encoder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["[Q] ", "[D] "])
    tokenizer.save(str(folder / "tokenizer.json"))
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    lines = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    write_json(folder / "modules.json", lines)
    written = {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 12,
        "document_length": 24,
        "do_query_expansion": True,
        "attend_to_expansion_tokens": False,
        "skiplist_words": ["e", "river", "?"],  # the last is not in the vocabulary and becomes [UNK]
    }
    write_json(folder / "config_sentence_transformers.json", written | settings)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False})
    identity = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": 32, "out_features": projection, "bias": False, "activation_function": identity}
    write_json(folder / "1_Dense" / "config.json", sizes)
    weight = np.random.default_rng(0).standard_normal((projection, 32)).astype(np.float32)
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors", {"format": "pt"})
    return folder
