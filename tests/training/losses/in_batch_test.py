"""The contrastive loss against float64 loops written from the formulas; gradients against finite differences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.scoring import MASKED_SCORE, similarities
from jaxret.training.losses.group_losses import BinarySettings, KlSettings, MarginMseSettings
from jaxret.training.losses.in_batch import (
    LossSettings,
    LossTerms,
    Scores,
    competing_passages,
    loss_settings,
    total_loss,
)
from jaxret.types import Batch
from tests.tiny import AGGRETRIEVER, MLR, MVR, make_config, make_retriever, make_tokens

D = 6


def contrastive_loss(S: Any, positives: Any, allowed: Any, settings: LossSettings, annealing: Any = 1.0) -> LossTerms:
    return total_loss(Scores(S, positives, allowed, settings, annealing))


@dataclass
class Case:
    """Five rows of queries (the last is padding) and nine passages.

    Query 0 has the same positive as query 3 (another copy, in row 6); passage 3 is another known positive of query 1;
    passage 8 is an empty slot.
    """

    V: int
    seed: int = 0
    positives: np.ndarray = field(default_factory=lambda: np.array([0, 2, 4, 6, -1], np.int32))
    ids: np.ndarray = field(default_factory=lambda: np.array([7, 11, 12, 13, 14, 15, 7, 17, -1], np.int32))
    known_positives: np.ndarray = field(
        default_factory=lambda: np.array([[7, -1], [12, 13], [14, -1], [7, -1], [-1, -1]], np.int32)
    )

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        self.queries = generator.standard_normal((len(self.positives), D)).astype(np.float32)
        self.passages = generator.standard_normal((len(self.ids), self.V, D)).astype(np.float32)
        # All scores of query 2 are negative: a missing passage must not win with 0.
        self.passages[:, :, 0] = -np.abs(self.passages[:, :, 0]) - 5
        self.queries[2] = np.eye(D)[0]
        counts = generator.integers(1, self.V + 1, len(self.ids))
        counts[[0, 2]] = self.V
        counts[8] = 0
        self.mask = np.arange(self.V)[None] < counts[:, None]

    def batch(self) -> Batch:
        tokens = make_tokens(2, 2)  # the loss does not use them
        return Batch(tokens, tokens, *map(jnp.asarray, (self.positives, self.ids, self.known_positives)))

    def raw(self) -> np.ndarray:
        return np.einsum("qd,nvd->qnv", self.queries.astype(np.float64), self.passages.astype(np.float64))

    def ours(self, settings: LossSettings) -> LossTerms:
        S = similarities(*map(jnp.asarray, (self.queries, self.passages, self.mask)))
        return contrastive_loss(S, jnp.asarray(self.positives), competing_passages(self.batch()), settings)


def competes(case: Case, i: int, j: int) -> bool:
    """Return whether passage j is in query i's softmax."""
    if j == case.positives[i]:
        return True
    return case.ids[j] != -1 and case.ids[j] not in case.known_positives[i]


def minus_log_softmax(logits: list[float], target: int) -> float:
    top = max(logits)
    return top + math.log(sum(math.exp(x - top) for x in logits)) - logits[target]


def oracle(raw: np.ndarray, case: Case, settings: LossSettings) -> dict[str, float]:
    """Compute the loss and its terms by loops, in float64."""
    contrastive, local, hits, ranks, count = 0.0, 0.0, 0, 0, 0
    for i, own in enumerate(case.positives):
        if own < 0:
            continue
        count += 1
        vectors = [raw[i, own, k] for k in range(case.V) if case.mask[own, k]]
        rows = [j for j in range(len(case.ids)) if competes(case, i, j)]
        scores = [max(raw[i, j, k] for k in range(case.V) if case.mask[j, k]) for j in rows]
        if settings.positive == "first":
            scores[rows.index(own)] = vectors[0]
        contrastive += minus_log_softmax([s / settings.temperature for s in scores], rows.index(own))
        hits += scores.index(max(scores)) == rows.index(own)
        ranks += sorted(range(len(rows)), key=lambda n: -scores[n]).index(rows.index(own))
        if settings.local_target != "none":
            target = 0 if settings.local_target == "first" else vectors.index(max(vectors))
            local += minus_log_softmax([s / settings.local_temperature for s in vectors], target)
    contrastive, local = contrastive / count, local / count
    loss = contrastive + settings.local_weight * local
    return {"loss": loss, "contrastive": contrastive, "local": local, "accuracy": hits / count, "rank": ranks / count}


