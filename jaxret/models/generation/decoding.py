"""Decoding of queries: greedy, sampling or beam search, in a loop with static shapes that is compiled once."""

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

IMPOSSIBLE = -1e9  # score of a sequence that cannot be chosen; finite, so that sums are, too


def generate_tokens(
    generator: T5Generator, options: DecodingOptions, params: Any, tokens: Tokens, numbers: UInt32[jax.Array, " B"]
) -> Int[jax.Array, "B queries U"]:
    """Return the token ids of the queries for each text, best beams first. After `end_id` comes `pad_id`.

    Args:
        tokens: tokens of the source texts. A row without tokens has no query.
        numbers: the index of each text in its source. It seeds the samples with the seed, so that they do not depend on
          the batch.
    """
    if options.method == "beam":
        return beam_search(generator, options, params, tokens)
    choose = partial(sample_token, options) if options.method == "sample" else likeliest_token
    return decode_tokens(generator, options, params, tokens, choose, numbers)


Choose = Callable[[Float[jax.Array, " vocabulary"], jax.Array], Int[jax.Array, ""]]


def likeliest_token(logits: Float[jax.Array, " vocabulary"], key: jax.Array) -> Int[jax.Array, ""]:
    """Return the token with the largest logit, the first of equal ones. `key` is not used."""
    return jnp.argmax(logits).astype(jnp.int32)


def sample_token(
    options: DecodingOptions, logits: Float[jax.Array, " vocabulary"], key: jax.Array
) -> Int[jax.Array, ""]:
    """Return a sampled token, after temperature, top-k and top-p (Holtzman et al. 2020) in this order."""
    logits = logits / options.temperature
    if not options.top_k and options.top_p == 1:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    values, ids = jax.lax.top_k(logits, min(options.top_k or len(logits), len(logits)))
    probabilities = jax.nn.softmax(values)
    # Sum over the likelier tokens. It is 0 for the likeliest token, which is never removed.
    likelier_sums = jnp.cumsum(probabilities) - probabilities
    values = jnp.where(likelier_sums < options.top_p, values, -jnp.inf)
    return ids[jax.random.categorical(key, values)].astype(jnp.int32)


class _Samples(NamedTuple):
    """State of greedy decoding and sampling after `step` tokens. The R rows are n sequences for each of B texts."""

    step: Int[jax.Array, ""]
    ids: Int[jax.Array, "R U"]
    last: Int[jax.Array, "R 1"]  # token to read next
    done: Bool[jax.Array, " R"]  # whether a sequence has ended
    cache: KeysValues


