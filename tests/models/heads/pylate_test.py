"""A PyLate directory: the config that it gives, and vectors and scores equal to PyLate's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.configs.base import get_config
from jaxret.data.records import Passage
from jaxret.export.compare_original import sample_texts
from jaxret.export.export import export
from jaxret.export.import_model import import_model
from jaxret.models.encoders.pretrained import resolve_encoder
from jaxret.models.heads import read_model_keys
from jaxret.models.scoring import late_interaction
from jaxret.runs.from_sentence_transformers import apply_settings, settings_family
from jaxret.runs.run import Run, open_run
from tests.pipeline import GOLDENS
from tests.sentence_transformers import write_pylate

# Long texts, and short ones that leave room for [MASK]s in a query.
TEXTS = [*sample_texts()[:12], "river", "silver garden bridge", "a [MASK] river?", "e"]
CASES: dict[str, dict[str, Any]] = {
    "expanded": {},
    "attended": {"attend_to_expansion_tokens": True, "skiplist_words": []},
    "plain": {"do_query_expansion": False, "query_length": 10, "query_prefix": "", "document_prefix": ""},
}
SAID = {
    "head.colbert.projection": 6,
    "head.colbert.late": True,
    "head.colbert.query_marker": 95,
    "head.colbert.passage_marker": 96,
    "head.colbert.expansion": "unattended",
    "head.colbert.mask_id": 4,
    "head.colbert.skiplist": (1, 9, 77),
    "normalize": True,
    "tokens.query_length": 12,
    "tokens.passage_length": 24,
    "tokens.query_prompt": "",
    "tokens.passage_prompt": "",
    "tokens.title_separator": " ",
}


def opened(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("jaxret.export.import_model.compare_with_original", lambda run, directory: "")
    import_model(str(write_pylate(folder / "model", **CASES[name])), folder / "run")
    return open_run(folder / "run")


@pytest.mark.daily("attended")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_vectors_and_scores_equal_pylate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyLate's values are stored by tests/goldens/make_pylate.py."""
    run, stored = opened(tmp_path, name, monkeypatch), np.load(GOLDENS / "pylate.npz")
    texts = stored["texts"].tolist()
    queries = run.embedder()(run.tokenizer.queries(texts), "query")
    passages = run.embedder()(
        run.tokenizer.passages([Passage(str(i), text) for i, text in enumerate(texts)]), "passage"
    )
    np.testing.assert_array_equal(np.stack([queries.lengths, passages.lengths], 1), stored[f"{name}/counts"])
    np.testing.assert_allclose(queries.flat, stored[f"{name}/query"], atol=1e-5)
    np.testing.assert_allclose(passages.flat, stored[f"{name}/passage"], atol=1e-5)
    rows = np.arange(len(texts))
    padded = [jnp.asarray(x) for x in (*queries.padded(rows, 12), *passages.padded(rows, 24))]
    np.testing.assert_allclose(late_interaction(*padded), stored[f"{name}/scores"], atol=1e-4)
    for other in CASES.keys() - {name}:
        if stored[f"{other}/query"].shape == queries.flat.shape:
            assert np.abs(queries.flat - stored[f"{other}/query"]).max() > 0.01, (
                "control: other tokens attend to [MASK]s"
            )
        assert stored[f"{other}/passage"].shape != passages.flat.shape, "control: the other cases have other shapes"


def test_keys_set_by_a_pylate_directory(tmp_path: Path) -> None:
    folder = write_pylate(tmp_path / "model")
    assert read_model_keys(folder) == SAID
    assert settings_family(SAID) == "colbert"
    assert resolve_encoder(str(folder)) == folder
    config = get_config()
    config.head.name = "colbert"
    # In the form in which stated.json has it.
    adopted, message = apply_settings(config, json.loads(json.dumps(SAID)), "there")
    assert adopted.head.colbert.skiplist == (1, 9, 77)
    assert adopted.tokens.passage_length == 24
    assert len(message) == 11
    assert apply_settings(adopted, SAID, "there") == (adopted, [])
    config.head.colbert.projection = 128
    with pytest.raises(ValueError, match=r"head.colbert.projection is 128 in the config and 6"):
        apply_settings(config, SAID, "there")


def test_other_families_use_only_lengths_and_prompts() -> None:
    adopted, message = apply_settings(get_config(), SAID, "there")
    assert (adopted.head.name, adopted.normalize, adopted.head.colbert.late) == ("dual_encoder", False, False)
    assert sorted(message) == ["tokens.passage_length=24", "tokens.query_length=12", "tokens.title_separator=' '"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query_prefix": "[unused0]"}, r"tokenizer .*'\[unused0\]', .*config_sent"),
        (
            {"query_length": 3},
            r"config_sentence_transformers.json: query_length .*3; .*number, 4",
        ),
        ({"model_type": "SparseEncoder"}, r"model_type is 'SparseEncoder'"),
        ({"default_prompt_name": "query"}, r"default_prompt_name is 'query'; it must be null"),
    ],
)
def test_unsupported_settings_are_errors(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_keys(write_pylate(tmp_path / "model", **settings))


def test_a_projection_with_bias_or_activation_is_refused(tmp_path: Path) -> None:
    folder = write_pylate(tmp_path / "model")
    path = folder / "1_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"activation_function": "torch.nn.GELU"}))
    with pytest.raises(ValueError, match=r"activation_function is 'torch.nn.GELU'; only 'torch.nn.modules.linear.Id"):
        read_model_keys(folder)
    lines = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*lines, lines[1] | {"idx": 2, "path": "2_Dense"}]))
    with pytest.raises(ValueError, match=r"modules.json: PyLate's modules .*; .*Transformer .*Dense"):
        read_model_keys(folder)


@pytest.mark.exhaustive
def test_a_pylate_directory_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = opened(tmp_path, "expanded", monkeypatch), tmp_path / "out"
    assert "read back, vectors of 64 texts differ by" in export(run.workdir.path, "pylate", out)
    assert read_model_keys(out) == SAID
    for name in ("model.safetensors", "1_Dense/model.safetensors"):
        exported, before = load_file(out / name), load_file(tmp_path / "model" / name)
        assert all((exported[key] == before[key]).all() for key in exported)
    save = save_file
    monkeypatch.setattr(
        "jaxret.export.targets.to_pylate.save_file",
        lambda tensors, *rest: save({name: x + 0.01 for name, x in tensors.items()}, *rest),
    )
    # Control: a wrong export is noticed.
    with pytest.raises(ValueError, match=r"more than 1e-04: nothing was exported"):
        export(run.workdir.path, "pylate", tmp_path / "other")
    assert not (tmp_path / "other").exists()
