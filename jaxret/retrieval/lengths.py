"""A run with other length limits than it was trained with."""

from __future__ import annotations

from dataclasses import replace

from jaxret.runs.run import Run


def with_lengths(run: Run, query_length: int = 0, passage_length: int = 0, tokens_per_batch: int = 0) -> Run:
    """The run with these limits, its contract too; 0 keeps the run's own. Raises ValueError for what the encoder cannot
    have."""
    tokenizer = run.tokenizer
    lengths = {"query_length": query_length, "passage_length": passage_length}
    lengths = {name: length or getattr(tokenizer, name) for name, length in lengths.items()}
    for name, length in lengths.items():
        if not 3 <= length <= run.retriever.longest:
            raise ValueError(f"{name} is {length}; it must be 3 to {run.retriever.longest}, the encoder's positions")
    if tokens_per_batch < 0:
        raise ValueError(f"tokens_per_batch is {tokens_per_batch}; it must be at least 1")
    config = run.config.copy_and_resolve_references()
    with config.unlocked():
        config.tokens.update(lengths)
        config.encode.tokens_per_batch = tokens_per_batch or config.encode.tokens_per_batch
    own = replace(tokenizer, **lengths, truncation={})
    return replace(run, config=config, tokenizer=own, contract=run.contract | lengths)
