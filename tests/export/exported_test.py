"""The head in an export: the code in docs/models.md is run here for every family."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.data.records import Passage
from jaxret.export.export import export
from jaxret.export.exported import read_export
from jaxret.export.targets.stock_modules import read_states
from jaxret.runs.run import open_run
from jaxret.storage.atomic import read_json
from tests.export.export_test import MLR, PROJECTED, make_run
from tests.pipeline import REPOSITORY

BLOCKS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "models.md").read_text(), re.DOTALL)
FAMILIES: dict[str, dict[str, Any]] = {
    "mlr": MLR,
    "me_bert": {"head__name": "me_bert", "head__me_bert__count": 2},
    "colbert": PROJECTED | {"head__colbert__late": True, "normalize": True},
    "mvr": {"head__name": "mvr", "head__mvr__count": 2, "encoder__tied": False},
    "aggretriever": {"head__name": "aggretriever", "head__aggretriever__lexical_dim": 8,
                     "head__aggretriever__cls_dim": 4},
    "i3": {"head__name": "i3", "head__i3__mask_id": 4, "head__i3__pseudo_length": 4,
           "data__pseudo_queries": "query"},
}  # fmt: skip
TITLE, TEXT = "River", "a stream of water"


@pytest.mark.daily("mlr")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_read_export_gives_the_runs_vectors(name: str, tmp_path: Path) -> None:
    workdir, out = make_run(tmp_path, **FAMILIES[name]), tmp_path / "out"
    assert "vectors by jaxret.export.exported.read_export of 64 texts differ by" in export(workdir, "hf", out)
    run, namespace = open_run(workdir), dict[str, Any]()
    exec(BLOCKS[0].replace("FOLDER", str(out)), namespace)
    tokens = run.tokenizer.passages([Passage("0", TEXT, TITLE)])
    expected = run.embedder()(tokens, "passage").flat
    np.testing.assert_allclose(namespace["passages"][0], expected, atol=1e-5)
    assert np.abs(namespace["retriever"].passages([TEXT])[0][0] - expected[0]).max() > 1e-3, (
        "control: without the title, the vector differs"
    )
    if name in ("mlr", "me_bert", "colbert"):
        numpys: dict[str, Any] = {"np": np}
        exec(BLOCKS[1], numpys)
        states, config = read_states(out, tokens)[0][:, 0], read_json(out / "jaxret.json")
        arguments = config["head"], load_file(out / "head.safetensors"), config["normalize"]
        np.testing.assert_allclose(numpys["vectors"](states, *arguments), expected, atol=1e-5)


@pytest.mark.exhaustive
def test_mismatched_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no jaxret.json; `jaxret export --to=hf` writes it"):
        read_export(tmp_path)
    out = tmp_path / "out"
    export(make_run(tmp_path, **FAMILIES["colbert"]), "hf", out)
    save_file({"head/projection/kernel": np.zeros((32, 5), np.float32)}, out / "head.safetensors")
    with pytest.raises(ValueError, match=r"head.safetensors does not fit .*jaxret.json: head/projection/kernel"):
        read_export(out)
