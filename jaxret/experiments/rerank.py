"""Open a cross-encoder, and rerank a run or score training data with it: `jaxret rerank`."""

from __future__ import annotations

from jaxret.data.formats import TrainingSource
from jaxret.experiments.rerank_request import RerankRequest
from jaxret.experiments.rerank_run import rerank_run
from jaxret.experiments.score_examples import score_examples
from jaxret.parallel.processes import require_platform
from jaxret.runs.reranker import Reranker, open_pretrained_reranker, open_reranker


def rerank(request: RerankRequest) -> None:
    """Write the reranked run, or the scored training data, of a request. Raises the errors of `rerank_run` and
    `score_examples`."""
    if request.run:
        _ = request.source, request.texts, request.rankings  # missing files are an error before the model is opened
    require_platform(request.platform, "--platform")
    reranker = _open_reranker(request)
    if request.run:
        rerank_run(reranker, request)
    else:
        data = TrainingSource.open(request.train, request.split or "train", request.negatives_run)
        score_examples(reranker, data, request.out, request.on_error)


def _open_reranker(request: RerankRequest) -> Reranker:
    sizes = {
        "query_length": request.query_length,
        "passage_length": request.passage_length,
        "tokens_per_batch": request.tokens_per_batch,
    }
    if request.model:
        return open_pretrained_reranker(request.model, **sizes, download=request.download)
    return open_reranker(request.workdir, request.checkpoint, **sizes)
