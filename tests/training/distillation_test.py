"""A teacher's scores from records to gradients: each passage gets its own score, and devices, chunks, packing and empty
places change nothing."""

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
from jaxret.data.formats import TrainingSource, write_retrieval_results, write_run
from jaxret.data.formats.example_writers import write_flag_examples
from jaxret.data.records import Example, Passage, Query
from jaxret.data.tokens.batches import BatchPlan, tokenize_examples
from jaxret.data.tokens.subset import choose_ids
from jaxret.data.tokens.teacher_scores import TeacherScores, with_scores
from jaxret.data.tokens.tokenized import ExampleSource, load_or_tokenize_examples
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.parallel.mesh import make_mesh, shard_batch
from jaxret.training.config_check import check_config
from jaxret.training.examples import load_examples
from jaxret.types import Batch
from tests import tiny
from tests.packed import pack
from tests.pipeline import write_encoder

QUERIES, GROUP = 8, 3
OVERRIDES = tiny.DUAL_ENCODER | {"loss.kl.weight": 0.5, "loss.kl.temperature": 3.0, "loss.margin_mse.weight": 0.1}


def examples_of(count: int = 9) -> list[Example]:
    """Examples with one to four negatives; a passage's score is its number, and every third example has no scores."""
    examples = []
    for i in range(count):
        passages = [Passage(f"{i}-{j}", f"river {i} stone {j}") for j in range(2 + i % 4)]
        scores = () if i % 3 == 2 else tuple(10.0 * i + j for j in range(len(passages)))
        examples.append(
            Example(Query(str(i), f"music {i}"), tuple(passages[:1]), tuple(passages[1:]), scores[:1], scores[1:])
        )
    return examples


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.load(write_encoder(tmp_path_factory.mktemp("distill") / "encoder"), 12, 24)


@pytest.mark.parametrize("step", [None, 0, 3])
def test_scores_belong_to_the_drawn_passages(tokenizer: TextTokenizer, step: int | None) -> None:
    examples = examples_of()
    data = tokenize_examples(examples, tokenizer)
    plan = BatchPlan(
        batch_size=9, negatives=3, length_multiple=8, max_query_length=12, max_passage_length=24, devices=2
    )
    rows = plan.pad_examples(np.arange(9) if step is None else plan.batch_examples(step, 9))
    batch = plan.batch(data, rows, step)
    scores_by_id = {
        row: score for e, t in zip(examples, data.positives) for row, score in [(t, (*e.positive_scores, np.nan)[0])]
    }
    for example, pool in zip(examples, data.negatives):
        scores_by_id |= dict(zip(pool, example.negative_scores or [np.nan] * len(pool)))
    expected = [scores_by_id.get(row, np.nan) if row >= 0 else np.nan for row in np.asarray(batch.passage_ids)]
    np.testing.assert_array_equal(np.asarray(batch.teacher_scores).reshape(-1), np.array(expected, np.float32))
    assert np.isfinite(expected).any()
    halves: list[Any] = [plan.batch(data, rows, step, part=(part, 2)).teacher_scores for part in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), batch.teacher_scores)


def write_records(path: Path, examples: list[Example]) -> Path:
    write_flag_examples(path, examples)
    return path


def test_scores_are_kept_with_the_tokens(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """Scores come from the records, or from a run by ids; without either, the error names the file."""
    path = write_records(tmp_path / "scored.jsonl", [e for e in examples_of() if e.positive_scores])
    source = ExampleSource(str(path), "train", "error", scores=True)
    data, _ = load_or_tokenize_examples(source, tokenizer, tmp_path / "store", False, print)
    read = TeacherScores.from_examples(TrainingSource.open(path).read())
    assert data.teacher is not None
    assert read is not None
    assert data.teacher.digest == read.digest
    without, _ = load_or_tokenize_examples(
        dataclasses.replace(source, scores=False), tokenizer, tmp_path / "store", False, print
    )
    assert without.teacher is None
    assert without.digest == data.digest
    first = TrainingSource.open(path).read()[1]
    scores = [(first.negatives[0].id, 2.5), (first.positives[0].id, 1.5)]
    write_run(tmp_path / "teacher.trec", {first.query.id: scores}, tag="teacher")
    run = dataclasses.replace(source, teacher_run=str(tmp_path / "teacher.trec"))
    data, _ = load_or_tokenize_examples(run, tokenizer, tmp_path / "store", False, print)
    assert data.teacher is not None
    np.testing.assert_array_equal(np.isfinite(data.teacher.positives), np.arange(len(data)) == 1)
    assert data.teacher.positives[1] == 1.5
    assert data.teacher.negatives[1][0] == 2.5
    unscored = [dataclasses.replace(e, positive_scores=(), negative_scores=()) for e in examples_of()]
    bare = write_records(tmp_path / "bare.jsonl", unscored)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"path": str(bare)}, "bare.jsonl"),
        ({"teacher_run": str(tmp_path / "other.trec")}, "other"),
    ]
    for overrides, name in cases:
        write_run(tmp_path / "other.trec", {"nobody": [("nothing", 1.0)]}, tag="teacher")
        with pytest.raises(ValueError, match=rf"{name}.*: .*example .*teacher's"):
            load_or_tokenize_examples(
                dataclasses.replace(source, **overrides), tokenizer, tmp_path / "store", False, print
            )


