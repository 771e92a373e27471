"""Open a trained cross-encoder for scoring, from a run or from a directory in transformers' format."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxret.data.records import Passage, Query
from jaxret.data.tokens.pairs import PairJoiner
from jaxret.data.tokens.tokenizer import TextTokenizer, Truncation
from jaxret.models.cross_encoder import (
    CrossEncoderModel,
    CrossEncoderModule,
    classifier,
    load_score_head,
    make_cross_encoder_model,
    read_cross_encoder,
    require_passage_room,
)
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained, resolve_encoder
from jaxret.parallel.mesh import make_mesh, shardings
from jaxret.parallel.progress import Progress
from jaxret.runs.provenance import model_origin
from jaxret.runs.run import RunOverrides, open_model
from jaxret.runs.scorer import OnProgress, PairScorer, ignore_progress
from jaxret.storage.checkpoint import tree_digest
from jaxret.types import Ragged

QUERY_LENGTH, TOKENS_PER_BATCH = 128, 16384  # defaults for a cross-encoder without a run


@dataclass(frozen=True)
class Reranker:
    """A function that scores pairs of query and passage texts."""

    scorer: PairScorer
    tokenizer: TextTokenizer
    # Description of the model in results (JSON): checkpoint, config and, for a run, its training data.
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __call__(
        self,
        queries: Mapping[str, Query],
        passages: Mapping[str, Passage],
        pairs: Sequence[tuple[str, str]],
        progress: bool = False,
    ) -> tuple[np.ndarray, tuple[Truncation, ...]]:
        """Return the scores of pairs, float32 [N], and the effect of the length limits.

        Args:
            queries: queries by id.
            passages: passages by id.
            pairs: (query id, passage id) of each pair.
            progress: whether to show a bar.
        """
        texts = self.scorer_of(queries, passages, progress)
        with Progress("score", len(pairs), "pair", progress=progress) as bar:
            return texts(pairs, bar.update), texts.cut

    def scorer_of(
        self, queries: Mapping[str, Query], passages: Mapping[str, Passage], progress: bool = False
    ) -> TextScores:
        """Tokenize texts, and return a function that scores pairs of them."""
        cut = Truncation("queries", self.tokenizer.query_length), Truncation("passages", self.tokenizer.passage_length)
        query_tokens = self.tokenizer.queries(queries.values(), progress, cut[0])
        passage_tokens = self.tokenizer.passages(passages.values(), progress, cut[1])
        pairs = Truncation("pairs", self.scorer.joiner.limit)
        return TextScores(self.scorer, query_tokens, passage_tokens, _numbers(queries), _numbers(passages), cut, pairs)


def _numbers(texts: Iterable[str]) -> dict[str, int]:
    return {key: row for row, key in enumerate(texts)}


@dataclass(frozen=True)
class TextScores:
    """Scores pairs of tokenized texts."""

    scorer: PairScorer  # Model and its programs
    queries: Ragged = field(repr=False)  # Token ids of queries
    passages: Ragged = field(repr=False)  # Token ids of passages
    query_numbers: Mapping[str, int] = field(repr=False)  # Row of each query id
    passage_numbers: Mapping[str, int] = field(repr=False)  # Row of each passage id
    text_truncations: tuple[Truncation, Truncation]  # Effect of the length limits of queries and of passages
    # Effect of the length limit of a pair: the encoder may have fewer positions than both texts have tokens
    pair_truncation: Truncation

    def __call__(self, pairs: Sequence[tuple[str, str]], on_progress: OnProgress = ignore_progress) -> np.ndarray:
        """Return the scores of pairs of ids, float32 [N]; `on_progress` gets the size of each finished batch."""
        query_rows = np.array([self.query_numbers[query] for query, _ in pairs], np.int64)
        passage_rows = np.array([self.passage_numbers[passage] for _, passage in pairs], np.int64)
        scores = self.scorer(self.queries, self.passages, query_rows, passage_rows, on_progress)
        for length in self.scorer.joiner.whole_lengths(self.queries, self.passages, query_rows, passage_rows).tolist():
            self.pair_truncation.add(length, 0)
        return scores

    @property
    def cut(self) -> tuple[Truncation, ...]:
        """Return the effects of the length limits so far; the effect on pairs only if a pair was cut."""
        return (*self.text_truncations, *([self.pair_truncation] if self.pair_truncation.cut else []))


def make_pair_scorer(
    model: CrossEncoderModel, params: Any, mesh: Mesh, tokenizer: TextTokenizer, tokens_per_batch: int
) -> PairScorer:
    """Return a scorer of pairs with as many tokens as both length limits together, but at most the encoder's positions.

    Args:
        model: the model.
        params: parameters of the model.
        mesh: the devices.
        tokenizer: tokenizer with the length limits.
        tokens_per_batch: approximate tokens of a batch.

    Raises:
        ValueError: a query may take all positions.
    """
    require_passage_room(tokenizer.query_length, model.longest)
    markers = classifier(model.module.config).separators
    pair_length = tokenizer.query_length + tokenizer.passage_length + markers - 2
    joiner = PairJoiner((tokenizer.sep_id,) * (markers - 1), min(pair_length, model.longest), tokenizer.pad_id)
    return PairScorer(model, params, mesh, joiner, tokens_per_batch)


def open_reranker(workdir: str | os.PathLike[str], checkpoint: str = "best", **overrides: Any) -> Reranker:
    """Open the run of a cross-encoder; `overrides` are fields of `RunOverrides`. Raises the errors of `open_run`."""
    run = open_model(workdir, "reranking", make_cross_encoder_model, checkpoint, RunOverrides(**overrides))
    tokens = run.config.encode.tokens_per_batch
    scorer = make_pair_scorer(run.model, run.params, run.mesh, run.tokenizer, tokens)
    return Reranker(scorer, run.tokenizer, model_origin(run))


def open_pretrained_reranker(
    name: str,
    query_length: int | None = None,
    passage_length: int | None = None,
    tokens_per_batch: int | None = None,
    download: bool = False,
) -> Reranker:
    """Open a cross-encoder with one label in transformers' format; scores are its logits.

    Args:
        name: directory, or name on the hub.
        query_length: largest length of a query in tokens; None: 128, but at most half the encoder's positions.
        passage_length: largest length of a passage in tokens; None: the encoder's positions.
        tokens_per_batch: approximate tokens of a batch; None: 16384.
        download: whether the model may be downloaded.

    Raises:
        FileNotFoundError: the model does not exist, as in `models.encoders.pretrained`.
        ValueError: the model is not supported, or its head is incomplete.
    """
    directory = resolve_encoder(name, download)
    shapes = read_cross_encoder(directory)
    _, encoder = load_pretrained(directory, ("pooler", *classifier(shapes).prefixes), shapes)
    model = CrossEncoderModel(CrossEncoderModule(shapes, Compute()))
    tokenizer = TextTokenizer.load(
        directory,
        query_length or min(QUERY_LENGTH, model.longest // 2),
        passage_length or model.longest,
        title_separator=" ",
    )
    model.check_tokenizer(tokenizer)
    mesh = make_mesh(devices=jax.local_devices())
    params = {"encoder": encoder, "head": load_score_head(directory, shapes)}
    params = jax.device_put(params, shardings(mesh, params))
    config, weights = {"task": "reranking", "encoder": {"checkpoint": name}}, tree_digest(params)
    start = {"start": {"weights": weights}}  # no file tells how it was trained
    origin = {"checkpoint": {"step": 0, "digest": weights}, "config": config, "training_data": start}
    scorer = make_pair_scorer(model, params, mesh, tokenizer, tokens_per_batch or TOKENS_PER_BATCH)
    return Reranker(scorer, tokenizer, origin)
