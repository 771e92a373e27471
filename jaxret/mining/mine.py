"""Training queries and pools of candidates -> a training file, which says where it comes from, and its audit.

    pool.rank -> window -> filters -> keep -> record

A block of queries at a time is ranked, and the texts of a smaller one are read by their places in the corpus: memory
holds the candidates of one block, however many queries there are, and what pools hold (`pools.py`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxret.data.files import Policy, write_text
from jaxret.data.formats import (
    absolute,
    corpus_file,
    describe,
    exists,
    files_of,
    read_corpus,
    run_files,
    scan_corpus,
    source_path,
)
from jaxret.data.formats.example_writers import tevatron_record
from jaxret.data.formats.readers import keeps_first, require_scores
from jaxret.data.records import Example, Passage
from jaxret.data.subset import subset_of
from jaxret.evaluation.answers import check_answers
from jaxret.mining.asked import Questions, as_written, blocks, question_files, read_asked, read_concatenated
from jaxret.mining.audit import Audit, audit
from jaxret.mining.choose import Chooser, Tally
from jaxret.mining.filters import Settings
from jaxret.mining.pools import BM25_NAME, FilePool, Pool, RunPool, WordPool, is_run
from jaxret.retrieval.encoded import open_encoded
from jaxret.retrieval.passages import Passages
from jaxret.retrieval.retrieve import corpus_folder, texts_of
from jaxret.retrieval.source import note_corpus
from jaxret.runs.workdir import Workdir
from jaxret.storage import require_apart, require_writable, sealed, sha256_file, write_json

RANKED = 4096  # queries whose candidates are held: 4,096 x 200 are about 120 MB
READ = 256  # of these, how many have their candidates' texts in memory: 256 x 200 passages are about 50 MB

Texts = Callable[[Collection[str]], Mapping[str, Passage]]


@dataclass(frozen=True)
class Job:
    """data, split: the training queries. pools: "bm25", folders of runs, files of rankings. corpus: where the texts
    are (and what BM25 indexes); a run that encoded it knows. encoded: which of a run's encoded corpora, "" for its only
    one. teacher: a file of rankings with a teacher's scores. concat: training files that follow. subset: of how many
    queries, and with which seed (data.subset); 0: of all."""

    data: str
    pools: tuple[str, ...]
    out: str
    split: str = "train"
    corpus: str = ""
    encoded: str = ""
    teacher: str = ""
    concat: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    on_error: str = "error"
    subset: tuple[int, int] = (0, 0)

    @property
    def judged(self) -> bool:
        """Whether positives are those of the training queries, and not retrieved ones."""
        return not self.settings.positives_from_retrieval


@dataclass(frozen=True)
class Mined:
    """What was written: the file, the number of its records, what became of the candidates, and what is in it."""

    path: Path
    tally: Tally
    audit: Audit


def mine(job: Job, progress: bool = True, say: Callable[[str], None] = print) -> Mined:
    """Writes the file, `<its name>.parents.json` beside it, and says what became of the candidates.

    Raises ValueError for settings that mean nothing together, DataError for bad records.
    """
    policy, path = Policy(job.on_error), Path(job.out)
    require_settings(job)
    require_writable(path.parent)
    questions = read_asked(job.data, job.split, policy, job.judged)
    if job.subset[0]:
        ids = subset_of((one.query.id for one in questions.asked), *job.subset)
        questions = replace(questions, asked=tuple(one for one in questions.asked if one.query.id in ids))
    check_answers((one.query for one in questions.asked), job.settings.match)
    say(f"{job.data}: {len(questions.asked):,} queries ({what_is(job)})")
    if job.settings.positives_from_retrieval:
        say("positives_from_retrieval: retrieved passages with an answer string are the positives, whatever is judged")
    with tempfile.TemporaryDirectory(prefix="jaxret-") as folder:
        pools, texts, corpus = open_pools(job, questions, policy, Path(folder), progress, say)
        teacher = FilePool(job.teacher, policy) if job.teacher else None
        for ranked in (*pools, *([teacher] if teacher else [])):
            if isinstance(ranked, FilePool):
                ranked.require_some([one.query for one in questions.asked], job.data)
        chooser = Chooser(job.settings, teacher, bool(job.concat))
        write_examples(job, path, questions, chosen(questions, pools, texts, chooser, progress), chooser, policy)
    if policy.report():
        say(policy.report())
    names = " and ".join(pool.name for pool in pools)
    say(f"from {names}, ranks {job.settings.skip + 1} to {job.settings.depth}:")
    say("\n".join(chooser.tally.lines()))
    if not teacher and (len(pools) > 1 or job.concat):
        say("  scores of two pools, or files, are not comparable: none are in the file (--teacher has one for all)")
    elif any(isinstance(pool, FilePool) and pool.ranks_alone for pool in pools) and not teacher:
        say(f"  {names} has ranks alone: no score is in the file")
    found = audit(path, questions.asked, job.settings.match)
    write_parents(job, path, questions, [*pools, *([teacher] if teacher else [])], corpus, chooser.tally, found)
    say(f"{found}\ntraining file: {path}\nits parents: {parents_path(path)}")
    return Mined(path, chooser.tally, found)


def require_settings(job: Job) -> None:
    """Raises ValueError for what is missing, or means nothing together, and for an output that is read; DataError where
    scores are wanted of a ranking that has none."""
    require_meaning(job.pools, job.settings, job.teacher)
    runs = [pool for pool in job.pools if is_run(pool)]
    for pool in job.pools:
        if pool not in (BM25_NAME, *runs) and (not exists(pool) or Path(pool).is_dir()):
            raise ValueError(f"pool {pool!r} is neither {BM25_NAME} nor the folder of a run nor a file of rankings")
    if not job.corpus and len(runs) < len(job.pools):
        raise ValueError("give the corpus (--corpus): only a run that encoded it knows where the texts are")
    for file in job.concat:
        if not source_path(file).is_file():
            raise ValueError(f"--concat={file} is no file; give one of training records")
    ranked = [pool for pool in job.pools if pool not in (BM25_NAME, *runs)]
    if job.teacher:
        require_scores(job.teacher, "the scores of a teacher")
    for pool in ranked if job.settings.limit and not job.teacher else ():
        require_scores(pool, f"scores to compare (--{job.settings.limit})")
    read: list[tuple[str, str, Iterable[Path]]] = [("a pool", pool, run_files(pool)) for pool in ranked]
    read += [("the teacher", job.teacher, run_files(job.teacher))] if job.teacher else []
    read += [("the corpus", job.corpus, files_of(corpus_file(job.corpus)))] if job.corpus else []
    for pool in runs if not job.corpus else ():
        encoded = open_encoded(corpus_folder(Workdir(pool), job.encoded, "--encoded"), verify=False)
        read.append(("the corpus that a pool encoded", pool, texts_of(encoded)))
    read += [("a file that follows", file, [source_path(file)]) for file in job.concat]
    read += [("the training data", job.data, question_files(job.data, job.split, job.judged))]
    for what, source, files in read:
        require_apart(job.out, files, f"{what} ({source})")


def require_meaning(pools: Sequence[str], settings: Settings, teacher: str = "") -> None:
    """Raises ValueError for pools and settings that mean nothing together, whatever the pools hold."""
    if not pools:
        raise ValueError(f"there is no pool to mine; give {BM25_NAME}, the folder of a run, or a file of rankings")
    if settings.positives_from_retrieval and len(pools) > 1:
        raise ValueError(
            "positives_from_retrieval takes the positives of one pool; mine the others apart, and --concat"
        )
    if settings.share is not None and BM25_NAME in pools and not teacher:
        raise _no_bound(settings.share, BM25_NAME)


def _no_bound(share: float, pool: str) -> ValueError:
    return ValueError(
        f"share is {share}, but scores of {pool} have no bound, as those of BM25 and of runs "
        "without normalize: a part of one means nothing; give a teacher's, or use the margin"
    )


def what_is(job: Job) -> str:
    role = "examples" if job.judged else "queries"
    return describe(job.data, role, job.split)


def open_pools(
    job: Job, questions: Questions, policy: Policy, folder: Path, progress: bool, say: Callable[[str], None]
) -> tuple[list[Pool], Texts, dict[str, Any]]:
    """The pools, where texts are read, and the corpus ({"path", "sha256", "passages"}); folder: for an index of it."""
    positives = {passage.id for one in questions.asked for passage in one.positives}
    pools: list[Pool] = []
    for name in job.pools:
        if name == BM25_NAME:
            pools.append(WordPool(read_corpus(job.corpus, policy), progress))
        elif is_run(name):
            pools.append(RunPool(name, job.encoded, positives))
        else:
            pools.append(FilePool(name, policy))
    unbounded = [pool.name for pool in pools if pool.bounded is False and not job.teacher]
    if job.settings.share is not None and unbounded:
        raise _no_bound(job.settings.share, unbounded[0])
    if job.settings.margin and unbounded:
        say(
            f"margin {job.settings.margin:g} is in scores of {unbounded[0]}, which have no bound: what is a narrow one "
            "shows in what positives score, below (0.05, as NV-Retriever's, is of cosines)"
        )
    if not job.corpus:
        searcher = next(pool for pool in pools if isinstance(pool, RunPool)).searcher
        return pools, searcher.passages, searcher.shards.corpus
    scan = scan_corpus(job.corpus, policy)
    for pool in pools:
        if isinstance(pool, RunPool):
            pool.require_corpus(job.corpus, scan.sha256)
    note_corpus(folder, job.corpus, scan)
    corpus = {"path": absolute(job.corpus), "sha256": scan.sha256, "passages": scan.passages}
    return pools, Passages(folder).read, corpus


def chosen(
    questions: Questions, pools: Sequence[Pool], texts: Texts, chooser: Chooser, progress: bool
) -> Iterator[Example]:
    """The example of each query that has a positive, in order."""
    settings = chooser.settings
    with tqdm(total=len(questions.asked), desc="mine", unit="query", disable=not progress, delay=1) as bar:
        for block in blocks(questions.asked, RANKED):
            queries = [one.query for one in block]
            ids = [[passage.id for passage in one.positives] for one in block]
            found = list(zip(*(pool.rank(queries, ids, settings.depth) for pool in pools), strict=True))
            for start in range(0, len(block), READ):
                part = found[start : start + READ]
                rankings = (one.ranking[settings.skip : settings.depth] for many in part for one in many)
                own = {key for some in ids[start : start + READ] for key in some}
                there = texts(own | {key for ranking in rankings for key, _ in ranking})
                for asked, many in zip(block[start : start + READ], part, strict=True):
                    if example := chooser.example(chooser.as_there(asked, there), many, there):
                        yield example
                bar.update(len(part))
    if not chooser.tally.found:
        raise ValueError(f"no passage was retrieved at ranks {settings.skip + 1} to {settings.depth} of any query")
    if chooser.tally.left_out["no such text in the corpus"] == chooser.tally.found:
        raise ValueError("nothing that was retrieved is in the corpus; use the one that the rankings are of")


def write_examples(
    job: Job, path: Path, questions: Questions, examples: Iterator[Example], chooser: Chooser, policy: Policy
) -> None:
    """The mined examples, then those of the files that follow. Where not each positive of all is a target, none of the
    file's examples has more than one."""
    parts = [(examples, questions.every_positive and job.judged)]
    asked = {one.query.id: one.query.text for one in questions.asked}
    for source in job.concat:
        follow = read_concatenated(source, job.settings.keep, policy)
        scored = (chooser.followed_by(example, asked) for example in follow)
        parts.append((scored, not keeps_first(source, None)))
    written_every = all(each for _, each in parts)
    rows = chain.from_iterable(as_written(some, each, written_every) for some, each in parts)
    texts: dict[str, int] = {}
    with write_text(path) as file:
        for example in rows:
            example = with_own_id(example, texts)
            file.write(json.dumps(tevatron_record(example, written_every), ensure_ascii=False) + "\n")


