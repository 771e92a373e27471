"""Options of generating queries for a corpus."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, option
from jaxret.storage.leases import BOUND

# For instruction-tuned models; models that were trained to write queries (doc2query) want "{passage}".
DEFAULT_PROMPT = "Passage: {passage} Write a search query that this passage answers. Query:"
PSEUDO_QUERIES, TRAINING, EXPANDED = "pseudo_queries", "training", "expanded"


@dataclass(frozen=True)
class GenerationOptions:
    """How passages are read and queries written. Raises ValueError for a value that is not allowed."""

    prompt: str = option(
        DEFAULT_PROMPT, "text that the model reads; {passage} is title and text, {title} and {text} one of them"
    )
    passage_length: int = option(
        256, "tokens of a prompt with its passage, at most; a longer passage is cut", lower_bound=2
    )
    write: tuple[str, ...] = option(
        (PSEUDO_QUERIES,),
        "pseudo_queries (the first query of each passage, for data.pseudo_queries), training (a BEIR folder for "
        "data.train), expanded (a corpus with the queries in its texts)",
        lower_bound=None,
    )
    dtype: str = option("float32", "type of products and weight matrices", ("float32", "bfloat16"))
    tokens_per_batch: int = option(
        16_384, "tokens of prompts that are computed at a time, over all sequences", lower_bound=1
    )
    part_rows: int = option(
        1024, "passages of one part of the work; a killed job loses at most one part", lower_bound=1
    )
    on_error: str = shared_options.on_error()
    lease: float = option(
        BOUND, "seconds after which hosts take over the parts of a job that does not renew its leases", lower_bound=1
    )

    def __post_init__(self) -> None:
        check_options(self)
        outputs = PSEUDO_QUERIES, TRAINING, EXPANDED
        if unknown := [name for name in self.write if name not in outputs]:
            raise ValueError(f"write is {unknown[0]!r}; it must be one of {', '.join(map(repr, outputs))}")
