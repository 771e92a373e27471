"""Training a cross-encoder: its loss against numpy, on several devices, in chunks; a run from its start to reranked
results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.data.errors import DataError
from jaxret.data.formats import (
    Corpus,
    QuerySource,
    RankingSource,
    TrainingSource,
    write_dpr_examples,
    write_run,
)
from jaxret.data.records import Passage, Query
from jaxret.data.tokens.batches import TrainingSet
from jaxret.data.tokens.known_positives import KnownPositives
from jaxret.data.tokens.pairs import PairJoiner
from jaxret.evaluation.answer_matching import answer_accuracy
from jaxret.experiments.compare_runs import compare_runs
from jaxret.experiments.rerank_request import RerankRequest
from jaxret.experiments.rerank_run import rerank, rerank_run, rerank_top
from jaxret.experiments.score_examples import score_examples
from jaxret.experiments.searches.evaluate_search import evaluation_path
from jaxret.experiments.teachers import open_teacher
from jaxret.export.export import export
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.models.cross_encoder import CrossEncoderModel, CrossEncoderModule
from jaxret.models.encoders.layers import Compute
from jaxret.parallel.mesh import make_mesh, shard_batch
from jaxret.parallel.processes import join_job
from jaxret.runs.reranker import open_pretrained_reranker, open_reranker
from jaxret.runs.run import open_run
from jaxret.runs.scorer import OnProgress, PairScorer, ignore_progress
from jaxret.runs.workdir import Workdir
from jaxret.training.loop import train
from jaxret.training.losses.group_losses import BinarySettings, KlSettings
from jaxret.training.losses.in_batch import LossSettings
from jaxret.training.tasks.reranking import RerankingObjective, RerankingValidation, make_reranking_objective
from jaxret.training.unread_keys import find_reader
from jaxret.types import PairBatch, Ragged, Tokens
from tests import tiny
from tests.configs.config_test import Reads
from tests.pipeline import flat_config, tiny_config, write_data, write_encoder
from tests.training.unread_keys_test import KEYS, other

QUERIES, GROUP, LENGTH = 8, 3, 6
SHAPES = dataclasses.replace(tiny.WITHOUT_DROPOUT, type_vocab_size=2)
SETTINGS = LossSettings(kl=KlSettings(0.5), binary=BinarySettings(0.25))


def make_batch(queries: int = QUERIES) -> PairBatch:
    """Every query with its positive and two negatives; with an empty slot, an empty query and missing scores."""
    random = np.random.default_rng(0)
    tokens = tiny.make_tokens(queries * GROUP, LENGTH)
    mask = np.asarray(tokens.mask).copy()
    passages = np.arange(queries * GROUP, dtype=np.int32).reshape(queries, GROUP)
    passages[1, 2] = -1
    passages[-1] = -1
    mask[5] = mask[-GROUP:] = False
    positives = np.arange(0, queries * GROUP, GROUP, dtype=np.int32)
    positives[-1] = -1
    teacher = random.standard_normal((queries, GROUP)).astype(np.float32)
    teacher[2] = np.nan
    pairs = Tokens(np.where(mask, tokens.ids, 0), mask, first=np.full(queries * GROUP, 2, np.int32))  # type: ignore[call-arg]
    return PairBatch(pairs, positives, passages, teacher)  # type: ignore[call-arg]


def objective_on(devices: int, chunk_size: int = 0, fsdp: int = 1) -> RerankingObjective:
    model = CrossEncoderModel(CrossEncoderModule(SHAPES, Compute()))
    return RerankingObjective(
        model=model, mesh=make_mesh(fsdp, jax.devices()[:devices]), chunk_size=chunk_size, settings=SETTINGS
    )


def computed(devices: int, chunk_size: int = 0, fsdp: int = 1) -> tuple[Any, Any]:
    objective = objective_on(devices, chunk_size, fsdp)
    params = tiny.make_params(objective.model)  # type: ignore[arg-type]

    def loss(params: Any, batch: PairBatch) -> Any:
        terms = objective(params, batch, jax.random.key(0), 0)
        return terms.loss, terms

    batch = shard_batch(objective.mesh, make_batch())
    (_, terms), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    return terms, gradients


@pytest.fixture(scope="module")
def alone() -> tuple[Any, Any]:
    return computed(1)


@pytest.mark.slow
def test_the_loss_by_hand(alone: tuple[Any, Any]) -> None:
    """The terms are computed in float64 from the model's scores: cross-entropy over the group, KL to the teacher,
    binary."""
    terms, _ = alone
    objective, batch = objective_on(1), make_batch()
    params = tiny.make_params(objective.model)  # type: ignore[arg-type]
    pairs = jax.tree.map(jnp.asarray, batch.pairs)
    scores = np.asarray(objective.model.score(params, pairs), np.float64).reshape(QUERIES, GROUP)
    exists = np.asarray(batch.passage_ids) >= 0
    ce, kl, binary, ranks = [], [], [], []
    for i in range(QUERIES - 1):
        s, t = scores[i][exists[i]], np.asarray(batch.teacher_scores, np.float64)[i][exists[i]]
        ce.append(np.log(np.exp(s).sum()) - s[0])
        binary += [np.log1p(np.exp(-s[0])), *np.log1p(np.exp(s[1:]))]
        ranks.append((s[1:] > s[0]).sum())
        if np.isfinite(t).all():
            p, q = np.exp(t) / np.exp(t).sum(), np.exp(s) / np.exp(s).sum()
            kl.append((p * np.log(p / q)).sum())
    assert len(kl) == QUERIES - 2
    assert float(terms.terms["contrastive"]) == pytest.approx(np.mean(ce), rel=1e-5)
    assert float(terms.terms["kl"]) == pytest.approx(np.mean(kl), rel=1e-5)
    assert float(terms.terms["binary"]) == pytest.approx(np.mean(binary), rel=1e-5)
    total = np.mean(ce) + 0.5 * np.mean(kl) + 0.25 * np.mean(binary)
    assert float(terms.loss) == pytest.approx(total, rel=1e-5)
    assert float(terms.rank) == pytest.approx(np.mean(ranks), rel=1e-6)


@pytest.mark.daily("1-2-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "chunk_size", "fsdp"), [(8, 0, 2), pytest.param(1, 2, 1, marks=pytest.mark.exhaustive)]
)
def test_devices_and_chunks_change_nothing(alone: tuple[Any, Any], devices: int, chunk_size: int, fsdp: int) -> None:
    terms, gradients = computed(devices, chunk_size, fsdp)
    assert tiny.distance(terms, alone[0]) < 1e-5
    assert tiny.distance(gradients, alone[1]) < 1e-4
    assert tiny.distance(gradients, jax.tree.map(lambda x: x * 1.01, alone[1])) > 1e-3, (
        "control: a factor of 1.01 is noticed"
    )


class FixedScorer(PairScorer):
    """A scorer with fixed scores for the rows of passages."""

    def __call__(
        self, queries: Any, passages: Any, query_rows: Any, passage_rows: Any, done: OnProgress = ignore_progress
    ) -> np.ndarray:
        return np.array([0.0, 2.0, 1.0, 2.0, 5.0, 1.0, 0.5], np.float32)[passage_rows]


def test_validation_ranks_a_positive_among_its_negatives() -> None:
    """An equal score ranks before the positive; other known positives are not counted."""
    texts = Ragged.from_lists([[1]] * 7)
    dev = TrainingSet(
        queries=Ragged.from_lists([[1]] * 2),
        passages=texts,
        positives=np.array([1, 2], np.int32),
        known_positives=KnownPositives.from_lists([[1, 4], [2]]),
        negatives=Ragged.from_lists([[0, 3, 4, 2], [5, 6]]),
        query_ids=["a", "b"],
        pad_id=0,
        marker_ids=(1, 2),
        digest="",
    )
    model = objective_on(1).model
    metrics = RerankingValidation(
        dev, FixedScorer(model, {}, make_mesh(1, jax.devices()[:1]), PairJoiner((), 8, 0), 64)
    )({})
    assert metrics["average_rank"] == 1.0  # one passage is above each positive: row 3, and row 5
    assert metrics["RR@10"] == 0.5
    nll = [np.log(np.exp([2.0, 0.0, 2.0, 1.0]).sum()) - 2.0, np.log(np.exp([1.0, 1.0, 0.5]).sum()) - 1.0]
    assert metrics["nll"] == pytest.approx(np.mean(nll), rel=1e-6)


def test_validation_scores_a_pair_of_query_and_passage_once() -> None:
    """The examples of a query, one for each positive, share the scores of its negatives."""
    dev = TrainingSet(
        queries=Ragged.from_lists([[1]] * 3),
        passages=Ragged.from_lists([[1]] * 7),
        positives=np.array([1, 6, 2], np.int32),
        known_positives=KnownPositives.from_lists([[1, 6], [1, 6], [2]]),
        negatives=Ragged.from_lists([[0, 3], [0, 3], [0, 5]]),
        query_ids=["a", "a", "b"],
        pad_id=0,
        marker_ids=(1, 2),
        digest="",
    )
    pairs: list[tuple[int, int]] = []

    class RecordingScorer(FixedScorer):
        def __call__(self, queries: Any, passages: Any, query_rows: Any, passage_rows: Any, *args: Any) -> np.ndarray:
            pairs.extend(zip(query_rows.tolist(), passage_rows.tolist()))
            return super().__call__(queries, passages, query_rows, passage_rows, *args)

    mesh = make_mesh(1, jax.devices()[:1])
    metrics = RerankingValidation(dev, RecordingScorer(objective_on(1).model, {}, mesh, PairJoiner((), 8, 0), 64))({})
    assert pairs == [(0, 1), (0, 0), (0, 3), (0, 6), (2, 2), (2, 0), (2, 5)]
    assert metrics["average_rank"] == pytest.approx((1 + 1 + 1) / 3), "the rank of every positive counts"
    assert metrics["RR@10"] == pytest.approx(0.5)


# A run, from training data to results.


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, a data set, and a run over all of its queries that has ten passages of each."""
    root = tmp_path_factory.mktemp("reranking")
    write_encoder(root / "encoder")
    data = write_data(root / "data", train=24, dev=8)
    random = np.random.default_rng(0)
    for split in ("train", "dev"):
        examples = TrainingSource.open(data, split).read()
        passages = sorted({p.id for e in examples for p in (*e.positives, *e.negatives)})
        rankings = {}
        for example in examples:
            chosen = [*(p.id for p in example.positives), *random.choice(passages, 8, replace=False)]
            random.shuffle(chosen)
            rankings[example.query.id] = [(key, 10.0 - rank) for rank, key in enumerate(dict.fromkeys(chosen))]
        write_run(root / f"{split}.trec", rankings, tag="test")
    return root