def test_a_teacher_run_is_matched_by_ids() -> None:
    scored = with_scores(examples_of(1)[0], {"0-1": 3.0, "1-0": 9.0})
    assert np.isnan(scored.positive_scores[0])
    assert scored.negative_scores == (3.0,)


def test_only_unscored_passages_are_left_out(
    tokenizer: TextTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other passages of the record stay. A record teaches only if its target and at least one negative have
    scores."""

    def passage(key: str, *score: float) -> dict[str, Any]:
        return {"docid": key, "text": f"river {key}", **({"score": score[0]} if score else {})}

    sides = [
        ([passage("a", 2.0)], [passage("b", 1.0), passage("c")]),
        ([passage("d")], [passage("e", 1.0)]),
        ([passage("f", 1.0)], [passage("g")]),
    ]
    rows = [
        {"query_id": str(n), "query": f"music {n}", "positive_passages": positives, "negative_passages": negatives}
        for n, (positives, negatives) in enumerate(sides)
    ]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny.make_config(
        {"data.train": str(tmp_path / "some.jsonl"), "data.store": str(tmp_path / "store"), "loss.kl.weight": 1.0}
    )
    data = load_examples(config, "train", tokenizer, False, print)
    assert data is not None
    assert data.teacher is not None
    np.testing.assert_array_equal(data.teacher.negatives.flat, [1.0, np.nan, 1.0, np.nan])
    assert "1 of 3 examples have a teacher's scores of their target and of a negative" in capsys.readouterr().out
    chosen = [choose_ids("012", 1, seed) for seed in range(99)]
    config.data.subset, config.seed.data = 1, chosen.index({"0"})
    assert load_examples(config, "train", tokenizer, False, print)
    config.seed.data = chosen.index({"1"})
    with pytest.raises(ValueError, match=r"data.subset=1 \(seed.data .*\) .*some.jsonl .*teacher's"):
        load_examples(config, "train", tokenizer, False, print)
    config.data.subset = 0
    (tmp_path / "none.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    config.data.train = str(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"none\.jsonl: .*example .*teacher's"):
        load_examples(config, "train", tokenizer, False, print)


def test_rankings_without_scores_are_refused(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """A file of ranks has no scores; and results without ids must be of the same questions."""
    examples = examples_of()
    path = write_records(tmp_path / "train.jsonl", examples)
    examples = TrainingSource.open(path).read()
    (tmp_path / "ranks.tsv").write_text("".join(f"{n}\tp{rank}\t{rank}\n" for n in range(2) for rank in range(1, 9)))
    rankings = [(e.query, [(p, 2.0, True) for p in (*e.positives, *e.negatives)]) for e in examples]
    write_retrieval_results(tmp_path / "same.json", rankings)
    write_retrieval_results(tmp_path / "turned.json", rankings[::-1])
    source = ExampleSource(str(path), "train", "error", scores=True, teacher_run=str(tmp_path / "same.json"))
    data, _ = load_or_tokenize_examples(source, tokenizer, tmp_path / "store", False, print)
    assert data.teacher is not None
    assert data.teacher.scored_examples == len(data)
    for name, message in (
        ("ranks.tsv", "this is a ranking without scores .*, but a teacher's scores are needed"),
        ("turned.json", "query 0 is 'music 8' in this run and 'music 0' in .*train.jsonl; give a run with scores"),
    ):
        other = dataclasses.replace(source, teacher_run=str(tmp_path / name))
        with pytest.raises(DataError, match=rf"{name}.*: {message}"):
            load_or_tokenize_examples(other, tokenizer, tmp_path / "store", False, print)


def scores_of(batch: Batch) -> np.ndarray:
    assert batch.teacher_scores is not None
    return np.asarray(batch.teacher_scores)


def make_batch() -> Batch:
    batch = tiny.make_batch(QUERIES, GROUP)
    teacher = np.random.default_rng(5).standard_normal((QUERIES, GROUP)).astype(np.float32)
    teacher[2] = teacher[4, 1] = np.nan
    return dataclasses.replace(batch, teacher_scores=teacher)


def computed(batch: Batch, devices: int = 1, chunk_size: int = 0) -> tuple[Any, Any]:
    objective = tiny.make_objective(
        OVERRIDES, make_mesh(devices=jax.devices()[:devices]), tiny.WITHOUT_DROPOUT, chunk_size
    )
    params = tiny.make_params(objective.model)

    def loss(params: Any, batch: Batch) -> Any:
        terms = objective(params, batch, jax.random.key(0), 0)
        return terms.loss, terms

    placed = shard_batch(objective.mesh, batch)
    (_, terms), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, placed)
    return terms, gradients


@pytest.fixture(scope="module")
def alone() -> tuple[Any, Any]:
    return computed(make_batch())


@pytest.mark.slow
def test_distillation_terms_by_hand(alone: tuple[Any, Any]) -> None:
    """The terms are computed from the vectors in float64."""
    terms, batch = alone[0], make_batch()
    objective = tiny.make_objective(OVERRIDES, make_mesh(devices=jax.devices()[:1]), tiny.WITHOUT_DROPOUT)
    params = tiny.make_params(objective.model)
    sides = {"query": batch.queries, "passage": batch.passages}
    q, d = (
        np.asarray(objective.model.encode(params, jax.tree.map(jnp.asarray, t), side).vectors, np.float64)[:, 0]  # type: ignore[arg-type]
        for side, t in sides.items()
    )
    s = np.einsum("bd,bgd->bg", q, d.reshape(QUERIES, GROUP, -1))
    t = np.where(np.asarray(batch.passage_ids).reshape(QUERIES, GROUP) >= 0, scores_of(batch), np.nan)
    kl, margins = [], []
    for i in range(QUERIES):
        mask = np.isfinite(t[i])
        if mask[0] and mask.sum() > 1:
            p, r = np.exp(t[i, mask]), np.exp(s[i, mask] / 3.0)
            p, r = p / p.sum(), r / r.sum()
            kl.append((p * np.log(p / r)).sum())
            margins += [((s[i, 0] - s[i, j]) - (t[i, 0] - t[i, j])) ** 2 for j in range(1, GROUP) if mask[j]]
    assert len(kl) == QUERIES - 1
    assert len(margins) == 2 * (QUERIES - 1) - 2
    assert float(terms.terms["kl"]) == pytest.approx(np.mean(kl), rel=1e-4)
    assert float(terms.terms["margin_mse"]) == pytest.approx(np.mean(margins), rel=1e-4)
    total = float(terms.terms["contrastive"]) + 0.5 * np.mean(kl) + 0.1 * np.mean(margins)
    assert float(terms.loss) == pytest.approx(total, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["devices", "chunks", "packed", "empty places"])
def test_devices_and_chunks_change_nothing(alone: tuple[Any, Any], how: str) -> None:
    batch = make_batch()
    if how == "empty places":
        teacher = np.full((4, GROUP), np.nan, np.float32)
        more = tiny.filled(batch, 12)
        terms = computed(dataclasses.replace(more, teacher_scores=np.concatenate([scores_of(batch), teacher])))
    elif how == "packed":
        head = tiny.make_retriever(OVERRIDES, tiny.WITHOUT_DROPOUT).module.head
        terms = computed(dataclasses.replace(pack(batch, 1, head), teacher_scores=batch.teacher_scores))
    else:
        terms = computed(batch, 8 if how == "devices" else 1, 2 if how == "chunks" else 0)
    assert tiny.distance(terms[0], alone[0]) < 1e-5
    assert tiny.distance(terms[1], alone[1]) < 1e-4


@pytest.mark.slow
def test_control_without_distillation_the_gradient_differs(alone: tuple[Any, Any]) -> None:
    other = dataclasses.replace(make_batch(), teacher_scores=scores_of(make_batch())[::-1].copy())
    assert tiny.distance(computed(other)[1], alone[1]) > 1e-2, (
        "control: other scores of the teacher give another gradient"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"data.teacher_run": "a.trec"},
            "data.teacher_run is set, but loss.kl.weight and loss",
        ),
        ({"loss.kl.weight": 1.0, "data.negatives": 0}, "loss.kl.weight is set, but data.negatives is 0"),
        ({"loss.margin_mse.weight": -1.0}, r"loss.margin_mse.weight .*-1.0; .*least 0"),
    ],
)
def test_invalid_settings_are_errors(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(tiny.make_config({"data.train": "somewhere"} | overrides))
