"""Every key is read by something, and every shipped config builds."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxret.distributed import make_mesh
from jaxret.models.bert import BertConfig
from jaxret.models.retriever import build_retriever
from jaxret.models.run import open_run
from jaxret.retrieval.encode import encode_corpus
from jaxret.tools.search import search_files
from jaxret.training.check import check, check_lengths
from jaxret.training.losses import loss_settings
from jaxret.training.optimizers import make_optimizer
from tests.pipeline import REPOSITORY, flat_config, run_script, tiny_config, write_data, write_encoder

SUFFIXES = {"minilm": ("mlr", "dual_encoder", "as_it_comes"), "demo": ("mlr", "dual_encoder", "as_it_comes")}
SHIPPED = [
    (path.stem, suffix)
    for path in sorted((REPOSITORY / "configs").glob("*.py"))
    for suffix in SUFFIXES.get(path.stem, ("",))
]


class Reads:
    """Notes the keys that are read of any ConfigDict; copying a whole config (`to_dict`) reads nothing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.keys: set[str] = set()
        self._places: dict[int, tuple[str, ConfigDict]] = {}  # the config too, so that its id stays its own
        self._copying = 0
        get, to_dict = ConfigDict.__getitem__, ConfigDict.to_dict

        def reading(config: ConfigDict, key: str) -> Any:
            value = get(config, key)
            name = self._places.get(id(config), ("", config))[0] + key
            if isinstance(value, ConfigDict):
                self._places[id(value)] = (f"{name}.", value)
            elif not self._copying:
                self.keys.add(name)
            return value

        def copying(config: ConfigDict, *arguments: Any, **options: Any) -> Any:
            self._copying += 1
            try:
                return to_dict(config, *arguments, **options)
            finally:
                self._copying -= 1

        patch.setattr(ConfigDict, "__getitem__", reading)
        patch.setattr(ConfigDict, "to_dict", copying)


def test_every_key_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("train")
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    config = tiny_config(encoder, data, train__steps=-1, train__epochs=0.2)
    with config.unlocked():
        config.train.added = 1  # control: a key that nothing reads
    keys = set(flat_config(config))
    with monkeypatch.context() as patch:
        reads = Reads(patch)
        patch.setattr(script, "_CONFIG", SimpleNamespace(value=config))
        patch.setattr(script, "_WORKDIR", SimpleNamespace(value=str(tmp_path / "run")))
        script.main()
        run = open_run(tmp_path / "run")
        encode_corpus(run, data, progress=False)
        search_files(run, str(data), str(data), "test", 5, ["RR@10"], progress=False)
    assert keys - reads.keys == {"train.added"}


@pytest.mark.parametrize(("name", "suffix"), SHIPPED)
def test_a_shipped_config_builds(name: str, suffix: str) -> None:
    get_config = importlib.import_module(f"configs.{name}").get_config
    config = get_config(suffix) if suffix else get_config()
    config.data.train = "somewhere"
    layers = 6 if name in SUFFIXES else 12
    retriever = build_retriever(config, BertConfig(99, 16, layers, 2, 32, max_positions=512))
    check(config, make_mesh())
    check_lengths(config, retriever)
    loss_settings(config)
    make_optimizer(config.optimizer, 10)
    assert set(flat_config(config)) == set(flat_config(importlib.import_module("configs.base").get_config()))


@pytest.mark.parametrize("name", sorted(SUFFIXES))
def test_an_unknown_suffix(name: str) -> None:
    with pytest.raises(ValueError, match="must be mlr, dual_encoder or as_it_comes"):
        importlib.import_module(f"configs.{name}").get_config("mrl")


def test_an_unknown_key_on_the_command_line_is_an_error(tmp_path: Path) -> None:
    done = run_script("train.py", "--config=configs/base.py", f"--workdir={tmp_path}", "--config.nope=1")
    assert done.returncode != 0
    assert "nope" in done.stderr
    assert not list(tmp_path.iterdir())