def config_of(root: Path, **overrides: Any) -> Any:
    runs = {"data__negatives_run": str(root / "train.trec"), "data__dev_negatives_run": str(root / "dev.trec")}
    usual = {"task": "reranking", "tokens__title_separator": " ", "tokens__length_multiple": 40, "data__negatives": 3}
    return tiny_config(root / "encoder", root / "data", **(usual | runs | overrides))


@pytest.fixture(scope="module")
def workdir(root: Path) -> Path:
    result = train(config_of(root), root / "run", progress=False)
    assert result.step == 6
    assert result.programs == 1
    return root / "run"


@pytest.mark.slow
def test_every_key_is_read(root: Path, tmp_path: Path) -> None:
    """Every key is read that is not refused, except encoder.tied: a cross-encoder has only one encoder."""
    more = {"optimizer__head_learning_rate": 1e-3, "lora__rank": 1, "train__steps": -1, "train__epochs": 0.2}
    config = config_of(root, **more)
    with config.unlocked():
        config.train.added = 1  # control: a key that nothing reads
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        join_job(config.mesh)
        train(config, tmp_path / "run", progress=False)
    own = {key for key in flat_config(config) if not find_reader("reranking", key)}
    assert own - reads.keys == {"train.added", "encoder.tied"}


@pytest.mark.slow
def test_a_loss_depends_on_every_key_that_is_not_refused() -> None:
    """It depends on no other key of losses, although the task reads their settings as a whole."""
    on = {"kl.weight": 1.0, "kl.temperature": 2.0, "margin_mse.weight": 1.0, "binary.weight": 1.0}
    on |= {"false_negatives.masked": True}
    model, mesh, batch = objective_on(1).model, make_mesh(1, jax.devices()[:1]), make_batch()
    params, key = jax.eval_shape(model.init, jax.random.key(0)), jax.random.key(0)

    def program(changes: dict[str, Any]) -> str:
        config = tiny.make_config({"task": "reranking", **{f"loss.{name}": value for name, value in on.items()}})
        config.update_from_flattened_dict(changes)
        return str(jax.make_jaxpr(make_reranking_objective(config, model, mesh, 0.5))(params, batch, key, 3))

    # The two keys of matryoshka only work together.
    keys = [name for name in KEYS if name.startswith("loss.") and "matryoshka" not in name]
    changes = {name: "l1" if "norm" in name else other(name) for name in keys}
    changes |= {f"loss.{name}": not value if value is True else value + 0.5 for name, value in on.items()}
    plain = program({})
    assert plain == program({}), "control: the same settings give the same program"
    read = {name for name in keys if program({name: changes[name]}) != plain}
    assert read == {name for name in keys if not find_reader("reranking", name)}


