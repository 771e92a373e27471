"""The loss over sizes of vectors against PyTorch. As in sentence-transformers, vectors are cut, scaled to length 1, and
the loss is computed again and weighted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.scoring import similarities, unit_length
from jaxret.parallel.mesh import make_mesh
from jaxret.training.losses.in_batch import Scores, competing_passages, loss_settings, total_loss
from jaxret.training.losses.matryoshka import MatryoshkaSettings, cut_embeddings
from jaxret.training.tasks.retrieval import RetrievalObjective
from jaxret.types import Batch, Embeddings
from tests import tiny

torch = pytest.importorskip("torch")
functional = torch.nn.functional

SIZES, WEIGHTS = (4, 16, 8), (2.0, 1.0, 0.5)  # sizes of the parts of a vector with 16 numbers
TEMPERATURE = 0.3
MATRYOSHKA: dict[str, Any] = {
    "normalize": True,
    "loss.temperature": TEMPERATURE,
    "loss.matryoshka.sizes": SIZES,
    "loss.matryoshka.weights": WEIGHTS,
}
DISTILLED = {"loss.kl.weight": 0.7, "loss.kl.temperature": 0.2, "loss.margin_mse.weight": 0.4}


def make_batch(group: int) -> Batch:
    return jax.tree.map(jnp.asarray, tiny.make_batch(4, group))


def encoded(overrides: dict[str, Any], batch: Batch) -> tuple[Any, Any, Any]:
    """(objective, parameters, vectors of queries and passages that the loss reads)."""
    objective = tiny.make_objective(overrides, make_mesh(1, jax.devices()[:1]), tiny.WITHOUT_DROPOUT)
    params = tiny.make_params(objective.model)
    return objective, params, objective.encode(params, batch, jax.random.key(0), train=True)


def tensors(*arrays: Any) -> list[Any]:
    return [torch.tensor(np.asarray(array, np.float64)) for array in arrays]


def allowed(batch: Batch) -> Any:
    """Compute from the definition which passages compete for each query."""
    ids, relevant = np.asarray(batch.passage_ids), np.asarray(batch.known_positives)
    own = np.arange(len(ids))[None] == np.asarray(batch.positives)[:, None]
    return torch.tensor(own | ((ids >= 0)[None] & ~(ids[None, :, None] == relevant[:, None, :]).any(-1)))


def contrastive(vectors: list[Any], batch: Batch, size: int, first: bool) -> tuple[Any, Any]:
    """(loss, scores of every query with every vector), from the first `size` numbers."""
    q, d = (functional.normalize(side[..., :size], dim=-1) for side in vectors)
    scores = torch.einsum("qd,nvd->qnv", q[:, 0], d)
    own = torch.tensor(np.asarray(batch.positives)).long()
    best = scores.max(-1).values
    if first:
        best = torch.where(torch.arange(best.shape[1])[None] == own[:, None], scores[..., 0], best)
    logits = torch.where(allowed(batch), best / TEMPERATURE, torch.tensor(-1e9, dtype=torch.float64))
    return functional.cross_entropy(logits, own), scores


@pytest.mark.exhaustive
def test_the_loss_is_the_weighted_sum_over_sizes() -> None:
    batch = make_batch(3)
    taught = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    taught[-1, -1] = np.nan  # the empty slot
    batch = replace(batch, teacher_scores=jnp.asarray(taught))
    objective, params, (q, d) = encoded(tiny.DUAL_ENCODER | MATRYOSHKA | DISTILLED, batch)
    expected = 0.0
    for size, weight in zip(SIZES, WEIGHTS, strict=True):
        loss, scores = contrastive(tensors(q.vectors, d.vectors), batch, size, first=False)
        groups = scores[..., 0].reshape(4, 4, 3)[torch.arange(4), torch.arange(4)]
        (teacher,) = tensors(taught)
        scored = ~torch.isnan(teacher)
        ours = torch.where(scored, groups / 0.2, -1e9).log_softmax(1)
        theirs = torch.where(scored, teacher, -1e9).softmax(1)
        divergence = torch.where(scored, theirs * (theirs.clamp(min=1e-30).log() - ours), 0.0).sum(1).mean()
        margins = (groups[:, :1] - groups[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
        expected += weight * float(loss + 0.7 * divergence + 0.4 * (margins[scored[:, 1:]] ** 2).mean())
    terms = objective(params, batch, jax.random.key(0))
    assert float(terms.loss) == pytest.approx(expected, rel=2e-5)
    assert set(terms.terms) == {
        f"{name}{size}" for name in ("contrastive", "kl", "margin_mse") for size in ("", "_8", "_4")
    }
    whole = replace(objective.settings, matryoshka=MatryoshkaSettings())
    plain = replace(objective, settings=whole)(params, batch, jax.random.key(0))
    assert float(terms.terms["contrastive"]) == pytest.approx(float(plain.terms["contrastive"]), rel=1e-6)
    assert abs(float(plain.loss) - expected) > 0.5, "control: the loss of whole vectors only"
    assert (float(terms.accuracy), float(terms.rank)) == (float(plain.accuracy), float(plain.rank))


@pytest.mark.slow
def test_every_vector_of_a_passage_is_cut() -> None:
    """MLR, self-contrastive: the contrastive and the local term of each size use every layer's cut vector."""
    batch = make_batch(2)
    objective, params, (q, d) = encoded(tiny.SELF_CONTRASTIVE | MATRYOSHKA, batch)
    expected = 0.0
    for size, weight in zip(SIZES, WEIGHTS, strict=True):
        loss, scores = contrastive(tensors(q.vectors, d.vectors), batch, size, first=True)
        own = scores[torch.arange(4), torch.tensor(np.asarray(batch.positives)).long()]
        local = functional.cross_entropy(own, torch.zeros(4).long())
        expected += weight * float(loss + 0.5 * local)
    assert float(objective(params, batch, jax.random.key(0)).loss) == pytest.approx(expected, rel=2e-5)


