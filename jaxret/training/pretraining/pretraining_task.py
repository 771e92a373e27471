"""The task of pre-training an encoder on the documents of a corpus."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from jaxret.data.tokens.store import store_root
from jaxret.models.encoders.architectures import EncoderConfig
from jaxret.models.encoders.pretrained import find_model
from jaxret.models.pretraining import (
    PRETRAINING_HEAD,
    PRETRAINING_METHODS,
    PretrainingMethod,
    PretrainingModel,
    PretrainingModule,
)
from jaxret.models.retriever_model import COMPUTE_DTYPES, check_compute
from jaxret.runs.contract import make_contract
from jaxret.runs.run import load_tokenizer, require_stored_contract
from jaxret.training.config_sources import training_corpus
from jaxret.training.objective import Objective
from jaxret.training.optimizers import check_parameters
from jaxret.training.prepare import require_same_data
from jaxret.training.pretraining.masked_batches import MaskedBatches
from jaxret.training.pretraining.masking import MaskingVocabulary
from jaxret.training.pretraining.pretraining_objective import PretrainingObjective
from jaxret.training.pretraining.spans import Documents, Spans, cut_spans, load_documents
from jaxret.training.task import Task, TrainingData, TrainingJob
from jaxret.types import MaskedTexts

TASK_NAME = "pretraining"  # value of config.task


@dataclass(frozen=True)
class PretrainingCorpus:
    """The training examples of pre-training. An example is a span or, if `in_pairs`, a document with at least two
    spans."""

    documents: Documents  # tokenized documents
    spans: Spans  # parts of the documents
    in_pairs: bool  # whether an example is two spans of a document
    pad_id: int  # id of padding

    @property
    def record(self) -> dict[str, Any]:
        """Sizes and digest, for data.json of a run."""
        return {"documents": len(self.documents), "spans": len(self.spans), "sha256": self.documents.sha256}

    def __len__(self) -> int:
        return len(self.spans.documents_with_pairs) if self.in_pairs else len(self.spans)


PretrainingJob: TypeAlias = TrainingJob[PretrainingModel, PretrainingCorpus, MaskedTexts]


def make_method(config: ConfigDict) -> PretrainingMethod:
    """Return the method of a config. Raises ValueError for an unknown name."""
    settings = config.pretraining
    if settings.method not in PRETRAINING_METHODS:
        names = ", ".join(PRETRAINING_METHODS)
        raise ValueError(f"pretraining.method is {settings.method!r}; it must be one of {names}")
    return PretrainingMethod(
        settings.method, settings.head_layers, settings.skip_from, settings.late_mlm, settings.contrast_weight
    )


def make_pretrainer(config: ConfigDict, shapes: EncoderConfig) -> PretrainingModel:
    """Return the model of a config with an encoder of these shapes. Raises ValueError if the method cannot train it."""
    method = make_method(config)
    if problem := method.problem(shapes):
        raise ValueError(f"pretraining.method is {method.name!r}, which cannot train this encoder: {problem}")
    return PretrainingModel(PretrainingModule(replace(shapes, mlm_head=True), check_compute(config, shapes), method))


def check_pretraining_config(config: ConfigDict) -> None:
    """Raise ValueError for settings that no encoder can be pre-trained with."""
    settings = config.pretraining
    make_method(config)
    if config.task != TASK_NAME:
        raise ValueError(f"task is {config.task!r}; pre-training needs a config whose task is {TASK_NAME!r}")
    for key in ("mask_rate", "decoder_rate"):
        if not 0 < settings[key] < 1:
            raise ValueError(f"pretraining.{key} is {settings[key]}; it must be above 0 and below 1")
    if settings.length < 3:
        raise ValueError(f"pretraining.length is {settings.length}; it must be 3 or more")
    if settings.shortest > settings.length - 2:
        raise ValueError(
            f"pretraining.shortest is {settings.shortest}, but spans have at most {settings.length - 2} tokens of text"
        )


def check_pretraining(config: ConfigDict, model: PretrainingModel) -> None:
    """Raise ValueError for settings that this encoder cannot be pre-trained with."""
    check_pretraining_config(config)
    if config.pretraining.length > model.longest:
        length = config.pretraining.length
        raise ValueError(f"pretraining.length is {length}; it must be 3 to {model.longest}, the encoder's positions")
    check_parameters(config, model)


def read_pretraining_data(job: PretrainingJob) -> TrainingData[PretrainingCorpus]:
    """Return tokenizer, contract, and the corpus as spans of tokens, which come from the store if it has them. Log the
    numbers of documents and spans.

    Raises:
        DataError: a record is bad.
        ContractError: the run began with another corpus.
        ValueError: no span is long enough.
    """
    config, settings = job.config, job.config.pretraining
    tokenizer = load_tokenizer(config, job.encoder, job.model)
    contract = make_contract(job.model, tokenizer, job.encoder)
    if job.has_begun:
        require_stored_contract(job.workdir, contract, "Restore the files, or choose another --workdir.")
    root, method = store_root(config.data.store), make_method(config)
    documents = load_documents(training_corpus(config), config.data.on_error, tokenizer, root, job.progress, job.log)
    spans = cut_spans(documents.tokens, settings.length - 2, settings.shortest, least=2 if method.in_pairs else 1)
    corpus = PretrainingCorpus(documents, spans, method.in_pairs, tokenizer.pad_id)
    if not len(corpus):
        lack = "no document with two spans" if method.in_pairs else "no span"
        raise ValueError(f"{config.data.train} has {lack} of at least pretraining.shortest={settings.shortest} tokens")
    job.log(describe_corpus(corpus))
    if not job.has_begun and (method.condenses or method.decodes):
        head = job.model.stored_head(find_model(config.encoder.checkpoint, config.encoder.download))
        job.log(
            f"the head of {method.name} continues from {PRETRAINING_HEAD} in the encoder's folder"
            if head
            else "the pre-training head starts from random weights"
        )
    if documents.report:
        job.log(f"  {documents.report}")
    data = TrainingData(tokenizer, contract, corpus, None, None)
    require_same_data(job, data.record)
    return data


def describe_corpus(corpus: PretrainingCorpus) -> str:
    """Return a line with the numbers of documents, spans and tokens of a corpus."""
    documents, spans = corpus.documents, corpus.spans
    tokens = len(documents.tokens.flat)
    pairs = f"; {len(corpus):,} documents have two or more" if corpus.in_pairs else ""
    return (
        f"train: {len(documents):,} documents, {len(spans):,} spans of at most {spans.longest + 2} tokens{pairs}; "
        f"{spans.left_out:,} of {tokens:,} tokens are in spans too short to learn from"
    )


def make_masked_batches(
    job: PretrainingJob, data: TrainingData[PretrainingCorpus], objective: Objective[PretrainingModel, MaskedTexts]
) -> MaskedBatches:
    """Return the plan of a job's batches. All rows have the length of the longest span, rounded up, so that one program
    is compiled."""
    config, settings, corpus, tokenizer = job.config, job.config.pretraining, data.train, data.tokenizer
    assert corpus is not None
    assert tokenizer.cls_id is not None
    multiple, decoder = config.tokens.length_multiple, (settings.decoder_rate, settings.decoder_masks)
    return MaskedBatches(
        spans=corpus.spans,
        vocabulary=MaskingVocabulary.from_tokenizer(tokenizer),
        markers=(tokenizer.cls_id, tokenizer.sep_id),
        pad_id=tokenizer.pad_id,
        size=config.train.batch_size,
        devices=job.mesh.size,
        length=min(-(-(corpus.spans.longest + 2) // multiple) * multiple, settings.length),
        rate=settings.mask_rate,
        data_seed=config.seed.data,
        mask_seed=settings.seed,
        in_pairs=corpus.in_pairs,
        decoder=decoder if make_method(config).decodes else None,
    )


PRETRAINING: Task[PretrainingModel, PretrainingCorpus, MaskedTexts] = Task(
    name=TASK_NAME,
    encoder_settings=lambda _: {},
    build=make_pretrainer,
    check=check_pretraining,
    read_data=read_pretraining_data,
    make_objective=lambda config, model, mesh, _: PretrainingObjective(
        model=model,
        mesh=mesh,
        chunk_size=config.train.chunk_size,
        reduce_dtype=COMPUTE_DTYPES[config.mesh.reduce_dtype],
    ),
    make_plan=make_masked_batches,
    make_validator=lambda *_: None,
)