def with_own_id(example: Example, texts: dict[str, int]) -> Example:
    """The example, with another id if a question of other words has its own: files without ids count their rows, each
    from 0. texts: of the ids that were met, a hash of the question; is filled."""
    key, text, number = example.query.id, hash(example.query.text), 1
    while texts.setdefault(key, text) != text:
        number += 1
        key = f"{example.query.id}.{number}"
    return example if key == example.query.id else replace(example, query=replace(example.query, id=key))


def parents_path(path: Path) -> Path:
    """What a mined file was made of: written beside it."""
    name = path.name
    for ending in (".gz", ".zst", ".jsonl", ".json"):
        name = name.removesuffix(ending)
    return path.with_name(f"{name}.parents.json")


def write_parents(
    job: Job,
    path: Path,
    questions: Questions,
    pools: Sequence[Pool],
    corpus: Mapping[str, Any],
    tally: Tally,
    found: Audit,
) -> None:
    queries = {"source": job.data, "split": job.split, "subset": job.subset[0], "subset_seed": job.subset[1]}
    made: dict[str, Any] = {
        "file": {"name": path.name, "sha256": sha256_file(path)},
        "queries": queries | {"count": len(questions.asked), "sha256": questions.digest()},
        "corpus": dict(corpus),
        "pools": [pool.parent() for pool in pools],
        "teacher": job.teacher,
        "concat": [{"source": source, "sha256": sha256_file(source_path(source))} for source in job.concat],
        "settings": asdict(job.settings),
        "left_out": dict(tally.left_out),
        "audit": found.to_json(),
    }
    write_json(parents_path(path), sealed(made))