SETTINGS = [
    LossSettings(positive, local, temperature, local_temperature, weight)  # type: ignore[arg-type]
    for positive in ("max", "first")
    for local in ("none", "first", "argmax")
    for temperature, local_temperature, weight in ((1.0, 1.0, 0.1), (0.3, 2.0, 10.0), (5.0, 0.7, 0.0))
]


def close(terms: LossTerms, expected: dict[str, float]) -> bool:
    values = {"local": 0.0, **vars(terms), **terms.terms}
    return all(abs(float(values[n]) - e) <= 2e-6 * max(1.0, abs(e)) for n, e in expected.items())


@pytest.mark.table
@pytest.mark.parametrize("V", [5, 1, 2])
def test_golden_values_of_every_term(V: int) -> None:
    case = Case(V)
    for settings in SETTINGS:
        terms, expected = case.ours(settings), oracle(case.raw(), case, settings)
        assert close(terms, expected), (settings, terms, expected)


def test_only_the_querys_own_negatives() -> None:
    """I3 eq. 9 by a loop in float64: three queries with three passages each. The second query's last passage is another
    positive of it; the third query's last does not exist."""
    generator = np.random.default_rng(3)
    raw = generator.standard_normal((3, 9)) * 2
    ids = np.array([1, 2, 3, 4, 5, 6, 7, 8, -1], np.int32)
    relevant = np.array([[1, -1], [4, 6], [7, -1]], np.int32)
    tokens = make_tokens(2, 2)
    batch = Batch(tokens, tokens, *map(jnp.asarray, (np.array([0, 3, 6], np.int32), ids, relevant)))
    own = {0: [0, 1, 2], 1: [3, 4], 2: [6, 7]}
    expected = np.mean([minus_log_softmax([raw[i, j] for j in rows], 0) for i, rows in own.items()])
    competing = competing_passages(batch, in_batch_negatives=False)
    assert [list(np.flatnonzero(row)) for row in np.asarray(competing)] == list(own.values())
    S = jnp.asarray(raw, jnp.float32)[..., None]
    terms = contrastive_loss(S, batch.positives, competing, LossSettings(in_batch_negatives=False))
    assert float(terms.loss) == pytest.approx(expected, rel=1e-6)
    whole = contrastive_loss(S, batch.positives, competing_passages(batch), LossSettings())
    assert abs(float(whole.loss) - expected) > 0.1, "control: with all negatives of the batch, the loss differs"
    empty = Batch(tokens, tokens, jnp.array([0, 3, -1]), *map(jnp.asarray, (ids, relevant)))
    alone = contrastive_loss(S, empty.positives, competing_passages(empty, False), LossSettings())
    first_two = np.mean([minus_log_softmax([raw[i, j] for j in own[i]], 0) for i in (0, 1)])
    assert float(alone.loss) == pytest.approx(first_two, rel=1e-6)


def test_every_feature_of_the_case_changes_the_loss() -> None:
    """Without one of these features, the loss differs, so every test of values covers all of them."""
    settings = LossSettings("first", "first", 1.0, 1.0, 1.0)
    case, terms = Case(5), Case(5).ours(settings)
    assert (case.raw()[2] < 0).all()
    changes: dict[str, Any] = {
        "a copy of the positive": {"ids": np.array([7, 11, 12, 13, 14, 15, 16, 17, -1], np.int32)},
        "another known positive": {
            "known_positives": np.array([[7, -1], [12, -1], [14, -1], [7, -1], [-1, -1]], np.int32)
        },
        "padding queries": {"positives": np.array([0, 2, 4, 6, 1], np.int32)},
    }
    for name, change in changes.items():
        other = Case(5, **change)
        assert close(other.ours(settings), oracle(other.raw(), other, settings)), name
        assert not close(terms, oracle(other.raw(), other, settings)), f"control: {name} changes the loss"
    whole = Case(5)
    whole.mask[:8] = True
    assert not close(terms, oracle(whole.raw(), whole, settings)), "control: masked vectors change the loss"
    for other_settings in SETTINGS:
        assert not close(terms, oracle(case.raw(), case, other_settings)), "control: settings change the loss"


