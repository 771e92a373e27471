"""Losses of a query and a group of passages: distillation of a teacher's scores, and binary cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float
from ml_collections import ConfigDict

from jaxret.models.scoring import MASKED_SCORE
from jaxret.training.losses.matryoshka import MatryoshkaSettings
from jaxret.training.losses.sparsity import SparsitySettings
from jaxret.types import Scalar

Group = Float[jax.Array, "B G"]  # scores of each query with the passages of its group, its own positive first
GroupMask = Bool[jax.Array, "B G"]  # False for passages that are ignored


@dataclass(frozen=True)
class KlSettings:
    """KL(teacher || student) over the passages of each query that a teacher scored (Hinton et al. 2015, 2)."""

    weight: float = 0.0  # weight of the term; 0: off
    temperature: float = 1.0  # divides the student's scores before the softmax
    teacher_temperature: float = 1.0  # divides the teacher's scores
    # whether the loss is multiplied by temperature^2, so that the size of gradients does not depend on the temperature
    scaled: bool = False


@dataclass(frozen=True)
class MarginMseSettings:
    """Squared error of the margins of the positive over each negative (Hofstätter et al. 2020)."""

    weight: float = 0.0


@dataclass(frozen=True)
class BinarySettings:
    """Cross-entropy of sigmoid(score) with 1 for the positive and 0 for every other passage of its query. The loss of
    the positive is multiplied by `positive_weight`."""

    weight: float = 0.0
    positive_weight: float = 1.0


def kl_divergence(student: Group, teacher: Group, mask: GroupMask, settings: KlSettings) -> Scalar:
    """Return mean_i sum_j p_ij (log p_ij - log q_ij), where p is the teacher's softmax and q the student's.

    Args:
        student: scores of the student.
        teacher: scores of the teacher.
        mask: False for passages that are ignored. Queries that have only such passages are ignored, too.
        settings: temperatures.
    """
    log_q = jax.nn.log_softmax(jnp.where(mask, student / settings.temperature, MASKED_SCORE), axis=1)
    log_p = jax.nn.log_softmax(jnp.where(mask, teacher / settings.teacher_temperature, MASKED_SCORE), axis=1)
    rows = jnp.sum(jnp.where(mask, jnp.exp(log_p) * (log_p - log_q), 0.0), axis=1)
    mean = jnp.sum(rows) / jnp.maximum(jnp.sum(jnp.any(mask, axis=1)), 1)
    return mean * (settings.temperature**2 if settings.scaled else 1.0)


def margin_mse(student: Group, teacher: Group, mask: GroupMask) -> Scalar:
    """Return the mean over the unmasked negatives j of ((s_i+ - s_ij) - (t_i+ - t_ij))^2."""
    margins = (student[:, :1] - student[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    return jnp.sum(jnp.where(mask[:, 1:], margins**2, 0.0)) / jnp.maximum(jnp.sum(mask[:, 1:]), 1)


def binary_cross_entropy(scores: Group, mask: GroupMask, settings: BinarySettings) -> Scalar:
    """Return the mean over the unmasked pairs of -w log sigmoid(s) for a positive, and -log sigmoid(-s) for a negative
    (torch's BCEWithLogitsLoss with pos_weight w)."""
    positive = jnp.arange(scores.shape[1]) == 0
    losses = jax.nn.softplus(jnp.where(mask, jnp.where(positive, -scores, scores), 0.0))
    weights = jnp.where(positive, settings.positive_weight, 1.0)
    return jnp.sum(jnp.where(mask, weights * losses, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


@dataclass(frozen=True)
class FalseNegativeSettings:
    """Treatment of negatives whose score is above the positive's by more than `margin`: if `masked`, they are left out
    of the softmax."""

    masked: bool = False
    margin: float = 0.1


# Name of a group of keys in config.loss -> its dataclass.
_GROUPS = {
    "false_negatives": FalseNegativeSettings,
    "kl": KlSettings,
    "in_batch_kl": KlSettings,
    "margin_mse": MarginMseSettings,
    "binary": BinarySettings,
    "matryoshka": MatryoshkaSettings,
    "sparsity": SparsitySettings,
}


def loss_fields(config: ConfigDict) -> dict[str, Any]:
    """Return the keys of `config.loss` as fields of LossSettings. Raises ValueError for temperatures of 0 or below."""
    loss = config.loss
    positive = {key: loss[key] for key in ("temperature", "local_temperature", "annealing_floor")}
    for group in ("kl", "in_batch_kl"):
        positive |= {f"{group}.{key}": loss[group][key] for key in ("temperature", "teacher_temperature")}
    for key, value in positive.items():
        if value <= 0:
            raise ValueError(f"loss.{key} is {value}; it must be positive")
    return {key: _group(key, value) if key in _GROUPS else value for key, value in loss.items()}


def _group(name: str, keys: ConfigDict) -> Any:
    """Return the dataclass of a group of keys. Lists become tuples, because a config from JSON has lists."""
    return _GROUPS[name](**{key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()})


def distillation_keys(config: ConfigDict) -> list[str]:
    """Return the keys that turn on losses which read a teacher's scores from the training data."""
    return [f"loss.{name}.weight" for name in ("kl", "margin_mse") if config.loss[name].weight]


def check_losses(config: ConfigDict) -> None:
    """Raise ValueError for losses without data to learn from, and for data that no loss reads."""
    distillation, binary = distillation_keys(config), config.loss.binary.weight
    in_batch = config.loss.in_batch_kl.weight
    contrastive_only = not distillation and not binary and not in_batch
    if config.loss.contrastive_weight == 0 and not config.data.pseudo_queries and contrastive_only:
        raise ValueError("loss.contrastive_weight is 0 and data.pseudo_queries is empty: there is nothing to learn")
    if config.data.teacher_run and not distillation:
        raise ValueError(
            "data.teacher_run is set, but loss.kl.weight and loss.margin_mse.weight are 0: no loss reads it"
        )
    if in_batch and not config.train.teacher:
        raise ValueError(
            "loss.in_batch_kl.weight is set, but train.teacher is empty: give the workdir of a retriever to learn from"
        )
    if config.train.teacher and not in_batch:
        raise ValueError("train.teacher is set, but loss.in_batch_kl.weight is 0: no loss reads its scores")
    if config.loss.false_negatives.masked and config.loss.contrastive_weight == 0:
        raise ValueError(
            "loss.false_negatives.masked is True, but loss.contrastive_weight is 0, so there is no softmax to mask"
        )
    if config.loss.local_weight and config.loss.contrastive_weight == 0:
        raise ValueError(
            f"loss.local_weight is {config.loss.local_weight}, but loss.contrastive_weight, which multiplies the local "
            "term too, is 0: set local_weight=0, or a small contrastive_weight"
        )
    if not config.loss.in_batch_negatives and config.data.negatives == 0:
        raise ValueError(
            "loss.in_batch_negatives is False and data.negatives is 0: a positive has nothing to compete with"
        )
    for key in [*distillation, *(["loss.binary.weight"] if binary else [])]:
        if config.data.negatives == 0:
            raise ValueError(f"{key} is set, but data.negatives is 0: the loss compares a query's own passages")
    if config.loss.contrastive_weight == 0 and config.data.dev and contrastive_only:
        raise ValueError(
            "loss.contrastive_weight is 0, so validation by retrieval is meaningless; leave data.dev empty"
        )