@pytest.mark.slow
def test_a_run_validates_by_the_rank_of_the_positive(root: Path, workdir: Path) -> None:
    """The rank is among all passages of the query, not those of a batch; a brute force over the reranker's scores gives
    the same."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert {"contrastive_loss", "in_batch_accuracy", "tokens_per_second"} <= lines[0].keys()
    metrics = [line for line in lines if "validation/RR@10" in line][-1]
    examples = TrainingSource.open(root / "data", "dev", root / "dev.trec").read()
    reranker = open_reranker(workdir, "last")
    reciprocal, nll = [], []
    for e in examples:
        passages = {p.id: p for p in (e.positives[0], *e.negatives)}
        scores, _ = reranker({e.query.id: e.query}, passages, [(e.query.id, key) for key in passages])
        rank = 1 + (scores[1:] >= scores[0]).sum()
        reciprocal.append(1 / rank if rank <= 10 else 0)
        nll.append(np.log(np.exp(scores.astype(np.float64)).sum()) - scores[0])
    assert max(len(e.negatives) for e in examples) > 3
    assert metrics["validation/RR@10"] == pytest.approx(np.mean(reciprocal), rel=1e-6)
    assert metrics["validation/nll"] == pytest.approx(np.mean(nll), rel=1e-5)


@pytest.mark.slow
def test_progress_counts_scored_pairs(workdir: Path) -> None:
    """Progress counts batches, because a teacher scores hundreds of thousands of pairs in one call."""
    queries = {"q": Query("q", "silver river")}
    passages = {f"p{i}": Passage(f"p{i}", "river " * i) for i in range(1, 30)}
    pairs = [("q", key) for key in passages]
    counts: list[int] = []
    teacher = open_reranker(workdir, tokens_per_batch=128)
    teacher.scorer_of(queries, passages)(pairs, counts.append)
    assert sum(counts) == len(pairs)
    assert max(counts) < len(pairs) / 2


@pytest.mark.exhaustive
def test_a_resumed_run_equals_an_uninterrupted_one(root: Path, workdir: Path, tmp_path: Path) -> None:
    train(config_of(root, train__steps=3, optimizer__decay="none", optimizer__warmup_steps=0), tmp_path / "run", False)
    train(config_of(root, optimizer__decay="none", optimizer__warmup_steps=0), tmp_path / "run", False)
    train(config_of(root, optimizer__decay="none", optimizer__warmup_steps=0), tmp_path / "whole", False)
    both = [open_reranker(tmp_path / name, "last").scorer.params for name in ("run", "whole")]
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, both))


@pytest.mark.slow
def test_a_run_is_reranked(root: Path, workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first five of each query are reordered by the model's scores, whichever pairs share a batch; the others keep
    their order."""
    reranker, data = open_reranker(workdir), str(root / "data")
    out = tmp_path / "out.trec"
    sources = {"queries": data, "qrels": data, "corpus": data, "split": "dev"}
    job = RerankRequest(out=str(out), workdir=str(workdir), run=str(root / "dev.trec"), k=5, **sources)  # type: ignore[arg-type]
    done = rerank_run(reranker, job, progress=False)
    before, after = RankingSource.open(root / "dev.trec").read(), RankingSource.open(out).read()
    assert before.keys() == after.keys()
    moved = 0
    for query, ranking in before.items():
        ids, new = [key for key, _ in ranking], [key for key, _ in after[query]]
        assert sorted(new[:5]) == sorted(ids[:5])
        assert new[5:] == ids[5:]
        moved += new != ids
        scores = [score for _, score in after[query]]
        assert scores == sorted(scores, reverse=True)
    assert moved
    output = capsys.readouterr().out
    assert "before" in output
    assert "after" in output
    assert "scoring 40 pairs: the first 5 passages of each query" in output
    assert done is not None
    written = json.loads((tmp_path / "out.trec.eval.json").read_text())
    before_json, after_json = (one.to_json() for one in done)
    assert written["mean"] == after_json["mean"]
    assert written["per_query"] == after_json["per_query"] != before_json["per_query"]
    assert written["answers"]["mean"].keys() == {"Accuracy@1", "Accuracy@5"}
    assert written["cost"]["bytes_per_passage"] == 0.0
    times = written["cost"]["latency"]
    assert (times["questions"], times["batch"], times["k"]) == (8, 1, 5)
    assert list(times["rerank_ms"]) == ["p1", "p50", "p90", "p99"]
    assert 0 < times["rerank_ms"]["p1"] <= times["rerank_ms"]["p50"] <= times["rerank_ms"]["p99"]
    assert written["answers"]["queries_asked"] == written["answers"]["queries_expected"] == 8
    assert written["provenance"]["dataset"]["split"] == "dev"
    again = tmp_path / "again.trec"
    rerank_run(reranker, dataclasses.replace(job, out=str(again), k=2, latency=0), progress=False)
    second = json.loads((tmp_path / "again.trec.eval.json").read_text())
    assert second["cost"] == {"bytes_per_passage": 0.0}
    assert second["answers"]["mean"].keys() == {"Accuracy@1", "Accuracy@5"}, (
        "answers are also searched in the tail, which is not scored"
    )
    now = RankingSource.open(again).read()
    texts = {passage.id: passage.text for passage in Corpus.open(data).read()}
    queries = {query.id: query for query in QuerySource.open(data, "dev").read() if query.id in now}
    by_hand = answer_accuracy(now, queries.values(), texts, [1, 5])
    assert second["answers"]["mean"] == by_hand.mean
    with pytest.raises(ValueError, match=r"^R@100 .*100 passages .*dev.trec .*10"):
        rerank_run(reranker, dataclasses.replace(job, measures=("R@100",)), progress=False)
    job_of_5 = dataclasses.replace(job, measures=("R@10",), tail=False)
    with pytest.raises(ValueError, match=r"^R@10 .*--k=10 .*5 .*requested"):
        rerank_run(reranker, job_of_5, progress=False)
    (tmp_path / "none.trec").touch()
    with pytest.raises(DataError, match=r"none\.trec: .*rankings; .*rankings"):
        rerank_run(reranker, dataclasses.replace(job, run=str(tmp_path / "none.trec")), progress=False)
    with pytest.raises(ValueError, match=r"dev.trec .*run .*reranked"):
        rerank_run(reranker, dataclasses.replace(job, out=str(root / "dev.trec")), progress=False)
    for name in ("queries.jsonl", "corpus.jsonl", "qrels/dev.tsv"):
        read = root / "data" / name
        with pytest.raises(ValueError, match=rf"{name} .*data .*lost"):
            rerank_run(reranker, dataclasses.replace(job, out=str(read)), progress=False)
    comparison, systems = compare_runs([str(evaluation_path(path)) for path in (out, again)], resamples=1000)
    assert list(systems) == ["out.trec", "again.trec"], "another depth makes another system"
    assert "RR@9" in comparison.measures or "RR@10" in comparison.measures


