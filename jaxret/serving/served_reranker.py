"""A served cross-encoder. The thread of a request turns texts into pairs of tokens; the thread of the device turns
pairs into scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import Truncation
from jaxret.runs.reranker import Reranker, open_reranker
from jaxret.serving.refusal import RefusalError
from jaxret.serving.serve_options import ServeOptions, named_run
from jaxret.serving.shapes import batch_sizes, served_length, served_lengths
from jaxret.types import Ragged


class ServedReranker:
    """A cross-encoder's run, and its operations."""

    task = "reranking"

    def __init__(self, workdir: str, checkpoint: str, options: ServeOptions) -> None:
        """Open the run in `workdir`, a folder or NAME=FOLDER. Raises the errors of `open_reranker`."""
        self.name, workdir = named_run(workdir)
        self.options = options
        reranker = open_reranker(workdir, checkpoint)
        self.reranker: Reranker = replace(reranker, scorer=replace(reranker.scorer, padding=served_length))

    @property
    def most_tokens(self) -> int:
        """Upper bound of a pair's length in tokens."""
        return self.reranker.scorer.joiner.limit

    def pairs(self, question: str, texts: Sequence[str], cut: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the token ids of a question with each of some texts. Raises `RefusalError` for a text that is too
        long, unless it may be cut."""
        tokenizer = self.reranker.tokenizer
        truncation = Truncation("texts", tokenizer.passage_length)
        query = tokenizer.queries([question], truncation=truncation)[0]
        passages = tokenizer.passages([Passage("0", text) for text in texts], truncation=truncation)
        if truncation.cut and not cut:
            raise RefusalError(413, f"{truncation.cut} of the texts have too many tokens", "too_long")
        pairs = [(query, passage) for passage in passages]
        joiner = self.reranker.scorer.joiner
        lengths = [len(query) + len(passage) - 1 + len(joiner.between) for query, passage in pairs]
        if not cut and (longer := sum(length > joiner.limit for length in lengths)):
            message = f"{longer} of the texts have more than {joiner.limit} tokens with the query"
            raise RefusalError(413, message, "too_long")
        return pairs

    def score(self, items: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        """Return the scores of pairs of token ids (query, passage), in their order. Pairs of similar lengths are
        computed together."""
        scores: list[float] = [0.0] * len(items)
        order = np.argsort([len(query) + len(passage) for query, passage in items], kind="stable").tolist()
        for start in range(0, len(order), self.options.batch):
            part = order[start : start + self.options.batch]
            queries, passages = (Ragged.from_lists([items[row][side].tolist() for row in part]) for side in (0, 1))
            rows = np.arange(len(part))
            for row, score in zip(part, self.reranker.scorer(queries, passages, rows, rows).tolist(), strict=True):
                scores[row] = score
        return scores

    def warm_up(
        self, report: Callable[[str], object] = lambda text: None, should_stop: Callable[[], bool] = lambda: False
    ) -> int:
        """Compile all programs, and return their number, see `ServedRetriever.warm_up`."""
        tokenizer, between = self.reranker.tokenizer, len(self.reranker.scorer.joiner.between)
        for length in served_lengths(self.most_tokens):
            if length < 8:
                continue
            query, passage = (np.full(n, tokenizer.sep_id, np.int32) for n in (3, length - 2 - between))
            for count in batch_sizes(self.options.batch):
                if should_stop():
                    return self.reranker.scorer.program.count
                self.score([(query, passage)] * count)
        report(f"{self.name}: compiled pairs of up to {self.most_tokens} tokens")
        return self.reranker.scorer.program.count
