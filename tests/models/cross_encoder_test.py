"""A cross-encoder in transformers' format: scores of a network whose weights are a formula, pairs, and refused
models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from jaxret.data.records import Passage
from jaxret.data.tokens.pairs import PairJoiner
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.cross_encoder import (
    CrossEncoderModel,
    CrossEncoderModule,
    load_score_head,
    read_cross_encoder,
    save_cross_encoder,
    score_head_names,
)
from jaxret.models.encoders.architectures import ARCHITECTURES, read_config, stored_tensors
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.types import Ragged
from tests.pipeline import write_encoder

BERT = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
}
XLM_ROBERTA = BERT | {"model_type": "xlm-roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
QUERY = [1, 5, 6, 7, 2]
PASSAGES = [[1, 10, 11, 2, 20, 21, 22, 23, 2], [1, 12, 2, 24, 25, 2], [1, 13, 14, 2, 26, 2]]
# Logits of torch's BertForSequenceClassification with these weights, to 5e-8.
LOGITS = [0.15581586, 0.15790691, 0.15604673]
ALL_OF_ONE_TYPE = [0.156283, 0.158707, 0.158628]


def write_model(folder: Path, raw: dict[str, Any]) -> Path:
    """A model whose parameters, sorted by name, are w.flat[i] = 0.2 sin(0.7 i + 1.3 t), norms 1 more."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_config(folder)
    prefix = ARCHITECTURES[config.model_type].prefix
    shapes = {prefix + name: one.shape for one in stored_tensors(config).values() for name in one.names}
    size = config.hidden_size
    for path, name in score_head_names(config).items():
        whole = prefix + name if name.startswith("pooler") else name
        shapes[whole] = {"dense/kernel": (size, size), "score/kernel": (1, size), "score/bias": (1,)}.get(path, (size,))
    tensors = {}
    for t, name in enumerate(sorted(shapes)):
        values = 0.2 * np.sin(0.7 * np.arange(np.prod(shapes[name])) + 1.3 * t)
        values += "norm" in name.lower() and name.endswith("weight")
        tensors[name] = values.reshape(shapes[name]).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def opened(folder: Path) -> tuple[CrossEncoderModel, Any]:
    config = read_cross_encoder(folder)
    _, encoder = load_pretrained(folder, ("pooler", "classifier"), config)
    return CrossEncoderModel(CrossEncoderModule(config, Compute())), {
        "encoder": encoder,
        "head": load_score_head(folder, config),
    }


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "bert", BERT)


def tokens_of(joiner: PairJoiner, length: int = 16) -> Any:
    queries, passages = Ragged.from_lists([QUERY]), Ragged.from_lists(PASSAGES)
    return jax.tree.map(jnp.asarray, joiner.tokens(queries, passages, np.zeros(3, int), np.arange(3), length))


def test_scores_equal_torch(bert: Path) -> None:
    model, params = opened(bert)
    pairs = tokens_of(PairJoiner((), 32, 0))
    score = jax.jit(model.score)
    np.testing.assert_allclose(score(params, pairs), LOGITS, atol=2e-7)
    of_one_type = score(params, pairs.replace(first=jnp.full(3, 16)))
    np.testing.assert_allclose(of_one_type, ALL_OF_ONE_TYPE, atol=1e-6)


