"""Validation against numpy: the in-batch loss, retrieval from the pool, and the passages of the pool."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxret.data.formats import Corpus, RankingSource, TrainingSource, write_beir, write_dpr_examples
from jaxret.data.records import Example, Judgement, Passage, Query
from jaxret.data.tokens.batches import TrainingSet, tokenize_examples
from jaxret.data.tokens.known_positives import KnownPositives
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import Run
from jaxret.training import data_warnings
from jaxret.training.diagnosis import NotFiniteError
from jaxret.training.examples import data_record, load_validation_corpus
from jaxret.training.ranking import Ranker
from jaxret.training.task import TrainingData
from jaxret.training.tasks.retrieval import RetrievalObjective, make_validation
from jaxret.training.validation import CORPUS_MEASURES, RetrievalValidation, make_collection, make_passage_pool
from jaxret.types import Ragged
from tests.pipeline import untrained_run, write_data, write_encoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("validation")
    data = write_data(root / "data", train=30, dev=11)
    return untrained_run(root / "run", write_encoder(root / "encoder"), data, validation__pool_size=45)


@pytest.fixture(scope="module")
def validation(run: Run) -> RetrievalValidation:
    folder = Path(run.config.data.train)
    train = tokenize_examples(TrainingSource.open(folder, "train").read(), run.tokenizer)
    dev = tokenize_examples(TrainingSource.open(folder, "dev").read(), run.tokenizer)
    objective = RetrievalObjective(model=run.model, mesh=run.mesh)
    return make_validation(run.config, objective, run.params, TrainingData(run.tokenizer, {}, train, dev, None))


def vectors(run: Run, validation: RetrievalValidation) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of queries [E,D] and of the pool [P,D], in float64."""
    embedder = run.embedder()
    collection = validation.collection
    queries, pool = embedder(collection.queries, "query"), embedder(collection.passages, "passage")
    return tuple(collection.stacked()[:, 0].astype(np.float64) for collection in (queries, pool))  # type: ignore[return-value]


def by_query(validation: RetrievalValidation) -> list[list[Judgement]]:
    collection = validation.collection
    return [[j for j in collection.judgements if j.query_id == str(query)] for query in range(len(collection.queries))]


def test_retrieval_from_the_pool(run: Run, validation: RetrievalValidation) -> None:
    metrics = validation(run.params)
    queries, pool = vectors(run, validation)
    reciprocal, top5, top20 = [], [], []
    relevant = [{int(j.passage_id) for j in judgements} for judgements in by_query(validation)]
    for query, rows in zip(queries, relevant, strict=True):
        order = np.argsort(-(pool @ query).astype(np.float32), kind="stable")
        rank = 1 + min(int(np.flatnonzero(order == row)[0]) for row in rows)
        reciprocal.append(1 / rank if rank <= 10 else 0)
        top5.append(rank <= 5)
        top20.append(rank <= 20)
    assert metrics["RR@10"] == pytest.approx(np.mean(reciprocal), abs=1e-9)
    assert metrics["Success@5"] == pytest.approx(np.mean(top5), abs=1e-9)
    assert metrics["Success@20"] == pytest.approx(np.mean(top20), abs=1e-9)
    moved = jax.tree.map(lambda leaf: leaf * 1.5, run.params)
    assert validation(moved)["nll"] != pytest.approx(metrics["nll"], abs=1e-3), (
        "control: another model has other values"
    )


