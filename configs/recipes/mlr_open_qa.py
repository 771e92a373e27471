"""MLR on NQ, TriviaQA and SQuAD: BERT-base or T5-base, 40 epochs, batches of 128 with one BM25 negative.

configs/recipes/mlr_open_qa.py:bert, :bert_all_layers, :t5, :me_bert, :me_bert_t5, :colbert, :colbert_t5. To clip as
its 4 GPUs did: --config.optimizer.reference_processes=4
"""

from ml_collections import ConfigDict

from configs import colbert, me_bert, mlr
from configs.base import require_suffix
from configs.t5 import use_t5

SYSTEMS = ("bert", "bert_all_layers", "t5", "me_bert", "me_bert_t5", "colbert", "colbert_t5")


def get_config(system: str = "bert") -> ConfigDict:
    require_suffix("recipes/mlr_open_qa.py", system, SYSTEMS)
    if system in ("me_bert", "me_bert_t5"):
        c = me_bert.get_config("t5" if system == "me_bert_t5" else "bert")
    elif system.startswith("colbert"):
        c = colbert.get_config()
    else:
        c = mlr.get_config()
    if system == "bert_all_layers":
        c.head.layers = tuple(range(1, 13))
        c.loss.local_weight = 0.1
    if system in ("t5", "colbert_t5"):
        c = use_t5(c)
    return c
