"""Generate queries for many passages, sorted by the length of their prompts, in batches of few static shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxret.data.records import Passage
from jaxret.data.tokens.backend import load_backend
from jaxret.models.encoders.layers import Compute
from jaxret.models.generation.decoding import generate_tokens
from jaxret.models.generation.decoding_options import DecodingOptions
from jaxret.models.generation.generator_weights import load_generator
from jaxret.models.generation.t5_decoder import T5Generator
from jaxret.parallel.mesh import ROW_AXES, Program, path_name, replicated_sharding, row_sharding, shard_whole_batch
from jaxret.runs.embedder import plan_batches
from jaxret.types import Ragged, Tokens

FIELDS = ("{passage}", "{title}", "{text}")
_CHARACTERS = 64  # characters of a passage that are read for each token of the limit; English has 4 to 5 per token


@dataclass(frozen=True)
class PromptTokenizer:
    """A function that turns a passage into the token ids of a prompt. A long passage is cut, but never the prompt."""

    backend: Any  # tokenizers.Tokenizer of the generator
    template: str  # prompt with at least one of "{passage}" (title and text), "{title}" and "{text}"
    limit: int  # largest number of tokens, including the end of text
    end_id: int  # id of the end of text

    def __post_init__(self) -> None:
        if not any(name in self.template for name in FIELDS):
            raise ValueError(f"the prompt {self.template!r} has no passage; it must have one of {', '.join(FIELDS)}")
        size = len(self._ids(self._prompt("", "")))
        if size >= self.limit:
            raise ValueError(
                f"the prompt takes {size} tokens, which leaves none of {self.limit} for a passage; shorten the prompt "
                "or allow more tokens"
            )

    def __call__(self, passage: Passage) -> tuple[list[int], bool]:
        """Return the ids of the prompt with a passage, and whether the passage was cut."""
        longest = _CHARACTERS * self.limit
        title, text = passage.title.strip()[:longest], passage.text.strip()[:longest]
        cut = len(title) + len(text) < len(passage.title.strip()) + len(passage.text.strip())
        ids = self._ids(self._prompt(title, text))
        while len(ids) > self.limit:
            cut = True
            # The title is cut only if no text is left.
            title, text = (title, self._shorten(text, len(ids))) if text else (self._shorten(title, len(ids)), "")
            ids = self._ids(self._prompt(title, text))
        return ids, cut

    def _shorten(self, text: str, length: int) -> str:
        """Return a text without its last tokens: as many as `length` exceeds the limit. At least one character
        remains."""
        ends = [end for _, end in self.backend.encode(text, add_special_tokens=False).offsets]
        count = len(ends) - (length - self.limit)
        return text[: min(ends[count - 1], len(text) - 1)].rstrip() if count > 0 else ""

    def _prompt(self, title: str, text: str) -> str:
        passage = " ".join(part for part in (title, text) if part)
        values = dict(zip(FIELDS, (passage, title, text), strict=True))
        # In one pass, so that "{title}" in the text of a passage is not replaced.
        parts, template = [], self.template
        while template:
            name = min((name for name in FIELDS if name in template), key=template.index, default="")
            prefix, _, template = template.partition(name) if name else (template, "", "")
            parts += [prefix, values.get(name, "")]
        return "".join(parts)

    def _ids(self, prompt: str) -> list[int]:
        return [*self.backend.encode(prompt, add_special_tokens=False).ids, self.end_id]


@dataclass(frozen=True)
class QueryGenerator:
    """A T5 model that generates queries for any number of passages."""

    generator: T5Generator
    params: Any = field(repr=False)  # parameters, replicated on every device
    mesh: Mesh
    prompts: PromptTokenizer  # turns passages into token ids
    options: DecodingOptions
    tokens_per_batch: int  # approximate tokens of a batch of prompts, times the sequences decoded for each prompt

    @cached_property
    def program(self) -> Program:
        """Return the program that generates queries for a batch, which is compiled for each shape.

        Devices decode their rows independently, so that a device with short queries does not wait at every token.
        """
        generate = jax.shard_map(
            partial(generate_tokens, self.generator, self.options),
            mesh=self.mesh,
            in_specs=(P(), P(ROW_AXES), P(ROW_AXES)),
            out_specs=P(ROW_AXES),
            check_vma=False,  # the loop begins with constants, and has no collective
        )
        rows = row_sharding(self.mesh)
        return Program(
            generate,
            in_shardings=(replicated_sharding(self.mesh), rows, rows),
            out_shardings=replicated_sharding(self.mesh),
        )

    def __call__(
        self, passages: Sequence[Passage], first: int, advance: Callable[[int], object] | None = None
    ) -> tuple[list[list[str]], int]:
        """Return the queries of each passage, without empty and repeated ones, and the number of passages that were
        cut.

        Args:
            passages: passages in the order of the corpus.
            first: number of the first passage in the corpus; samples depend on this number.
            advance: called with the number of passages of each finished batch.
        """
        prompts = [self.prompts(passage) for passage in passages]
        texts, pad_id = Ragged.from_lists([ids for ids, _ in prompts]), self.generator.config.pad_id
        queries: list[list[str]] = [[] for _ in passages]
        budget = max(self.tokens_per_batch // self.options.sequences, 1)
        for rows, size, length in plan_batches(texts.lengths, budget, self.mesh.size):
            ids, mask = np.full((size, length), pad_id, np.int32), np.zeros((size, length), bool)
            numbers = np.zeros(size, np.uint32)
            ids[: len(rows)], mask[: len(rows)] = texts.padded(rows, length, pad_id)
            numbers[: len(rows)] = first + rows
            batch = shard_whole_batch(self.mesh, (Tokens(ids, mask), numbers))
            token_ids = np.asarray(jax.device_get(self.program(self.params, *batch)))
            for row, sequences in zip(rows, token_ids, strict=False):
                queries[row] = self.texts(sequences)
            if advance:
                advance(len(rows))
        return queries, sum(cut for _, cut in prompts)

    def texts(self, sequences: np.ndarray) -> list[str]:
        """Return the distinct texts of one passage's queries [queries, U], best first, without empty ones."""
        words = (self.prompts.backend.decode(ids.tolist(), skip_special_tokens=True) for ids in sequences)
        return [text for text in dict.fromkeys(" ".join(text.split()) for text in words) if text]


