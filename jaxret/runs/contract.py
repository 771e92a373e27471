"""The contract of a run: all settings that change a vector, and nothing else.

It is stored with checkpoints, shards and results. If two contracts differ, the job stops with both values of each key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.model import Model
from jaxret.runs.added_keys import complete_contract
from jaxret.runs.mismatch import ContractError, require_equal

VERSION = 2
LENGTHS = ("query_length", "passage_length")
DIMENSION = "dimension"  # key for the dimension of cut vectors; the contract of uncut vectors does not have it


def make_contract(model: Model, tokenizer: TextTokenizer, folder: Path) -> dict[str, Any]:
    """Return the contract of a model with the tokenizer of `folder`, in the form that JSON returns."""
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
    return json.loads(json.dumps(contract))  # turns tuples into lists


def of_whole_vectors(contract: Mapping[str, Any]) -> dict[str, Any]:
    """Return a contract without the dimension of cut vectors."""
    return {key: value for key, value in contract.items() if key != DIMENSION}


def require_same_contract(
    stored_contract: Mapping[str, Any],
    current: Mapping[str, Any],
    stored_name: str,
    current_name: str,
    remedy: str,
    lengths: bool = True,
) -> None:
    """Raise ContractError with both values of every key on which two contracts differ.

    Args:
        stored_contract: the contract in a file.
        current: the contract of a model and its tokenizer.
        stored_name: the file, for the error message.
        current_name: the model, for the error message.
        remedy: the last sentence of the error message.
        lengths: whether the lengths of queries and passages and the dimension of vectors are compared, too.
    """
    try:
        version, expected = stored_contract["version"], complete_contract(stored_contract, current)
    except (AttributeError, KeyError, TypeError) as error:
        raise ContractError(f"{stored_name} is damaged: it is not a contract ({error!r}). {remedy}") from error
    if version != VERSION:
        raise ContractError(
            f"{stored_name} has contract version {version!r}, and this jaxret has {VERSION}: use the version of jaxret "
            "that wrote it"
        )
    if not lengths:
        expected |= {key: current[key] for key in LENGTHS}
        expected, current = of_whole_vectors(expected), of_whole_vectors(current)
    require_equal(expected, current, stored_name, current_name, remedy)
