"""Files -> tokenised examples, from their store, with what was skipped and cut printed before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.batches import TrainingSet
from jaxret.data.store import store_root
from jaxret.data.tokenized import ExampleSource, stored_examples
from jaxret.data.tokenizer import TextTokenizer


def load_examples(
    config: ConfigDict, which: str, tokenizer: TextTokenizer, progress: bool, say: Callable[[str], None]
) -> TrainingSet | None:
    """The `train` or `dev` examples, tokenised now or before, and prints what was skipped and cut; None if the config
    names none."""
    if not config.data[which]:
        return None
    path, split, training = config.data[which], config.data[f"{which}_split"], which == "train"
    imagine = config.data.pseudo_queries if training else ""
    source = ExampleSource(
        path=path,
        split=split,
        on_error=config.data.on_error,
        negatives_run=config.data.negatives_run if training else "",
        pseudo_queries="" if imagine == "query" else imagine,
    )
    data, report = stored_examples(source, tokenizer, store_root(config.data.store), progress, say)
    data = replace(data, imagine_queries=imagine == "query")
    say(f"{which}: {len(data):,} examples from {path}")
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
    if report:
        say(f"  {report}")
    return data


def data_record(train: TrainingSet | None, dev: TrainingSet | None) -> dict[str, dict[str, Any]]:
    """What data.json holds: the sizes and a digest of each set that there is."""
    return {
        name: {"examples": len(data), "passages": len(data.passages), "sha256": data.digest}
        for name, data in (("train", train), ("dev", dev))
        if data is not None
    }
