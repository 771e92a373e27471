"""Search a corpus by BM25, as a system like any other: `jaxret bm25`."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from jaxret.data.formats import Corpus, Policy
from jaxret.data.records import Query
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.evaluate_search import Retrieved, plan_evaluation, treat_self_matches, write_results
from jaxret.experiments.evaluation_options import EvaluationOptions
from jaxret.experiments.evaluation_queries import EvaluationSource
from jaxret.index.encode import corpus_name
from jaxret.index.passages import Passages
from jaxret.parallel.progress import print_line
from jaxret.runs.workdir import Workdir
from jaxret.search.bm25 import BM25
from jaxret.search.bm25_index import keep_bm25_index
from jaxret.search.bm25_settings import BM25Settings
from jaxret.search.latency import measurement_conditions, spread_evenly, time_phases
from jaxret.storage.atomic import require_folder_path, sha256_json
from jaxret.storage.folder_kinds import BM25_RESULTS, require_folder_kind


def search_bm25(
    workdir: str,
    corpus: Corpus,
    source: EvaluationSource,
    settings: BM25Settings,
    evaluation: EvaluationOptions,
    progress: bool = True,
) -> Evaluation | None:
    """Search for every query by BM25, and write rankings and evaluation as `search_files` does.

    The index of the corpus is kept in `<workdir>/bm25/<corpus>/`.

    Args:
        workdir: folder of the results; it is made, in a folder that exists.
        corpus: to search.
        source: queries and judgements.
        evaluation: measures and further results.

    Raises:
        ContractError: the index in the folder is of another corpus, or has other settings.
        ValueError: as `plan_evaluation` says; the index is damaged; `workdir` is in a folder that does not exist.
        FileExistsError: the folder is of another kind.
        DataError: a bad record.
    """
    run = Workdir(workdir)
    require_folder_path(run.path, "--workdir")
    require_folder_kind(run.path, BM25_RESULTS)
    plan = plan_evaluation(run, source, evaluation)
    queries, policy = plan.dataset.queries, Policy(evaluation.on_error)
    folder = bm25_folder(run, corpus)
    is_new, manifest = keep_bm25_index(folder, corpus, settings, policy, progress)
    if policy.report():
        print_line(policy.report())
    print_line(f"{'built' if is_new else 'opened'} the index of {manifest['corpus']['passages']:,} passages: {folder}")
    index = BM25(folder, settings)
    rankings = index.search(queries, plan.depth, progress)
    empty = sum(not ranking for ranking in rankings.values())
    note = f"; {empty:,} share no word with any passage" if empty else ""
    print_line(
        f"BM25 search (k1 {settings.k1:g}, b {settings.b:g}, {settings.language}) for {len(queries):,} queries{note}"
    )
    texts = Passages(folder, corpus)
    retrieval = Retrieved(
        rankings=treat_self_matches(plan, rankings),
        texts=texts.read,
        missing_ids=index.missing_ids,
        provenance=_provenance(manifest, evaluation.k),
        bytes_per_passage=index.bytes_per_passage,
        latency=lambda: _measure_latency(index, queries, evaluation),
    )
    return write_results(plan, retrieval)


def bm25_folder(workdir: Workdir, corpus: Corpus) -> Path:
    return workdir / "bm25" / corpus_name(corpus)


def _provenance(manifest: dict[str, Any], k: int) -> dict[str, Any]:
    """Return the provenance of results, with the keys of that of a trained model."""
    return {
        "checkpoint": {"step": 0, "digest": sha256_json(manifest)},
        "config": {"bm25": manifest["settings"]},
        "training_data": {},
        "environment": {"python": platform.python_version(), "packages": manifest["packages"]},
        "corpus": manifest["corpus"],
        "search": {"backend": "bm25s", "k": k, "exact": True},
    }


def _measure_latency(index: BM25, queries: list[Query], evaluation: EvaluationOptions) -> dict[str, Any]:
    """Time the words of a query and the search for them, one query at a time, after one query as a warm-up."""
    sample, k = spread_evenly(queries, evaluation.latency), evaluation.k
    index.search(sample[:1], k)
    phases = {"encode_ms": lambda query: index.words([query])[0], "search_ms": lambda words: index.rank(words, k)}
    times = time_phases(sample, evaluation.latency, phases)
    return {**times, **measurement_conditions(k, platform.processor() or platform.machine()), "backend": "bm25s"}
