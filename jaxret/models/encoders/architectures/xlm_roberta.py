"""XLM-RoBERTa: RoBERTa with a vocabulary of a hundred languages and with other class names."""

from __future__ import annotations

from dataclasses import replace

from jaxret.models.encoders.architectures import roberta

assert roberta.ARCHITECTURE.classifier

ARCHITECTURE = replace(
    roberta.ARCHITECTURE,
    model_type="xlm-roberta",
    class_name="XLMRobertaModel",
    mlm_class="XLMRobertaForMaskedLM",
    classifier=replace(roberta.ARCHITECTURE.classifier, class_name="XLMRobertaForSequenceClassification"),
)