def open_query_generator(
    directory: str | Path,
    template: str,
    limit: int,
    options: DecodingOptions,
    dtype: str,
    tokens_per_batch: int,
    mesh: Mesh,
) -> QueryGenerator:
    """Return the generator of a Hugging Face directory with its weights on the devices.

    Args:
        directory: T5 with its decoder, and its tokenizer.
        template: prompt, as in PromptTokenizer.
        limit: largest number of tokens of a prompt with its passage.
        dtype: type of products and kernels: "float32" or "bfloat16".
        tokens_per_batch: see QueryGenerator.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: weights or tokenizer do not fit, or the prompt leaves no token for a passage.
    """
    config, params = load_generator(directory)
    backend, special = load_backend(Path(directory))
    if special["eos"] != config.end_id:
        raise ValueError(
            f"{directory}: the tokenizer's end of text has the id {special['eos']}, but eos_token_id of config.json "
            f"is {config.end_id}; they must be the same"
        )
    backend.no_padding()
    backend.no_truncation()
    compute = Compute(jnp.dtype(dtype))

    def place(path: tuple[Any, ...], leaf: np.ndarray) -> jax.Array:
        kernel = path_name(path).endswith("kernel")  # norms, tables and hidden states stay float32
        return jax.device_put(leaf.astype(compute.dtype) if kernel else leaf, replicated_sharding(mesh))

    params = jax.tree_util.tree_map_with_path(place, params)
    prompts = PromptTokenizer(backend, template, limit, config.end_id)
    return QueryGenerator(T5Generator(config, compute), params, mesh, prompts, options, tokens_per_batch)
