"""Decoding of queries: greedy, by sampling, or by beam search, in a loop of static shapes that is compiled once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from jaxret.models.generation.decoding_options import DecodingOptions
from jaxret.models.generation.t5_decoder import KeysValues, Source, T5Generator, empty_cache
from jaxret.types import Tokens

IMPOSSIBLE = -1e9  # score of a sequence that cannot be chosen; sums with it stay finite


def generate_tokens(
    generator: T5Generator, options: DecodingOptions, params: Any, tokens: Tokens, numbers: UInt32[jax.Array, " B"]
) -> Int[jax.Array, "B queries U"]:
    """Return the token ids of queries for each text, best beams first; `pad_id` follows `end_id`.

    Args:
        tokens: of the source texts; a row without a token has no query.
        numbers: of the texts. A sample depends on the seed, the number and the logits, not on the batch.
    """
    if options.method == "beam":
        return beam_search(generator, options, params, tokens)
    choose = partial(sample_token, options) if options.method == "sample" else likeliest_token
    return decode_tokens(generator, options, params, tokens, choose, numbers)


Choose = Callable[[Float[jax.Array, " vocabulary"], jax.Array], Int[jax.Array, ""]]


def likeliest_token(logits: Float[jax.Array, " vocabulary"], key: jax.Array) -> Int[jax.Array, ""]:
    """Return the likeliest token, of equal ones the first."""
    return jnp.argmax(logits).astype(jnp.int32)


def sample_token(
    options: DecodingOptions, logits: Float[jax.Array, " vocabulary"], key: jax.Array
) -> Int[jax.Array, ""]:
    """Return a sample of the tokens that temperature, top-k and top-p (Holtzman et al. 2020) leave, in this order."""
    logits = logits / options.temperature
    if not options.top_k and options.top_p == 1:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    values, ids = jax.lax.top_k(logits, min(options.top_k or len(logits), len(logits)))
    probabilities = jax.nn.softmax(values)
    before = jnp.cumsum(probabilities) - probabilities  # of the likelier tokens; 0 for the first, which always stays
    values = jnp.where(before < options.top_p, values, -jnp.inf)
    return ids[jax.random.categorical(key, values)].astype(jnp.int32)


class _Samples(NamedTuple):
    """State of greedy decoding and sampling after `step` tokens; R rows are B texts with n sequences each."""

    step: Int[jax.Array, ""]
    ids: Int[jax.Array, "R U"]
    last: Int[jax.Array, "R 1"]  # token to read next
    done: Bool[jax.Array, " R"]
    cache: KeysValues


def decode_tokens(
    generator: T5Generator,
    options: DecodingOptions,
    params: Any,
    tokens: Tokens,
    choose: Choose,
    numbers: UInt32[jax.Array, " B"],
) -> Int[jax.Array, "B n U"]:
    """Return token ids that are chosen one after the other, n sequences for each text.

    Args:
        tokens: of the source texts.
        choose: (logits, key) -> token.
        numbers: of the texts.
    """
    config, count, length = generator.config, options.sequences, options.query_length
    source, cache = _start(generator, options, params, tokens)
    rows = len(numbers) * count
    base = jax.random.key(options.seed)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jax.vmap(fold, (0, None))(fold(base, numbers), jnp.arange(count)).reshape(rows)

    def body(state: _Samples) -> _Samples:
        logits, cache = _decode(generator, params, state.last, state.cache, state.step, source)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
        next_ids = jnp.where(state.done, config.pad_id, jax.vmap(choose)(logits, step_keys))
        ids = jax.lax.dynamic_update_index_in_dim(state.ids, next_ids, state.step, 1)
        return _Samples(state.step + 1, ids, next_ids[:, None], state.done | (next_ids == config.end_id), cache)

    state = _Samples(
        jnp.int32(0),
        jnp.full((rows, length), config.pad_id, jnp.int32),
        jnp.full((rows, 1), config.start_id, jnp.int32),
        jnp.repeat(~jnp.any(tokens.mask, axis=1), count),  # a row that fills the batch waits for no token
        cache,
    )
    state = jax.lax.while_loop(lambda state: (state.step < length) & ~jnp.all(state.done), body, state)
    return state.ids.reshape(-1, count, length)


class _Beams(NamedTuple):
    """State of beam search after `step` tokens, for B texts with n beams."""

    step: Int[jax.Array, ""]
    ids: Int[jax.Array, "B n U"]
    last: Int[jax.Array, "R 1"]
    scores: Float[jax.Array, "B n"]  # sums of log-probabilities
    whole_ids: Int[jax.Array, "B n U"]  # of the best sequences that have ended
    whole_scores: Float[jax.Array, "B n"]  # divided by length ** length_penalty
    ended: Bool[jax.Array, "B n"]  # whether there is such a sequence
    open: Bool[jax.Array, " B"]  # whether a text's whole sequences may still change
    cache: KeysValues


def beam_search(
    generator: T5Generator, options: DecodingOptions, params: Any, tokens: Tokens
) -> Int[jax.Array, "B queries U"]:
    """Return the token ids of the best sequences of beam search, best first, as transformers' `generate` does it.

    Of n beams the 2n best continuations are candidates. Those among the n best that end, or are of full length, join
    the whole sequences, of which the n best are kept; the n best candidates that do not end are the next beams. A text
    is finished when its best beam, with its score divided as if it ended now, is not above its worst whole sequence.
    With `early_stopping` it is finished when it has n whole sequences.

    Args:
        tokens: of the source texts.
    """
    config, beams, length = generator.config, options.beams, options.query_length
    source, cache = _start(generator, options, params, tokens)
    texts = len(tokens.ids)
    first_rows = jnp.arange(texts)[:, None] * beams

    def body(state: _Beams) -> _Beams:
        logits, cache = _decode(generator, params, state.last, state.cache, state.step, source)
        scores = jax.nn.log_softmax(logits).reshape(texts, beams, -1) + state.scores[..., None]
        words = scores.shape[-1]
        best, index = jax.lax.top_k(scores.reshape(texts, -1), 2 * beams)  # [B,2n]
        parents, next_ids = index // words, (index % words).astype(jnp.int32)
        ids = _take(state.ids, parents)
        ids = jax.lax.dynamic_update_index_in_dim(ids, next_ids, state.step, 2)
        ends = (next_ids == config.end_id) | (state.step + 1 == length)

        running_scores, order = jax.lax.top_k(jnp.where(ends, best + IMPOSSIBLE, best), beams)
        rows = (first_rows + _take(parents, order)).reshape(-1)

        divisor = (state.step + 1).astype(jnp.float32) ** options.length_penalty
        joins = ends & (jnp.arange(2 * beams) < beams)
        may_join = joins & state.open[:, None]
        candidates = jnp.where(may_join, best / divisor, best / divisor + IMPOSSIBLE)
        whole_scores, whole_order = jax.lax.top_k(jnp.concatenate([state.whole_scores, candidates], axis=1), beams)
        whole_ids = _take(jnp.concatenate([state.whole_ids, ids], axis=1), whole_order)
        ended = _take(jnp.concatenate([state.ended, may_join], axis=1), whole_order)

        worst = jnp.where(ended, jnp.min(whole_scores, axis=1, keepdims=True), IMPOSSIBLE)
        improvable = jnp.any(running_scores[:, :1] / divisor > worst, axis=1)
        full = jnp.all(ended, axis=1) if options.early_stopping else jnp.zeros(texts, bool)
        return _Beams(
            state.step + 1,
            _take(ids, order),
            _take(next_ids, order).reshape(-1, 1),
            running_scores,
            whole_ids,
            whole_scores,
            ended,
            state.open & improvable & ~full,
            jax.tree.map(lambda x: jnp.take(x, rows, axis=1), cache),
        )

    blank_ids = jnp.full((texts, beams, length), config.pad_id, jnp.int32)
    # Of equal beams at the start one counts, else all would stay equal.
    scores = jnp.where(jnp.arange(beams) == 0, 0.0, IMPOSSIBLE) * jnp.ones((texts, 1))
    state = _Beams(
        jnp.int32(0),
        blank_ids,
        jnp.full((texts * beams, 1), config.start_id, jnp.int32),
        scores,
        blank_ids,
        jnp.full((texts, beams), IMPOSSIBLE),
        jnp.zeros((texts, beams), bool),
        jnp.any(tokens.mask, axis=1),
        cache,
    )
    state = jax.lax.while_loop(lambda state: (state.step < length) & jnp.any(state.open), body, state)
    return state.whole_ids[:, : options.queries]


def _start(generator: T5Generator, options: DecodingOptions, params: Any, tokens: Tokens) -> tuple[Source, KeysValues]:
    """Return the source of a batch, and an empty cache for its sequences."""
    source = generator.apply({"params": params}, tokens, method="read")
    rows = len(tokens.ids) * options.sequences
    return source, empty_cache(generator.config.decoder, rows, options.query_length, generator.compute.dtype)


def _decode(
    generator: T5Generator, params: Any, last: jax.Array, cache: KeysValues, step: jax.Array, source: Source
) -> tuple[Float[jax.Array, "R vocabulary"], KeysValues]:
    """Return the logits after one more token of each row, and the cache with it."""
    logits, cache = generator.apply({"params": params}, last, cache, step, source, method="decode")
    return logits[:, 0], cache


def _take(values: jax.Array, index: Int[jax.Array, "B m"]) -> jax.Array:
    """Return the entries of each text at `index` along the second axis."""
    return jnp.take_along_axis(values, index.reshape(*index.shape, *[1] * (values.ndim - 2)), axis=1)