def test_a_model_is_written_as_it_was_read(bert: Path, tmp_path: Path) -> None:
    model, params = opened(bert)
    save_cross_encoder(tmp_path, model.module.config, params)
    first, second = load_file(bert / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["BertForSequenceClassification"]
    assert raw["id2label"] == {"0": "LABEL_0"}


def test_roberta_has_another_head_and_other_names(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "xlm", XLM_ROBERTA)
    names = load_file(folder / "model.safetensors").keys()
    own = {"classifier.dense.weight", "classifier.dense.bias", "classifier.out_proj.weight", "classifier.out_proj.bias"}
    assert {name for name in names if not name.startswith("roberta.")} == own
    model, params = opened(folder)
    save_cross_encoder(tmp_path / "again", model.module.config, params)
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == names


def damaged(bert: Path, folder: Path, change: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((bert / "config.json").read_text())
    tensors = load_file(bert / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def two_labels(tensors: dict[str, Any]) -> None:
    tensors["classifier.weight"] = np.zeros((2, 16), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            two_labels,
            r"\(2, 16\), .*classifier .*2 .*\(1, 16\)",
        ),
        (lambda t: t.pop("classifier.bias"), r"classifier.bias, although .*layer"),
        (lambda t: t["classifier.bias"].fill(np.nan), "classifier.bias holds NaN or infinity"),
        (
            lambda t: [t.pop("classifier.bias"), t.pop("classifier.weight")],
            "is not a cross-encoder: classifier",
        ),
    ],
)
def test_an_incomplete_head_is_refused(bert: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cross_encoder(damaged(bert, tmp_path / "damaged", change))


def test_a_pooler_without_classifier_is_kept(bert: Path, tmp_path: Path) -> None:
    folder = damaged(bert, tmp_path / "bare", lambda t: [t.pop("classifier.bias"), t.pop("classifier.weight")])
    head = load_score_head(folder, read_config(folder))
    assert head.keys() == {"dense"}
    assert head["dense"].keys() == {"kernel", "bias"}


def test_a_head_of_weights_in_parts(bert: Path, tmp_path: Path) -> None:
    folder = damaged(bert, tmp_path / "parts", lambda _: None)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.endswith('bias')}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    whole, parts = (load_score_head(one, read_config(one)) for one in (bert, folder))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


def test_an_encoder_without_such_a_head_is_refused(tmp_path: Path) -> None:
    raw = {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "distilbert"}))
    with pytest.raises(ValueError, match=r"cross-encoder .*distilbert .*modern"):
        load_score_head(tmp_path, read_config(tmp_path))


# A tokenizer's template for a pair, and how many more markers it has between the two texts than after the first.
TEMPLATES = {
    "bert": ("[CLS] $A [SEP] $B:1 [SEP]:1", 0),
    "roberta": ("[CLS] $A [SEP] [SEP] $B [SEP]", 1),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_pairs_equal_those_of_the_tokenizer(kind: str, tmp_path: Path) -> None:
    """Equal to the pairs of tokenizers, truncated with "only_second", and padded."""
    template, more = TEMPLATES[kind]
    folder, limit = write_encoder(tmp_path / "encoder"), 14
    tokenizer = TextTokenizer.load(folder, 10, 40)
    special = [("[CLS]", tokenizer.cls_id), ("[SEP]", tokenizer.sep_id)]
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    oracle.post_processor = TemplateProcessing(pair=template, special_tokens=special)  # type: ignore[assignment]
    oracle.enable_truncation(limit, strategy="only_second")
    query_texts, texts = ["river stone", "light"], ["music paper", "stone " * 20, "river"]
    queries = tokenizer.queries(query_texts)
    passages = tokenizer.passages([Passage(str(i), text) for i, text in enumerate(texts)])
    joiner = PairJoiner((tokenizer.sep_id,) * more, limit, tokenizer.pad_id)
    rows = [(q, p) for q in range(2) for p in range(3)]
    both = np.array(rows).T
    pairs: Any = joiner.tokens(queries, passages, both[0], both[1], limit + 2)
    lengths = joiner.lengths(queries, passages, both[0], both[1])
    for row, (q, p) in enumerate(rows):
        expected = oracle.encode(query_texts[q], texts[p])
        assert pairs.ids[row][pairs.mask[row]].tolist() == expected.ids
        assert lengths[row] == len(expected.ids) <= limit
        assert (np.arange(len(expected.ids)) >= pairs.first[row]).astype(int).tolist() == (
            expected.type_ids if kind == "bert" else [int(i >= pairs.first[row]) for i in range(len(expected.ids))]
        )
    nothing = joiner.tokens(queries, passages, np.array([0, -1]), np.array([-1, 0]), 4)
    assert not nothing.mask.any()
    assert (nothing.ids == tokenizer.pad_id).all()