@pytest.mark.slow
def test_a_request_reranks_or_scores(root: Path, workdir: Path, tmp_path: Path) -> None:
    """The request uses the cross-encoder that it names."""
    data, run, negatives = str(root / "data"), str(root / "dev.trec"), str(root / "train.trec")
    sources = {"queries": data, "corpus": data, "qrels": data, "split": "dev"}
    job = RerankRequest(
        out=str(tmp_path / "b.trec"),
        workdir=str(workdir),
        run=run,
        k=5,
        tail=False,
        latency=0,
        **sources,  # type: ignore[arg-type]
    )
    rerank(job)
    reranker = open_reranker(workdir)
    rerank_run(reranker, dataclasses.replace(job, out=str(tmp_path / "a.trec")), progress=False)
    rerank(RerankRequest(out=str(tmp_path / "b.jsonl"), workdir=str(workdir), train=data, negatives_run=negatives))
    training = TrainingSource.open(data, "train", negatives)
    score_examples(reranker, training, tmp_path / "a.jsonl")
    for name in ("trec", "jsonl", "trec.eval.json"):
        assert (tmp_path / f"b.{name}").read_bytes() == (tmp_path / f"a.{name}").read_bytes()


def test_passages_below_the_depth_keep_their_order() -> None:
    run = {"q": [("a", 9.0), ("b", 8.0), ("c", 7.0), ("d", 6.0), ("e", 5.0)]}
    scores = {("q", "a"): -3.0, ("q", "b"): 1.0, ("q", "c"): 1.0}
    expected = [("b", 1.0), ("c", 1.0), ("a", -3.0), ("d", -4.0), ("e", -5.0)]
    assert rerank_top(run, scores, 3) == {"q": expected}
    assert rerank_top(run, scores, 3, tail=False) == {"q": expected[:3]}, (
        "a teacher's records have only scores of a model"
    )


