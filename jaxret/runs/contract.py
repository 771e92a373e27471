"""The contract of a run: everything that changes a vector, and nothing else.

It is written beside the checkpoints, the shards and the results; those who disagree stop with both values shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from jaxret.contract import ContractError, flatten, require_equal
from jaxret.data.tokenizer import JOINS, TextTokenizer
from jaxret.models.encoders.architectures import ARCHITECTURES
from jaxret.models.model import Model
from jaxret.runs.upgrade import ABSENT, upgrade

VERSION = 2
LENGTHS = ("query_length", "passage_length")
_OLDER_ENCODER = {"type": "model_type", "layers": "num_layers"}  # version 1 -> now


def make_contract(model: Model, tokenizer: TextTokenizer, folder: Path) -> dict[str, Any]:
    """The contract of a model that reads with the tokenizer of `folder`; JSON-like."""
    contract = {
        "version": VERSION,
        "text": tokenizer.markers,
        "special_ids": tokenizer.special_ids,
        "tokenizer": TextTokenizer.digests(folder),
        "query_length": tokenizer.query_length,
        "passage_length": tokenizer.passage_length,
        **tokenizer.joins,
        **model.contract(),
    }
    return json.loads(json.dumps(contract))  # tuples are lists, as in a file


def _defaults(model_type: str) -> dict[str, Any]:
    """What an encoder's config has in fields that nobody set."""
    kind: Any = ARCHITECTURES[model_type].config
    return {f.name: f.default for f in fields(getattr(kind, "func", kind)) if f.default is not MISSING}


def understood(stored: Mapping[str, Any], now: Mapping[str, Any], tokenizer_digest: str) -> dict[str, Any]:
    """A contract as this version would have written it, to be compared with `now`.

    What an older one did not record is taken from `now`, and what it recorded of other families is left out.
    `tokenizer_digest`: of the tokenizer as `now` has it, since older contracts hold a digest of that kind.
    """
    version = stored.get("version", 1)
    joins = {name: ABSENT[f"tokens.{name}"] for names in JOINS.values() for name in names if name in now}
    if version == VERSION:  # keys that came later mean what the code did before there were any
        family = stored["head"]["name"]
        absent = {key: ABSENT[f"head.{family}.{key}"] for key in now["head"] if f"head.{family}.{key}" in ABSENT}
        encoder = {k: v for k, v in _defaults(stored["encoder"]["model_type"]).items() if k in now["encoder"]}
        return {**joins, **stored, "head": {**absent, **stored["head"]}, "encoder": {**encoder, **stored["encoder"]}}
    if version != 1:
        raise ContractError(f"a contract has version {version!r}; this jaxret understands up to {VERSION}")
    encoder = {_OLDER_ENCODER.get(key, key): value for key, value in stored["encoder"].items()}
    encoder = {key: value for key, value in encoder.items() if key in now["encoder"]}
    head = upgrade({"head": stored["head"]})["head"]
    own = {**head, **(head.get(head["name"]) if isinstance(head.get(head["name"]), Mapping) else {})}
    return {
        **now,
        **joins,
        **{key: stored[key] for key in ("text", *LENGTHS, "pooling", "normalize")},
        "tokenizer": now["tokenizer"] if stored["tokenizer"] == tokenizer_digest else stored["tokenizer"],
        "encoder": {**now["encoder"], **encoder},
        "head": {key: own.get(key, value) for key, value in now["head"].items()} | {"name": head["name"]},
    }


def require_same(
    stored: Mapping[str, Any],
    now: Mapping[str, Any],
    tokenizer_digest: str,
    stored_name: str,
    now_name: str,
    remedy: str,
    lengths: bool = True,
) -> None:
    """Raises ContractError with both values of everything on which a stored contract, perhaps an older one, differs.
    lengths=False: of texts, queries and passages alike, are each side's own."""
    try:
        expected = understood(stored, now, tokenizer_digest)
        flatten(expected)
    except (AttributeError, KeyError, TypeError) as error:
        raise ContractError(f"{stored_name} is damaged: it is no contract ({error!r}). {remedy}") from error
    if not lengths:
        expected |= {key: now[key] for key in LENGTHS}
    require_equal(expected, now, stored_name, now_name, remedy)
