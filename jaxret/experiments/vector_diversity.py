"""Measure how much the vectors of one passage differ, on judged queries (`jaxret diversity`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxret.data.formats import Corpus, JudgementSource, Policy, QuerySource, is_named, read_judged_queries
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.trec import reject_unknown_ids
from jaxret.data.lines import PathLike
from jaxret.data.records import Judgement, Passage, Query
from jaxret.evaluation.diversity import Diversity, diversity
from jaxret.experiments.searches.evaluation_queries import EvaluationSource, require_same_dataset
from jaxret.models.pooling import POOLINGS
from jaxret.models.retriever_model import RetrieverModel
from jaxret.parallel.events import emit
from jaxret.runs.run import Run, find_best_checkpoint
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, sha256_json, write_json

DIVERSITY_MEASURES = ("local_variation", "perplexity")
LOCAL_VARIATION = "softmax"  # normalization of the scores; the values of MVR's table 6 are possible only with this one


@dataclass(frozen=True)
class JudgedSource:
    """Queries with judgements, and a corpus. If the judgements are training records with texts, such as DPR's, all
    three are read from these records."""

    source: EvaluationSource
    judgements: JudgementSource  # the judgements of `source`, which must have some
    corpus: Corpus

    @classmethod
    def open(cls, data: PathLike, split: str | None) -> JudgedSource:
        """Detect the files of a folder with queries, judgements and corpus, or a file of training records. Raises
        DataError if one of them is missing."""
        source = DataSource.open(data)
        judgements = JudgementSource.of(source, split)
        if records := cls._of_records(judgements):
            return records
        return cls(EvaluationSource(QuerySource.of(source, split), judgements), judgements, Corpus.of(source))

    @classmethod
    def of(cls, source: EvaluationSource, corpus: Corpus) -> JudgedSource:
        """Return the judged texts of open sources. Raises ValueError if `source` has no judgements."""
        if source.judgements is None:
            raise ValueError(f"{source.queries} was opened without judgements")
        return cls._of_records(source.judgements) or cls(source, source.judgements, corpus)

    @classmethod
    def _of_records(cls, judgements: JudgementSource) -> JudgedSource | None:
        data, file = judgements.data, judgements.file
        if file.format.examples is None:
            return None
        queries = QuerySource(data, judgements.split, (replace(file, role="queries"),))
        corpus = Corpus(data, replace(file, role="passages"))
        return cls(EvaluationSource(queries, judgements), judgements, corpus)

    @property
    def name(self) -> str:
        """The name of the report. The name of a file has no split."""
        is_file = not self.judgements.is_folder and not is_named(self.judgements.file.path)
        return self.source.dataset_name if is_file else self.source.name


@dataclass(frozen=True)
class JudgedTexts:
    """Judged queries by id, their relevant passages, and the pairs of both."""

    queries: dict[str, Query]
    passages: list[Passage]
    pairs: list[Judgement]

    def digest(self) -> str:
        """Return a SHA-256 digest of the queries of pairs, the passages and the pairs, independent of their order."""
        queries = [self.queries[key].to_json() for key in sorted({pair.query_id for pair in self.pairs})]
        passages = sorted([passage.id, passage.title, passage.text] for passage in self.passages)
        return sha256_json([queries, passages, sorted([pair.query_id, pair.passage_id] for pair in self.pairs)])


@dataclass(frozen=True)
class JudgedPairs:
    """P pairs of a judged query and a relevant passage, with their vectors."""

    query_ids: list[str]  # query id of each pair
    passage_ids: list[str]  # passage id of each pair
    queries: Float[np.ndarray, "P D"]  # query vectors
    passages: Float[np.ndarray, "P V D"]  # vectors before pooling
    rows: Int[np.ndarray, " P"]  # number of the pair's passage

    def diversity(self) -> Diversity:
        """Return how much the vectors of a passage differ, and how often each vector has the highest score."""
        return diversity(self.queries, self.passages, self.rows)


def judged_pairs(run: Run, texts: JudgedTexts) -> JudgedPairs:
    """Encode judged queries and their relevant passages. Raises ValueError if the run has one vector per passage or per
    token."""
    if not has_several_vectors(run.model):
        vectors = run.model.unpooled().vectors_per_passage
        raise ValueError(
            f"head {run.config.head.name!r} has {'a vector for every token' if vectors is None else 'one vector'} of a "
            "passage; diversity needs a head with several vectors, the same number for every passage"
        )
    pairs = texts.pairs
    passage_rows = {passage.id: row for row, passage in enumerate(texts.passages)}
    query_rows = {query_id: row for row, query_id in enumerate(dict.fromkeys(pair.query_id for pair in pairs))}

    tokens = run.tokenizer.queries((texts.queries[query_id] for query_id in query_rows), progress=True)
    query_vectors = run.embedder()(tokens, "query", progress=True).stacked()[:, 0]
    tokens = run.tokenizer.passages(texts.passages, progress=True)
    passage_vectors = run.embedder(unpooled=True)(tokens, "passage", progress=True).stacked()
    left = np.array([query_rows[pair.query_id] for pair in pairs])
    right = np.array([passage_rows[pair.passage_id] for pair in pairs])
    ids = [pair.query_id for pair in pairs], [pair.passage_id for pair in pairs]
    return JudgedPairs(*ids, query_vectors[left], passage_vectors[right], right)


def has_several_vectors(model: RetrieverModel) -> bool:
    """Return whether a model has the same number of vectors, above 1, for every passage."""
    return (model.unpooled().vectors_per_passage or 1) > 1


def read_judged_texts(data: JudgedSource) -> JudgedTexts:
    """Read the judged queries of a source and their relevant passages. Raises ValueError if no query has a relevant
    passage, or a relevant passage is missing."""
    policy = Policy()
    query_list, records = read_judged_queries(data.source.queries, data.judgements, policy)
    queries = {query.id: query for query in query_list}
    judgements = (judgement for _, judgement in reject_unknown_ids(records, queries, None, policy))
    pairs = [judgement for judgement in judgements if judgement.relevance > 0]
    if not pairs:
        raise ValueError(
            f"{data.judgements} has no query with a relevant passage in the split {data.judgements.split!r}"
        )
    passage_ids = {judgement.passage_id for judgement in pairs}
    passages = [passage for passage in data.corpus.read(policy) if passage.id in passage_ids]
    ids = passage_ids.difference(passage.id for passage in passages)
    if ids:
        raise ValueError(
            f"{data.judgements}: {len(ids):,} relevant passages are not in its corpus, such as {min(ids)!r}"
        )
    return JudgedTexts(queries, passages, pairs)


def diversity_path(workdir: Workdir, data: JudgedSource, step: int | None = None, name: str = "") -> Path:
    """Return the path of a run's report: `eval/DATA.SPLIT.diversity.json`, or `eval/DATA.diversity.json` for a file.

    Args:
        workdir: folder of the run.
        data: the judged texts.
        step: step of a checkpoint that is not the best one; the name then has `.step-N`.
        name: name that replaces DATA.SPLIT, unless it is "".
    """
    return workdir.evaluation(f"{name or data.name}{'' if step is None else f'.step-{step}'}.diversity")


def read_diversity(path: Path) -> dict[str, float | None]:
    """Return local variation and perplexity from a report, with the normalization of MVR's table 6."""
    report = read_json(path)
    values = report["local_variation"][LOCAL_VARIATION], report["perplexity"]
    return dict(zip(DIVERSITY_MEASURES, values, strict=True))


