"""Model folders with any JSON value at any key: each is read, or refused by a ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.encoders.sentence_transformers import read_sentence_transformers_keys
from tests.fuzz.refusal import refusal
from tests.pipeline import write_encoder, write_language_model, write_t5
from tests.sentence_transformers import write_modules

MODELS: dict[str, Callable[[Path], Path]] = {
    "bert": write_encoder,
    "t5": write_t5,
    "modules": write_modules,
    **{
        name: lambda folder, name=name: write_language_model(folder, f"tiny_{name}")  # type: ignore[misc]
        for name in ("qwen3", "llama", "mistral", "gemma3")
    },
}
SCALARS = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=6,
)
DELETED = object()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {name: write(root / name) for name, write in MODELS.items()}


def read(folder: Path, weights: bool) -> None:
    """Read the files of a folder that `jaxret open` and a config with `encoder.checkpoint` read."""
    if weights:
        load_pretrained(folder)
    read_sentence_transformers_keys(folder)
    TextTokenizer.load(folder, 8, 8)


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of every value in a JSON tree, beginning with the root."""
    yield at
    children = tree.items() if isinstance(tree, dict) else enumerate(tree[:4]) if isinstance(tree, list) else ()
    for key, value in children:
        yield from places(value, (*at, key))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Return a tree with another value at a place, or without that place."""
    if not at:
        return None if value is DELETED else value
    copy = tree.copy()
    if len(at) == 1 and value is DELETED:
        del copy[at[0]]
    else:
        copy[at[0]] = changed(tree[at[0]], at[1:], value)
    return copy


@pytest.mark.parametrize("name", MODELS)
@hypothesis.given(data=st.data())
def test_a_folder_with_another_value_is_read_or_refused(
    name: str, data: st.DataObject, folders: dict[str, Path]
) -> None:
    folder = folders[name]
    file = data.draw(st.sampled_from(sorted(folder.rglob("*.json"))))
    before = file.read_text()
    tree = json.loads(before)
    at = data.draw(st.sampled_from(list(places(tree))))
    value = data.draw(st.just(DELETED) | VALUES)
    try:
        file.write_text(json.dumps(changed(tree, at, value)))
        message = refusal(lambda: read(folder, file == folder / "config.json"), ValueError, FileNotFoundError)
    finally:
        file.write_text(before)
    assert message is None or ("\n" not in message and message != "")


@hypothesis.given(data=st.data())
def test_weights_with_another_header_are_read_or_refused(data: st.DataObject, folders: dict[str, Path]) -> None:
    """Any JSON value at any key of a safetensors header, which gives the places of tensors; or damaged bytes."""
    file = folders["bert"] / "model.safetensors"
    before = file.read_bytes()
    size = int.from_bytes(before[:8], "little")
    if data.draw(st.booleans()):
        tree = json.loads(before[8 : 8 + size])
        at = data.draw(st.sampled_from(list(places(tree))))
        header = json.dumps(changed(tree, at, data.draw(st.just(DELETED) | VALUES))).encode()
        damaged = len(header).to_bytes(8, "little") + header + before[8 + size :]
    else:
        start = data.draw(st.integers(0, size + 100))
        damaged = before[:start] + data.draw(st.binary(max_size=20)) + before[start + data.draw(st.integers(0, 20)) :]
    try:
        file.write_bytes(damaged)
        message = refusal(lambda: load_pretrained(folders["bert"]), ValueError)
    finally:
        file.write_bytes(before)
    assert message is None or (str(file.parent) in message and "\n" not in message)
