"""Files -> tokenised examples, and what to retrieve from, from their stores; what was skipped and cut is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxret.data.batches import AnyExamples, BatchPlan, TrainingSet
from jaxret.data.formats import Policy, describe, read_judgements, scan_corpus
from jaxret.data.records import Judgement
from jaxret.data.store import store_root
from jaxret.data.subset import take_queries
from jaxret.data.tokenized import ExampleSource, find_corpus, stored_corpus, stored_examples
from jaxret.data.tokenizer import TextTokenizer
from jaxret.training.group_losses import taught_by
from jaxret.training.validation import CORPUS_MEASURES, Collection

TRAINING_PASSAGES = "train"  # a validation.corpus that is at hand already


def example_source(config: ConfigDict, which: str) -> ExampleSource:
    """Where the `train` or `dev` examples of a config come from."""
    training, data = which == "train", config.data
    return ExampleSource(
        path=data[which],
        split=data[f"{which}_split"],
        on_error=data.on_error,
        negatives_run=data.negatives_run if training else data.dev_negatives_run,
        pseudo_queries=data.pseudo_queries if training and data.pseudo_queries != "query" else "",
        scores=training and bool(taught_by(config)),
        teacher_run=data.teacher_run if training and taught_by(config) else "",
    )


def load_examples(
    config: ConfigDict, which: str, tokenizer: TextTokenizer, progress: bool, say: Callable[[str], None]
) -> TrainingSet | None:
    """The `train` or `dev` examples, tokenised now or before, and prints what was skipped and cut; None if the config
    names none."""
    if not config.data[which]:
        return None
    source, training = example_source(config, which), which == "train"
    imagine = config.data.pseudo_queries if training else ""
    data, report = stored_examples(source, tokenizer, store_root(config.data.store), progress, say)
    data = replace(data, imagine_queries=imagine == "query")
    described = describe(source.path, "examples", source.split, source.negatives_run or None)
    say(f"{which}: {len(data):,} examples from {source.path} ({described})")
    if training and config.data.subset:
        data = take_queries(data, config.data.subset, config.seed.data)
        say(f"  of these, the {len(data):,} of {config.data.subset:,} queries (seed.data {config.seed.data})")
    for truncation in data.truncations:
        say(f"  {truncation}")
    short = int((data.negatives.lengths < config.data.negatives).sum())
    if short:
        advice = "" if data.negatives.lengths.any() else " (none has any: data.negatives=0 does the same, faster)"
        say(
            f"  {short:,} examples have fewer than {config.data.negatives} hard negatives; "
            f"their slots stay empty{advice}"
        )
    if data.teacher is not None:
        taught = data.teacher.taught
        if not taught:  # of the subset: without one, no example is an error of reading
            raise ValueError(
                f"data.subset={config.data.subset} (seed.data {config.seed.data}) of {source.path} has no example with "
                "a teacher's scores, of its target and of a negative; take more queries, or give these scores"
            )
        told = "have a teacher's scores, of their target and of a negative: they are taught"
        say(f"  {taught:,} of {len(data):,} examples {told}")
    if data.pseudo_queries is not None:
        found = int((data.pseudo_queries.lengths > 0).sum())
        if not found:
            raise ValueError(f"data.pseudo_queries={imagine}: none of its ids is that of a training passage")
        say(f"  {found:,} of {len(data.passages):,} passages have a pseudo-query")
    if report:
        say(f"  {report}")
    return data


def load_corpus(
    config: ConfigDict, dev: TrainingSet | None, tokenizer: TextTokenizer, progress: bool, say: Callable[[str], None]
) -> Collection | None:
    """validation.corpus, tokenised now or before, for the queries of the dev set, judged by its judgements; None if the
    config names no file. Raises DataError for bad records, ValueError if no relevant passage is in it."""
    path, source = config.validation.corpus, config.data.dev
    if not path or path == TRAINING_PASSAGES or dev is None:
        return None
    root, policy = store_root(config.data.store), Policy(config.data.on_error)
    texts = find_corpus(path, policy, tokenizer, root)
    texts = texts or stored_corpus(path, scan_corpus(path, policy), policy, tokenizer, root, progress, say)
    first: dict[str, int] = {}  # query -> its first example: there is one for each positive
    for row, query in enumerate(dev.query_ids):
        first.setdefault(query, row)
    say(f"validation: {len(texts.passages):,} passages from {path}, {len(first):,} queries\n  {texts.truncation}")
    judged = [j for j in read_judgements(source, config.data.dev_split, policy) if j.query_id in first]
    wanted = {j.passage_id for j in judged}
    rows = {key: str(row) for row, key in enumerate(texts.ids) if key in wanted}
    relevant = {j.passage_id for j in judged if j.relevance > 0}
    missing = len(relevant - rows.keys())
    if missing == len(relevant):
        raise ValueError(f"validation.corpus is {path}, which has none of the relevant passages of {source}")
    if missing:
        say(f"  {missing:,} of {len(relevant):,} relevant passages are not in it: they count as not found")
    number = {query: str(place) for place, query in enumerate(first)}
    judgements = tuple(
        Judgement(number[j.query_id], rows.get(j.passage_id, f"absent {j.passage_id}"), j.relevance) for j in judged
    )
    return Collection(dev.queries.take(np.array(list(first.values()))), texts.passages, judgements, CORPUS_MEASURES)


def data_record(train: AnyExamples | None, dev: TrainingSet | None) -> dict[str, dict[str, Any]]:
    """What data.json holds: of each set that there is, what it says of itself."""
    return {name: data.record for name, data in (("train", train), ("dev", dev)) if data is not None}


def plan_of(config: ConfigDict, batch_size: int, devices: int, pseudo_length: int = 0) -> BatchPlan:
    """How a config makes batches of examples."""
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
