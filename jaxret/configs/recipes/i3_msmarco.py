"""I3 on MS MARCO: 16 queries per step, each with 127 negatives of its own and no others (eq. 9), LAMB.

The suffix :bert has 6 + 6 + 3 + 3 layers without retrieval pre-training, :retromae has 12 + 1 + 1. :distilled is
:retromae with a cross-encoder as teacher (KL divergence instead of the contrastive loss; `jaxret recipe` also trains
the teacher). The paper states no number of epochs; 40 is the number of the code's distillation.

:warm_up and :warm_up_bert are the first step of the paper: they train reconstructor and interactor for 20,000 steps on
(pseudo-query, passage) pairs of the collection with both losses (eq. 11), and the encoders are frozen. `jaxret generate
--model=FLAN-T5-XL --corpus=COLLECTION --out=FOLDER --write=training` makes these pairs; FOLDER/training is data.train.
Continue with --config.train.start_from=WORKDIR. The weight in eq. 11 is illegible in our copy of the paper.

:released and :distilled_released follow the published scripts (docs/methods.md). The script of the first has 64 queries
of 15 negatives on each of 8 GPUs:
--config.train.batch_size=512 --config.data.negatives=15 --config.train.chunk_size=32
"""

from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.base import one_stage, require_suffix, two_stages
from jaxret.configs.i3 import get_config as i3

SUFFIXES = ("bert", "retromae", "distilled", "distilled_released", "warm_up", "warm_up_bert", "released")
NO_PSEUDO_QUERIES = {"data.pseudo_queries": ""}  # a cross-encoder reads none


def stages(system: str = "retromae") -> tuple[dict[str, Any], ...]:
    if "warm_up" in system:
        return one_stage()
    keep = 64 if system == "released" else 200  # max_index of the code's scripts
    first, second = two_stages(keep=keep, pools=("bm25", "stage1"))
    if not system.startswith("distilled"):
        return first, second
    teacher = {"name": "teacher", "base": "cross_encoder", "mine": second["mine"], "config": NO_PSEUDO_QUERIES}
    return {**first, "suffix": "retromae"}, teacher, {**second, "teacher": "teacher"}


def get_config(system: str = "retromae") -> ConfigDict:
    require_suffix("recipes/i3_msmarco.py", system, SUFFIXES)
    config = i3()
    config.data.negatives = 127
    config.train.batch_size, config.train.chunk_size, config.train.epochs = 16, 4, 40.0
    config.loss.in_batch_negatives = system in ("released", "distilled_released")
    if system in ("bert", "warm_up_bert"):
        config.encoder.layers = 6
        config.head.i3.reconstructor_layers = config.head.i3.interactor_layers = 3
    else:
        config.encoder.checkpoint = "Shitao/RetroMAE_MSMARCO"
    if system.startswith("distilled"):
        config.loss.contrastive_weight, config.loss.kl.weight = 0.0, 1.0
    if system == "distilled_released":
        config.encoder.checkpoint = "Shitao/RetroMAE_MSMARCO_distill"
        config.head.i3.reconstruction_weight, config.head.i3.reconstruction_decay = 0.0002, 1.0
        config.optimizer.weight_decay, config.train.batch_size = 1e-4, 128
    if config.loss.in_batch_negatives:
        config.head.i3.variant = "released"
        config.optimizer.name, config.optimizer.head_learning_rate = "lamb_reference", 1e-3
    if system == "released":
        config.encoder.checkpoint = "Shitao/RetroMAE_MSMARCO_finetune"
        config.head.i3.reconstruction_weight = 0.1  # 0.1^epoch, epochs counted from 1
        config.train.epochs = 200.0
    if system.startswith("warm_up"):
        config.data.negatives = config.train.chunk_size = 0
        config.loss.in_batch_negatives = True  # pairs have no negatives of their own
        config.head.i3.reconstruction_decay = 1.0
        config.optimizer.frozen = "encoder/"
        config.train.steps = 20_000
    return config
