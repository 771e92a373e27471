"""ANCE on MS MARCO passages: a warm-up on BM25's negatives, then ten rounds, each on new negatives of the model.

Constants are those of the published code (commands/run_train.sh, run_train_warmup.sh): one RoBERTa-base for queries of
64 tokens and passages of 512; 64 queries per step, each only with its own negative (8 on each of 4 GPUs, 2 batches
accumulated); LAMB at 1e-6; 20 of the first 200 candidates drawn for each query; a refresh every 10,000 steps.

Differences from the code: the number of steps of the warm-up (60,000) and of rounds (ten), which the code does not
state; a constant learning rate (in the code it falls over 1,000,000 steps); 512 tokens in the warm-up, too (128 in the
code), because a run cannot change its lengths; no linear layer with a norm on top of [CLS]; training waits for a
refresh (in the code both run at the same time).
"""

from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base


def stages() -> tuple[dict[str, Any], ...]:
    warm_up = {
        "optimizer.learning_rate": 2e-4,
        "optimizer.warmup_steps": 1000,
        "train.batch_size": 32,
        "train.steps": 60_000,
    }
    return (
        {"name": "warm_up", "mine": {"pools": ("bm25",), "depth": 1000, "keep": 100}, "config": warm_up},
        {
            "name": "ance",
            "rounds": 10,
            "mine": {"pools": ("warm_up",), "depth": 200, "keep": 20},
            "config": {"train.start_from": "warm_up"},
        },
    )


def get_config() -> ConfigDict:
    config = base()
    config.encoder.checkpoint = "FacebookAI/roberta-base"
    config.encoder.tied = True
    config.encoder.dtype = "bfloat16"
    config.tokens.query_length, config.tokens.passage_length = 64, 512
    config.data.negatives = 1
    config.loss.in_batch_negatives = False
    config.optimizer.name = "lamb"
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 5000
    config.optimizer.decay = "none"
    config.optimizer.clip_norm = 1.0
    config.train.batch_size = 64
    config.train.steps = 10_000
    config.validation.best = "last"
    return config
