"""Mine negatives for training queries: write a training file, a record of its sources, and an audit of it.

    pool.rank -> window -> filters -> select -> record

Queries are ranked in blocks, and the texts of a smaller block are read by their rows in the corpus. Memory holds the
rankings of one block and the indexes of the pools (`pools.py`), and does not grow with the number of queries.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from jaxret.configs.synonyms import suggest_name
from jaxret.data.errors import Policy
from jaxret.data.formats import Corpus, QuerySource, TrainingSource, source_exists
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.example_writers import make_tevatron_record
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.lines import write_text
from jaxret.data.records import Example, PassageLookup
from jaxret.data.tokens.subset import choose_ids
from jaxret.evaluation.answer_matching import check_answers
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.passages import Passages
from jaxret.index.source import note_corpus
from jaxret.mining.mining_audit import MiningAudit, audit_mined_file
from jaxret.mining.mining_settings import TOP, MiningSettings
from jaxret.mining.negative_selection import MiningTally, NegativeSelector
from jaxret.mining.pools import (
    BM25_NAME,
    BM25Pool,
    NegativePool,
    RankingFilePool,
    RunPool,
    is_run_folder,
    pool_parent,
    rankings_parent,
)
from jaxret.mining.training_queries import TrainingQueries, read_concatenated, read_training_queries, split_by_target
from jaxret.parallel.events import emit
from jaxret.parallel.progress import Progress
from jaxret.runs.mismatch import require_equal
from jaxret.runs.ray_cluster import RayWorkers
from jaxret.runs.workdir import Workdir
from jaxret.search.passage_texts import text_files
from jaxret.storage.atomic import read_with_digest, sha256_file, with_digest, write_json
from jaxret.storage.buckets.working_copy import require_writable

RANK_BLOCK = 4096  # queries whose rankings are in memory: 4,096 x 200 are about 120 MB
TEXT_BLOCK = 256  # queries whose passages' texts are in memory: 256 x 200 passages are about 50 MB


@dataclass(frozen=True)
class MiningJob:
    """The inputs and the output of `jaxret mine`."""

    data: TrainingSource | QuerySource  # the training queries; they may lack positives only if positives are retrieved
    pools: tuple[str, ...]  # "bm25", folders of runs, files of rankings
    out: str  # training file to write
    corpus: Corpus | None = None  # the passages; needed unless a pool is a run, which has encoded them
    encoded_name: str = ""  # name of a run's encoded corpus; "": the only one
    teacher: str = ""  # file of rankings with a teacher's scores
    concat: tuple[TrainingSource, ...] = ()  # training files whose records follow the mined ones
    settings: MiningSettings = field(default_factory=MiningSettings)
    on_error: str = "error"  # or "skip": policy for bad records
    subset: tuple[int, int] = (0, 0)  # number of queries (0: all) and seed, as for data.subset
    workers: RayWorkers | None = None  # workers that search the corpora of runs in place of this process
    explicit_fields: tuple[str, ...] = ()  # names of the fields of `settings` that are on the command line

    @cached_property
    def rankings(self) -> dict[str, RankingSource]:
        """The files of rankings by the names of pools and teacher. Raises DataError for one without rankings."""
        names = [pool for pool in self.pools if pool != BM25_NAME and not is_run_folder(pool)]
        return {name: RankingSource.open(name) for name in filter(None, dict.fromkeys([*names, self.teacher]))}

    @property
    def judged(self) -> bool:
        """Whether the positives come from the training queries, and not from retrieved passages."""
        return not self.settings.positives_from_retrieval


@dataclass(frozen=True)
class MiningResult:
    """The file that was written, counts of the retrieved passages, and the audit of the file."""

    path: Path
    tally: MiningTally
    audit: MiningAudit


def mine_negatives(job: MiningJob) -> MiningResult:
    """Write the training file and `<its name>.parents.json` next to it, and log counts of each step.

    Raises:
        ValueError: settings that contradict each other or the pools.
        DataError: a bad record.
    """
    policy, path = Policy(job.on_error), Path(job.out)
    require_settings(job)
    require_writable(path.parent)
    for data in job.concat:  # its records are written after the mined ones, hours later; a bad one is an error now
        deque(read_concatenated(data, job.settings.keep, Policy(job.on_error)), maxlen=0)
    questions = _read_queries(job, policy)
    check_answers((entry.query for entry in questions.queries), job.settings.match)
    print(f"{job.data}: {len(questions.queries):,} queries ({job.data.describe()})")
    if job.settings.positives_from_retrieval:
        print(
            "positives_from_retrieval: the positives are retrieved passages with an answer string, not the judged ones"
        )
    with tempfile.TemporaryDirectory(prefix="jaxret-") as folder:
        pools, texts, origin = open_pools(job, questions, policy, Path(folder))
        teacher = RankingFilePool(job.rankings[job.teacher], policy) if job.teacher else None
        for source in (*pools, *([teacher] if teacher else [])):
            if isinstance(source, RankingFilePool):
                source.require_queries([entry.query for entry in questions.queries], job.data.source)
        chooser = NegativeSelector(job.settings, teacher, bool(job.concat))
        write_examples(job, path, questions, select_examples(questions, pools, texts, chooser), chooser, policy)
    if policy.report():
        print(policy.report())
    names = " and ".join(pool.name for pool in pools)
    print(f"from {names}, ranks {job.settings.skip + 1} to {job.settings.depth}:")
    print(*chooser.tally.lines(), sep="\n")
    if not teacher and (len(pools) > 1 or job.concat):
        print("  scores of two pools or files are not comparable, so the file has none (--teacher gives one scale)")
    elif any(isinstance(pool, RankingFilePool) and pool.ranks_alone for pool in pools) and not teacher:
        print(f"  {names} has ranks without scores, so the mined file has no scores")
    audit = audit_mined_file(path, questions.queries, job.settings.match)
    write_parents(job, path, questions, [*pools, *([teacher] if teacher else [])], origin, chooser.tally, audit)
    print(f"{audit}\ntraining file: {path}\nits parents: {parents_path(path)}")
    emit("mining", path=path, parents=parents_path(path), audit=vars(audit))
    return MiningResult(path, chooser.tally, audit)


def _read_queries(job: MiningJob, policy: Policy) -> TrainingQueries:
    questions = read_training_queries(job.data, policy)
    if not job.subset[0]:
        return questions
    ids = choose_ids((entry.query.id for entry in questions.queries), *job.subset)
    return replace(questions, queries=tuple(entry for entry in questions.queries if entry.query.id in ids))


def require_same_sources(job: MiningJob) -> None:
    """Raise ContractError if the training file that an earlier command wrote was changed since, or was mined for other
    queries, from another corpus or other pools, or with other settings or files than `job` has."""
    assert job.corpus is not None
    record, policy = parents_path(Path(job.out)), Policy(job.on_error)
    content = read_with_digest(record)
    sources = {name: content[name]["sha256"] for name in ("file", "queries", "corpus")}
    names, rankings = (*job.pools, *([job.teacher] if job.teacher else [])), job.rankings
    current = {
        "file": sha256_file(Path(job.out)),
        "queries": _read_queries(job, policy).digest(),
        "corpus": job.corpus.scan(policy).sha256,
        "pools": [rankings_parent(rankings[n]) if n in rankings else pool_parent(n, job.encoded_name) for n in names],
        **_settings_record(job),
    }
    sources |= {name: content[name] for name in current.keys() - sources.keys()}
    remedy = f"Name another output, or delete {job.out} to mine again."
    require_equal(sources, current, str(record), f"mining from {job.data} and {job.corpus}", remedy)


def _settings_record(job: MiningJob) -> dict[str, Any]:
    """Return the part of a file's record that describes a job's settings: all but queries, corpus and pools."""
    return {
        "teacher": job.teacher,
        "concat": [{"source": data.source, "sha256": sha256_file(data.file.path)} for data in job.concat if data.file],
        "settings": asdict(job.settings),
    }


def require_settings(job: MiningJob) -> None:
    """Raise ValueError for missing or contradicting settings and for an output that is also an input, and DataError if
    scores are needed and a ranking has none."""
    require_meaning(job.pools, job.settings, job.teacher)
    if "seed" in job.explicit_fields and job.settings.draw == TOP and not job.subset[0]:
        raise ValueError(f"--seed draws nothing with --draw={TOP} and no --subset: remove it")
    runs = [pool for pool in job.pools if is_run_folder(pool)]
    for pool in job.pools:
        if pool not in (BM25_NAME, *runs) and (not source_exists(pool) or Path(pool).is_dir()):
            raise ValueError(
                f"pool {pool!r} is neither {BM25_NAME} nor the folder of a run nor a file of rankings"
                + suggest_name(pool, [BM25_NAME])
            )
    if not job.corpus and len(runs) < len(job.pools):
        raise ValueError("give the corpus (--corpus): only a run that encoded it knows where the texts are")
    if job.encoded_name and not runs:
        raise ValueError(f"--encoded={job.encoded_name} names the corpus of a run, but no pool is a run: remove it")
    ranking_files = [pool for pool in job.pools if pool not in (BM25_NAME, *runs)]
    if job.teacher:
        job.rankings[job.teacher].require_scores("the scores of a teacher")
    for pool in ranking_files if job.settings.limit and not job.teacher else ():
        job.rankings[pool].require_scores(f"scores to compare (--{job.settings.limit})")
    sources = [("a pool", job.rankings[pool].data) for pool in ranking_files]
    sources += [("the teacher", job.rankings[job.teacher].data)] if job.teacher else []
    sources += [("the corpus", job.corpus.data)] if job.corpus else []
    for pool in runs if not job.corpus else ():
        encoded_corpus = open_encoded(corpus_folder(Workdir(pool), job.encoded_name, "--encoded"), verify=False)
        sources += [(f"the corpus that {pool} encoded", DataSource.open(file)) for file in text_files(encoded_corpus)]
    sources += [("a file that follows", data.data) for data in job.concat]
    for path in (job.out, parents_path(Path(job.out))):
        require_other_output(path, [*sources, ("the training data", job.data.data)], [job.data.split])


def require_run_pool(job: MiningJob) -> None:
    """Raise ValueError if no pool is a run, because the workers of an engine search only with runs."""
    if not any(map(is_run_folder, job.pools)):
        raise ValueError(f"workers search with runs, but no pool is a run ({', '.join(job.pools)}): remove --engine")


def require_meaning(pools: Sequence[str], settings: MiningSettings, teacher: str = "") -> None:
    """Raise ValueError for pools and settings that contradict each other; no pool is opened."""
    if not pools:
        raise ValueError(f"there is no pool to mine; give {BM25_NAME}, the folder of a run, or a file of rankings")
    if settings.positives_from_retrieval and len(pools) > 1:
        raise ValueError(
            "positives_from_retrieval takes positives from one pool; mine the others separately, with --concat"
        )
    if settings.share is not None and BM25_NAME in pools and not teacher:
        raise _no_bound(settings.share, BM25_NAME)


def _no_bound(share: float, pool: str) -> ValueError:
    return ValueError(
        f"share is {share}, but scores of {pool} have no bound, as those of BM25 and of runs "
        "without normalize: a part of one means nothing; give a teacher's, or use the margin"
    )


def open_pools(
    job: MiningJob, questions: TrainingQueries, policy: Policy, folder: Path
) -> tuple[list[NegativePool], PassageLookup, dict[str, Any]]:
    """Open the pools. Return them, a reader of texts, and the origin of the texts ({"path", "sha256", "passages"}).

    Args:
        job: names of pools and corpus, settings.
        questions: the training queries; runs look up the rows of their positives.
        folder: folder of an index of the corpus file.
    """
    positives = {passage.id for entry in questions.queries for passage in entry.positives}
    pools: list[NegativePool] = []
    for name in job.pools:
        if name == BM25_NAME:
            assert job.corpus is not None  # checked by `require_settings`
            pools.append(BM25Pool(job.corpus.read(policy)))
        elif is_run_folder(name):
            pools.append(RunPool(name, job.encoded_name, positives, workers=job.workers))
        else:
            pools.append(RankingFilePool(job.rankings[name], policy))
    names = [pool.name for pool in pools if pool.has_bound is False and not job.teacher]
    if job.settings.share is not None and names:
        raise _no_bound(job.settings.share, names[0])
    if job.settings.margin and names:
        print(
            f"margin {job.settings.margin:g} is in scores of {names[0]}, which have no upper limit: compare it with "
            "the scores of positives below (NV-Retriever's 0.05 is for cosines)"
        )
    if not job.corpus:
        searcher = next(pool for pool in pools if isinstance(pool, RunPool)).searcher
        return pools, searcher.texts.read, searcher.encoded_corpus.corpus_identity
    scan = job.corpus.scan(policy)
    for pool in pools:
        if isinstance(pool, RunPool):
            pool.require_corpus(job.corpus, scan.sha256)
    note_corpus(folder, job.corpus, scan)
    origin = {"path": job.corpus.absolute, "sha256": scan.sha256, "passages": scan.passages}
    return pools, Passages(folder, job.corpus).read, origin


def select_examples(
    questions: TrainingQueries, pools: Sequence[NegativePool], texts: PassageLookup, chooser: NegativeSelector
) -> Iterator[Example]:
    """Yield the example of each query that has a positive, in order.

    Args:
        texts: reader of passages by id.
        chooser: selects negatives and counts.

    Raises:
        ValueError: no passage was retrieved at the ranks, or none of them is in the corpus.
    """
    settings = chooser.settings
    with Progress("mine", len(questions.queries), "query") as bar:
        for first in range(0, len(questions.queries), RANK_BLOCK):
            block = questions.queries[first : first + RANK_BLOCK]
            queries = [entry.query for entry in block]
            ids = [[passage.id for passage in entry.positives] for entry in block]
            results = list(zip(*(pool.rank(queries, ids, settings.depth) for pool in pools), strict=True))
            for start in range(0, len(block), TEXT_BLOCK):
                part = results[start : start + TEXT_BLOCK]
                rankings = (result.ranking[settings.skip : settings.depth] for of_pools in part for result in of_pools)
                positive_ids = {key for keys in ids[start : start + TEXT_BLOCK] for key in keys}
                passages = texts(positive_ids | {key for ranking in rankings for key, _ in ranking})
                for query, of_pools in zip(block[start : start + TEXT_BLOCK], part, strict=True):
                    if example := chooser.make_example(chooser.with_corpus_texts(query, passages), of_pools, passages):
                        yield example
                bar.update(len(part))
    if not chooser.tally.passages:
        raise ValueError(f"no passage was retrieved at ranks {settings.skip + 1} to {settings.depth} of any query")
    if chooser.tally.left_out["no such text in the corpus"] == chooser.tally.passages:
        raise ValueError("no retrieved passage is in the corpus; use the corpus of the rankings")


def write_examples(
    job: MiningJob,
    path: Path,
    questions: TrainingQueries,
    examples: Iterator[Example],
    chooser: NegativeSelector,
    policy: Policy,
) -> None:
    """Write the mined examples, then the records of --concat files.

    If only the first positive is a target in the examples of some part, no example of the file has several targets.

    Args:
        job: names of --concat files, settings.
        chooser: scores the --concat records.
    """
    parts = [(examples, questions.every_positive and job.judged)]
    query_texts = {entry.query.id: entry.query.text for entry in questions.queries}
    for data in job.concat:
        follow = read_concatenated(data, job.settings.keep, policy)
        scored_examples = (chooser.score_concatenated(example, query_texts) for example in follow)
        parts.append((scored_examples, not data.first_target_only))
    every_positive = all(every_target for _, every_target in parts)
    rows = chain.from_iterable(split_by_target(part, every_target, every_positive) for part, every_target in parts)
    texts: dict[str, int] = {}
    with write_text(path) as file:
        for example in rows:
            example = with_unique_id(example, texts)
            file.write(json.dumps(make_tevatron_record(example, every_positive), ensure_ascii=False) + "\n")
        parents_path(path).unlink(missing_ok=True)  # record of the replaced file; a job killed here leaves no record


def with_unique_id(example: Example, texts: dict[str, int]) -> Example:
    """Return the example, with another id if a different question has its id (files without ids count rows from 0).

    texts: id -> hash of its question, for all examples so far; updated.
    """
    key, text, number = example.query.id, hash(example.query.text), 1
    while texts.setdefault(key, text) != text:
        number += 1
        key = f"{example.query.id}.{number}"
    return example if key == example.query.id else replace(example, query=replace(example.query, id=key))


def parents_path(path: Path) -> Path:
    """Return the path of the record of a mined file's sources, which is next to the file. a.jsonl and a.jsonl.gz have
    different records."""
    return path.with_name(f"{path.name}.parents.json")


def write_parents(
    job: MiningJob,
    path: Path,
    questions: TrainingQueries,
    pools: Sequence[NegativePool],
    origin: Mapping[str, Any],
    tally: MiningTally,
    audit: MiningAudit,
) -> None:
    """Write a record of the sources of a mined file, with digests, next to the file (`parents_path`).

    Args:
        job: the inputs and settings.
        path: the mined file, complete.
        questions: the training queries that were mined for.
        pools: the pools, and the teacher, if there is one.
        origin: record of the corpus, as JSON.
        tally: counts of the passages that filters left out.
        audit: figures of the mined file.
    """
    subset, seed = job.subset
    queries = {"source": job.data.source, "split": job.data.split, "subset": subset, "subset_seed": seed}
    content: dict[str, Any] = {
        "file": {"name": path.name, "sha256": sha256_file(path)},
        "queries": queries | {"count": len(questions.queries), "sha256": questions.digest()},
        "corpus": dict(origin),
        "pools": [pool.parent() for pool in pools],
        **_settings_record(job),
        "left_out": dict(tally.left_out),
        "audit": vars(audit),
    }
    write_json(parents_path(path), with_digest(content))
