"""What pre-training is to the loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxret.data.store import store_root
from jaxret.models.encoders.pretrained import find
from jaxret.models.pretraining import HEAD, METHODS, Method, Pretrainer, PretrainingModule
from jaxret.models.retriever import DTYPES, check_compute
from jaxret.pretraining.batches import Batches
from jaxret.pretraining.masking import Vocabulary
from jaxret.pretraining.objective import PretrainingObjective
from jaxret.pretraining.spans import Documents, Spans, cut, load_documents
from jaxret.runs.contract import make_contract
from jaxret.runs.run import load_tokenizer, require_stored_contract
from jaxret.training.begin import Job, Texts, require_same_data
from jaxret.training.objective import Objective
from jaxret.training.optimizers import make_optimizer
from jaxret.training.task import Plan, Task

NAME = "pretraining"  # as config.task


@dataclass(frozen=True)
class Corpus:
    """What is learned from. An example is a span, or, if `paired`, a document with two spans or more."""

    documents: Documents
    spans: Spans
    paired: bool
    pad_id: int

    @property
    def record(self) -> dict[str, Any]:
        """What data.json of a run holds."""
        return {"documents": len(self.documents), "spans": len(self.spans), "sha256": self.documents.sha256}

    def __len__(self) -> int:
        return len(self.spans.paired) if self.paired else len(self.spans)


def method_of(config: ConfigDict) -> Method:
    """Raises ValueError for a name that there is not."""
    c = config.pretraining
    if c.method not in METHODS:
        raise ValueError(f"pretraining.method is {c.method!r}; it must be one of {', '.join(METHODS)}")
    return Method(c.method, c.head_layers, c.skip_from, c.late_mlm, c.contrast_weight)


def build(config: ConfigDict, shapes: Any) -> Pretrainer:
    """The model of a config, on an encoder of these shapes. Raises ValueError if they do not fit."""
    method = method_of(config)
    if problem := method.problem(shapes):
        raise ValueError(f"pretraining.method is {method.name!r}, but this encoder cannot be trained so: {problem}")
    return Pretrainer(PretrainingModule(replace(shapes, mlm_head=True), check_compute(config, shapes), method))


def check_settings(config: ConfigDict) -> None:
    """Raises ValueError for settings that mean nothing, whatever the encoder."""
    c = config.pretraining
    method_of(config)
    if config.task != NAME:
        raise ValueError(f"task is {config.task!r}; pre-training needs a config whose task is {NAME!r}")
    for key in ("mask_rate", "decoder_rate"):
        if not 0 < c[key] < 1:
            raise ValueError(f"pretraining.{key} is {c[key]}; it must be above 0 and below 1")
    if c.length < 3:
        raise ValueError(f"pretraining.length is {c.length}; it must be 3 or more")
    if c.shortest > c.length - 2:
        raise ValueError(f"pretraining.shortest is {c.shortest}, but spans have at most {c.length - 2} tokens of text")
    for key, empty in (("data.dev", ""), ("data.subset", 0), ("tokens.packing", False), ("train.start_from", "")):
        group, name = key.split(".")
        if config[group][name] != empty:
            raise ValueError(f"{key} is {config[group][name]!r}, which pre-training has no use for; leave it {empty!r}")


def check(config: ConfigDict, model: Pretrainer) -> None:
    """Raises ValueError for settings that mean nothing, or that the encoder cannot have."""
    check_settings(config)
    if config.pretraining.length > model.longest:
        length = config.pretraining.length
        raise ValueError(f"pretraining.length is {length}; it must be 3 to {model.longest}, the encoder's positions")
    optimizer, _ = make_optimizer(config.optimizer, max(config.train.steps, 1))
    jax.eval_shape(optimizer.init, jax.eval_shape(model.init, jax.random.key(0)))  # its patterns match something


def read(job: Job) -> Texts:
    """The tokenizer and the corpus, tokenised now or before and cut into spans, of which is said how many there are."""
    config, c = job.config, job.config.pretraining
    tokenizer = load_tokenizer(config, job.encoder, job.model)
    contract = make_contract(job.model, tokenizer, job.encoder)
    if job.begun:
        require_stored_contract(job.workdir, contract, tokenizer, "Restore the files, or choose another --workdir.")
    root, method = store_root(config.data.store), method_of(config)
    documents = load_documents(config.data.train, config.data.on_error, tokenizer, root, job.progress, job.say)
    spans = cut(documents.tokens, c.length - 2, c.shortest, least=2 if method.pairs else 1)
    found: Any = Corpus(documents, spans, method.pairs, tokenizer.pad_id)
    if not len(found):
        what = "no document with two spans" if method.pairs else "no span"
        raise ValueError(f"{config.data.train} has {what} of at least pretraining.shortest={c.shortest} tokens")
    job.say(told(found))
    if not job.begun and (method.condenses or method.decodes):
        known = job.model.stored_head(find(config.encoder.checkpoint, config.encoder.download))
        job.say(
            f"the head of {method.name} goes on from {HEAD} beside the encoder" if known else "its head begins anew"
        )
    if documents.report:
        job.say(f"  {documents.report}")
    texts = Texts(tokenizer, contract, found, None, None)
    require_same_data(job, texts.record)
    return texts


def told(corpus: Corpus) -> str:
    """One line on what is learned from."""
    documents, spans = corpus.documents, corpus.spans
    tokens = len(documents.tokens.flat)
    pairs = f"; {len(corpus):,} documents have two or more" if corpus.paired else ""
    return (
        f"train: {len(documents):,} documents, {len(spans):,} spans of at most {spans.longest + 2} tokens{pairs}; "
        f"{spans.left_out:,} of {tokens:,} tokens are in spans too short to learn from"
    )


def objective(config: ConfigDict, model: Pretrainer, mesh: Mesh, epochs_per_batch: float) -> Objective:
    reduce_dtype = DTYPES[config.mesh.reduce_dtype]
    return PretrainingObjective(model, None, mesh, config.train.chunk_size, reduce_dtype)


def plan(job: Job, texts: Texts, objective: Objective) -> Plan:
    """Every row is as long as the longest span, rounded up: there is one program."""
    config, c, corpus, tokenizer = job.config, job.config.pretraining, texts.train, texts.tokenizer
    assert isinstance(corpus, Corpus)
    assert tokenizer.cls_id is not None
    multiple, decoder = config.tokens.length_multiple, (c.decoder_rate, c.decoder_masks)
    return Batches(
        spans=corpus.spans,
        vocabulary=Vocabulary.of(tokenizer),
        markers=(tokenizer.cls_id, tokenizer.sep_id),
        pad_id=tokenizer.pad_id,
        size=config.train.batch_size,
        devices=job.mesh.size,
        length=min(-(-(corpus.spans.longest + 2) // multiple) * multiple, c.length),
        rate=c.mask_rate,
        data_seed=config.seed.data,
        mask_seed=c.seed,
        paired=corpus.paired,
        decoder=decoder if method_of(config).decodes else None,
    )


PRETRAINING = Task(
    name=NAME,
    stated=lambda _: {},
    build=build,
    check=check,
    read=read,
    objective=objective,
    plan=plan,
    validate=lambda *_: None,
)
