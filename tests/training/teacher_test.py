"""Distillation within the batch: the loss against numpy, on several devices and in chunks, and the run of a student."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxret.models.scoring import MASKED_SCORE
from jaxret.parallel.mesh import make_mesh, shard_batch, shardings
from jaxret.plan import programs
from jaxret.plan.estimates import plan_training
from jaxret.runs.identity import trained_on
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_run
from jaxret.storage.atomic import read_json
from jaxret.training.config_check import check_config
from jaxret.training.diagnosis import SOUND, diagnose
from jaxret.training.loop import train
from jaxret.training.losses.group_losses import KlSettings
from jaxret.training.losses.in_batch import LossSettings, Scores, competing_passages, total_loss
from jaxret.training.tasks.retrieval import RetrievalObjective
from jaxret.training.teacher import teacher_model
from jaxret.types import Batch
from tests import tiny
from tests.packed import pack
from tests.pipeline import tiny_config, write_data, write_encoder
from tests.training.loop_test import final_state, interrupt

QUERIES, GROUP = 8, 3
SETTINGS = KlSettings(0.5, temperature=3.0, teacher_temperature=2.0)
LOSS = {f"loss.in_batch_kl.{field.name}": getattr(SETTINGS, field.name) for field in dataclasses.fields(SETTINGS)}
STUDENTS = {"dual encoder": tiny.DUAL_ENCODER, "self-contrastive": tiny.SELF_CONTRASTIVE | {"loss.local_weight": 0.1}}


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


@pytest.mark.table
@pytest.mark.parametrize("scaled", [False, True])
def test_loss_and_gradient_by_hand(scaled: bool) -> None:
    """In float64. The gradient of KL(p || softmax(s / tau)) is (q - p) / tau; known positives have a gradient, too."""
    generator = np.random.default_rng(0)
    batch, settings = tiny.make_batch(4, GROUP), dataclasses.replace(SETTINGS, scaled=scaled)
    positives = np.append(np.asarray(batch.positives)[:3], -1)  # the last row is empty
    exists = np.asarray(batch.passage_ids) >= 0
    scores, teacher = (generator.standard_normal((4, len(exists))) * 4 for _ in range(2))
    teacher[:, ~exists] = MASKED_SCORE  # the score of a missing vector
    value, gradient = [], np.zeros_like(scores)
    for i in range(3):
        p, q = softmax(teacher[i, exists] / 2.0), softmax(scores[i, exists] / 3.0)
        value.append((p * np.log(p / q)).sum())
        gradient[i, exists] = (q - p) / 3.0 / 3
    factor = 9.0 if scaled else 1.0

    def loss(similarities: Any) -> Any:
        terms = total_loss(
            Scores(
                similarities,
                jnp.asarray(positives),
                competing_passages(dataclasses.replace(batch, positives=jnp.asarray(positives))),
                LossSettings(in_batch_kl=settings, contrastive_weight=0.0),
                passage_exists=jnp.asarray(exists),
                in_batch_teacher=jnp.asarray(teacher, jnp.float32),
            )
        )
        return terms.loss, terms.terms["in_batch_kl"]

    similarities = jnp.asarray(scores[..., None], jnp.float32)
    (total, term), actual = jax.value_and_grad(loss, has_aux=True)(similarities)
    assert float(term) == pytest.approx(factor * np.mean(value), rel=1e-5)
    assert float(total) == pytest.approx(0.5 * factor * np.mean(value), rel=1e-5)
    np.testing.assert_allclose(actual[..., 0], 0.5 * factor * gradient, atol=1e-6)
    assert not competing_passages(batch)[0, batch.positives[1]], "the passage is a known positive of query 0"
    assert abs(gradient[0, batch.positives[1]]) > 1e-4


def objective_on(student: str, devices: int = 1, chunk_size: int = 0, fsdp: int = 1) -> RetrievalObjective:
    mesh = make_mesh(fsdp, jax.devices()[:devices])
    teacher = tiny.make_objective(tiny.LATE_INTERACTION, mesh, tiny.WITHOUT_DROPOUT, chunk_size)
    objective = tiny.make_objective(STUDENTS[student] | LOSS, mesh, tiny.WITHOUT_DROPOUT, chunk_size)
    return dataclasses.replace(objective, teacher=teacher)


def computed(student: str, batch: Batch, seed: int = 7, **how: int) -> tuple[Any, Any]:
    """Terms and gradients of a batch, with a teacher whose parameters are drawn with `seed`."""
    objective = objective_on(student, **how)
    assert objective.teacher is not None
    models = objective.model, objective.teacher.model
    params, teacher = (tiny.make_params(model, s) for model, s in zip(models, (0, seed), strict=True))
    params, teacher = (jax.device_put(tree, shardings(objective.mesh, tree)) for tree in (params, teacher))

    def loss(params: Any, teacher: Any, batch: Batch) -> Any:
        terms = objective.with_teacher(teacher)(params, batch, jax.random.key(0), 0)
        return terms.loss, terms

    placed = shard_batch(objective.mesh, batch)
    (_, terms), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, teacher, placed)
    return jax.device_get((terms, gradients))


@functools.cache
def on_one_device(student: str) -> tuple[Any, Any]:
    """Terms and gradients of the whole batch at once."""
    return computed(student, tiny.make_batch(QUERIES, GROUP))


def vectors(objective: RetrievalObjective, seed: int, batch: Batch) -> tuple[list[np.ndarray], ...]:
    """The vectors [V,D] of every query and every passage, in float64."""
    params = tiny.make_params(objective.model, seed)
    sides = []
    for side, tokens in (("query", batch.queries), ("passage", batch.passages)):
        encoded = objective.model.encode(params, jax.tree.map(jnp.asarray, tokens), side)  # type: ignore[arg-type]
        sides.append([v[m] for v, m in zip(np.asarray(encoded.vectors, np.float64), np.asarray(encoded.mask))])
    return tuple(sides)


@pytest.mark.slow
def test_scores_of_student_and_teacher_by_hand() -> None:
    """The scores of all passages of the batch: the student's dot products, and the teacher's late interaction."""
    batch, objective = tiny.make_batch(QUERIES, GROUP), objective_on("dual encoder")
    assert objective.teacher is not None
    (q, d), (tq, td) = vectors(objective, 0, batch), vectors(objective.teacher, 7, batch)
    exists, losses = np.asarray(batch.passage_ids) >= 0, []
    for i in range(QUERIES):
        student = np.array([q[i][0] @ one[0] for one in d])[exists]
        teacher = np.array([(tq[i] @ one.T).max(axis=1).sum() for one in td])[exists]
        p, r = softmax(teacher / 2.0), softmax(student / 3.0)
        losses.append((p * np.log(p / r)).sum())
    terms, _ = on_one_device("dual encoder")
    assert float(terms.terms["in_batch_kl"]) == pytest.approx(np.mean(losses), rel=1e-4)
    whole = float(terms.terms["contrastive"]) + 0.5 * np.mean(losses)
    assert float(terms.loss) == pytest.approx(whole, rel=1e-4)


HOW: dict[str, dict[str, int]] = {
    "devices in chunks": {"devices": 8, "chunk_size": 8},
    "split parameters": {"devices": 8, "fsdp": 4},
    "chunks": {"chunk_size": 2},
}


@pytest.mark.daily("devices in chunks-self-contrastive")
@pytest.mark.slow
@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.exhaustive) for how in HOW), "packed", "empty places"]
)
def test_devices_and_chunks_change_nothing(student: str, how: str) -> None:
    batch = tiny.make_batch(QUERIES, GROUP)
    if how == "packed":
        batch = pack(batch, 1, objective_on(student).model.module.head)
    if how == "empty places":
        batch = tiny.filled(batch, 12)
    terms, gradients = computed(student, batch, **HOW.get(how, {}))
    expected_terms, expected = on_one_device(student)
    assert tiny.distance(terms, expected_terms) < 1e-5
    assert tiny.distance(gradients, expected) < 1e-4


@pytest.mark.slow
def test_control_another_teacher_gives_another_gradient() -> None:
    gradients = computed("dual encoder", tiny.make_batch(QUERIES, GROUP), seed=8)[1]
    assert tiny.distance(gradients, on_one_device("dual encoder")[1]) > 1e-2, "control: the gradient differs"


@pytest.mark.slow
def test_a_nonfinite_teacher_is_named_by_its_term() -> None:
    """The step is computed again, with the teacher's parameters as arguments."""
    objective = objective_on("dual encoder")
    assert objective.teacher is not None
    params, teacher = tiny.make_params(objective.model), tiny.make_params(objective.teacher.model, 7)
    batch = shard_batch(objective.mesh, tiny.make_batch(QUERIES, GROUP))
    key = jax.random.key(0)
    assert diagnose(objective.with_teacher(teacher), params, batch, key) == SOUND
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, teacher)
    cause = diagnose(objective.with_teacher(broken), params, batch, key)
    assert cause == "loss term loss is not finite, though every hidden state is"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with encoder/, data/, and teacher/: a run of late interaction."""
    folder = tmp_path_factory.mktemp("teacher")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    keys = {"head__name": "colbert", "head__colbert__late": True, "normalize": True, "loss__temperature": 0.2}
    train(tiny_config(folder / "encoder", folder / "data", **keys), folder / "teacher", progress=False)
    return folder


TAUGHT: dict[str, Any] = {
    "loss__in_batch_kl__weight": 1.0,
    "loss__in_batch_kl__temperature": 2.0,
    "loss__in_batch_kl__teacher_temperature": 0.2,
    "loss__contrastive_weight": 0.0,
}


def student_config(root: Path, **overrides: Any) -> ConfigDict:
    return tiny_config(
        root / "encoder", root / "data", **{"train__teacher": str(root / "teacher"), **TAUGHT, **overrides}
    )


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    """The run of a student without interruptions."""
    train(student_config(root), root / "student", progress=False)
    return root / "student"


def kl_losses(folder: Path) -> list[float]:
    """The in-batch distillation loss of every step."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["in_batch_kl_loss"] for line in steps if "in_batch_kl_loss" in line]


