"""Search a corpus by BM25, with the same files of results as other systems: `jaxret bm25`."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from jaxret.data.formats import Corpus, Policy
from jaxret.data.records import Query
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.searches.evaluate_search import Retrieved, plan_evaluation, treat_self_matches, write_results
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.index.encoding.encode import corpus_name
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
    """Search for every query by BM25, write rankings and evaluation like `search_files`, and return the evaluation.

    The index of the corpus is in `<workdir>/bm25/<corpus>/`.

    Args:
        workdir: folder of the results; it is made if its parent exists.
        corpus: the corpus to search.
        source: queries and judgements.
        settings: settings of BM25.
        evaluation: measures and further results.
        progress: whether progress is printed.

    Raises:
        ContractError: the folder has an index of another corpus or with other settings.
        ValueError: a check of `plan_evaluation` fails, the index is damaged, or the parent of `workdir` does not exist.
        FileExistsError: the folder is of another kind.
        DataError: a record is bad.
    """
    run = Workdir(workdir)
    require_folder_path(run.path, "--workdir")
    require_folder_kind(run.path, BM25_RESULTS)
    plan = plan_evaluation(run, source, evaluation)
    queries, policy = plan.evaluation_queries.queries, Policy(evaluation.on_error)
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
    """Return the folder of the BM25 index of a corpus."""
    return workdir / "bm25" / corpus_name(corpus)


def _provenance(manifest: dict[str, Any], k: int) -> dict[str, Any]:
    """Return the provenance of results, with the same keys as for a trained model."""
    return {
        "checkpoint": {"step": 0, "digest": sha256_json(manifest)},
        "config": {"bm25": manifest["settings"]},
        "training_data": {},
        "environment": {"python": platform.python_version(), "packages": manifest["packages"]},
        "corpus": manifest["corpus"],
        "search": {"backend": "bm25s", "k": k, "exact": True},
    }


def _measure_latency(index: BM25, queries: list[Query], evaluation: EvaluationOptions) -> dict[str, Any]:
    """Return the times of splitting a query into words and of searching for them, one query at a time. One query is a
    warm-up."""
    sample, k = spread_evenly(queries, evaluation.latency), evaluation.k
    index.search(sample[:1], k)
    phases = {"encode_ms": lambda query: index.words([query])[0], "search_ms": lambda words: index.rank(words, k)}
    times = time_phases(sample, evaluation.latency, phases)
    return {**times, **measurement_conditions(k, platform.processor() or platform.machine()), "backend": "bm25s"}
