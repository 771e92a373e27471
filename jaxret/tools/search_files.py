"""What search.py does: files in, run file and evaluation out, or an answer on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from jaxret.contract import ContractError
from jaxret.data.formats import Policy, read_judgements, read_queries, write_run
from jaxret.data.records import Passage, Query
from jaxret.evaluation.answers import answer_accuracy
from jaxret.evaluation.metrics import Evaluation, parse_measure
from jaxret.evaluation.report import to_text, write_evaluation
from jaxret.retrieval.retrieve import choose_corpus, evaluate_retrieved, passage_texts, provenance, retrieve
from jaxret.runs.run import Run

ANSWER_CUTOFFS = (5, 20, 100)


def dataset_name(queries: str | Path) -> str:
    """BEIR folder or a file in it -> the folder's name; any other file -> its name without suffixes."""
    path = Path(queries).absolute()
    if path.is_dir():
        return path.name
    return path.parent.name if path.name.startswith("queries.jsonl") else path.name.split(".")[0]


def search_files(
    run: Run,
    queries: str,
    qrels: str,
    split: str,
    k: int,
    measures: Sequence[str],
    corpus: str = "",
    backend: str = "auto",
    on_error: str = "error",
    progress: bool = True,
) -> Evaluation | None:
    """Searches for every query, and writes `runs/<dataset>.trec` in the run's folder. With judgements: for every judged
    query; writes `runs/<dataset>.<split>.trec` and `eval/<dataset>.<split>.json`, and prints the table."""
    for measure in measures:
        parse_measure(measure)  # before the search, not after it
    policy = Policy(on_error)
    asked = read_queries(queries, policy)
    judgements = []
    if qrels:
        judgements = read_judgements(qrels, split, policy, query_ids={query.id for query in asked})
        judged = {judgement.query_id for judgement in judgements}
        asked = [query for query in asked if query.id in judged]
        if Path(qrels).is_file():
            split = Path(qrels).name.split(".")[0]
    if policy.report():
        print(policy.report())
    folder = choose_corpus(run, corpus)
    retrieved = retrieve(run, asked, folder, k, backend, progress)
    result = retrieved.result
    print(retrieved.truncation)
    print(f"exact search of {retrieved.corpus['passages']:,} passages for {len(asked):,} queries by {result.backend}")
    name = f"{dataset_name(queries)}.{split}" if qrels else dataset_name(queries)
    path = run.workdir / "runs" / f"{name}.trec"
    write_run(path, retrieved.rankings, tag=f"jaxret-{run.workdir.name}")
    print(f"run: {path}")

    accuracy: dict[str, float] = {}
    if any(query.answers for query in asked):
        try:
            accuracy = answers_found(folder, retrieved.rankings, [q for q in asked if q.answers], k)
            print("answer strings found: " + ", ".join(f"{m} {v:.4f}" for m, v in accuracy.items()))
        except (FileNotFoundError, ContractError) as error:  # the judgements can be used all the same
            print(f"answer strings cannot be looked for: {error}")
    if not qrels:
        return None
    evaluation = evaluate_retrieved(retrieved, judgements, measures)
    relevant = {judgement.passage_id for judgement in judgements if judgement.relevance > 0}
    missing = len(retrieved.shards.without(relevant))
    if missing:
        print(f"{missing:,} of {len(relevant):,} relevant passages are not in the corpus: they count as not found")
    source = {
        "queries": str(queries),
        "qrels": str(qrels),
        "split": split,
        "skipped": dict(policy.skipped),
        "relevant_passages_not_in_corpus": missing,
    }
    more = {"dataset": source, "answer_accuracy": accuracy} if accuracy else {"dataset": source}
    path = run.workdir / "eval" / f"{name}.json"
    write_evaluation(path, evaluation, provenance(run, retrieved, k, **more))
    print(to_text({run.workdir.name: evaluation}))
    print(f"evaluation: {path}")
    return evaluation


def answers_found(
    folder: Path, ranking: dict[str, list[tuple[str, float]]], queries: Sequence[Query], k: int
) -> dict[str, float]:
    """Top-k accuracy by answer string (DPR's measure), for the cut-offs that k covers."""
    wanted = {passage for query in queries for passage, _ in ranking[query.id]}
    texts = {key: passage.text for key, passage in passage_texts(folder, wanted).items()}
    return answer_accuracy(ranking, queries, texts, [c for c in ANSWER_CUTOFFS if c <= k] or [k])


def answer(run: Run, question: str, k: int, corpus: str = "", backend: str = "auto", progress: bool = True) -> None:
    """Prints the k best passages for a question."""
    folder = choose_corpus(run, corpus)
    retrieved = retrieve(run, [Query("0", question)], folder, k, backend, progress)
    found = retrieved.rankings["0"]
    passages: dict[str, Passage] = {}
    try:
        passages = passage_texts(folder, {passage for passage, _ in found})
    except (FileNotFoundError, ContractError) as error:
        print(error)
    print(f"{question}   (exact search of {retrieved.corpus['passages']:,} passages by {retrieved.result.backend})")
    print_ranking(found, passages)


def print_ranking(found: Sequence[tuple[str, float]], passages: dict[str, Passage]) -> None:
    """A line each: rank, score, title, and the beginning of the text."""
    for rank, (key, score) in enumerate(found, 1):
        passage = passages.get(key)
        title = (passage.title or key) if passage else key
        text = textwrap.shorten(passage.text, 90, placeholder=" ...") if passage else ""
        print(f"{rank:3d}. {score:8.4f}  {title:<36} {text}")
