"""Prompts whose tokens do not count in a mean: vectors against numpy, packed rows, training, and directories of
sentence-transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.data.formats import write_beir
from jaxret.data.records import Judgement, Passage, Query
from jaxret.experiments.probe.layer_vectors import encode_layers
from jaxret.export.export import export
from jaxret.export.import_model import import_model
from jaxret.export.import_options import ImportOptions
from jaxret.parallel.mesh import make_mesh
from jaxret.runs.run import Run, open_run
from jaxret.storage.atomic import read_json, write_json
from jaxret.training.loop import train
from jaxret.types import Batch
from tests import tiny
from tests.packed import pack
from tests.pipeline import tiny_config, untrained_run, write_encoder, write_language_model

KEYS: dict[str, Any] = {
    "head__token": "mean",
    "tokens__query_length": 30,
    "tokens__passage_length": 30,
    "tokens__query_prompt": "{task} q ",
    "tokens__task": "find",
    "tokens__prompt_in_mean": False,
}
QUERIES = [Query("1", "stone"), Query("2", "river", instruction="go far"), Query("3", "a b c d e f")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("prompts") / "model")


def by_hand(run: Run, counted: list[slice]) -> np.ndarray:
    """The means of the last layer's states over some tokens of each query."""
    plain = replace(run.tokenizer, skip_prompt=False).queries(QUERIES)
    ids, mask = plain.padded(np.arange(len(plain)), int(plain.lengths.max()))
    tokens = tiny.Tokens(jnp.asarray(ids), jnp.asarray(mask))
    states = np.asarray(run.model.hidden_states(run.params, tokens, "query").states[-1])
    return np.stack([states[i, :length][part].mean(0) for i, (length, part) in enumerate(zip(plain.lengths, counted))])


@pytest.mark.daily("mean")
@pytest.mark.slow
@pytest.mark.parametrize("token", [pytest.param("mean", marks=pytest.mark.exhaustive), "mean_without_first"])
def test_vectors_are_means_without_the_prompt(tmp_path: Path, model: Path, token: str) -> None:
    run = untrained_run(tmp_path / "run", model, "", **KEYS | {"head__token": token})
    vectors = run.embedder()(run.tokenizer.queries(QUERIES), "query").flat
    sizes = [len("find q "), len("go far q "), len("find q ")]  # the tokenizer makes a token of each character
    np.testing.assert_allclose(vectors, by_hand(run, [slice(size, None) for size in sizes]), atol=1e-5)
    layers = encode_layers(run, run.tokenizer.queries(QUERIES), "query")
    np.testing.assert_allclose(layers.of(run.model.module.config.num_layers, token), vectors, atol=1e-5)
    with_prompt = by_hand(run, [slice(token != "mean", None)] * 3)
    assert np.abs(vectors - with_prompt).max(axis=1).min() > 1e-2, "control: means with the prompt differ"
    assert read_json(run.workdir.contract)["prompt_in_mean"] is False
    passages = [Passage("1", "stone"), Passage("2", "river")]
    of_passages = run.embedder()(run.tokenizer.passages(passages), "passage").flat
    counts = untrained_run(
        tmp_path / "counts", model, "", **KEYS | {"head__token": token, "tokens__prompt_in_mean": True}
    )
    without = counts.embedder()(counts.tokenizer.passages(passages), "passage").flat
    np.testing.assert_array_equal(of_passages, without)  # the passages have no prompt


