"""Train a cross-encoder on each query with its own passages, and validate by the rank of the positive among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.data.tokens.batches import TrainingSet
from jaxret.data.tokens.pairs import PairPlan
from jaxret.models.cross_encoder import (
    CrossEncoderModel,
    make_cross_encoder_model,
    require_passage_room,
    score_head_names,
)
from jaxret.models.encoders.fused import require_no_dropout
from jaxret.models.encoders.pretrained import find_model
from jaxret.models.retriever_model import COMPUTE_DTYPES
from jaxret.parallel.mesh import row_sharding
from jaxret.parallel.progress import Progress
from jaxret.runs.reranker import make_pair_scorer
from jaxret.runs.scorer import PairScorer
from jaxret.training.examples import make_batch_plan
from jaxret.training.losses.grad_cache import encode_in_chunks
from jaxret.training.losses.group_losses import loss_fields
from jaxret.training.losses.in_batch import LossSettings, LossTerms, Scores, total_loss
from jaxret.training.objective import Objective, number_rows
from jaxret.training.optimizers import check_parameters
from jaxret.training.prepare import read_training_data
from jaxret.training.task import Task, TrainingData, TrainingJob
from jaxret.types import HiddenStates, PairBatch, Params, Tokens

RerankingJob: TypeAlias = TrainingJob[CrossEncoderModel, TrainingSet, PairBatch]


@dataclass(frozen=True, kw_only=True)
class RerankingObjective(Objective[CrossEncoderModel, PairBatch]):
    """The loss of a batch in which each query has its own passages: contrastive (softmax over these passages),
    distillation of a teacher's scores, or binary cross-entropy."""

    settings: LossSettings = field(default_factory=LossSettings)

    def __call__(
        self,
        params: Params,
        batch: PairBatch,
        key: jax.Array,
        batch_number: jax.Array | int | None = None,
        train: bool = True,
    ) -> LossTerms:
        chunks = self.chunks(batch.size)

        def score_rows(model: CrossEncoderModel, params: Params, pairs: Tokens, key: jax.Array) -> jax.Array:
            def score(pairs: Tokens) -> jax.Array:
                return model.score(params, pairs, train, key)

            return encode_in_chunks(score, (number_rows(pairs),), chunks)

        scores = self.on_devices(score_rows, params, batch.pairs, key, repeated=chunks > 1)
        scores = scores.reshape(batch.passage_ids.shape)
        scores = jax.lax.with_sharding_constraint(scores, row_sharding(self.mesh))
        return total_loss(
            Scores(
                similarities=scores[..., None],
                positives=jnp.where(batch.positives >= 0, 0, -1),
                softmax_mask=batch.passage_ids >= 0,
                settings=self.settings,
                teacher_scores=batch.teacher_scores,
                group_size=scores.shape[1],
            )
        )

    def hidden_states(self, params: Params, batch: PairBatch) -> Iterator[tuple[str, HiddenStates]]:
        yield "encoder", jax.jit(self.model.hidden_states)(params, batch.pairs)


def make_reranking_objective(
    config: ConfigDict, model: CrossEncoderModel, mesh: Mesh, epochs_per_batch: float = 0.0
) -> RerankingObjective:
    """Return the objective of a config.

    Args:
        config: the config of the run.
        model: the cross-encoder.
        mesh: the devices.
        epochs_per_batch: batch size / number of examples.
    """
    return RerankingObjective(
        model=model,
        mesh=mesh,
        chunk_size=config.train.chunk_size,
        reduce_dtype=COMPUTE_DTYPES[config.mesh.reduce_dtype],
        settings=LossSettings(**loss_fields(config), epochs_per_batch=epochs_per_batch),
    )


