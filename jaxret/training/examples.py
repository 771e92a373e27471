"""Files -> tokenised examples, with what was skipped and cut printed before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.batches import TrainingSet, tokenize_examples
from jaxret.data.formats import Policy, read_examples, read_queries
from jaxret.data.tokenizer import TextTokenizer


def load_examples(
    config: ConfigDict, which: str, tokenizer: TextTokenizer, progress: bool, say: Callable[[str], None]
) -> TrainingSet | None:
    """Reads and tokenises the `train` or `dev` examples, and prints what was skipped and cut; None if the config names
    none."""
    if not config.data[which]:
        return None
    policy = Policy(config.data.on_error)
    source, split = config.data[which], config.data[f"{which}_split"]
    negatives_run = config.data.negatives_run or None
    examples = read_examples(source, split, policy, negatives_run=negatives_run if which == "train" else None)
    imagine = config.data.pseudo_queries if which == "train" else ""
    pseudo_queries = None
    if imagine and imagine != "query":
        pseudo_queries = {query.id: query.text for query in read_queries(imagine, policy)}
    data = tokenize_examples(examples, tokenizer, progress, pseudo_queries, imagine == "query")
    say(f"{which}: {len(data):,} examples from {source}")
    for truncation in data.truncations:
        say(f"  {truncation}")
    short = int((data.negatives.lengths < config.data.negatives).sum())
    if short:
        advice = "" if data.negatives.lengths.any() else " (none has any: data.negatives=0 does the same, faster)"
        say(
            f"  {short:,} examples have fewer than {config.data.negatives} hard negatives; "
            f"their slots stay empty{advice}"
        )
    if data.pseudo_queries is not None:
        found = int((data.pseudo_queries.lengths > 0).sum())
        if not found:
            raise ValueError(f"data.pseudo_queries={imagine}: none of its ids is that of a training passage")
        say(f"  {found:,} of {len(data.passages):,} passages have a pseudo-query")
    if policy.report():
        say(f"  {policy.report()}")
    return data


def data_record(train: TrainingSet | None, dev: TrainingSet | None) -> dict[str, dict[str, Any]]:
    """What data.json holds: the sizes and a digest of each set that there is."""
    return {
        name: {"examples": len(data), "passages": len(data.passages), "sha256": data.digest}
        for name, data in (("train", train), ("dev", dev))
        if data is not None
    }