@pytest.mark.daily("bert")
@pytest.mark.slow
@pytest.mark.parametrize(
    "encoder",
    [pytest.param(tiny.WITHOUT_DROPOUT, marks=pytest.mark.exhaustive, id="bert"), pytest.param(tiny.LLAMA, id="llama")],
)
def test_packed_rows_exclude_the_same_tokens(encoder: Any) -> None:
    overrides = {"head.token": "mean", "tokens.prompt_in_mean": False, "loss.temperature": 4.0, "encoder.tied": True}
    objective = tiny.make_objective(overrides, make_mesh(1, jax.devices()[:1]), encoder)
    params, batch = tiny.make_params(objective.model), tiny.make_batch(4)

    program = jax.jit(lambda batch: objective(params, batch, jax.random.key(0)).loss)

    def loss(batch: Batch) -> float:
        return float(program(jax.tree.map(jnp.asarray, batch)))

    def marked(batch: Batch, count: int) -> Batch:
        ids = np.array(batch.passages.ids)
        of_prompt = np.arange(ids.shape[1]) < np.minimum(count, batch.passages.mask.sum(1, keepdims=True) - 1)
        ids[of_prompt] = ~ids[of_prompt]
        return replace(batch, passages=replace(batch.passages, ids=ids))

    padded = loss(marked(batch, 2))
    packed = pack(marked(batch, 2), 1, objective.model.module.head)
    assert loss(packed) == pytest.approx(padded, rel=1e-5)
    assert abs(padded - loss(batch)) > 1e-3, "control: means of all tokens have another loss"


@pytest.mark.slow
def test_training_reads_the_instruction_of_each_query(tmp_path: Path, model: Path) -> None:
    """Data sets that differ only in an instruction have other digests, other tokens and other losses."""
    losses, digests = [], []
    for name, instruction in (("none", ""), ("own", "a long way")):
        data = tmp_path / name
        passages = [Passage(f"p{i}", f"text {i} stone") for i in range(8)]
        queries = [Query(f"q{i}", f"text {i}", instruction=instruction) for i in range(8)]
        write_beir(data, passages, queries, {"train": [Judgement(f"q{i}", f"p{i}", 1) for i in range(8)]})
        keys = KEYS | {"train__steps": 1, "data__dev": "", "data__negatives": 0, "train__checkpoint_every": 0}
        config = tiny_config(model, data, **keys | {"data__store": str(tmp_path / "store")})
        train(config, tmp_path / f"run-{name}", progress=False)
        line = (tmp_path / f"run-{name}" / "metrics.jsonl").read_text().splitlines()[0]
        losses.append(line[line.index('"loss"') :][:20])
        digests.append(read_json(tmp_path / f"run-{name}" / "data.json")["train"]["sha256"])
    assert len(set(losses)) == len(set(digests)) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head.token": "cls"}, r"tokens.prompt_in_mean is False, which leaves prompts out .* head.token 'cls'"),
        ({"head.token": "mean", "head.name": "colbert"}, r"vectors .*'colbert' .*means"),
        ({"tokens.prompts": "gritlm", "tokens.prompt_in_mean": True}, r"tokens.prompts is 'gritlm', which leaves"),
    ],
)
def test_other_token_selections_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.make_retriever({"tokens.prompt_in_mean": False} | overrides)


@pytest.mark.slow
def test_onnx_export_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    keys = {"head__token": "mean", "tokens__query_prompt": "river ", "tokens__prompt_in_mean": False}
    run = untrained_run(tmp_path / "run", write_encoder(tmp_path / "bert"), "", **keys)
    with pytest.raises(ValueError, match=r"--to=onnx: .*graph .*prompt"):
        export(run.workdir.path, "onnx", tmp_path / "out")


@pytest.mark.exhaustive
def test_include_prompt_of_sentence_transformers_round_trips(tmp_path: Path, model: Path) -> None:
    """The vectors are also compared with sentence-transformers, if PyTorch is installed."""
    import_model(str(model), tmp_path / "run", ImportOptions(token="mean", normalize=True, title_separator=" "))
    export(tmp_path / "run", "sentence-transformers", tmp_path / "out")
    settings, pooling = tmp_path / "out" / "config_sentence_transformers.json", tmp_path / "out/1_Pooling/config.json"
    prompts = {"query": "Instruct: go\nQuery:", "document": "of "}
    write_json(settings, read_json(settings) | {"prompts": prompts})
    write_json(pooling, read_json(pooling) | {"include_prompt": False})
    said = import_model(str(tmp_path / "out"), tmp_path / "again")
    assert "largest difference" in said or "not compared" in said
    run = open_run(tmp_path / "again")
    assert not run.config.tokens.prompt_in_mean
    export(tmp_path / "again", "sentence-transformers", tmp_path / "twice")
    for file in ("1_Pooling/config.json", "config_sentence_transformers.json", "model.safetensors"):
        assert (tmp_path / "twice" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
