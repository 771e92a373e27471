"""Losses of a query's own documents alone, without those of others: what a teacher's scores teach, and yes or no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float
from ml_collections import ConfigDict

from jaxret.scoring import MASKED

Group = Float[jax.Array, "B G"]  # of each query with its own documents, the positive first
There = Bool[jax.Array, "B G"]  # which of them count
Scalar = Float[jax.Array, ""]


@dataclass(frozen=True)
class Kl:
    """KL(teacher || student) over the documents of each query that a teacher scored. Each side's scores are divided by
    a temperature of its own before their softmax; scaled: the loss is multiplied by the square of the student's, so
    that gradients are about as large whatever it is (Hinton et al. 2015, section 2)."""

    weight: float = 0.0
    temperature: float = 1.0
    teacher_temperature: float = 1.0
    scaled: bool = False


@dataclass(frozen=True)
class MarginMse:
    """The margins of the positive over each negative, as the teacher has them (Hofstätter et al. 2020)."""

    weight: float = 0.0


@dataclass(frozen=True)
class Binary:
    """Cross-entropy of sigmoid(score) with 1 for the positive and 0 for every other document of its query; the positive
    counts `positive_weight` times."""

    weight: float = 0.0
    positive_weight: float = 1.0


def kl(student: Group, teacher: Group, there: There, settings: Kl) -> Scalar:
    """mean_i sum_j p_ij (log p_ij - log q_ij) over the queries of which any document counts: p is the teacher's
    softmax, q the student's."""
    log_q = jax.nn.log_softmax(jnp.where(there, student / settings.temperature, MASKED), axis=1)
    log_p = jax.nn.log_softmax(jnp.where(there, teacher / settings.teacher_temperature, MASKED), axis=1)
    rows = jnp.sum(jnp.where(there, jnp.exp(log_p) * (log_p - log_q), 0.0), axis=1)
    mean = jnp.sum(rows) / jnp.maximum(jnp.sum(jnp.any(there, axis=1)), 1)
    return mean * (settings.temperature**2 if settings.scaled else 1.0)


def margin_mse(student: Group, teacher: Group, there: There) -> Scalar:
    """mean over the negatives j that count of ((s_i+ - s_ij) - (t_i+ - t_ij))^2."""
    margins = (student[:, :1] - student[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    return jnp.sum(jnp.where(there[:, 1:], margins**2, 0.0)) / jnp.maximum(jnp.sum(there[:, 1:]), 1)


def binary(scores: Group, there: There, settings: Binary) -> Scalar:
    """mean over the pairs that count of -w log sigmoid(s) for a positive, -log sigmoid(-s) for another document
    (torch's BCEWithLogitsLoss, w its pos_weight)."""
    positive = jnp.arange(scores.shape[1]) == 0
    losses = jax.nn.softplus(jnp.where(there, jnp.where(positive, -scores, scores), 0.0))
    weights = jnp.where(positive, settings.positive_weight, 1.0)
    return jnp.sum(jnp.where(there, weights * losses, 0.0)) / jnp.maximum(jnp.sum(there), 1)


GROUPS = {"kl": Kl, "margin_mse": MarginMse, "binary": Binary}  # of the keys of config.loss


def loss_keys(config: ConfigDict) -> dict[str, Any]:
    """The keys of `config.loss` as fields of LossSettings. Raises ValueError for values that mean nothing."""
    loss = config.loss
    positive = {key: loss[key] for key in ("temperature", "local_temperature", "annealing_floor")}
    positive |= {f"kl.{key}": loss.kl[key] for key in ("temperature", "teacher_temperature")}
    if min(positive.values()) <= 0:
        found = [f"loss.{key} {value}" for key, value in positive.items()]
        raise ValueError(f"{', '.join(found[:-1])} and {found[-1]} must be positive")
    return {key: GROUPS[key](**value) if key in GROUPS else value for key, value in loss.items()}


def taught_by(config: ConfigDict) -> list[str]:
    """The keys of the config that ask for a teacher's scores; [] if nothing reads them."""
    return [f"loss.{name}.weight" for name in ("kl", "margin_mse") if config.loss[name].weight]
