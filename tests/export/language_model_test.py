"""A language model is imported, exported, and imported again: its last token, end token and prompts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxret.export.export import export
from jaxret.export.import_model import import_model
from jaxret.export.import_options import ImportOptions
from jaxret.export.targets.stock_modules import dense_config
from jaxret.runs.run import open_run
from jaxret.storage.atomic import read_json, write_json
from tests.pipeline import write_language_model

DENSE = [f"{folder}/{file}" for folder in ("2_Dense", "3_Dense") for file in ("config.json", "model.safetensors")]
INSTRUCTION = "Instruct: find a river\nQuery:"


def write_dense(folder: Path, sizes: tuple[int, ...]) -> None:
    """Add Dense modules between Pooling and Normalize, as in EmbeddingGemma."""
    lines = read_json(folder / "modules.json")[:2]
    for number, (before, size) in enumerate(pairwise(sizes), start=2):
        matrix = np.random.default_rng(number).normal(size=(size, before)).astype(np.float32)
        (folder / f"{number}_Dense").mkdir()
        save_file({"linear.weight": matrix}, folder / f"{number}_Dense" / "model.safetensors", {"format": "pt"})
        write_json(folder / f"{number}_Dense" / "config.json", dense_config(matrix.T))
        lines.append({"path": f"{number}_Dense", "type": "sentence_transformers.models.Dense"})
    lines.append({"path": f"{len(lines)}_Normalize", "type": "sentence_transformers.models.Normalize"})
    numbered = [{"idx": i, "name": str(i), "path": x["path"], "type": x["type"]} for i, x in enumerate(lines)]
    write_json(folder / "modules.json", numbered)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_embeddinggemma"])  # one causal, one bidirectional
@pytest.mark.exhaustive
def test_a_language_model_round_trips(tmp_path: Path, name: str) -> None:
    """Both directories are also compared with transformers, if PyTorch is installed."""
    model = write_language_model(tmp_path / "model", name)
    said = import_model(str(model), tmp_path / "run", ImportOptions(token="last", normalize=True, title_separator=" "))
    assert "around every text: nothing and '<|end|>' (id 0); its vector: head.token='last'" in said
    assert "read back, vectors of 64 texts differ by" in export(
        tmp_path / "run", "sentence-transformers", tmp_path / "out"
    )
    assert "last token" in (tmp_path / "out" / "README.md").read_text()
    pooling = read_json(tmp_path / "out" / "1_Pooling" / "config.json")
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_lasttoken"]

    settings = tmp_path / "out" / "config_sentence_transformers.json"
    prompts = {"query": INSTRUCTION, "document": ""}
    write_json(settings, read_json(settings) | {"prompts": prompts, "truncate_dim": 12})
    for length in ("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length"):
        path = tmp_path / "out" / length[0]
        write_json(path, read_json(path) | {length[1]: 40})  # the length has room for the instruction
    write_dense(tmp_path / "out", (30, 48, 24))
    import_model(str(tmp_path / "out"), tmp_path / "again")
    run = open_run(tmp_path / "again")
    keys = run.config.tokens.query_prompt, run.config.head.token, run.config.normalize
    assert keys == (INSTRUCTION, "last", True)
    assert run.tokenizer.sep_id == 0
    assert (run.model.module.head.dense, run.model.uncut.dimension, run.model.dimension) == ((48, 24), 24, 12)
    (vector,) = run.embedder()(run.tokenizer.queries(["stone"]), "query")[0]
    assert len(vector) == 12
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert run.model.module.config == open_run(tmp_path / "run").model.module.config
    notes = export(tmp_path / "again", "sentence-transformers", tmp_path / "twice")
    assert "The run keeps the first 12 dimensions of a vector. The files give full vectors" in notes
    written = read_json(tmp_path / "twice" / settings.name)
    assert (written["prompts"], written["truncate_dim"]) == (prompts, 12)
    for file in ("model.safetensors", "config.json", "1_Pooling/config.json", "modules.json", *DENSE):
        assert (tmp_path / "twice" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