class GivenVectors(RetrievalObjective):
    """An objective whose parameters are the vectors."""

    def encode(self, params: Any, *_: Any) -> tuple[Embeddings, Embeddings]:
        return params["query"], params["passage"]


def test_the_loss_and_its_gradients_equal_pytorch() -> None:
    """Gradients are with respect to the vectors, through cutting and scaling."""
    batch, random = make_batch(2), np.random.default_rng(0)
    objective = tiny.make_objective(
        tiny.DUAL_ENCODER | MATRYOSHKA, make_mesh(1, jax.devices()[:1]), tiny.WITHOUT_DROPOUT
    )
    q, d = (
        Embeddings(jnp.asarray(random.normal(size=(texts, 1, 16)), jnp.float32), jnp.ones((texts, 1), bool))
        for texts in (4, 8)
    )
    objective_of_vectors = GivenVectors(model=objective.model, mesh=objective.mesh, settings=objective.settings)

    def loss(vectors: Any) -> jax.Array:
        scaled = [replace(side, vectors=unit_length(numbers)) for side, numbers in zip((q, d), vectors)]
        return objective_of_vectors(dict(zip(("query", "passage"), scaled)), batch, jax.random.key(0)).loss

    value, ours = jax.jit(jax.value_and_grad(loss))((q.vectors, d.vectors))
    theirs = [tensor.requires_grad_() for tensor in tensors(q.vectors, d.vectors)]
    losses = [weight * contrastive(theirs, batch, size, first=False)[0] for size, weight in zip(SIZES, WEIGHTS)]
    total = torch.stack(losses).sum()
    total.backward()
    assert float(value) == pytest.approx(total.item(), rel=2e-5)
    for mine, tensor in zip(ours, theirs, strict=True):
        assert np.abs(np.asarray(mine) - tensor.grad.numpy()).max() < 1e-5 * float(tensor.grad.abs().max())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"loss.matryoshka.sizes": (8, 4)}, r"largest .*16, .*vectors"),
        ({"loss.matryoshka.sizes": (16, 8, 8)}, r"different whole numbers of at least 1"),
        ({"loss.matryoshka.sizes": (16, 0)}, r"different whole numbers of at least 1"),
        ({"loss.matryoshka.weights": (1.0,)}, r"weights .*\(1.0,\); .*0"),
        ({"normalize": False}, r"normalize is False: set it to True"),
        ({"loss.matryoshka.sizes": ()}, r"sizes .*\(\): .*sizes"),
        (tiny.AGGRETRIEVER, r"'aggretriever' joins .*\[CLS\]"),
        (tiny.SPLADE, r"head 'splade' .*weight"),
    ],
)
def test_invalid_settings_are_errors(overrides: dict[str, Any], message: str) -> None:
    overrides = MATRYOSHKA | overrides
    with pytest.raises(ValueError, match=message):
        loss_settings(tiny.make_config(overrides), tiny.make_retriever(overrides))


