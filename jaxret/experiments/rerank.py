"""Open a cross-encoder, and rerank a run or score training data with it: `jaxret rerank`."""

from __future__ import annotations

from jaxret.data.formats import Corpus, TrainingSource
from jaxret.data.formats.rankings import RankingSource
from jaxret.experiments.evaluation_queries import EvaluationSource
from jaxret.experiments.rerank_request import RerankRequest
from jaxret.experiments.rerank_run import RerankJob, rerank_run
from jaxret.experiments.score_examples import score_examples
from jaxret.parallel.processes import require_platform
from jaxret.runs.reranker import Reranker, open_pretrained_reranker, open_reranker


def rerank(request: RerankRequest) -> None:
    """Write the reranked run, or the scored training data, of a request. Raises the errors of `rerank_run` and
    `score_examples`."""
    run_texts = _open_run_texts(request) if request.run else None
    require_platform(request.platform, "--platform")
    reranker = _open_reranker(request)
    if run_texts is None:
        data = TrainingSource.open(request.train, request.split or "train", request.negatives_run)
        score_examples(reranker, data, request.out, request.on_error)
        return
    job = RerankJob(
        RankingSource.open(request.run),
        *run_texts,
        out=request.out,
        depth=request.k,
        tail=request.tail,
        on_error=request.on_error,
        measures=request.measures,
        self_matches=request.self_matches,
        match=request.match,
        latency=request.latency,
    )
    rerank_run(reranker, job)


def _open_run_texts(request: RerankRequest) -> tuple[Corpus, EvaluationSource]:
    source = EvaluationSource.open(request.queries, request.qrels, request.split or "test")
    return Corpus.open(request.corpus), source


def _open_reranker(request: RerankRequest) -> Reranker:
    sizes = {
        "query_length": request.query_length,
        "passage_length": request.passage_length,
        "tokens_per_batch": request.tokens_per_batch,
    }
    if request.model:
        return open_pretrained_reranker(request.model, **sizes, download=request.download)
    return open_reranker(request.workdir, request.checkpoint, **sizes)