@dataclass(frozen=True)
class RerankingValidation:
    """Ranks the passages of every dev example by scores: its target, and its negatives that are not known positives."""

    dev: TrainingSet
    scorer: PairScorer
    progress: bool = False

    def __call__(self, params: Params) -> dict[str, float]:
        """Return RR@10 and rank (from 0) of the positive, accuracy, and the mean negative log-likelihood. Among equal
        scores, the positive is last."""
        dev = self.dev
        parts = [
            np.append(target, negatives[~np.isin(negatives, known_positives)])
            for target, known_positives, negatives in zip(dev.positives, dev.known_positives, dev.negatives)
        ]
        counts = np.array([len(part) for part in parts])
        queries = np.repeat(dev.query_numbers, counts)
        # The examples of a query have the same negatives: each pair is scored once.
        pairs: dict[tuple[int, int], int] = {}
        entries = zip(queries.tolist(), np.concatenate(parts).tolist(), strict=True)
        places = np.array([pairs.setdefault(pair, len(pairs)) for pair in entries])
        numbers, passages = np.array(list(pairs)).T
        scorer = replace(self.scorer, params=params)
        with Progress("validate", len(pairs), "pair", progress=self.progress) as bar:
            scores = scorer(dev.queries, dev.passages, dev.first_examples[numbers], passages, bar.update)
        groups = np.split(scores[places].astype(np.float64), np.cumsum(counts)[:-1])
        ranks = np.array([(group[1:] >= group[0]).sum() for group in groups])
        nll = [np.logaddexp.reduce(group) - group[0] for group in groups]
        return {
            "nll": float(np.mean(nll)),
            "average_rank": float(ranks.mean()),
            "in_batch_accuracy": float((ranks == 0).mean()),
            "RR@10": float(np.where(ranks < 10, 1 / (ranks + 1), 0).mean()),
        }

    def measured_on(self, metric: str) -> str:
        """Return "", because the dev set cannot change on resuming, and no setting changes how it is ranked."""
        return ""


RERANKING_METRICS = ("nll", "average_rank", "RR@10")


def check_reranking(config: ConfigDict, model: CrossEncoderModel) -> None:
    """Raise ValueError for settings that a cross-encoder does not allow or does not use."""
    if config.data.negatives == 0:
        raise ValueError("data.negatives is 0, so a positive has no passage to compete with; set it to 1 or more")
    for key in ("metric", "then"):
        if (name := config.validation[key]) not in (*RERANKING_METRICS, ""):
            names = ", ".join(RERANKING_METRICS)
            raise ValueError(f"validation.{key} is {name!r}; for a reranker it must be one of {names}")
    check_parameters(config, model)
    require_passage_room(config.tokens.query_length, model.longest)
    require_no_dropout(config.encoder.attention, getattr(model.module.config, "attention_dropout", 0.0))
    loss_fields(config)


def _read_reranking_data(job: RerankingJob) -> TrainingData[TrainingSet]:
    data: TrainingData[TrainingSet] = read_training_data(job)
    if not job.has_begun and not job.config.train.start_from:
        directory = find_model(job.config.encoder.checkpoint, job.config.encoder.download)
        parts = dict.fromkeys(path.partition("/")[0] for path in score_head_names(job.model.module.config))
        if missing_parts := [part for part in parts if part not in job.model.stored_head(directory)]:
            job.log(f"{directory} has no {' and '.join(missing_parts)} layer of a cross-encoder: drawn from seed.init")
    if data.dev and not data.dev.negatives.lengths.any():
        raise ValueError(
            f"{job.config.data.dev} has no negatives, so positives cannot be ranked: give a dev set with negatives, "
            "data.dev_negatives_run, or no dev set (data.dev='')"
        )
    return data


def _make_plan(
    job: RerankingJob, data: TrainingData[TrainingSet], objective: Objective[CrossEncoderModel, PairBatch]
) -> PairPlan:
    plan = make_batch_plan(job.config, job.config.train.batch_size, job.mesh.size)
    return PairPlan(plan, _make_scorer(job, data, {}).joiner)


def _make_validator(
    job: RerankingJob,
    data: TrainingData[TrainingSet],
    objective: Objective[CrossEncoderModel, PairBatch],
    params: Params,
) -> RerankingValidation | None:
    if not data.dev:
        return None
    return RerankingValidation(data.dev, _make_scorer(job, data, params), job.progress)


def _make_scorer(job: RerankingJob, data: TrainingData[TrainingSet], params: Params) -> PairScorer:
    return make_pair_scorer(job.model, params, job.mesh, data.tokenizer, job.config.encode.tokens_per_batch)


RERANKING: Task[CrossEncoderModel, TrainingSet, PairBatch] = Task(
    name="reranking",
    encoder_settings=lambda _: {},  # sentence-transformers directories have settings only of models with vectors
    build=make_cross_encoder_model,
    check=check_reranking,
    read_data=_read_reranking_data,
    make_objective=make_reranking_objective,
    make_plan=_make_plan,
    make_validator=_make_validator,
)
