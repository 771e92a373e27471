"""RoBERTa: a BERT whose positions begin after the id of padding and depend on the ids."""

from __future__ import annotations

from dataclasses import replace

from jaxret.models.encoders.architectures import bert
from jaxret.models.encoders.stored import Classifier, Key, at_least, one_of

ARCHITECTURE = replace(
    bert.ARCHITECTURE,
    model_type="roberta",
    keys=bert.BERT_KEYS
    | {
        "hidden_act": Key("hidden_act", one_of("gelu"), "gelu"),  # the MLM head always has GELU
        "first_position": Key("pad_token_id", at_least(0), 1, offset=1),
    },
    names=lambda _: (
        bert.BERT_NAMES
        | {"mlm_head/dense": "lm_head.dense", "mlm_head/norm": "lm_head.layer_norm", "mlm_head/bias": "lm_head.bias"}
    ),
    class_name="RobertaModel",
    prefix="roberta.",
    mlm_class="RobertaForMaskedLM",
    mlm_output="lm_head.decoder.weight",
    classifier=Classifier(
        "RobertaForSequenceClassification",
        "classifier.dense",
        "classifier.out_proj",
        dropout_before=True,
        separators=2,
    ),
)