def is_diversity_of(path: Path, checkpoint: Mapping[str, Any], texts: JudgedTexts) -> bool:
    """Return whether a report exists and was made from this checkpoint and these texts, which its path does not
    show."""
    if not path.exists():
        return False
    report = read_json(path)
    return report.get("checkpoint") == checkpoint and report.get("dataset", {}).get("sha256") == texts.digest()


def report_diversity(run: Run, data: JudgedSource, name: str = "") -> str:
    """Measure diversity, write it to `diversity_path`, and return the text to print. Raises ValueError for the reasons
    of `read_judged_texts`, `judged_pairs` and `require_same_dataset`."""
    texts = read_judged_texts(data)
    record = data.source.record(texts.digest())
    is_best = run.checkpoint == find_best_checkpoint(run.workdir, run.config)
    path = diversity_path(run.workdir, data, None if is_best else run.checkpoint["step"], name)
    require_same_dataset(path, record)
    pairs = judged_pairs(run, texts)
    result = pairs.diversity()
    names = run.model.module.head.vector_names()
    winners = dict(zip(names, result.wins, strict=True))
    # Weights in the pooled vector at inference; for pooling "scalar_mix", softmax(alpha) (MLR eq. 8). None: all vectors
    # are searched.
    weights = POOLINGS[run.config.pooling].weights(len(names), run.params.get("pooling", {}))
    mixture = None if weights is None else dict(zip(names, weights, strict=True))
    pooling = {"name": run.config.pooling, "weights": mixture}
    values = {**vars(result), "wins": winners, "equal": result.equal, "pooling": pooling, "checkpoint": run.checkpoint}
    values["dataset"] = record
    write_json(path, values)
    emit("diversity", path=path, result=values)
    lines = [
        f"{result.pairs:,} pairs of a query and a relevant passage; {result.passages:,} passages have several queries",
        f"1 - cos of two vectors of a passage, on average: {result.distance:.2g}",
    ]
    if mixture:
        listing = ", ".join(f"{name} {weight:.4f}" for name, weight in mixture.items())
        lines.append(f"weights of pooling {run.config.pooling!r} at inference: {listing}")
    if result.equal:
        lines.append("the vectors of a passage are equal except for rounding, so no winner is shown")
        return "\n".join([*lines, f"written to {path}"])
    lines += [f"local variation ({norm}): {value:.4f}" for norm, value in result.local_variation.items()]
    if result.perplexity is None:
        lines.append("perplexity of the winner: not defined, because no passage has two queries")
    else:
        lines.append(f"perplexity of the winner: {result.perplexity:.4f} (1: always the same vector)")
    width = max(map(len, names))
    for name, wins in zip(names, result.wins, strict=True):
        share = wins / result.pairs
        lines.append(f"  {name:<{width}}  {share:6.1%}  {'#' * round(40 * share)}")
    return "\n".join([*lines, f"written to {path}"])
