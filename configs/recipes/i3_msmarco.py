"""I3 on MS MARCO: 16 queries a step with 127 negatives each, LAMB. :bert is 6 + 6 + 3 + 3 layers without retrieval
pre-training, :retromae 12 + 1 + 1. :warm_up and :warm_up_bert train the head alone on reconstruction, with the encoders
frozen; go on from it with --config.train.start_from=WORKDIR. :released has what the published code differs in. The
paper trains until a dev set says stop: give data.dev, and the best checkpoint is used."""

from typing import Any

from ml_collections import ConfigDict

from configs.base import one_stage, require_suffix, two_stages
from configs.i3 import get_config as i3

SUFFIXES = ("bert", "retromae", "warm_up", "warm_up_bert", "released")


def stages(system: str = "retromae") -> tuple[dict[str, Any], ...]:
    return one_stage() if "warm_up" in system else two_stages(keep=200, own=("bm25", "stage1"))


def get_config(system: str = "retromae") -> ConfigDict:
    require_suffix("recipes/i3_msmarco.py", system, SUFFIXES)
    c = i3()
    c.data.negatives = 127
    c.train.batch_size, c.train.chunk_size = 16, 4
    if system in ("bert", "warm_up_bert"):
        c.encoder.layers = 6
        c.head.implicit.reconstructor_layers = c.head.implicit.interactor_layers = 3
    else:
        c.encoder.checkpoint = "Shitao/RetroMAE_MSMARCO"
    if system == "released":
        c.head.implicit.variant, c.head.implicit.reconstruction_weight = "released", 0.1
        c.optimizer.name, c.optimizer.head_learning_rate = "lamb_reference", 1e-3
    if system.startswith("warm_up"):
        c.data.negatives = c.train.chunk_size = 0
        c.loss.contrastive_weight = 0.0
        c.head.implicit.reconstruction_decay = 1.0
        c.optimizer.frozen = "encoder/"
        c.train.steps = 20_000
    return c
