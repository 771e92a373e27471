"""MLR on NQ, TriviaQA and SQuAD: BERT-base or T5-base, 40 epochs, batches of 128 with one BM25 negative.

The suffixes :bert, :bert_all_layers, :me_bert and :colbert have self-contrastive pooling. :t5, :multi_vector,
:me_bert_multi, :t5_me_bert (the mean and the first seven tokens) and :t5_me_bert_first (the first eight; footnote 4)
search with all vectors. :dual_encoder and :t5_dual_encoder are baselines. Warm-up is 5 % of the steps (appendix A); the
code has --config.optimizer.warmup_steps=1237. --config.optimizer.reference_processes=4 clips gradients as on 4 GPUs.
The checkpoint is the best on the dev set; for TriviaQA the paper takes the last: --config.validation.best=last
"""

from ml_collections import ConfigDict

from jaxret.configs import base, colbert, me_bert, mlr
from jaxret.configs.base import one_stage as stages  # noqa: F401
from jaxret.configs.base import require_suffix
from jaxret.configs.t5 import use_t5

ME_BERT = ("me_bert", "me_bert_multi", "t5_me_bert", "t5_me_bert_first")
FAMILIES = {
    **dict.fromkeys(ME_BERT, me_bert),
    "colbert": colbert,
    **dict.fromkeys(("dual_encoder", "t5_dual_encoder"), base),
}
SUFFIXES = ("bert", "bert_all_layers", "t5", *FAMILIES, "multi_vector")


def get_config(system: str = "bert") -> ConfigDict:
    require_suffix("recipes/mlr_open_qa.py", system, SUFFIXES)
    config = FAMILIES.get(system, mlr).get_config()
    config.encoder.dtype = "bfloat16"
    if system == "bert_all_layers":
        config.head.mlr.chosen = tuple(range(1, 13))
        config.loss.local_weight = 0.1
    if system.startswith("t5"):
        config = use_t5(config)
    config.head.me_bert.mean_vector = system != "t5_me_bert_first"
    if system in ("t5", "multi_vector"):
        config.head.mlr.chosen = (8, 12)  # layers of the two vectors (figure 3)
    if system.startswith("t5") or system in ("multi_vector", "me_bert_multi"):
        config.pooling = "none"
        config.loss.local_weight = 0.0
    config.validation.metric, config.validation.then = "nll", "average_rank"  # from the 32nd epoch on
    return config
