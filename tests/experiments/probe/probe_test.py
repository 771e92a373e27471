"""The probe of layers: vectors against numpy, measures against the evaluation, and choices measured on other
queries."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.data.records import Judgement
from jaxret.evaluation.metrics import evaluate
from jaxret.experiments.probe.layer_quality import (
    Choice,
    ProbeData,
    fit_weights,
    layer_pair_choices,
    rank_measures,
    single_layer_choices,
)
from jaxret.experiments.probe.layer_vectors import TOKEN_TITLES, LayerVectors, encode_layers, pool_layers
from jaxret.experiments.probe.probe_options import ProbeOptions
from jaxret.experiments.probe.probe_report import report_probe, trained_keys
from jaxret.experiments.probe.run_probe import choose, probe_layers
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import write_json
from jaxret.training.loop import train
from jaxret.types import HiddenStates
from tests.pipeline import (
    REPOSITORY,
    environment,
    run_script,
    tiny_config,
    untrained_run,
    write_data,
    write_encoder,
    write_t5,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("probe")
    untrained_run(root / "run", write_encoder(root / "encoder"), write_data(root / "data"))
    return root


def test_vectors_of_layers_equal_numpy() -> None:
    random = np.random.default_rng(0)
    states = random.standard_normal((3, 2, 5, 4)).astype(np.float32)
    mask = np.array([[True] * 3 + [False] * 2, [True] + [False] * 4])
    pooled = np.asarray(pool_layers(HiddenStates(jnp.array(states), jnp.array(mask))))
    assert pooled.shape == (3, len(TOKEN_TITLES), 2, 4)
    of = dict(zip(TOKEN_TITLES, pooled.swapaxes(0, 1)))
    np.testing.assert_allclose(of["cls"], states[:, :, 0])
    np.testing.assert_allclose(of["mean"][:, 0], states[:, 0, :3].mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(of["mean_without_first"][:, 0], states[:, 0, 1:3].mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(of["last"][:, 0], states[:, 0, 2])
    for token in TOKEN_TITLES:  # the second text has one token
        np.testing.assert_allclose(of[token][:, 1], states[:, 1, 0], rtol=1e-6)


def test_the_last_layer_is_what_a_run_encodes(root: Path) -> None:
    run = open_run(root / "run")
    texts = run.tokenizer.queries(["garden bridge", "river", "stone window of a silver bridge"])
    layers = encode_layers(run, texts, "query")
    last = layers.of(run.model.module.config.num_layers, "cls")
    np.testing.assert_allclose(last, run.embedder()(texts, "query").stacked()[:, 0], atol=1e-5)


@pytest.mark.slow
def test_t5_has_no_first_token_vector(root: Path, tmp_path: Path) -> None:
    run = untrained_run(tmp_path / "t5", write_t5(tmp_path / "encoder"), root / "data", head__token="mean")
    layers = encode_layers(run, run.tokenizer.queries(["garden bridge"]), "query")
    assert layers.tokens == ("mean", "mean_without_first", "last")


def test_measures_are_those_of_an_evaluation() -> None:
    random = np.random.default_rng(0)
    scores = random.integers(0, 40, (12, 130)).astype(np.float32)  # some scores are equal
    relevance = random.integers(0, 4, (12, 130)) * (random.random((12, 130)) < 0.1)
    relevance[:, 7] = 1
    ndcg, recall = rank_measures(scores, relevance)
    judgements = [Judgement(str(q), str(p), int(relevance[q, p])) for q, p in zip(*np.nonzero(relevance))]
    order = np.argsort(-scores, axis=1, kind="stable")[:, :100]
    rankings = {str(q): [(str(p), float(scores[q, p])) for p in row] for q, row in enumerate(order)}
    expected = evaluate(rankings, judgements, ["nDCG@10", "R@100"])
    for values, name in ((ndcg, "nDCG@10"), (recall, "R@100")):
        of = expected.per_query[name]
        np.testing.assert_allclose(values, [of[str(q)] for q in range(12)], atol=1e-12)
    assert len(set(ndcg)) > 5


def planted(good: int, noise: float = 0.6, queries: int = 60) -> ProbeData:
    """Embeddings and three layers, of which only layer `good` of a passage resembles the last layer of its query."""
    random = np.random.default_rng(3)
    query = random.standard_normal((queries, 16))
    passages = random.standard_normal((4, queries, 16))
    passages[good] = query + noise * random.standard_normal((queries, 16))
    sides = [np.repeat(query[None], 4, axis=0), passages]
    layers = [LayerVectors(side[:, None].astype(np.float32), ("mean",)) for side in sides]
    return ProbeData(layers[0], layers[1], np.eye(queries, dtype=np.int64))


@pytest.mark.parametrize("good", [1, 2, 3])
def test_the_mixture_weights_the_layer_that_retrieves(good: int) -> None:
    weights = fit_weights(planted(good), "mean", True, np.arange(30)).weights
    assert sum(weights) == pytest.approx(1)
    assert min(weights) >= 0
    assert np.argmax(weights) == good - 1
    assert max(weights) > 0.8


def test_a_pair_is_the_maximum_or_the_average_of_both_layers() -> None:
    data = planted(2)
    query, low, last = data.queries.of(3, "mean"), data.passages.of(2, "mean"), data.passages.of(3, "mean")
    best = data.scores(Choice((2, 3), "mean", False))
    np.testing.assert_allclose(best, np.maximum(query @ low.T, query @ last.T), rtol=1e-6)
    average = data.scores(Choice((2, 3), "mean", True, "average"))
    mean = (low + last) / 2
    expected = (query / np.linalg.norm(query, axis=1)[:, None]) @ (mean / np.linalg.norm(mean, axis=1)[:, None]).T
    np.testing.assert_allclose(average, expected, atol=1e-6)


@pytest.mark.table
@pytest.mark.parametrize("pooling", ["none", "average"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_printed_command_trains_the_probed_choice(
    root: Path, tmp_path: Path, pooling: str, normalize: bool
) -> None:
    run = open_run(root / "run")
    last = run.model.module.config.num_layers
    choice = Choice((last - 1, last), "mean", normalize, pooling)
    texts = run.tokenizer.queries(["garden bridge", "river", "stone window of a silver bridge"])
    layers = encode_layers(run, texts, "passage")
    probed = np.stack([layers.of(layer, "mean") for layer in (last, last - 1)], axis=1)
    probed = probed if pooling == "none" else probed.mean(axis=1, keepdims=True)
    probed = probed / np.linalg.norm(probed, axis=2, keepdims=True) if normalize else probed
    assert ProbeData(layers, layers, np.eye(3, dtype=np.int64)).stored_bytes(choice) == probed[0].nbytes

    name, keys = trained_keys(choice, run.config)
    assert name == "mlr"
    keys = {key.replace(".", "__"): value for key, value in keys.items()}
    keys["head__mlr__chosen"] = choice.layers  # a text, as on a command line
    del keys["encoder__checkpoint"]
    trained = untrained_run(tmp_path / "run", root / "encoder", root / "data", head__name="mlr", **keys)
    np.testing.assert_allclose(trained.embedder()(texts, "passage").stacked(), probed, atol=1e-5)


def test_the_printed_command_reads_texts_as_the_run_does(root: Path) -> None:
    config = open_run(root / "run").config.copy_and_resolve_references().unlock()
    config.update_from_flattened_dict({"encoder.layers": 2, "tokens.query_prompt": "castle: "})
    _, keys = trained_keys(Choice((1, 2), "mean", True), config)
    assert (keys["encoder.layers"], keys["tokens.query_prompt"]) == (2, "castle: ")
    assert keys["tokens.passage_length"] == config.tokens.passage_length
    assert "tokens.passage_prompt" not in keys, "the prompt has its usual value"


@pytest.mark.table
def test_the_printed_command_trains_one_layer(root: Path, tmp_path: Path) -> None:
    run = open_run(root / "run")
    layer = run.model.module.config.num_layers - 1
    name, keys = trained_keys(Choice((layer,), "mean", True), run.config)
    del keys["encoder.checkpoint"]
    config = {key.replace(".", "__"): value for key, value in keys.items()}
    trained = untrained_run(tmp_path / "run", root / "encoder", root / "data", **config)
    assert (name, trained.config.head.name) == ("base", "dual_encoder")
    texts = run.tokenizer.queries(["garden bridge", "river", "stone window of a silver bridge"])
    probed = encode_layers(run, texts, "passage").of(layer, "mean")
    probed = probed / np.linalg.norm(probed, axis=1, keepdims=True)
    np.testing.assert_allclose(trained.embedder()(texts, "passage").stacked()[:, 0], probed, atol=1e-5)


def test_choices_are_measured_on_other_queries() -> None:
    """Layer 1 ranks passages well only for the first half of the queries: it is chosen, and is worse on the others."""
    data = planted(1, noise=0.0)
    half = np.arange(30)
    data.passages.vectors[1, 0, 30:] = -data.queries.vectors[1, 0, 30:]
    data.passages.vectors[3, 0] = data.queries.vectors[3, 0] + np.random.default_rng(0).standard_normal((60, 16))
    qualities = [data.quality(c) for c in [*single_layer_choices(3, ("mean",)), *layer_pair_choices(3, ("mean",))]]
    findings = {finding.name: finding for finding in choose(data, qualities, half, np.arange(30, 60), 0)}
    layer = findings["one layer"]
    assert layer.quality.choice.layers == (1,)
    assert layer.quality.mean(half) == 1
    assert layer.comparison is not None
    assert layer.comparison.difference < -0.2
    assert layer.comparison.queries == 30
    assert layer.p_value is not None
    assert layer.p_value >= layer.comparison.p_permutation


@pytest.mark.exhaustive
def test_a_probe_as_a_process(root: Path) -> None:
    command = [sys.executable, "-m", "jaxret", "probe", str(root / "data"), f"--workdir={root}/run", "--passages=40"]
    command.append("--corpus_size=500")
    result = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    path = root / "run/eval/data.dev.probe.json"
    values = json.loads(path.read_text())
    assert path.with_suffix(".svg").stat().st_size > 1000
    layers, tokens = open_run(root / "run").model.module.config.num_layers + 1, 4
    assert len(values["alone"]) == 2 * layers * tokens
    assert len(values["pairs"]) == 2 * 2 * tokens * (layers - 1)
    assert values["passages"] == 40
    assert values["findings"][0]["name"] == "last layer"
    best = max(values["pairs"], key=lambda one: one["nDCG@10"])
    pair = f"({', '.join(map(str, best['layers']))}; "
    assert f"The best pair on all {values['queries']} queries {pair}" in result.stdout
    hidden = open_run(root / "run").model.module.config.hidden_size
    assert [one["bytes_per_passage"] for one in values["findings"]] == [4 * hidden * n for n in (1, 1, 2, 1, 1)]
    assert values["findings"][2]["corpus_bytes"] == 500 * 8 * hidden
    assert "  500" in result.stdout

    (line,) = [line for line in result.stdout.splitlines() if line.startswith("  jaxret train --config=mlr ")]
    assert line.endswith(" --config.data.train=... --workdir=...")
    arguments = [*shlex.split(line)[1:-2], f"--config.data.train={root}/data", f"--workdir={root}/trained"]
    done = run_script("-m", "jaxret", *arguments, "--config.train.steps=0")
    assert done.returncode == 0, done.stderr
    config = json.loads((root / "trained/config.json").read_text())
    assert config["tokens"]["passage_length"] == open_run(root / "run").config.tokens.passage_length
    assert (config["pooling"], config["head"]["token"]) == (best["pooling"], best["token"])
    assert (config["head"]["mlr"]["chosen"], config["normalize"]) == (best["layers"], best["normalize"])
    again = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert again.stdout == result.stdout
    assert path not in Workdir(root / "run").evaluations


@pytest.mark.exhaustive
def test_opening_a_model_writes_a_run_event(root: Path, tmp_path: Path) -> None:
    command = ["probe", str(root / "data"), f"--workdir={tmp_path}/run", f"--model={root}/encoder", "--json"]
    done = run_script("-m", "jaxret", *command)
    assert done.returncode == 0, done.stderr
    run, svg, png, probe = map(json.loads, done.stdout.splitlines())
    opened = {"event": "run", "workdir": f"{tmp_path}/run", "model": f"{root}/encoder", "notes": []}
    assert (run, probe["event"]) == (opened, "probe")
    stem = f"{tmp_path}/run/eval/data.dev.probe"
    assert [one["path"] for one in (svg, png, probe)] == [f"{stem}.svg", f"{stem}.png", f"{stem}.json"]


@pytest.mark.slow
def test_a_trained_run_reports_winning_vectors(root: Path, tmp_path: Path) -> None:
    config = tiny_config(root / "encoder", root / "data", head__name="mlr", head__mlr__chosen=(2, 3), train__steps=1)
    train(config, tmp_path / "run", progress=False)
    options, corpus = ProbeOptions(queries=6, passages=20), Corpus.open(root / "data")
    source = EvaluationSource.open(root / "data", root / "data", "dev")
    text = report_probe(open_run(tmp_path / "run"), source, corpus, options)
    assert "trained for 1 steps" in text
    winners = text.partition("Which vector of a relevant passage wins")[2]
    assert "local variation (cosine): " in winners
    assert "perplexity of the winner: " in winners
    assert re.search(r"layer 2 +\d+\.\d%", winners)
    assert (tmp_path / "run/eval/data.dev.diversity.json").exists()
    before = report_probe(open_run(root / "run"), source, corpus, options)
    assert "before training" in before
    assert "wins" not in before


def test_a_probe_replaces_none_of_another_data_set_of_the_same_name(root: Path, tmp_path: Path) -> None:
    """A probe stops before it encodes."""
    run, corpus = replace(open_run(root / "run"), workdir=Workdir(tmp_path), params={}), Corpus.open(root / "data")
    source = EvaluationSource.open(root / "data", root / "data", "dev")
    write_json(tmp_path / "eval" / "data.dev.probe.json", {"dataset": {"queries": "b/data", "sha256": {}}})
    with pytest.raises(ValueError, match=f"result on b/data, .* that on {root}/data would .* --name"):
        probe_layers(run, source, corpus, ProbeOptions())


def test_unsupported_models_are_errors(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"passages .*1; .*2"):
        ProbeOptions(passages=1)
    data = write_data(tmp_path / "data", dev=2)
    source = EvaluationSource.open(data, data, "dev")
    run = replace(open_run(root / "run"), workdir=Workdir(tmp_path))  # which no test has probed
    with pytest.raises(ValueError, match=r"2 .*'dev' .*relevant"):
        probe_layers(run, source, Corpus.open(data), ProbeOptions())
