"""Tokenizers that are loaded without transformers equal those of transformers, to the byte; it loads all others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.tokens.backend import _load_plain, _load_with_transformers
from jaxret.storage.atomic import read_json, write_json
from tests.pipeline import REPOSITORY, environment, untrained_run, write_encoder, write_t5


def folder(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> Path:
    if name == "tiny":
        return write_encoder(tmp_path / "x")
    if name == "t5":
        return write_t5(tmp_path / "x")
    (tmp_path / "x").mkdir()
    for file in request.getfixturevalue("minilm_dir").glob("*.*"):
        if file.suffix in (".json", ".txt"):
            shutil.copyfile(file, tmp_path / "x" / file.name)
    return tmp_path / "x"


def outcome(load: Callable[[Path], Any], place: Path) -> tuple[str, dict[str, Any]]:
    backend, ids = load(place)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str(), {name: ids[name] for name in ("cls", "sep", "pad", "mask", "eos")}


@pytest.mark.parametrize("name", ["tiny", "t5", "minilm"])
def test_the_plain_tokenizer_equals_transformers(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    place = folder(tmp_path, name, request)
    assert _load_plain(place) is not None
    assert outcome(_load_plain, place) == outcome(_load_with_transformers, place)


EDITS: list[tuple[str, dict[str, Any]]] = [
    ("tokenizer_config.json", {"do_lower_case": False}),
    ("tokenizer_config.json", {"strip_accents": True}),
    ("tokenizer_config.json", {"tokenize_chinese_chars": False}),
    ("tokenizer_config.json", {"cls_token": "[MASK]"}),
    ("tokenizer_config.json", {"sep_token": None}),
    ("tokenizer_config.json", {"eos_token": "</s>"}),
    ("tokenizer_config.json", {"bos_token": "[CLS]", "add_bos_token": True}),
    ("tokenizer_config.json", {"mask_token": {"content": "[MASK]", "__type": "AddedToken", "lstrip": True}}),
    ("tokenizer_config.json", {"additional_special_tokens": ["[Q]"]}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"98": {"content": "[Q]", "special": True}}}),
    ("tokenizer_config.json", {"tokenizer_class": "DistilBertTokenizer"}),
    ("tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"}),
    ("tokenizer_config.json", {"tokenizer_class": None}),
    ("special_tokens_map.json", {"cls_token": "[SEP]"}),
    ("added_tokens.json", {"[Q]": 98}),
    ("tokenizer.json", {"normalizer": None}),
    ("tokenizer.json", {"post_processor": None}),
    ("tokenizer.json", {"decoder": None}),
    ("tokenizer.json", {"added_tokens": []}),
]


@pytest.mark.parametrize("name", ["tiny", "minilm"])
@pytest.mark.parametrize(("file", "change"), EDITS)
def test_an_edited_tokenizer_equals_transformers_or_is_loaded_by_it(
    tmp_path: Path, name: str, file: str, change: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    place = folder(tmp_path, name, request)
    write_json(place / file, (read_json(place / file) if (place / file).exists() else {}) | change)
    if _load_plain(place) is not None:
        assert outcome(_load_plain, place) == outcome(_load_with_transformers, place)


@pytest.mark.slow
def test_a_search_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    """These imports would add seconds to a question on the command line."""
    workdir = untrained_run(tmp_path / "run", write_encoder(tmp_path / "encoder"), "").workdir
    code = (
        "import sys; from jaxret.runs.run import open_run; import jaxret.experiments.searches.search_files; "
        f"open_run({str(workdir)!r}); print([m for m in ('transformers', 'torch', 'tensorboardX', 'optax', "
        "'scipy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
