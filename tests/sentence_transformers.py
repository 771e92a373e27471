"""sentence-transformers directories in miniature, written as its versions 2 to 5 do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from jaxret.storage import write_json
from tests.pipeline import write_encoder

MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write_bert(folder: Path) -> Path:
    """The encoder of `pipeline.write_encoder`, with markers that transformers puts around a text too."""
    write_encoder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=markers)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_modules(
    folder: Path,
    pooling: dict[str, Any] = MEAN,
    normalize: bool = False,
    similarity: str | None = None,
    prompts: dict[str, str] | None = None,
    transformer: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    encoder: str = "",
    package: str = "sentence_transformers.models",
    first: str = "",
    more: Sequence[tuple[str, str]] = (),
) -> Path:
    """The encoder of `write_bert` with modules around it: a Transformer, a Pooling, perhaps a Normalize."""
    write_bert(folder / encoder)
    lines = [(encoder, f"{package}.Transformer"), ("1_Pooling", f"{package}.Pooling")]
    if first:
        lines[0] = ("", f"sentence_transformers.{first}")
    lines += [("2_Normalize", f"{package}.Normalize")] * normalize
    lines += [(path, f"sentence_transformers.{kind}") for path, kind in more]
    write_json(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(lines)],
    )
    limits = {"max_seq_length": 16, "do_lower_case": False} if transformer is None else transformer
    write_json(folder / encoder / "sentence_bert_config.json", limits)
    old = MEAN if not any(key == "pooling_mode" for key in pooling) else {}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32} | old | pooling)
    named = {"similarity_fn_name": similarity} if similarity else {}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts or {}} | named | (settings or {}))
    return folder