def test_the_teacher_of_a_batch_teaches_every_size() -> None:
    """loss.in_batch_kl: one teacher scores whole vectors, and teaches every size."""
    random = np.random.default_rng(0)
    student = {size: random.normal(size=(4, 8, 1)).astype(np.float32) for size in (16, 8, 4)}
    teacher = random.normal(size=(4, 8)).astype(np.float32)
    batch = make_batch(2)
    keys = MATRYOSHKA | {"loss.in_batch_kl.weight": 0.5, "loss.contrastive_weight": 0.0, "train.teacher": "x"}
    settings = loss_settings(tiny.make_config(keys), tiny.make_retriever(keys))
    scores = Scores(
        jnp.asarray(student.pop(16)),
        batch.positives,
        competing_passages(batch),
        settings,
        in_batch_teacher=jnp.asarray(teacher),
        passage_exists=jnp.ones(8, bool),
        smaller={size: jnp.asarray(numbers) for size, numbers in student.items()},
    )
    expected, (target,) = 0.0, tensors(teacher)
    for size, weight in zip(SIZES, WEIGHTS, strict=True):
        (ours,) = tensors(scores.similarities if size == 16 else scores.smaller[size])
        divergence = functional.kl_div(ours[..., 0].log_softmax(1), target.softmax(1), reduction="batchmean")
        expected += weight * 0.5 * float(divergence)
    assert float(total_loss(scores).loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sizes", [(), (16, 2)])
def test_trained_first_numbers_retrieve_like_whole_vectors(sizes: tuple[int, ...]) -> None:
    """Only the vectors of 24 pairs are trained; then the first two numbers choose among 24 passages."""
    keys = {"normalize": True, "loss.temperature": 0.1, "loss.matryoshka.sizes": sizes}
    settings = loss_settings(tiny.make_config(keys), tiny.make_retriever(keys))
    pairs, mask = jnp.arange(24), jnp.ones((24, 1), bool)

    def loss(vectors: jax.Array) -> jax.Array:
        q, d = (Embeddings(unit_length(side)[:, None], mask) for side in vectors)
        smaller = {
            size: (cut_embeddings(q, size), cut_embeddings(d, size)) for size in settings.matryoshka.smaller_sizes
        }
        products = {size: similarities(a.vectors[:, 0], b.vectors, mask) for size, (a, b) in smaller.items()}
        whole = similarities(q.vectors[:, 0], d.vectors, mask)
        return total_loss(Scores(whole, pairs, jnp.ones((24, 24), bool), settings, smaller=products)).loss

    vectors = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, 16)).astype(np.float32))
    step = jax.jit(lambda vectors: vectors - 2.0 * jax.grad(loss)(vectors))
    for _ in range(150):
        vectors = step(vectors)

    def accuracy(size: int) -> float:
        q, d = (unit_length(side[:, :size]) for side in vectors)
        return float(jnp.mean(jnp.argmax(q @ d.T, axis=1) == pairs))

    assert accuracy(16) == 1.0
    assert (accuracy(2) > 0.6) == bool(sizes)


def test_weights_default_to_one() -> None:
    overrides = MATRYOSHKA | {"loss.matryoshka.weights": ()}
    settings = loss_settings(tiny.make_config(overrides), tiny.make_retriever(overrides))
    assert settings.matryoshka.weight_of == {16: 1.0, 8: 1.0, 4: 1.0}
