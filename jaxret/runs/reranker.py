"""A trained cross-encoder, opened for scoring: that of a run, or one in transformers' files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jaxret.checkpoint import digest
from jaxret.data.pairs import Joiner
from jaxret.data.records import Passage, Query
from jaxret.data.tokenizer import TextTokenizer, Truncation
from jaxret.distributed import make_mesh, shardings
from jaxret.models.cross_encoder import (
    CrossEncoder,
    CrossEncoderModule,
    build_cross_encoder,
    classifier,
    load_head,
    read_cross_encoder,
    require_room,
)
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained, resolve
from jaxret.runs.run import open_model
from jaxret.runs.scorer import Done, PairScorer, untold
from jaxret.storage import read_json
from jaxret.types import Ragged

QUERY_LENGTH, TOKENS_PER_BATCH = 128, 16384  # of a cross-encoder that says nothing of them


@dataclass(frozen=True)
class Reranker:
    """Scores of queries with passages, as texts. origin: what it is, for results (JSON): checkpoint, config, and of a
    run what it was trained on."""

    scorer: PairScorer
    tokenizer: TextTokenizer
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __call__(
        self,
        queries: Mapping[str, Query],
        passages: Mapping[str, Passage],
        pairs: Sequence[tuple[str, str]],
        progress: bool = False,
    ) -> tuple[np.ndarray, tuple[Truncation, ...]]:
        """The scores, float32 [N], of pairs of ids; and what the length limits cost."""
        texts = self.over(queries, passages, progress)
        with tqdm(total=len(pairs), desc="score", unit="pair", disable=not progress, delay=1) as bar:
            return texts(pairs, bar.update), texts.cut

    def over(self, queries: Mapping[str, Query], passages: Mapping[str, Passage], progress: bool = False) -> TextScores:
        """Tokenises texts, so that pairs of them can be scored."""
        cut = Truncation("queries", self.tokenizer.query_length), Truncation("passages", self.tokenizer.passage_length)
        asked = self.tokenizer.queries((query.text for query in queries.values()), progress, cut[0])
        found = self.tokenizer.passages(passages.values(), progress, cut[1])
        pairs = Truncation("pairs", self.scorer.joiner.limit)
        return TextScores(self.scorer, asked, found, _numbers(queries), _numbers(passages), cut, pairs)


def _numbers(texts: Iterable[str]) -> dict[str, int]:
    return {key: row for row, key in enumerate(texts)}


@dataclass(frozen=True)
class TextScores:
    """Scores of pairs of tokenised texts; numbers: of ids, their rows. texts_cut: what the length limits cost;
    pairs_cut: what pairs that were scored lose because the encoder has not as many positions as both texts have
    tokens."""

    scorer: PairScorer
    queries: Ragged = field(repr=False)
    passages: Ragged = field(repr=False)
    query_numbers: Mapping[str, int] = field(repr=False)
    passage_numbers: Mapping[str, int] = field(repr=False)
    texts_cut: tuple[Truncation, Truncation]
    pairs_cut: Truncation

    def __call__(self, pairs: Sequence[tuple[str, str]], done: Done = untold) -> np.ndarray:
        """float32 [N]."""
        asked = np.array([self.query_numbers[query] for query, _ in pairs], np.int64)
        found = np.array([self.passage_numbers[passage] for _, passage in pairs], np.int64)
        scores = self.scorer(self.queries, self.passages, asked, found, done)
        for length in self.scorer.joiner.whole_lengths(self.queries, self.passages, asked, found).tolist():
            self.pairs_cut.add(length, 0)
        return scores

    @property
    def cut(self) -> tuple[Truncation, ...]:
        """What was lost so far, of pairs only if something was."""
        return (*self.texts_cut, *([self.pairs_cut] if self.pairs_cut.cut else []))


def make_scorer(
    model: CrossEncoder, params: Any, mesh: Mesh, tokenizer: TextTokenizer, tokens_per_batch: int
) -> PairScorer:
    """A pair may have as many tokens as both its texts, and as the encoder has positions. Raises ValueError where a
    query may take them all."""
    require_room(tokenizer.query_length, model.longest)
    markers = classifier(model.module.config).separators
    both = tokenizer.query_length + tokenizer.passage_length + markers - 2
    joiner = Joiner((tokenizer.sep_id,) * (markers - 1), min(both, model.longest), tokenizer.pad_id)
    return PairScorer(model, params, mesh, joiner, tokens_per_batch)


def open_reranker(workdir: str | os.PathLike[str], checkpoint: str = "best", **changed: Any) -> Reranker:
    """Opens the run of a cross-encoder. changed: query_length, passage_length, tokens_per_batch and attention as for
    `runs.run.open_run`, with the same errors."""
    opened = open_model(workdir, "reranking", build_cross_encoder, checkpoint, **changed)
    assert isinstance(opened.model, CrossEncoder)
    tokens = opened.config.encode.tokens_per_batch
    scorer = make_scorer(opened.model, opened.params, opened.mesh, opened.tokenizer, tokens)
    folder = opened.workdir
    files = {"config": folder.config, "training_data": folder.data, "environment": folder.environment}
    files |= {"lineage": folder.lineage} if folder.lineage.exists() else {}
    made = {name: read_json(path) for name, path in files.items()}
    return Reranker(scorer, opened.tokenizer, {"checkpoint": opened.checkpoint, **made})


def open_stock(
    name: str,
    query_length: int | None = None,
    passage_length: int | None = None,
    tokens_per_batch: int | None = None,
    download: bool = False,
) -> Reranker:
    """Opens a cross-encoder in transformers' files, of one label; scores are its logits. Raises FileNotFoundError and
    ValueError as `models.encoders.pretrained` does, and for a head that is not whole."""
    directory = resolve(name, download)
    shapes = read_cross_encoder(directory)
    _, encoder = load_pretrained(directory, ("pooler", *classifier(shapes).prefixes), shapes)
    model = CrossEncoder(CrossEncoderModule(shapes, Compute()))
    tokenizer = TextTokenizer.load(
        directory,
        query_length or min(QUERY_LENGTH, model.longest // 2),
        passage_length or model.longest,
        title_separator=" ",
    )
    model.check_tokenizer(tokenizer)
    mesh = make_mesh(devices=jax.local_devices())
    params = {"encoder": encoder, "head": load_head(directory, shapes)}
    params = jax.device_put(params, shardings(mesh, params))
    config, weights = {"task": "reranking", "encoder": {"checkpoint": name}}, digest(params)
    start = {"start": {"weights": weights}}  # nothing else is known of its training
    origin = {"checkpoint": {"step": 0, "digest": weights}, "config": config, "training_data": start}
    scorer = make_scorer(model, params, mesh, tokenizer, tokens_per_batch or TOKENS_PER_BATCH)
    return Reranker(scorer, tokenizer, origin)
