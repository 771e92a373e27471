"""A trained cross-encoder, opened for scoring: that of a run, or one in transformers' files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

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
)
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained, resolve
from jaxret.runs.run import open_model
from jaxret.runs.scorer import PairScorer
from jaxret.storage import read_json

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
    ) -> tuple[np.ndarray, tuple[Truncation, Truncation]]:
        """The scores, float32 [N], of pairs of ids; and what the length limits cost."""
        cut = Truncation("queries", self.tokenizer.query_length), Truncation("passages", self.tokenizer.passage_length)
        asked = self.tokenizer.queries((query.text for query in queries.values()), progress, cut[0])
        found = self.tokenizer.passages(passages.values(), progress, cut[1])
        numbers = [{key: row for row, key in enumerate(texts)} for texts in (queries, passages)]
        rows = [np.array([numbers[side][pair[side]] for pair in pairs], np.int64) for side in (0, 1)]
        return self.scorer(asked, found, rows[0], rows[1], progress), cut


def make_scorer(
    model: CrossEncoder, params: Any, mesh: Mesh, tokenizer: TextTokenizer, tokens_per_batch: int
) -> PairScorer:
    """A pair may have as many tokens as both its texts, and as the encoder has positions."""
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
    config = {"task": "reranking", "encoder": {"checkpoint": name}}
    origin = {"checkpoint": {"step": 0, "digest": digest(params)}, "config": config, "training_data": {}}
    scorer = make_scorer(model, params, mesh, tokenizer, tokens_per_batch or TOKENS_PER_BATCH)
    return Reranker(scorer, tokenizer, origin)