@pytest.mark.exhaustive
def test_written_scores_train_a_retriever(
    root: Path, workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rerank --train` writes scores, and the retriever learns only from these."""
    out = tmp_path / "scored.jsonl"
    reranker = open_reranker(workdir)
    source = str(root / "data")
    data = TrainingSource.open(source, "train", root / "train.trec")
    pairs = score_examples(open_teacher(str(workdir), ""), data, out)
    examples = TrainingSource.open(out).read()
    assert pairs == len({(e.query.text, p.id) for e in examples for p in (*e.positives, *e.negatives)})
    originals = TrainingSource.open(source, "train", root / "train.trec").read()
    assert [(e.query.id, e.positives[0].id) for e in examples] == [(e.query.id, e.positives[0].id) for e in originals]
    original = originals[0]
    scores, _ = reranker(
        {"q": original.query}, {p.id: p for p in original.positives}, [("q", p.id) for p in original.positives]
    )
    np.testing.assert_allclose(examples[0].positive_scores, scores, rtol=1e-5)
    taught = {"loss__kl__weight": 1.0, "loss__margin_mse__weight": 0.1, "loss__contrastive_weight": 0.0}
    config = tiny_config(root / "encoder", out, data__dev="", data__negatives=3, train__steps=2, **taught)
    train(config, tmp_path / "student", progress=False)
    line = json.loads((tmp_path / "student" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(line["kl_loss"] + 0.1 * line["margin_mse_loss"], rel=1e-5)
    assert json.loads((tmp_path / "student" / "data.json").read_text())["train"]["scores"]
    with pytest.raises(ValueError, match=r"example .*teacher's scores"):
        train(tiny_config(root / "encoder", root / "data", **taught), tmp_path / "none", progress=False)
    assert not (tmp_path / "none").exists()


def test_scored_records_keep_their_one_target(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In records of DPR, only the first positive is a target, even if they have scores; in judgements, each positive is
    a target."""

    monkeypatch.setattr("jaxret.experiments.score_examples.PAIRS_PER_BLOCK", 9)  # many blocks of records
    blocks = []

    class Lengths:
        """A scorer by the lengths of texts."""

        cut = ()

        def scorer_of(self, queries: Any, passages: Any, progress: bool = False) -> Lengths:
            self.passages = passages
            return self

        def __call__(self, pairs: Any, on_progress: OnProgress = ignore_progress) -> np.ndarray:
            blocks.append(len(pairs))
            return np.array([float(len(self.passages[passage].text)) for _, passage in pairs], np.float32)

    examples = TrainingSource.open(root / "data", "train", root / "train.trec").read(targets=False)
    write_dpr_examples(tmp_path / "dpr.json", examples)
    assert any(len(example.positives) > 1 for example in examples)
    for source, run, targets in (("dpr.json", "", 1), (str(root / "data"), str(root / "train.trec"), 2)):
        out = tmp_path / "out.jsonl"
        pairs = score_examples(Lengths(), TrainingSource.open(tmp_path / source, "train", run), out)
        assert len(blocks) > 2
        assert sum(blocks) == pairs
        assert max(blocks) < 9 + max(len(e.positives) + len(e.negatives) for e in examples)
        blocks.clear()
        records = TrainingSource.open(out).read()
        assert len(records) == sum(min(len(example.positives), targets) for example in examples)
        for e in records:
            assert e.positive_scores == tuple(len(p.text) for p in e.positives)
            assert e.negative_scores == tuple(len(p.text) for p in e.negatives)
    with pytest.raises(ValueError, match=r"out.jsonl .*\(the training data\)"):
        score_examples(Lengths(), TrainingSource.open(out), out)

    class Broken(Lengths):
        def __call__(self, pairs: Any, on_progress: OnProgress = ignore_progress) -> np.ndarray:
            scores = super().__call__(pairs)
            scores[-1] = np.nan
            return scores

    whole = out.read_bytes()
    with pytest.raises(ValueError, match=r"teacher's .*'.*' .*'.*'"):
        score_examples(Broken(), TrainingSource.open(tmp_path / "dpr.json"), out)
    assert out.read_bytes() == whole


@pytest.mark.slow
def test_an_exported_run_has_the_same_scores(workdir: Path, tmp_path: Path) -> None:
    notes = export(workdir, "hf", tmp_path / "out")
    assert "Scores of 64 pairs, read back, differ from the run's by at most" in notes
    stock, own = open_pretrained_reranker(str(tmp_path / "out"), 12, 24), open_reranker(workdir)
    assert f", of step {own.origin['checkpoint']['step']}." in (tmp_path / "out" / "README.md").read_text()
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(one.scorer.params) for one in (stock, own)))
    assert stock.origin["training_data"] == {"start": {"weights": stock.origin["checkpoint"]["digest"]}}
    long = {"p": Passage("p", "river " * 60)}
    _, cut = open_pretrained_reranker(str(tmp_path / "out"), 12, 40)(
        {"q": Query("q", "silver river")}, long, [("q", "p")]
    )
    assert [str(one).partition(":")[0] for one in cut] == ["1 queries", "1 passages", "1 pairs"]
    assert str(cut[2]).endswith("100.0% cut at 40 tokens, 7.0% of tokens lost"), (
        "the pair has 4 + 40 - 1 tokens, the model 40 positions"
    )
    for open_long in (
        lambda: open_pretrained_reranker(str(tmp_path / "out"), 38),
        lambda: open_reranker(workdir, query_length=38),
    ):
        with pytest.raises(ValueError, match=r"passage.* 40 .*37"):
            open_long()
    with pytest.raises(ValueError, match="--to=onnx: a cross-encoder is exported only by --to=hf"):
        export(workdir, "onnx", tmp_path / "other")


@pytest.mark.slow
def test_instructions_of_queries_are_scored(workdir: Path) -> None:
    reranker = open_reranker(workdir)
    tokenizer = dataclasses.replace(reranker.tokenizer, query_prompt="{task} ", task="stone")
    queries = {"q": Query("q", "river", instruction="music")}
    texts = dataclasses.replace(reranker, tokenizer=tokenizer).scorer_of(queries, {"p": Passage("p", "light")})
    assert texts.queries[0].tolist() == reranker.tokenizer.queries(["music river"])[0].tolist()


@pytest.mark.slow
def test_each_verb_names_the_model_that_it_needs(workdir: Path) -> None:
    for needs_a_retriever in (open_run, lambda folder: corpus_folder(Workdir(folder))):
        with pytest.raises(ValueError, match=r"reranker: rerank .*retriever"):
            needs_a_retriever(workdir)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__negatives": 0}, r"data.negatives .*0, .*positive"),
        ({"tokens__packing": True}, r"tokens.packing .*True, .*'reranking' .*False"),
        ({"tokens__query_length": 39}, r"--query_length\) .*39, .*passage.* 40"),
        ({"validation__metric": "Success@5"}, r"validation.metric .*'Success@5'; .*reranker"),
        ({"normalize": True}, r"normalize .*True, .*False"),
        ({"loss__matryoshka__sizes": (8,)}, r"loss.matryoshka.sizes .*\(8,\), .*'reranking' .*\(\)"),
        ({"encode__words": 5}, r"encode.words .*5, .*'reranking' .*0"),
        ({"loss__sparsity__query": 0.1}, r"loss.sparsity.query .*0.1, .*'reranking' .*0"),
        ({"loss__sparsity__passage": 0.1}, r"loss.sparsity.passage .*0.1, .*'reranking' .*0"),
        ({"encode__dimension": 8}, r"encode.dimension .*8, .*'reranking' .*0"),
        ({"tokens__prompt_in_mean": False}, r"tokens.prompt_in_mean .*False, .*task 'reranking'"),
        ({"tokens__prompts": "gritlm"}, r"tokens.prompts .*'gritlm', .*prompts"),
        ({"loss__kl__temperature": 0.0}, "loss.kl.temperature is 0.0; it must be positive"),
        ({"task": "rerank"}, r"'rerank'; .*retrieval, reranking"),
    ],
)
def test_invalid_settings_are_errors(root: Path, tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(config_of(root, **overrides), tmp_path / "run", progress=False)