@pytest.mark.slow
def test_in_batch_loss(run: Run, validation: RetrievalValidation) -> None:
    """The last batch is not full: its empty rows do not count. A known positive is not a negative."""
    dev, plan = validation.dev, validation.plan
    embed = run.embedder()
    queries = embed(dev.queries, "query").stacked()[:, 0].astype(np.float64)
    pool = embed(dev.passages, "passage").stacked()[:, 0].astype(np.float64)
    losses, ranks = [], []
    for start in range(0, len(dev), plan.batch_size):
        rows = range(start, min(start + plan.batch_size, len(dev)))
        passages = [d for row in rows for d in (dev.positives[row], *dev.negatives[row][: plan.negatives])]
        for row in rows:
            others = [d for d in passages if d not in dev.known_positives[row]]
            scores = pool[[dev.positives[row], *others]] @ queries[row]
            losses.append(np.log(np.exp(scores - scores[0]).sum()))
            ranks.append((scores > scores[0]).sum())
    metrics = validation(run.params)
    assert metrics["nll"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert metrics["average_rank"] == pytest.approx(np.mean(ranks), abs=1e-6)
    assert len(dev) % plan.batch_size, "control: one batch is not full"


def test_the_pool(run: Run, validation: RetrievalValidation) -> None:
    folder = Path(run.config.data.train)
    train = tokenize_examples(TrainingSource.open(folder, "train").read(), run.tokenizer)
    dev = validation.dev
    again, places = make_passage_pool(dev, train, 45, seed=run.config.seed.data)
    assert len(again) == 45
    assert sorted(places) == list(range(len(dev.passages)))
    for row, place in enumerate(places):
        assert np.array_equal(again[place], dev.passages[row])
    distinct = {again[row].tobytes() for row in range(len(again))}
    assert len(distinct) == 45
    assert np.array_equal(again.flat, validation.collection.passages.flat)
    assert len(validation.collection.queries) < len(dev), "control: some queries have several positives"
    for positives, judgements in zip(dev.known_positives.take(dev.first_examples), by_query(validation), strict=True):
        assert sorted(j.passage_id for j in judgements) == sorted(str(places[row]) for row in positives)
    all_of_them = make_collection(dev, train, None, seed=1)
    texts = {row.tobytes() for row in (*dev.passages, *train.passages)}
    assert {row.tobytes() for row in all_of_them.passages} == texts
    assert all_of_them.measures == CORPUS_MEASURES
    assert not np.array_equal(make_passage_pool(dev, train, 45, seed=1)[0].flat, again.flat)
    relevant = {row for positives in dev.known_positives for row in positives}
    few, places = make_passage_pool(dev, train, 5, seed=1)
    assert len(few) == len(relevant) > 5, "relevant passages are never left out"
    assert {row for row, place in enumerate(places) if place >= 0} == relevant
    assert (places[sorted(relevant)] == np.arange(len(relevant))).all()


def test_a_query_with_several_positives_searches_the_pool_once() -> None:
    """Records of one query may also name different positives."""
    dev = TrainingSet(
        queries=Ragged.from_lists([[2, 9, 3], [2, 9, 3], [2, 8, 3], [2, 9, 3]]),
        passages=Ragged.from_lists([[4], [5], [6], [7]]),
        positives=np.array([0, 1, 2, 3], np.int32),
        known_positives=KnownPositives.from_lists([[0, 1], [0, 1], [2], [3]]),
        negatives=Ragged.from_lists([[]] * 4),
        query_ids=("a", "a", "b", "a"),
        pad_id=0,
        marker_ids=(2, 3),
        digest="",
    )
    collection = make_collection(dev, None, None, seed=0)
    assert [query.tolist() for query in collection.queries] == [[2, 9, 3], [2, 8, 3]]
    judgements = [(judgement.query_id, judgement.passage_id) for judgement in collection.judgements]
    assert judgements == [("0", "0"), ("0", "1"), ("1", "2"), ("0", "3")]


def passages_only(*rows: list[int]) -> TrainingSet:
    """A set with one query, whose positive is the first passage."""
    return TrainingSet(
        queries=Ragged.from_lists([[2, 9, 3]]),
        passages=Ragged.from_lists(list(rows)),
        positives=np.zeros(1, np.int32),
        known_positives=KnownPositives.from_lists([[0]]),
        negatives=Ragged.from_lists([[]]),
        query_ids=("q",),
        pad_id=0,
        marker_ids=(2, 3),
        digest="",
    )


def test_the_pool_has_no_duplicates() -> None:
    """A copy of the positive, under another id, would be ranked instead of it."""
    dev, train = passages_only([7], [8, 5]), passages_only([7], [4], [8, 5], [4], [6], [8])
    pool, places = make_passage_pool(dev, train, 20, seed=0)
    assert sorted(row.tolist() for row in pool) == [[4], [6], [7], [8], [8, 5]]
    assert places.tolist() == [0, 1]
    alone, _ = make_passage_pool(dev, None, 20, seed=0)
    assert [row.tolist() for row in alone] == [[7], [8, 5]]


@pytest.mark.parametrize("size", [1, 3, 40, 2000, 9000])
def test_the_pool_is_filled_with_passages_in_the_order_of_the_draw(size: int) -> None:
    """A loop over all passages gives the same pool, although passages are drawn in blocks and most of them are
    copies."""
    rng = np.random.default_rng(7)
    dev = passages_only([7], [7], [1, 2])
    train = passages_only(*([int(rng.integers(60))] * int(rng.integers(1, 60)) for _ in range(5000)))
    expected = [row.tolist() for row in dev.passages][: max(size, 1)]
    for row in np.random.default_rng(3).permutation(len(train.passages)):
        if len(expected) < size and train.passages[row].tolist() not in expected:
            expected.append(train.passages[row].tolist())
    pool, _ = make_passage_pool(dev, train, size, seed=3)
    assert [row.tolist() for row in pool] == expected
    assert pool.flat.dtype == np.int32


def test_a_pool_of_all_passages_is_made_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs about twice the memory of its tokens, and no Python object per passage."""
    monkeypatch.setattr(data_warnings, "_BLOCK_ROWS", 500)  # several blocks
    rows, length = 20_000, 60
    tokens = np.random.default_rng(0).integers(5, 30_000, (rows, length), np.int32)
    dev = passages_only([7])
    train = replace(dev, passages=Ragged(tokens.reshape(-1), np.arange(rows + 1) * length))
    tracemalloc.start()
    try:
        pool, _ = make_passage_pool(dev, train, rows + 1, seed=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(pool) == rows + 1
    assert peak < 3 * tokens.nbytes


def test_values_on_other_data_are_not_compared(validation: RetrievalValidation) -> None:
    """The batch size changes metrics within a batch; passages and judgements change retrieval."""
    collection, plan = validation.collection, replace(validation.plan, batch_size=3)
    first, *others = collection.judgements
    changed = {
        "batch size": replace(validation, plan=plan),
        "passages": replace(validation, collection=replace(collection, passages=collection.passages.part(0, 40))),
        "grade": replace(validation, collection=replace(collection, judgements=(replace(first, relevance=2), *others))),
    }
    for name, other in changed.items():
        for metric in ("nll", "average_rank", "RR@10", "Success@5"):
            same = (name == "batch size") == (metric in CORPUS_MEASURES)
            assert (other.measured_on(metric) == validation.measured_on(metric)) is same, (name, metric)


def test_equal_scores_are_ordered_by_row(validation: RetrievalValidation) -> None:
    """The lower row is first, whichever batch it was in: all texts are equal, and long ones are encoded first."""
    params = jax.tree.map(jnp.zeros_like, validation.ranker.embedder.params)
    pool = Ragged.from_lists([[2] + [9] * (n % 5) + [3] for n in range(150)])
    rankings = validation.ranker(params, validation.dev.queries, pool)
    assert rankings.keys() == {str(query) for query in range(len(validation.dev))}
    for ranking in rankings.values():
        assert ranking == [(str(row), 0.0) for row in range(validation.ranker.depth)]


def test_a_score_that_is_not_finite_is_an_error(validation: RetrievalValidation) -> None:
    """It would otherwise displace another passage."""
    ranker = validation.ranker
    pool = Ragged.from_lists([[2, 9, 3]] * 49 + [[2, 98, 3]])
    table = ranker.embedder.params["encoder"]["embeddings"]["word"]["embedding"].at[98].set(np.nan)
    params = jax.tree.map(lambda leaf: leaf, ranker.embedder.params)
    params["encoder"]["embeddings"]["word"]["embedding"] = table
    with pytest.raises(NotFiniteError, match="passage 49 "):
        ranker(params, validation.dev.queries, pool)


def test_fewer_passages_than_k(validation: RetrievalValidation) -> None:
    ranker = Ranker(validation.ranker.embedder, 50)
    rankings = ranker(ranker.embedder.params, validation.dev.queries, validation.dev.passages.take(np.arange(7)))
    for ranking in rankings.values():
        assert sorted(row for row, _ in ranking) == [str(row) for row in range(7)]


FAMILIES: dict[str, dict[str, Any]] = {
    "dual_encoder": {},
    "several_vectors": {"head__name": "mlr", "head__mlr__chosen": (1, 3)},
    "late_interaction": {"head__name": "colbert", "head__colbert__late": True, "head__colbert__projection": 6},
    "lists": {"head__name": "colbert"},
}


@pytest.mark.daily("lists")
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "dual_encoder" else pytest.mark.exhaustive) for name in FAMILIES],
)
def test_validation_over_a_corpus_equals_search(family: str, tmp_path: Path) -> None:
    """Over the whole folder, on eight devices with split parameters: rankings and measures equal those of encode.py and
    search.py."""
    data = write_data(tmp_path / "data", train=30, dev=11)
    overrides: dict[str, Any] = {"encoder__tied": False, "mesh__fsdp": 2, **FAMILIES[family]}
    run = untrained_run(tmp_path / "run", write_encoder(tmp_path / "encoder"), data, **overrides)
    config = ConfigDict(run.config)
    config.data.dev, config.validation.corpus = str(data), str(data)
    dev = tokenize_examples(TrainingSource.open(data, "dev").read(), run.tokenizer)
    lines: list[str] = []
    corpus = load_validation_corpus(config, dev, run.tokenizer, False, lines.append)
    assert corpus is not None
    assert any(line.startswith(f"validation: 91 passages from {data}, 11 queries") for line in lines)
    objective = RetrievalObjective(model=run.model, mesh=run.mesh)
    data_read: TrainingData[TrainingSet] = TrainingData(run.tokenizer, {}, None, dev, corpus)
    validation = make_validation(config, objective, run.params, data_read)

    encode_corpus(run, Corpus.open(data), progress=False)
    expected = search_files(
        run,
        EvaluationSource.open(data, data, "dev"),
        EvaluationOptions(k=100, measures=tuple(list(CORPUS_MEASURES))),
        progress=False,
    )
    assert expected is not None
    metrics = validation(run.params)
    for name, value in expected.mean.items():
        assert metrics[name] == pytest.approx(value, abs=1e-9), name
    ids = [passage.id for passage in Corpus.open(data).read()]
    rankings = RankingSource.open(run.workdir.rankings("data.dev")).read()
    mine = validation.ranker(run.params, corpus.queries, corpus.passages)
    assert len(rankings) == len(mine) == 11
    for number, query in enumerate(dict.fromkeys(dev.query_ids)):
        same = [(ids[int(row)], score) for row, score in mine[str(number)]]
        theirs = rankings[query]
        scores = np.array([score for _, score in theirs])
        rounding = 1e-5 * np.abs(scores).max()
        np.testing.assert_allclose([score for _, score in same], scores, atol=rounding)
        gaps = -np.diff(scores, prepend=np.inf, append=-np.inf) > 2 * rounding
        clear = np.flatnonzero(gaps[1:] & gaps[:-1])  # no neighbour has nearly the same score
        assert len(clear) > 50
        assert [same[i][0] for i in clear] == [theirs[i][0] for i in clear]
    moved = jax.tree.map(lambda leaf: leaf * 1.5, run.params)
    assert validation(moved)["nDCG@10"] != pytest.approx(metrics["nDCG@10"], abs=1e-6), (
        "control: another model has other values"
    )


def test_judgements_for_dev_records_without_query_ids(run: Run, tmp_path: Path) -> None:
    """The number of a record is not an id of the judgements, even if one of them is equal to it."""
    passages = [Passage(f"d{number}", f"silver stone {number}") for number in range(5)]
    queries = [Query("0", "music light"), Query("7", "silver stone")]
    write_beir(tmp_path, passages, queries, {"dev": [Judgement("0", "d1", 1), Judgement("7", "d3", 1)]})
    write_dpr_examples(tmp_path / "dev.json", [Example(Query("0", "silver stone"), (passages[3],))])
    config = ConfigDict(run.config)
    config.data.dev = config.validation.corpus = str(tmp_path)
    dev = tokenize_examples(TrainingSource.open(tmp_path, "dev").read(), run.tokenizer)
    corpus = load_validation_corpus(config, dev, run.tokenizer, False, lambda _: None)
    assert corpus is not None
    assert corpus.judgements == (Judgement("0", "1", 1), Judgement("1", "3", 1))
    expected = run.tokenizer.queries(queries)
    assert [corpus.queries[row].tolist() for row in range(2)] == [expected[row].tolist() for row in range(2)]
    write_beir(tmp_path, passages, [replace(queries[0], text="music"), queries[1]], {})
    changed = load_validation_corpus(config, dev, run.tokenizer, False, lambda _: None)
    assert changed is not None
    assert {name for name in changed.record if changed.record[name] != corpus.record[name]} == {"queries"}
    assert changed.digest != corpus.digest, "values over the two corpora are not compared"


def test_the_record_of_a_corpus_has_digests_of_passages_and_grades(run: Run, tmp_path: Path) -> None:
    passages = [Passage(f"d{number}", f"silver stone {number}") for number in range(5)]

    def record(name: str, passages: list[Passage], grade: int) -> dict[str, str]:
        folder, queries = tmp_path / name, [Query("7", "silver stone")]
        write_beir(folder, passages, queries, {"dev": [Judgement("7", "d3", grade)]})
        config = ConfigDict(run.config)
        config.data.dev = config.validation.corpus = str(folder)
        dev = tokenize_examples(TrainingSource.open(folder, "dev").read(), run.tokenizer)
        corpus = load_validation_corpus(config, dev, run.tokenizer, False, lambda _: None)
        assert corpus is not None
        assert corpus.record["corpus"] == Corpus.open(folder).scan().sha256
        assert data_record(None, dev, corpus) == {"dev": dev.record, "validation": corpus.record}
        assert dev.record == tokenize_examples(TrainingSource.open(folder, "dev").read(), run.tokenizer).record
        return corpus.record

    first = record("a", passages, 1)
    assert first == record("b", passages, 1)
    longer, graded = record("c", [*passages, Passage("d9", "music")], 1), record("d", passages, 2)
    assert {name for name in first if first[name] != longer[name]} == {"corpus"}
    assert {name for name in first if first[name] != graded[name]} == {"judgements"}


def test_a_corpus_without_the_relevant_passages(run: Run, tmp_path: Path) -> None:
    folder = Path(run.config.data.train)
    lines: list[str] = []
    dev = tokenize_examples(TrainingSource.open(folder, "dev").read(), run.tokenizer)
    config = ConfigDict(run.config)
    config.data.dev = str(folder)
    passages = list(Corpus.open(folder).read())
    for kept, message in ((passages[:-1], "of 14 relevant passages are not in it"), (passages[:4], None)):
        write_beir(tmp_path / str(len(kept)), kept, [], {})
        config.validation.corpus = str(tmp_path / str(len(kept)))
        if message is None:
            with pytest.raises(ValueError, match=r"validation.corpus .*/4, .*relevant"):
                load_validation_corpus(config, dev, run.tokenizer, False, lines.append)
        else:
            corpus = load_validation_corpus(config, dev, run.tokenizer, False, lines.append)
            assert corpus is not None
            absent = [j for j in corpus.judgements if not j.passage_id.isdecimal()]
            assert message in lines[-1] or not absent
    for nothing in ("", "train"):
        config.validation.corpus = nothing
        assert load_validation_corpus(config, dev, run.tokenizer, False, lines.append) is None
