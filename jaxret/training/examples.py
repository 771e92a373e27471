"""Load tokenized examples and validation collections of a config from their stores, and log skipped and cut texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.formats import Policy, TrainingSource, read_judged_queries
from jaxret.data.records import Judgement
from jaxret.data.tokens.batches import BatchPlan, Examples, TrainingSet
from jaxret.data.tokens.store import store_root
from jaxret.data.tokens.subset import take_random_queries
from jaxret.data.tokens.tokenized import (
    ExampleSource,
    load_or_tokenize_corpus,
    load_or_tokenize_examples,
    load_tokenized_corpus,
)
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.runs.identity import VALIDATION
from jaxret.storage.atomic import sha256_json_lists
from jaxret.training.config_sources import dev_data, validation_corpus
from jaxret.training.losses.group_losses import distillation_keys
from jaxret.training.validation import CORPUS_MEASURES, DevCollection
from jaxret.types import Ragged


def example_source(config: ConfigDict, set_name: str) -> ExampleSource:
    """Return the source of the examples of a config; `set_name` is "train" or "dev"."""
    training, data = set_name == "train", config.data
    return ExampleSource(
        path=data[set_name],
        split=data[f"{set_name}_split"],
        on_error=data.on_error,
        negatives_run=data.negatives_run if training else data.dev_negatives_run,
        pseudo_queries=data.pseudo_queries if training and data.pseudo_queries != "query" else "",
        scores=training and bool(distillation_keys(config)),
        teacher_run=data.teacher_run if training and distillation_keys(config) else "",
    )


def require_sources(config: ConfigDict) -> None:
    """Raise DataError for missing data of a config. It is called before any data are tokenized."""
    for set_name in ("train", "dev"):
        if config.data[set_name]:
            example_source(config, set_name).files()
    validation_corpus(config)


def load_examples(
    config: ConfigDict, set_name: str, tokenizer: TextTokenizer, progress: bool, log: Callable[[str], None]
) -> TrainingSet | None:
    """Return the examples of a config, from the store or newly tokenized; None if the config names none.

    Args:
        config: the config of the run.
        set_name: "train" or "dev".
        tokenizer: the tokenizer of the run.
        progress: whether progress is printed.
        log: prints a line (sizes, skipped records, cut texts).

    Raises:
        DataError: a record is bad.
        ValueError: no example has the teacher's scores or the pseudo-query that the config names.
    """
    if not config.data[set_name]:
        return None
    source, training = example_source(config, set_name), set_name == "train"
    imagine = config.data.pseudo_queries if training else ""
    data, report = load_or_tokenize_examples(source, tokenizer, store_root(config.data.store), progress, log)
    data = replace(data, imagine_queries=imagine == "query")
    log(f"{set_name}: {len(data):,} examples from {source.data} ({source.data.describe()})")
    if training and config.data.subset:
        data = take_random_queries(data, config.data.subset, config.seed.data)
        log(f"  used: the {len(data):,} of {config.data.subset:,} queries (seed.data {config.seed.data})")
    for truncation in data.truncations:
        log(f"  {truncation}")
    short = int((data.negatives.lengths < config.data.negatives).sum())
    if short:
        is_useless = training and not data.negatives.lengths.any()
        advice = " (no example has one: data.negatives=0 is equal and faster)" if is_useless else ""
        log(
            f"  {short:,} examples have fewer than {config.data.negatives} hard negatives; "
            f"their slots stay empty{advice}"
        )
    example_count = 0 if config.data.negatives else int((data.negatives.lengths > 0).sum())
    if training and example_count:
        log(f"  {example_count:,} examples have hard negatives, which data.negatives=0 does not use")
    if data.teacher is not None:
        scored_count = data.teacher.scored_examples
        if not scored_count:  # only a subset can lack all scores: for a whole set without scores, reading raises
            raise ValueError(
                f"data.subset={config.data.subset} (seed.data {config.seed.data}) of {source.path} has no example with "
                "a teacher's scores, of its target and of a negative; take more queries, or give these scores"
            )
        log(
            f"  {scored_count:,} of {len(data):,} examples have a teacher's scores of their target and of a negative, "
            "and are used for distillation"
        )
    if data.pseudo_queries is not None:
        count = int((data.pseudo_queries.lengths > 0).sum())
        if not count:
            raise ValueError(f"data.pseudo_queries={imagine}: none of its ids belongs to a training passage")
        log(f"  {count:,} of {len(data.passages):,} passages have a pseudo-query")
    if report:
        log(f"  {report}")
    return data


def load_validation_corpus(
    config: ConfigDict, dev: TrainingSet | None, tokenizer: TextTokenizer, progress: bool, log: Callable[[str], None]
) -> DevCollection | None:
    """Return validation.corpus with the queries and judgements of the dev set; None if the config names no file.

    Args:
        config: the config of the run.
        dev: examples of the dev set.
        tokenizer: the tokenizer of the run.
        progress: whether progress is printed.
        log: prints a line.

    Raises:
        DataError: a record is bad.
        ValueError: the corpus has no relevant passage.
    """
    if dev is None or (corpus := validation_corpus(config)) is None:
        return None
    root, policy, source = store_root(config.data.store), Policy(config.data.on_error), config.data.dev
    texts = load_tokenized_corpus(corpus, policy, tokenizer, root)
    texts = texts or load_or_tokenize_corpus(corpus, corpus.scan(policy), policy, tokenizer, root, progress, log)
    ids, queries, dev_judgements, record = _load_dev_queries(dev_data(config), dev, tokenizer, policy)
    log(f"validation: {len(texts.passages):,} passages from {corpus}, {len(ids):,} queries\n  {texts.truncation}")
    judged_ids = {judgement.passage_id for judgement in dev_judgements}
    rows = {key: str(row) for row, key in enumerate(texts.ids) if key in judged_ids}
    relevant = {judgement.passage_id for judgement in dev_judgements if judgement.relevance > 0}
    missing_count = len(relevant - rows.keys())
    if missing_count == len(relevant):
        raise ValueError(f"validation.corpus is {corpus}, which has none of the relevant passages of {source}")
    if missing_count:
        log(f"  {missing_count:,} of {len(relevant):,} relevant passages are not in it: they count as not found")
    number = {query: str(i) for i, query in enumerate(ids)}
    judgements = tuple(
        Judgement(number[item.query_id], rows.get(item.passage_id, f"absent {item.passage_id}"), item.relevance)
        for item in dev_judgements
    )
    grades = ([item.query_id, item.passage_id, item.relevance] for item in dev_judgements)
    record |= {"corpus": texts.scan.sha256, "judgements": sha256_json_lists(grades)}
    return DevCollection(queries, texts.passages, judgements, CORPUS_MEASURES, record)


def _load_dev_queries(
    source: TrainingSource, dev: TrainingSet, tokenizer: TextTokenizer, policy: Policy
) -> tuple[list[str], Ragged, list[Judgement], dict[str, str]]:
    """Return the ids of the queries of a dev set, their tokens, their judgements, and {"queries": digest} if they are
    not those of the examples, whose record has a digest.

    Args:
        source: the source of the dev set.
        dev: the examples of the dev set.
        tokenizer: the tokenizer of the run.
        policy: what to do with bad records.
    """
    if source.file and source.file.format.without_query_ids and source.judgements.file.path != source.file.path:
        # The queries of this file have record numbers as ids, which may be ids of other queries in the judgements.
        all_queries, entries = read_judged_queries(source.queries, source.judgements, policy)
        judgements = [judgement for _, judgement in entries]
        judged_ids = {judgement.query_id for judgement in judgements}
        queries = [query for query in all_queries if query.id in judged_ids]
        ids, tokens = [query.id for query in queries], tokenizer.queries(queries)
        record = {"queries": sha256_json_lists([query.id, query.text, query.instruction] for query in queries)}
    else:
        ids, tokens = [dev.query_ids[row] for row in dev.first_examples], dev.queries.take(dev.first_examples)
        judgements, record = source.judgements.read(policy), {}
    known_ids = set(ids)
    return ids, tokens, [judgement for judgement in judgements if judgement.query_id in known_ids], record


def data_record(
    train: Examples | None, dev: TrainingSet | None, corpus: DevCollection | None = None
) -> dict[str, dict[str, Any]]:
    """Return the contents of data.json: the records of the sets, and of the corpus of validation."""
    record = {name: data.record for name, data in (("train", train), ("dev", dev)) if data is not None}
    return record | ({VALIDATION: corpus.record} if corpus and corpus.record else {})


def make_batch_plan(config: ConfigDict, batch_size: int, devices: int, pseudo_length: int = 0) -> BatchPlan:
    """Return the plan of batches of a config.

    Args:
        config: the config of the run.
        batch_size: number of examples of a batch.
        devices: number of devices that share a batch; it divides the size of the padded batch.
        pseudo_length: tokens of a pseudo-query; 0 if the head reads none.
    """
    return BatchPlan(
        batch_size=batch_size,
        devices=devices,
        negatives=config.data.negatives,
        length_multiple=config.tokens.length_multiple,
        max_query_length=config.tokens.query_length,
        max_passage_length=config.tokens.passage_length,
        pseudo_length=pseudo_length,
        data_seed=config.seed.data,
        negatives_seed=config.seed.negatives,
    )