def decode_tokens(
    generator: T5Generator,
    options: DecodingOptions,
    params: Any,
    tokens: Tokens,
    choose: Choose,
    numbers: UInt32[jax.Array, " B"],
) -> Int[jax.Array, "B n U"]:
    """Return the token ids of n sequences for each text, whose tokens are chosen one after the other.

    Args:
        tokens: tokens of the source texts.
        choose: (logits, key) -> token.
        numbers: the index of each text in its source, which seeds its samples.
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
        jnp.repeat(~jnp.any(tokens.mask, axis=1), count),  # rows that only fill the batch are done at once
        cache,
    )
    state = jax.lax.while_loop(lambda state: (state.step < length) & ~jnp.all(state.done), body, state)
    return state.ids.reshape(-1, count, length)


class _Beams(NamedTuple):
    """State of beam search after `step` tokens, for B texts with n beams."""

    step: Int[jax.Array, ""]
    ids: Int[jax.Array, "B n U"]
    last: Int[jax.Array, "R 1"]  # token to read next
    scores: Float[jax.Array, "B n"]  # sums of log-probabilities
    complete_ids: Int[jax.Array, "B n U"]  # the best complete sequences
    complete_scores: Float[jax.Array, "B n"]  # scores of the complete sequences, divided by length ** length_penalty
    ended: Bool[jax.Array, "B n"]  # whether the complete sequence exists
    open: Bool[jax.Array, " B"]  # whether the complete sequences of a text may still change
    cache: KeysValues


def beam_search(
    generator: T5Generator, options: DecodingOptions, params: Any, tokens: Tokens
) -> Int[jax.Array, "B queries U"]:
    """Return the token ids of the best sequences of beam search, best first, like transformers' `generate`.

    The candidates of each step are the 2n best continuations of n beams. Candidates among the n best that end, or have
    the full length, become complete sequences, and the n best complete sequences are kept. The n best candidates that
    do not end are the next beams. A text is finished when its best beam, with the score that it would have if it ended
    now, is not above its worst complete sequence. With `early_stopping`, it is finished when it has n complete
    sequences.

    Args:
        tokens: tokens of the source texts.
    """
    config, beams, length = generator.config, options.beams, options.query_length
    source, cache = _start(generator, options, params, tokens)
    texts = len(tokens.ids)

    def body(state: _Beams) -> _Beams:
        logits, cache = _decode(generator, params, state.last, state.cache, state.step, source)
        return _extend(state, logits, cache, config.end_id, options)

    blank_ids = jnp.full((texts, beams, length), config.pad_id, jnp.int32)
    # All beams start equal and would stay equal, so only one counts at the start.
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
    return state.complete_ids[:, : options.queries]


def _extend(
    state: _Beams, logits: Float[jax.Array, "R vocabulary"], cache: KeysValues, end_id: int, options: DecodingOptions
) -> _Beams:
    """Return the state after one more token of each beam.

    Args:
        logits: scores of this token.
        cache: the cache with the tokens so far.
        end_id: id of the token that ends a sequence.
    """
    texts, beams = state.scores.shape
    first_rows = jnp.arange(texts)[:, None] * beams
    scores = jax.nn.log_softmax(logits).reshape(texts, beams, -1) + state.scores[..., None]
    words = scores.shape[-1]
    best, index = jax.lax.top_k(scores.reshape(texts, -1), 2 * beams)  # [B,2n]
    parents, next_ids = index // words, (index % words).astype(jnp.int32)
    ids = _take(state.ids, parents)
    ids = jax.lax.dynamic_update_index_in_dim(ids, next_ids, state.step, 2)
    ends = (next_ids == end_id) | (state.step + 1 == options.query_length)

    running_scores, order = jax.lax.top_k(jnp.where(ends, best + IMPOSSIBLE, best), beams)
    rows = (first_rows + _take(parents, order)).reshape(-1)

    divisor = (state.step + 1).astype(jnp.float32) ** options.length_penalty
    joins = ends & (jnp.arange(2 * beams) < beams)
    may_join = joins & state.open[:, None]
    candidates = jnp.where(may_join, best / divisor, best / divisor + IMPOSSIBLE)
    complete_scores, complete_order = jax.lax.top_k(jnp.concatenate([state.complete_scores, candidates], axis=1), beams)
    complete_ids = _take(jnp.concatenate([state.complete_ids, ids], axis=1), complete_order)
    ended = _take(jnp.concatenate([state.ended, may_join], axis=1), complete_order)

    worst = jnp.where(ended, jnp.min(complete_scores, axis=1, keepdims=True), IMPOSSIBLE)
    improvable = jnp.any(running_scores[:, :1] / divisor > worst, axis=1)
    full = jnp.all(ended, axis=1) if options.early_stopping else jnp.zeros(texts, bool)
    return _Beams(
        state.step + 1,
        _take(ids, order),
        _take(next_ids, order).reshape(-1, 1),
        running_scores,
        complete_ids,
        complete_scores,
        ended,
        state.open & improvable & ~full,
        jax.tree.map(lambda x: jnp.take(x, rows, axis=1), cache),
    )


def _start(generator: T5Generator, options: DecodingOptions, params: Any, tokens: Tokens) -> tuple[Source, KeysValues]:
    """Return the source of a batch, and an empty cache for the sequences to decode."""
    source = generator.apply({"params": params}, tokens, method="read")
    rows = len(tokens.ids) * options.sequences
    return source, empty_cache(generator.config.decoder, rows, options.query_length, generator.compute.dtype)


def _decode(
    generator: T5Generator, params: Any, last: jax.Array, cache: KeysValues, step: jax.Array, source: Source
) -> tuple[Float[jax.Array, "R vocabulary"], KeysValues]:
    """Return the logits after one more token of each row, and the cache with this token."""
    logits, cache = generator.apply({"params": params}, last, cache, step, source, method="decode")
    return logits[:, 0], cache


def _take(values: jax.Array, index: Int[jax.Array, "B m"]) -> jax.Array:
    """Return the entries of each text at `index` along the second axis."""
    return jnp.take_along_axis(values, index.reshape(*index.shape, *[1] * (values.ndim - 2)), axis=1)