@pytest.mark.exhaustive
def test_a_student_moves_towards_its_teacher(root: Path, tmp_path: Path) -> None:
    """A student with the same batches that learns only by contrast does not: its distillation term has nearly no
    weight."""
    longer = {"train__steps": 40, "train__checkpoint_every": 40, "data__dev": ""}
    longer |= {"optimizer__learning_rate": 3e-3, "optimizer__warmup_fraction": 0.0}
    train(student_config(root, **longer), tmp_path / "taught", progress=False)
    untaught = {"loss__in_batch_kl__weight": 1e-9, "loss__contrastive_weight": 1.0, "loss__temperature": 2.0}
    train(student_config(root, **longer, **untaught), tmp_path / "untaught", progress=False)
    taught, control = kl_losses(tmp_path / "taught"), kl_losses(tmp_path / "untaught")
    assert taught[0] == pytest.approx(control[0], rel=1e-4)
    assert np.mean(taught[-5:]) < 0.5 * taught[0]
    assert np.mean(control[-5:]) > 1.5 * np.mean(taught[-5:])


def saved_leaves(path: Path) -> list[str]:
    return list(read_json(path)["custom_metadata"]["digests"])


@pytest.mark.slow
def test_a_student_run_resumes_without_teacher_in_checkpoints(
    whole: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints hold nothing of the teacher, which data.json names. An interrupted run ends with the same bytes."""
    config, record = student_config(root), read_json(whole / "data.json")
    assert record["teacher"] == open_run(root / "teacher").checkpoint
    assert set(trained_on(record, whole_sets=False)) == {"train", "dev"}
    (saved,) = {frozenset(saved_leaves(path)) for path in whole.glob("checkpoints/*/_CHECKPOINT_METADATA")}
    (plain,) = {frozenset(saved_leaves(path)) for path in (root / "teacher").glob("checkpoints/*/_CHECKPOINT_METADATA")}
    assert saved == plain
    with monkeypatch.context() as patch:
        interrupt(patch, 4, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", progress=False)
    result = train(config, tmp_path / "run", progress=False)
    assert (result.resumed_from, result.step) == (3, 6)
    assert final_state(tmp_path / "run", config) == final_state(whole, config)
    assert read_json(tmp_path / "run" / "data.json") == record
    open_run(whole)  # a finished run is opened without its teacher


@pytest.mark.slow
def test_a_resumed_run_needs_the_same_teacher(
    whole: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkpoint under the same path is refused."""
    shutil.copytree(whole, tmp_path / "run")

    def opened(*arguments: Any, **options: Any) -> Any:
        return dataclasses.replace(open_run(*arguments, **options), checkpoint={"step": 3, "digest": "other"})

    monkeypatch.setattr("jaxret.training.teacher.open_run", opened)
    with pytest.raises(ContractError, match=r"(?s)checkpoint .*teacher .*teacher\.digest: "):
        train(student_config(root), tmp_path / "run", progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train__teacher": "nowhere"}, "nowhere is not a run"),
        ({"train__teacher": ""}, "loss.in_batch_kl.weight is set, but train.teacher is empty"),
        (
            {"loss__in_batch_kl__weight": 0.0, "loss__contrastive_weight": 1.0},
            "train.teacher is set, but loss.in_batch",
        ),
        ({"loss__in_batch_kl__teacher_temperature": 0.0}, "loss.in_batch_kl.teacher_temperature is 0.0; it must be"),
        ({"loss__in_batch_kl__weight": -1.0}, r"loss.in_batch_kl.weight .*-1.0; .*least 0"),
        ({"tokens__query_prompt": "ask: "}, r"(?s)teacher/contract\.json:\n  \S*prompt\S*: .*same tokens"),
    ],
)
def test_invalid_teachers_are_errors(overrides: dict[str, Any], message: str, root: Path, tmp_path: Path) -> None:
    """The error comes before a folder is created."""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(student_config(root, **overrides), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_reranker_cannot_have_an_in_batch_teacher(tmp_path: Path) -> None:
    """The error comes before the teacher is read: there is none."""
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data")
    with pytest.raises(ValueError, match=r"loss\.in_batch_kl\.weight .*1\.0, .*'reranking'"):
        train(student_config(tmp_path, task="reranking"), tmp_path / "reranker", progress=False)


@pytest.mark.slow
def test_a_teacher_that_reads_packed_texts_differently_is_refused(root: Path, tmp_path: Path) -> None:
    """MVR puts viewer tokens before a passage."""
    viewers = {"head__name": "mvr", "head__mvr__count": 3, "head__mvr__first_id": -1}
    train(tiny_config(root / "encoder", root / "data", train__steps=0, **viewers), tmp_path / "mvr", progress=False)
    config = student_config(root, train__teacher=str(tmp_path / "mvr"), tokens__packing=True)
    student = tiny.make_retriever(tiny.DUAL_ENCODER)
    with pytest.raises(ValueError, match=r"tokens.packing .*True, .*head .*train\.teacher=.*mvr"):
        teacher_model(config, student)
    config.tokens.packing = False
    check_config(config)
    model = teacher_model(config, student)
    assert model is not None
    assert model.vectors_per_passage == 3


@pytest.mark.slow
def test_a_plan_counts_the_teacher(root: Path) -> None:
    """The plan includes the products of its forward pass; the checkpoint does not include the teacher."""
    config = student_config(root)
    plain = student_config(root, train__teacher="", loss__in_batch_kl__weight=0.0, loss__contrastive_weight=1.0)
    shapes = programs.longest_batch(config, programs.retriever_of(config, root / "encoder"))
    planned, without = (
        programs.training_program(c, root / "encoder", shapes, jax.devices()[:1]) for c in (config, plain)
    )
    assert planned.state["teacher"] == planned.state["parameters"]
    assert {key: size for key, size in planned.state.items() if key != "teacher"} == without.state
    with_teacher, alone = (plan_training(c, root / "encoder", shapes, None) for c in (config, plain))
    assert with_teacher["checkpoint_bytes"] == alone["checkpoint_bytes"]
    assert with_teacher["flops_total"] > 1.2 * alone["flops_total"]
