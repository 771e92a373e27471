"""Detect settings that contradict each other or the model, before files are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from jaxret.data.errors import ON_ERROR
from jaxret.data.tokens.prompts import read_prompts
from jaxret.models.encoders.architectures import EncoderConfig
from jaxret.models.encoders.architectures.decoder import DecoderConfig
from jaxret.models.encoders.fused import require_no_dropout
from jaxret.models.heads import HEADS
from jaxret.models.model import Model
from jaxret.models.pooling import POOLINGS
from jaxret.models.retriever_model import COMPUTE_DTYPES, RetrieverModel
from jaxret.runs.mismatch import flatten
from jaxret.training.losses.group_losses import check_losses
from jaxret.training.losses.in_batch import loss_settings
from jaxret.training.optimizers import check_optimizer, check_parameters
from jaxret.training.profile import check_profile
from jaxret.training.unread_keys import check_unread
from jaxret.training.validation import check_validation
from jaxret.types import VECTOR_DTYPES

WEAK = 0.5  # a temperature of at least this is too high for cosines, which differ by tenths between passages

LEAST_VALUES = {  # key -> its smallest valid number; heads check their own keys
    **dict.fromkeys(("tokens.query_length", "tokens.passage_length"), 3),
    **dict.fromkeys(
        (
            "tokens.length_multiple",
            "encode.shard_rows",
            "encode.shard_mb",
            "encode.tokens_per_batch",
            "train.log_every",
        ),
        1,
    ),
    **dict.fromkeys(("train.batch_size", "train.accumulate", "train.round", "train.rounds", "mesh.tensor"), 1),
    **dict.fromkeys(("validation.batch_size", "optimizer.reference_processes"), 1),
    **dict.fromkeys(
        ("train.chunk_size", "train.checkpoint_every", "validation.pool_size", "data.negatives", "data.subset"), 0
    ),
    "encode.words": 0,
    **dict.fromkeys(("loss.contrastive_weight", "loss.local_weight", "loss.annealing_rate"), 0),
    **dict.fromkeys((f"loss.{name}.weight" for name in ("kl", "in_batch_kl", "margin_mse", "binary")), 0),
    "loss.binary.positive_weight": 0,
    "loss.false_negatives.margin": 0,
    **dict.fromkeys((f"optimizer.{key}" for key in ("head_learning_rate", "weight_decay", "clip_norm", "eps")), 0),
    **dict.fromkeys((f"optimizer.{key}" for key in ("b1", "b2", "ema", "warmup_fraction")), 0),
    **dict.fromkeys(("train.skip_nonfinite", "validation.then_from"), 0),
    **dict.fromkeys(("pretraining.contrast_weight", "pretraining.skip_from", "pretraining.seed"), 0),
    **dict.fromkeys((f"pretraining.{key}" for key in ("shortest", "head_layers", "decoder_masks")), 1),
    **dict.fromkeys((f"pretraining.scratch.{key}" for key in ("layers", "heads", "hidden_size", "positions")), 1),
    **dict.fromkeys((f"pretraining.scratch.{key}" for key in ("intermediate_size", "vocabulary")), 1),
    **dict.fromkeys((f"seed.{key}" for key in ("init", "data", "dropout", "negatives")), 0),
}
BELOW = {  # key -> number that its value must be below
    "optimizer.b1": 1,
    "optimizer.b2": 1,
    "optimizer.ema": 1,
    **{key: 2**32 for key in LEAST_VALUES if key.startswith("seed.") or key == "pretraining.seed"},
}
GREATEST_VALUES = {"optimizer.warmup_fraction": 1, "loss.annealing_floor": 1}  # key -> its greatest valid number

# Keys whose values are tuples of texts, or of any numbers. Other tuples have whole numbers.
TEXT_KEYS = ("encoder.ignore", "lora.targets", "train.trackers")
NUMBER_KEYS = ("loss.matryoshka.weights",)


def check_tuples(config: ConfigDict) -> None:
    """Raise ValueError for a tuple with an item of the wrong type."""
    for key, value in flatten(config.to_dict()).items():
        types: tuple[type, ...] = (int,)
        words = "whole numbers"
        if key in TEXT_KEYS:
            types, words = (str,), "texts"
        elif key in NUMBER_KEYS:
            types, words = (int, float), "numbers"
        if isinstance(value, list) and not all(type(item) in types for item in value):
            raise ValueError(f"{key} is {tuple(value)}; its items must be {words}")


def check_numbers(config: ConfigDict) -> None:
    """Raise ValueError for the first number outside its range."""
    for key, value in flatten(config.to_dict()).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}; it must be a finite number")
        if key in LEAST_VALUES and value < LEAST_VALUES[key]:
            raise ValueError(f"{key} is {value}; it must be at least {LEAST_VALUES[key]}")
        if key in GREATEST_VALUES and value > GREATEST_VALUES[key]:
            raise ValueError(f"{key} is {value}; it must be at most {GREATEST_VALUES[key]}")
        if key in BELOW and value >= BELOW[key]:
            raise ValueError(f"{key} is {value}; it must be below {BELOW[key]}")


def check_config(config: ConfigDict) -> None:
    """Raise ValueError for unknown names, for keys that the task does not read, and for settings that contradict each
    other."""
    check_tuples(config)
    check_numbers(config)
    check_unread(config)
    for key, name, table in (
        ("head.name", config.head.name, HEADS),
        ("pooling", config.pooling, POOLINGS),
        ("mesh.reduce_dtype", config.mesh.reduce_dtype, COMPUTE_DTYPES),
        ("encode.dtype", config.encode.dtype, VECTOR_DTYPES),
        ("data.on_error", config.data.on_error, ON_ERROR),
    ):
        if name not in table:
            raise ValueError(f"{key} is {name!r}; it must be one of {', '.join(table)}")
    check_optimizer(config.optimizer)
    check_validation(config)
    check_tokens(config)
    check_losses(config)
    check_training_data(config)


def describe_unreached(config: ConfigDict, steps: int, epochs: float) -> Iterator[str]:
    """Yield a warning for each key with a step or an epoch that training does not reach. These are not errors, because
    a short run of a published config may have such keys.

    `steps` and `epochs` are the length of training, all rounds included; 0: nothing is trained.
    """
    sparsity, validation = config.loss.sparsity, config.validation
    if (sparsity.query or sparsity.passage) and 0 < steps < sparsity.steps:
        yield (
            f"loss.sparsity.steps is {sparsity.steps}, but training has {steps} steps: the weights of the penalties "
            f"end at {(steps / sparsity.steps) ** 2:.3g} of their values"
        )
    selects = config.data.dev and validation.then and validation.best == "metric"
    if selects and 0 < (last := round(epochs, 6)) < validation.then_from:
        yield (
            f"validation.then_from is {validation.then_from:g}, but training has {last:g} epochs: "
            f"validation.then={validation.then!r} never selects the best checkpoint"
        )


def check_tokens(config: ConfigDict) -> None:
    """Raise ValueError for prompts that are not text, and for attention that does not fit packing or dropout."""
    if (rate := config.encoder.attention_dropout) != -1 and not 0 <= rate < 1:
        raise ValueError(
            f"encoder.attention_dropout is {rate}; it must be from 0 to below 1, or -1 for the checkpoint's value"
        )
    if config.tokens.packing and config.encoder.attention != "plain":
        raise ValueError(
            f"tokens.packing is True and encoder.attention {config.encoder.attention!r}, whose kernel cannot keep the "
            "texts of a row apart; use 'plain', or tokens.packing=False"
        )
    if not read_prompts(config).in_mean and config.task != "retrieval":
        raise ValueError(
            f"tokens.prompts is {config.tokens.prompts!r}, which leaves prompts out of the mean over tokens, but task "
            f"{config.task!r} has none: give the texts as tokens.query_prompt and tokens.passage_prompt"
        )
    for key in ("query_prompt", "passage_prompt", "title_separator", "task"):
        try:
            config.tokens[key].encode("utf-8")
        except UnicodeEncodeError as error:  # a command line can hold bytes that are not text
            raise ValueError(f"tokens.{key} is {config.tokens[key]!r}; write it in UTF-8") from error


def check_training_data(config: ConfigDict) -> None:
    """Raise ValueError for missing training data or length, rounds or adapters that do not fit, and a store that is not
    a folder."""
    if config.train.steps < 0 and config.train.epochs < 0:
        raise ValueError(f"train.epochs is {config.train.epochs}; it must be at least 0")
    check_profile(config.train.profile)
    if config.train.profile and config.train.round == 1 and 0 <= config.train.steps < config.train.profile[0]:
        raise ValueError(
            f"train.profile is {tuple(config.train.profile)}, but train.steps is {config.train.steps}: no step would "
            "be traced"
        )
    if config.train.round > config.train.rounds:
        raise ValueError(f"train.round is {config.train.round}; it must be at most train.rounds, {config.train.rounds}")
    if config.lora.rank and config.train.rounds > 1:
        raise ValueError(
            f"lora.rank is {config.lora.rank} and train.rounds {config.train.rounds}: rounds continue all weights, "
            "and not only adapters; use train.rounds=1, and train.start_from for a further training"
        )
    if config.lora.base and not config.lora.adapters:
        raise ValueError(f"lora.base is {config.lora.base!r}, but lora.adapters, which have this base, is empty")
    if config.lora.adapters and not config.lora.rank:
        raise ValueError(f"lora.adapters is {config.lora.adapters!r}, but lora.rank is 0: set it to the files' rank")
    if config.train.round > 1 and not config.train.start_from:
        raise ValueError(
            f"train.round is {config.train.round}, but train.start_from is empty: give the workdir of the "
            "previous round"
        )
    if config.data.store and Path(config.data.store).exists() and not Path(config.data.store).is_dir():
        raise ValueError(f"data.store is {config.data.store}, which is a file; give a folder, which need not exist")
    if not config.data.train and config.train.steps != 0:
        raise ValueError(
            "data.train is empty; give a folder or a file of training data: --config.data.train=PATH "
            "(or --config.train.steps=0, to encode with the model without training)"
        )


def reference_options(config: ConfigDict, model: Model) -> list[str]:
    """Return descriptions of the options with which a run follows a published implementation and not its paper."""
    options = {
        "optimizer.name=lamb_reference (no bias correction, weight norms clamped at 10)": (
            config.optimizer.name == "lamb_reference"
        ),
        f"optimizer.reference_processes={config.optimizer.reference_processes} (clips at that multiple of clip_norm)": (
            config.optimizer.clip_norm > 0 and config.optimizer.reference_processes != 1
        ),
        "the best checkpoint by average_rank (inside a dev batch, so it depends on validation.batch_size)": (
            bool(config.data.dev) and "average_rank" in (config.validation.metric, config.validation.then)
        ),
    }
    return [*model.reference_options(), *(name for name, on in options.items() if on)]


def check_retrieval(config: ConfigDict, retriever: RetrieverModel) -> None:
    """Raise ValueError for lengths, pseudo-queries, a loss or an optimizer that do not fit the model."""
    if config.data.pseudo_queries and not retriever.module.head.pseudo_query_length():
        raise ValueError(f"data.pseudo_queries is set, but head {config.head.name!r} reads no pseudo-queries")
    if config.tokens.packing and (problem := retriever.module.head.unattended_tokens()):
        raise ValueError(
            "tokens.packing is True, but in packed rows all tokens of a text see each other, and "
            f"{problem} must not be seen: set tokens.packing=False"
        )
    if config.encode.words and not retriever.sparse:
        raise ValueError(
            f"encode.words is {config.encode.words}, but the vectors of head {config.head.name!r} are not weights of "
            "words: set it to 0"
        )
    check_text_lengths(config, retriever)
    check_tensor(config.mesh.tensor, retriever.module.config, config.encoder.attention)
    require_no_dropout(config.encoder.attention, getattr(retriever.module.config, "attention_dropout", 0.0))
    loss_settings(config, retriever)
    check_parameters(config, retriever)


def check_tensor(parts: int, shapes: EncoderConfig, attention: str = "plain") -> None:
    """Raise ValueError for an encoder whose layers mesh.tensor cannot split into `parts`, and for an attention
    kernel."""
    if parts == 1:
        return
    if attention != "plain":
        raise ValueError(
            f"mesh.tensor is {parts} and encoder.attention {attention!r}, which are not supported together: "
            "set encoder.attention='plain'"
        )
    if not isinstance(shapes, DecoderConfig):
        raise ValueError(
            f"mesh.tensor is {parts}, but it splits layers of language models, and the encoder is a "
            f"{shapes.model_type}: set mesh.tensor=1, and mesh.fsdp to split parameters"
        )
    for key, count in {
        "num_key_value_heads": shapes.num_kv_heads,
        "intermediate_size": shapes.intermediate_size,
    }.items():
        if count % parts:
            raise ValueError(f"mesh.tensor is {parts}; it must divide the encoder's {key}, {count}")
    if shapes.attention_dropout:
        raise ValueError(
            f"mesh.tensor is {parts}, which does not support dropout of attention weights, but the encoder's rate is "
            f"{shapes.attention_dropout}: set encoder.attention_dropout=0"
        )


def check_text_lengths(config: ConfigDict, retriever: RetrieverModel) -> None:
    """Raise ValueError if a text can be longer than the encoder's position table."""
    for key in ("query_length", "passage_length"):
        if config.tokens[key] > retriever.longest:
            raise ValueError(f"tokens.{key} is {config.tokens[key]}; the encoder has {retriever.longest} positions")


def weak_temperatures(config: ConfigDict, retriever: RetrieverModel) -> str:
    """Return a warning if a temperature is so high that a softmax of cosines is nearly even and teaches little, else
    "". Late interaction sums many cosines, so it has no such warning."""
    loss = config.loss
    if not config.normalize or retriever.late_interaction or config.train.steps == 0:
        return ""
    groups = {f"loss.{name}.temperature": loss[name] for name in ("kl", "in_batch_kl")}
    weights = {"loss.temperature": loss.contrastive_weight, **{key: group.weight for key, group in groups.items()}}
    values = {"loss.temperature": loss.temperature, **{key: group.temperature for key, group in groups.items()}}
    weak = [f"{key} is {values[key]:g}" for key, weight in weights.items() if weight and values[key] >= WEAK]
    if not weak:
        return ""
    return f"{' and '.join(weak)}, but scores are cosines: their softmax is nearly even and teaches little; try 0.05"