@pytest.mark.table
@pytest.mark.parametrize("V", [2, 1, 5])
@pytest.mark.parametrize("positive", ["first", "max"])
@pytest.mark.parametrize("local", ["argmax", "first", "none"])
def test_gradients_are_the_finite_differences_of_the_oracle(V: int, positive: Any, local: Any) -> None:
    case = Case(V, seed=3)
    settings = LossSettings(positive, local, 0.8, 1.7, 0.5)
    raw, step = case.raw(), 1e-5
    with jax.enable_x64(True):
        mask, chosen = jnp.asarray(case.mask), competing_passages(case.batch())

        def loss(raw: jax.Array) -> jax.Array:
            S = jnp.where(mask[None], raw, MASKED_SCORE)
            return contrastive_loss(S, jnp.asarray(case.positives), chosen, settings).loss

        value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(raw))
        assert value.dtype == jnp.float64
        value, gradient = float(value), np.asarray(gradient)
    assert abs(value - oracle(raw, case, settings)["loss"]) < 1e-12
    expected = np.zeros_like(raw)
    for at in np.ndindex(*raw.shape):
        moved = [raw.copy(), raw.copy()]
        moved[0][at] += step
        moved[1][at] -= step
        up, down = (oracle(m, case, settings)["loss"] for m in moved)
        expected[at] = (up - down) / (2 * step)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-8)
    assert np.abs(expected).max() > 0.05
    assert not gradient[-1].any(), "a padding query has no gradient"
    assert not gradient[:, -1].any(), "an empty passage has no gradient"
    assert not gradient[:, ~case.mask].any(), "a vector that does not exist has no gradient"


def test_two_vectors_make_the_local_loss_a_softplus() -> None:
    """MLR with m = 2: -log softmax(S0, S1)[0] = softplus(S1 - S0)."""
    case = Case(2)
    case.mask[:8] = True
    own = case.raw()[np.arange(4), case.positives[:4]]
    local = case.ours(LossSettings("first", "first", local_weight=1.0)).terms["local"]
    np.testing.assert_allclose(local, np.log1p(np.exp(own[:, 1] - own[:, 0])).mean(), rtol=1e-6)
    reversed_ = np.log1p(np.exp(own[:, 0] - own[:, 1])).mean()
    assert abs(float(local) - reversed_) > 0.1, "control: with the other vector as target, the loss differs"


@pytest.mark.table
@pytest.mark.parametrize("positive", ["max", "first"])
@pytest.mark.parametrize("local", ["none", "first", "argmax"])
def test_one_vector_without_local_weight_gives_the_loss_of_dpr(positive: Any, local: Any) -> None:
    """Cross-entropy of the [B,N] score matrix with the positives as labels; with one vector the local loss is 0."""
    generator = np.random.default_rng(0)
    scores = generator.standard_normal((4, 8)).astype(np.float32)
    labels = np.array([0, 2, 4, 6], np.int32)
    everything = jnp.ones((4, 8), bool)
    settings = LossSettings(positive, local, local_weight=0.0)
    terms = contrastive_loss(jnp.asarray(scores)[..., None], jnp.asarray(labels), everything, settings)
    dpr = -jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), jnp.asarray(labels)[:, None], axis=-1).mean()
    np.testing.assert_allclose(terms.loss, dpr, rtol=1e-6)
    assert float(terms.terms.get("local", 0.0)) == 0.0
    shuffled = contrastive_loss(jnp.asarray(scores)[..., None], jnp.asarray(labels[::-1].copy()), everything, settings)
    assert abs(float(shuffled.loss) - float(dpr)) > 0.1, "control: other labels give another loss"


