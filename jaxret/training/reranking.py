"""Training a cross-encoder: every query with its own documents; validation by the rank of the positive among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxret.data.batches import TrainingSet
from jaxret.data.pairs import PairPlan
from jaxret.distributed import by_row
from jaxret.models.cross_encoder import CrossEncoder, build_cross_encoder, head_names, require_room
from jaxret.models.encoders.fused import require_no_dropout
from jaxret.models.encoders.pretrained import find
from jaxret.models.model import Model, Params
from jaxret.models.retriever import DTYPES
from jaxret.runs.reranker import make_scorer
from jaxret.runs.scorer import PairScorer
from jaxret.training.begin import Job, Texts, read_texts
from jaxret.training.examples import plan_of
from jaxret.training.grad_cache import encode_in_chunks
from jaxret.training.group_losses import loss_keys
from jaxret.training.losses import LossSettings, LossTerms, Scores, total_loss
from jaxret.training.objective import Objective, numbered
from jaxret.training.task import Task
from jaxret.types import HiddenStates, PairBatch, Tokens


@dataclass(frozen=True)
class PairObjective(Objective):
    """The loss of a batch whose queries each have documents of their own: cross-entropy over them (`contrastive`), what
    a teacher says of them, or yes and no."""

    @property
    def cross_encoder(self) -> CrossEncoder:
        assert isinstance(self.model, CrossEncoder)
        return self.model

    def __call__(
        self, params: Params, batch: PairBatch, key: jax.Array, step: jax.Array | int | None = None, train: bool = True
    ) -> LossTerms:
        """Without `train` there is no dropout."""
        chunks = self.chunks(batch.size)

        def own(model: CrossEncoder, params: Params, pairs: Tokens, key: jax.Array) -> jax.Array:
            def score(pairs: Tokens) -> jax.Array:
                return model.score(params, pairs, train, key)

            return encode_in_chunks(score, (numbered(pairs),), chunks)

        scores = self.on_devices(own, params, batch.pairs, key, often=chunks > 1).reshape(batch.document_ids.shape)
        scores = jax.lax.with_sharding_constraint(scores, by_row(self.mesh))
        first = jnp.where(batch.positives >= 0, 0, -1)
        there, taught = batch.document_ids >= 0, batch.teacher_scores
        return total_loss(
            Scores(
                lambda _: scores[..., None], first, there, self.settings, teacher_scores=taught, group=scores.shape[1]
            )
        )

    def hidden_states(self, params: Params, batch: PairBatch) -> Iterator[tuple[str, HiddenStates]]:
        yield "encoder", jax.jit(self.cross_encoder.hidden_states)(params, batch.pairs)


def make_pair_objective(config: ConfigDict, model: Model, mesh: Mesh, epochs_per_batch: float = 0.0) -> PairObjective:
    """The loss that a config describes."""
    settings = LossSettings(**loss_keys(config), epochs_per_step=epochs_per_batch)
    return PairObjective(model, settings, mesh, config.train.chunk_size, DTYPES[config.mesh.reduce_dtype])


@dataclass(frozen=True)
class GroupValidation:
    """Ranks the passages of every dev example, all its negatives but those known to be relevant, by their scores."""

    dev: TrainingSet
    scorer: PairScorer
    progress: bool = False

    def __call__(self, params: Params) -> dict[str, float]:
        """RR@10 and rank (from 0) of the positive, accuracy, and the mean negative log-likelihood. Of equal scores the
        positive's comes last."""
        dev = self.dev
        parts = [
            np.append(target, own[~np.isin(own, known)])
            for target, known, own in zip(dev.positives, dev.known_positives, dev.negatives)
        ]
        counts = np.array([len(part) for part in parts])
        asked = np.repeat(np.arange(len(dev)), counts)
        scorer = replace(self.scorer, params=params)
        with tqdm(total=len(asked), desc="validate", unit="pair", disable=not self.progress, delay=1) as bar:
            scores = scorer(dev.queries, dev.passages, asked, np.concatenate(parts), bar.update)
        groups = np.split(scores.astype(np.float64), np.cumsum(counts)[:-1])
        ranks = np.array([(group[1:] >= group[0]).sum() for group in groups])
        nll = [np.logaddexp.reduce(group) - group[0] for group in groups]
        return {
            "nll": float(np.mean(nll)),
            "average_rank": float(ranks.mean()),
            "in_batch_accuracy": float((ranks == 0).mean()),
            "RR@10": float(np.where(ranks < 10, 1 / (ranks + 1), 0).mean()),
        }


METRICS = ("nll", "average_rank", "RR@10")


def check(config: ConfigDict, model: Model) -> None:
    """Raises ValueError for settings that a cross-encoder cannot have, or that mean nothing for it."""
    if config.tokens.packing:
        raise ValueError("tokens.packing is True, but pairs are not packed; set tokens.packing=False")
    if config.data.negatives == 0:
        raise ValueError("data.negatives is 0; a reranker learns to tell a query's own passages apart: at least 1")
    for key in ("metric", "then"):
        if (name := config.validation[key]) not in (*METRICS, ""):
            raise ValueError(f"validation.{key} is {name!r}; of a reranker it is one of {', '.join(METRICS)}")
    if config.validation.corpus:
        raise ValueError("validation.corpus is set, but a reranker retrieves nothing: leave it empty")
    unread = {"pooling": "none", "normalize": False, "loss.local_weight": 0, "loss.annealing_rate": 0}
    for key, value in (unread | {"data.pseudo_queries": ""}).items():
        group, _, name = key.rpartition(".")
        if (found := (config[group] if group else config)[name]) != value:
            raise ValueError(f"{key} is {found!r}, but a reranker has none: use {value!r}")
    require_room(config.tokens.query_length, model.longest)
    require_no_dropout(config.encoder.attention, getattr(model.module.config, "attention_dropout", 0.0))
    loss_keys(config)


def _read(job: Job) -> Texts:
    texts = read_texts(job)
    if not job.begun and not job.config.train.start_from:
        directory = find(job.config.encoder.checkpoint, job.config.encoder.download)
        parts = dict.fromkeys(path.partition("/")[0] for path in head_names(job.model.module.config))
        if missing := [part for part in parts if part not in job.model.stored_head(directory)]:
            job.say(f"{directory} has no {' and '.join(missing)} layer of a cross-encoder: drawn from seed.init")
    if texts.dev and not texts.dev.negatives.lengths.any():
        raise ValueError(
            f"{job.config.data.dev} has no negatives, so there is nothing to rank the positives among: give a dev set "
            "with negatives, data.dev_negatives_run, or none (data.dev='')"
        )
    return texts


def _plan(job: Job, texts: Texts, objective: Objective) -> PairPlan:
    plan = plan_of(job.config, job.config.train.batch_size, job.mesh.size)
    return PairPlan(plan, _scorer(job, texts, {}).joiner)


def _validate(job: Job, texts: Texts, objective: Objective, params: Any) -> GroupValidation | None:
    if not texts.dev:
        return None
    return GroupValidation(texts.dev, _scorer(job, texts, params), job.progress)


def _scorer(job: Job, texts: Texts, params: Params) -> PairScorer:
    assert isinstance(job.model, CrossEncoder)
    return make_scorer(job.model, params, job.mesh, texts.tokenizer, job.config.encode.tokens_per_batch)


def _nothing(_: Path) -> dict[str, Any]:
    return {}  # what a directory says of vectors is not about pairs


RERANKING = Task("reranking", _nothing, build_cross_encoder, check, _read, make_pair_objective, _plan, _validate)