def test_parts_compete_with_the_documents_of_the_whole() -> None:
    """The third document is the best by both parts, but does not compete."""
    S, competing = jnp.array([[[2.0], [1.0], [9.0]]]), jnp.array([[True, True, False]])
    terms = total_loss(Scores(S, jnp.array([0]), competing, LossSettings(parts_weight=0.5), parts=(S, 2 * S))).terms
    assert float(terms["parts"]) == pytest.approx(np.log1p(np.exp(-1)) + np.log1p(np.exp(-2)), rel=1e-6)


def test_equal_scores_are_ordered_by_position() -> None:
    scores, everyone = jnp.zeros((2, 4, 1)), jnp.ones((2, 4), bool)
    for positives in ([0, 1], [2, 3]):
        terms = contrastive_loss(scores, jnp.array(positives, jnp.int32), everyone, LossSettings())
        assert float(terms.rank) == np.mean(positives)
        assert float(terms.accuracy) == np.mean(np.array(positives) == 0)


def test_mask_of_candidates() -> None:
    """Rows are queries, columns are passages of the case above."""
    expected = [
        [1, 1, 1, 1, 1, 1, 0, 1, 0],  # without the copy of its positive in row 6
        [1, 1, 1, 0, 1, 1, 1, 1, 0],  # without its other positive
        [1, 1, 1, 1, 1, 1, 1, 1, 0],
        [0, 1, 1, 1, 1, 1, 1, 1, 0],  # without the copy in row 0; row 6 is its positive
        [1, 1, 1, 1, 1, 1, 1, 1, 0],
    ]
    np.testing.assert_array_equal(competing_passages(Case(1).batch()), np.array(expected, bool))


@pytest.mark.table
@pytest.mark.parametrize("settings", SETTINGS[::3], ids=str)
def test_rows_with_only_padding_are_finite(settings: LossSettings) -> None:
    """Without a query, a passage or a vector, the value and the gradient are 0, not NaN."""
    B, N, V = 2, 3, 2
    mask = jnp.zeros((N, V), bool)

    def loss(queries: jax.Array, passages: jax.Array) -> jax.Array:
        S = similarities(queries, passages, mask)
        return contrastive_loss(S, jnp.full(B, -1, jnp.int32), jnp.zeros((B, N), bool), settings).loss

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(jnp.ones((B, D)), jnp.ones((N, V, D)))
    assert float(value) == 0.0
    assert all(not np.asarray(gradient).any() for gradient in gradients)


@pytest.mark.table
@pytest.mark.parametrize("settings", SETTINGS[::3], ids=str)
def test_a_positive_without_vectors_is_finite(settings: LossSettings) -> None:
    """A positive without text gives a large finite loss, and no gradient of the missing vectors."""
    mask = jnp.ones((4, 2), bool).at[0].set(False)

    def loss(queries: jax.Array, passages: jax.Array) -> jax.Array:
        S = similarities(queries, passages, mask)
        return contrastive_loss(S, jnp.array([0, 2]), jnp.ones((2, 4), bool), settings).loss

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(jnp.ones((2, D)), jnp.ones((4, 2, D)))
    assert bool(jnp.isfinite(value))
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in gradients)
    assert not np.asarray(gradients[1][0]).any()


def test_padding_passages_do_not_change_the_loss() -> None:
    """Three more empty slots have vectors that would win by far if they competed."""
    case, settings = Case(2), LossSettings("first", "first", local_weight=1.0)
    longer = Case(2)
    longer.ids = np.append(case.ids, [-1, -1, -1]).astype(np.int32)
    longer.passages = np.concatenate([case.passages, np.full((3, 2, D), 100, np.float32)])
    longer.mask = np.concatenate([case.mask, np.ones((3, 2), bool)])
    np.testing.assert_allclose(longer.ours(settings).loss, case.ours(settings).loss, rtol=1e-6)
    longer.ids[-1] = 99
    assert abs(float(longer.ours(settings).loss) - float(case.ours(settings).loss)) > 1, (
        "control: the slot has a passage"
    )


def settings_of(overrides: dict[str, Any]) -> LossSettings:
    return loss_settings(make_config(overrides), make_retriever(overrides), epochs_per_batch=0.5)


def test_settings_from_the_config() -> None:
    plain = settings_of({"pooling": "none", "loss.temperature": 0.5})
    assert plain == LossSettings("max", "none", 0.5, 1.0, 0.0, epochs_per_batch=0.5)
    own = settings_of(MLR | {"pooling": "self_contrastive", "loss.local_weight": 0.1, "loss.local_temperature": 2.0})
    assert (own.positive, own.local_target, own.local_weight, own.local_temperature) == ("first", "first", 0.1, 2.0)
    viewers = settings_of(MVR)
    assert (viewers.positive, viewers.local_target, viewers.annealing_rate) == ("max", "argmax", 0.1)
    assert settings_of(AGGRETRIEVER).parts == ((0, 8), (8, 12))


def test_a_local_weight_without_a_local_term_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"loss.local_weight is 0.1, but pooling 'none' of head 'dual_encoder'"):
        settings_of({"loss.local_weight": 0.1})


@pytest.mark.parametrize("key", ["loss.temperature", "loss.local_temperature", "loss.annealing_floor"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_temperature_must_be_positive(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{key} is {value}; it must be positive"):
        settings_of({key: value})


def test_annealing_by_epoch() -> None:
    """max(0.3, exp(-0.1 t)), where t is 0 in the first epoch: the floor is reached in epoch 13."""
    settings = LossSettings(annealing_rate=0.1, annealing_floor=0.3, epochs_per_batch=0.2)
    factors = [float(settings.annealing(jnp.int32(step))) for step in (0, 4, 5, 9, 60, 64, 65, 1000)]
    expected = [1, 1, np.exp(-0.1), np.exp(-0.1), np.exp(-1.2), np.exp(-1.2), 0.3, 0.3]
    np.testing.assert_allclose(factors, expected, rtol=1e-6)
    assert LossSettings().annealing(1000) == 1.0


def test_a_heads_own_loss_decays_by_epoch() -> None:
    """The loss is the mean over tokens of (sum, count) pairs, times weight * decay^epoch."""
    settings = LossSettings(auxiliary_weight=2.0, auxiliary_decay=0.1, contrastive_weight=0.0)
    own = jnp.array([[3.0, 2.0], [0.0, 0.0], [5.0, 2.0]])
    S, allowed = jnp.zeros((1, 3, 1)), jnp.ones((1, 3), bool)
    for epoch, expected in ((0.0, 4.0), (1.0, 0.4), (2.0, 0.04)):
        scores = Scores(S, jnp.array([0]), allowed, settings, 1.0, jnp.float32(epoch), own)
        assert float(total_loss(scores).loss) == pytest.approx(expected, rel=1e-6)
    assert "reconstruction" not in total_loss(Scores(S, jnp.array([0]), allowed, settings)).terms, (
        "control: without the head's own loss, its term is absent"
    )


STUDENT = np.array([[2, 1, 0.5, -1], [0, 3, 1, 2]], np.float32)
TEACHER = np.array([[8, 6, 1, -2], [5, 4, 9, 0]], np.float32)


def taught(settings: LossSettings, teacher: np.ndarray = TEACHER, empty: tuple[int, int] | None = None) -> LossTerms:
    """The loss of two queries with four passages each; scores of the other query's passages are 0."""

    def value(student: jax.Array) -> tuple[jax.Array, LossTerms]:
        S = jnp.zeros((2, 8, 1)).at[0, :4, 0].set(student[0]).at[1, 4:, 0].set(student[1])
        allowed = jnp.ones((2, 8), bool)
        allowed = allowed if empty is None else allowed.at[empty[0], 4 * empty[0] + empty[1]].set(False)
        arguments = (S, jnp.array([0, 4]), allowed, settings)
        terms = total_loss(Scores(*arguments, teacher_scores=jnp.asarray(teacher, jnp.float32)))
        return terms.loss, terms

    (_, terms), gradient = jax.value_and_grad(value, has_aux=True)(jnp.asarray(STUDENT))
    return terms.replace(rank=gradient)  # type: ignore[attr-defined]


def only(**groups: Any) -> LossSettings:
    return LossSettings(contrastive_weight=0.0, **groups)


def numpy_kl(student: np.ndarray, teacher: np.ndarray, temperature: float, teacher_temperature: float) -> float:
    """Compute the KL divergence in float64; a passage that the teacher did not score is NaN. A row without a score of
    its positive is left out."""
    rows = []
    for s, t in zip(student.astype(np.float64), teacher.astype(np.float64)):
        mask = np.isfinite(t)
        if mask[0] and mask.sum() > 1:
            p, q = (np.exp(x[mask] / T) for x, T in ((t, teacher_temperature), (s, temperature)))
            p, q = p / p.sum(), q / q.sum()
            rows.append((p * (np.log(p) - np.log(q))).sum())
    return float(np.mean(rows))


# Values of torch's KLDivLoss(reduction="batchmean") on the rows above: (temperature, the teacher's, scaled) -> loss.
KL = {
    (2.0, 2.0, True): 2.848525,
    (1.0, 1.0, False): 1.279065,
    (2.0, 2.0, False): 0.712131,
    (1.0, 2.0, False): 0.938250,
    (2.0, 1.0, False): 1.090688,
}


@pytest.mark.table
@pytest.mark.parametrize("case", KL)
def test_kl_to_a_teacher(case: tuple[float, float, bool]) -> None:
    terms = taught(only(kl=KlSettings(0.5, *case)))
    assert float(terms.terms["kl"]) == pytest.approx(KL[case], rel=2e-6)
    assert float(terms.loss) == pytest.approx(0.5 * KL[case], rel=2e-6)
    if not case[2]:
        assert numpy_kl(STUDENT, TEACHER, *case[:2]) == pytest.approx(KL[case], rel=2e-6)
    others = [value for other, value in KL.items() if other != case]
    assert not any(value == pytest.approx(KL[case], rel=1e-2) for value in others), (
        "control: other settings have other values"
    )


def test_gradients_of_distillation_terms() -> None:
    """Gradients of the first row, in a mean over two rows or six margins, equal these values and finite differences
    in float64."""
    kl, mse = taught(only(kl=KlSettings(1.0))), taught(only(margin_mse=MarginMseSettings(1.0)))
    np.testing.assert_allclose(np.asarray(kl.rank)[0], [-0.135298, 0.052553, 0.067593, 0.015152], atol=2e-6)
    np.testing.assert_allclose(np.asarray(mse.rank)[0], [-4.5, 1 / 3, 11 / 6, 7 / 3], atol=2e-5)
    assert float(mse.terms["margin_mse"]) == pytest.approx(25.708333, rel=1e-6)
    step = 1e-6
    for row, column in ((0, 1), (1, 2)):
        moved = STUDENT.astype(np.float64)
        moved[row, column] += step
        slope = (numpy_kl(moved, TEACHER, 1, 1) - numpy_kl(STUDENT, TEACHER, 1, 1)) / step
        assert float(kl.rank[row, column]) == pytest.approx(slope, abs=1e-5)


def test_unscored_passages_have_no_effect() -> None:
    """An empty slot, a missing score, and a query without any score; gradients are finite."""
    assert float(taught(only(kl=KlSettings(1.0)), empty=(1, 3)).terms["kl"]) == pytest.approx(1.144550, rel=2e-6)
    missing = TEACHER.copy()
    missing[1, 3] = np.nan
    assert float(taught(only(kl=KlSettings(1.0)), missing).terms["kl"]) == pytest.approx(1.144550, rel=2e-6)
    padded = TEACHER.copy()
    padded[1, 3] = -15
    assert float(taught(only(kl=KlSettings(1.0)), padded).terms["kl"]) == pytest.approx(1.279722, rel=2e-6), (
        "control: I3 gives such a passage a score of -15"
    )
    for column in (slice(None), slice(0, 1), slice(1, None)):
        lost = TEACHER.copy()
        lost[1, column] = np.nan
        for settings in (only(kl=KlSettings(1.0)), only(margin_mse=MarginMseSettings(1.0))):
            terms = taught(settings, lost)
            assert np.isfinite(np.asarray(terms.rank)).all()
            assert not np.asarray(terms.rank)[1].any()
            assert np.asarray(terms.rank)[0].any()
        assert float(taught(only(kl=KlSettings(1.0)), lost).terms["kl"]) == pytest.approx(0.243615, rel=1e-5)
        assert float(taught(only(margin_mse=MarginMseSettings(1.0)), lost).terms["margin_mse"]) == pytest.approx(
            26.75, rel=1e-6
        )
    nothing = taught(only(kl=KlSettings(1.0), margin_mse=MarginMseSettings(1.0)), np.full_like(TEACHER, np.nan))
    assert float(nothing.loss) == 0
    assert not np.asarray(nothing.rank).any()


def test_binary_loss_equals_pytorch() -> None:
    """The values are those of torch's BCEWithLogitsLoss, labels 1 0 0 0, without and with pos_weight 3; the gradient is
    that of the formula."""
    assert float(taught(only(binary=BinarySettings(1.0))).terms["binary"]) == pytest.approx(1.238682, rel=1e-6)
    weighted = taught(only(binary=BinarySettings(1.0, 3.0)))
    assert float(weighted.terms["binary"]) == pytest.approx(1.443700, rel=1e-6)
    expected = 1 / (1 + np.exp(-STUDENT))
    expected[:, 0] = 3 * (expected[:, 0] - 1)
    np.testing.assert_allclose(np.asarray(weighted.rank), expected / STUDENT.size, rtol=1e-5)


def test_distillation_terms_are_off_without_a_teacher() -> None:
    settings = LossSettings(kl=KlSettings(1.0), margin_mse=MarginMseSettings(1.0))
    S = jnp.asarray(STUDENT[:, :, None])
    arguments = (S, jnp.array([0, 2]), jnp.ones((2, 4), bool))
    assert set(total_loss(Scores(*arguments, settings)).terms) == {"contrastive"}
    assert set(total_loss(Scores(*arguments, LossSettings(), teacher_scores=S[:, :2, 0])).terms) == {"contrastive"}


@pytest.mark.parametrize(("examples", "batch_size"), [(5, 3), (7, 2), (4, 4), (3, 8), (1000, 128)])
def test_annealing_uses_epochs_of_the_data(examples: int, batch_size: int) -> None:
    """A rounded number of steps per epoch would run ahead of the stream of examples, or behind it."""
    settings = LossSettings(epochs_per_batch=batch_size / examples)
    for step in range(200):
        first, middle, last = step * batch_size, (step + 0.5) * batch_size, (step + 1) * batch_size - 1
        epoch = int(settings.epoch(jnp.int32(step)))
        assert first // examples <= epoch <= last // examples
        if middle % examples:  # if the middle is between two epochs, either one is right
            assert epoch == middle // examples


def test_annealing_multiplies_both_temperatures() -> None:
    case = Case(3)
    settings = LossSettings(
        local_target="argmax", temperature=2.0, local_temperature=3.0, local_weight=0.5, annealing_rate=0.1
    )
    S = similarities(*map(jnp.asarray, (case.queries, case.passages, case.mask)))
    annealed = contrastive_loss(
        S, jnp.asarray(case.positives), competing_passages(case.batch()), settings, annealing=0.5
    )
    by_hand = case.ours(LossSettings("max", "argmax", 1.0, 1.5, 0.5))
    assert float(annealed.loss) == pytest.approx(float(by_hand.loss), rel=1e-6)
    assert float(annealed.loss) != pytest.approx(float(case.ours(settings).loss), rel=1e-2), (
        "control: without annealing, the loss differs"
    )
