"""Evaluate a run on every data set of a folder, as BEIR does: `jaxret beir`.

Each set is encoded and searched like in `jaxret encode` and `jaxret search`. A finished set is not evaluated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxret.data.formats import Corpus, stat_files
from jaxret.data.formats.set_folders import SetFolders, list_sets, unjudged_members
from jaxret.evaluation.metrics import MEAN_DECIMALS
from jaxret.evaluation.text_table import aligned_table
from jaxret.experiments.beir_job import BeirJob, split_column
from jaxret.experiments.recipes.ledger import Ledger
from jaxret.experiments.reproduce.papers import paper_means
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_bm25 import search_bm25
from jaxret.experiments.searches.search_files import search_files
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.parallel.events import emit
from jaxret.runs.run import Run, open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.bm25_settings import BM25Settings
from jaxret.search.search_options import SearchOptions
from jaxret.storage.atomic import read_json, write_json
from jaxret.storage.buckets.working_copy import shown_path

BEIR_MEASURES = ("nDCG@10", "R@100")
OPTIONS = EvaluationOptions(k=100, measures=BEIR_MEASURES, latency=0)


def evaluate_beir(job: BeirJob) -> dict[str, Any]:
    """Evaluate a run on every set, write the result as JSON, print it as a table, and return it.

    Raises:
        DataError: the folder has no set, or a record is bad.
        FileNotFoundError: a folder of `columns` has no evaluation of the sets.
        ValueError: a set of `sets` is missing or has no judgements, or another system was evaluated with other
            judgements.
    """
    sets = choose_sets(job)
    require_evaluations(job, sets)
    run = _Evaluator(job)
    results: dict[str, Any] = {}
    for name, members in sets.items():
        corpora = {member: Corpus.open(folder) for member, folder in members.items()}
        results[name] = combined_members({member: run.evaluate(member, corpus) for member, corpus in corpora.items()})
        for member, corpus in corpora.items() if job.bm25 else ():
            run.evaluate_bm25(member, corpus)
        result = run.write_result()  # written after each set, so that users see finished sets
    columns_to_read = (*job.columns, *([f"BM25={run.bm25_folder}"] if job.bm25 else ()))
    columns = {Workdir(job.workdir).name: results} | read_columns(columns_to_read, results, job.split)
    print(beir_table(columns))
    print(f"written to {job.result}")
    emit("beir", path=job.result, result=result)
    return result


def choose_sets(job: BeirJob) -> SetFolders:
    """Return the sets to evaluate on, and print why other sets of the folder are left out.

    Raises:
        DataError: the folder has no set.
        ValueError: a requested set is missing or has no judgements, or no set has judgements.
    """
    sets = list_sets(Path(job.folder))
    if unknown_names := [name for name in job.sets if name not in sets]:
        raise ValueError(f"{job.folder} has no set {', '.join(unknown_names)}; it has {', '.join(sets)}")
    selection = {name: members for name, members in sets.items() if not job.sets or name in job.sets}
    reasons = unjudged_sets(selection, job.split)
    if reasons and (job.sets or len(reasons) == len(selection)):
        name, reason = next(iter(reasons.items()))
        raise ValueError(f"{job.folder}: {name} has {reason}; give another --split, or other --sets")
    for name, reason in reasons.items():
        print(f"left out: {name} has {reason}")
    return {name: members for name, members in selection.items() if name not in reasons}


def unjudged_sets(sets: SetFolders, split: str) -> dict[str, str]:
    """Return set -> reason, for the sets that cannot be evaluated because members have no judgements of the split."""
    reasons: dict[str, str] = {}
    for name, members in sets.items():
        if names := unjudged_members(members, split):
            reasons[name] = f"no judgements of {split}" + (f" in {names[0]}" if names != [name] else "")
    return reasons


def require_evaluations(job: BeirJob, sets: SetFolders) -> None:
    """Raise FileNotFoundError if a folder of `columns` has no evaluation of the sets. `read_columns` would raise it
    after hours of work."""
    stems = [
        f"{stem}.{job.split}"
        for name, members in sets.items()
        for member in members
        for stem in (member, member.removeprefix(f"{name}-"))
    ]
    for column in job.columns:
        _, folder = split_column(column)
        names = [path.name for place in (folder / "eval", folder) for path in place.glob("*.json")]
        if not any(name.startswith(f"{stem}.") for name in names for stem in stems):
            raise _no_evaluation(folder, stems[0])


def _no_evaluation(folder: Path, stem: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{folder} has no evaluation of these sets: it, or its folder eval/, must have files such as {stem}.json"
    )


class _Evaluator:
    """Encodes and searches single sets. A model is opened when the first set needs it."""

    def __init__(self, job: BeirJob) -> None:
        self.job, self.workdir = job, Workdir(job.workdir)
        self.ledger = Ledger(job.result.with_suffix(""))
        # folder of BM25's indexes and evaluations
        self.bm25_folder = job.result.parent / ".".join(filter(None, ("bm25", job.name)))

    @cached_property
    def encoder(self) -> Run:
        return open_run(self.job.workdir, self.job.checkpoint, passage_length=self.job.passage_length)

    @cached_property
    def searcher(self) -> Run:
        return open_run(self.job.workdir, self.job.checkpoint, query_length=self.job.query_length)

    def label(self, query: bool) -> str:
        """Return the part of file names that has the job's name, checkpoint and lengths; the query length only if
        `query` is set."""
        step = "" if self.job.checkpoint == "best" else f"step-{self.searcher.checkpoint['step']}"
        length, passage_length = self.job.lengths
        return ".".join(filter(None, (self.job.name, step, length if query else "", passage_length)))

    def _source(self, corpus: Corpus) -> EvaluationSource:
        """Open the queries and judgements in the folder of a corpus."""
        return EvaluationSource.open(corpus.source, corpus.source, self.job.split)

    def _stem(self, name: str) -> str:
        """Return the name, without suffix, of the files of a set's evaluation."""
        return ".".join(filter(None, (f"{name}.{self.job.split}", self.label(True))))

    def evaluate(self, name: str, corpus: Corpus) -> dict[str, Any]:
        """Evaluate on the set in a corpus's folder, unless it is already evaluated, and return the set's result
        (`read_set`)."""
        encoded_name, label = ".".join(filter(None, (name, self.label(False)))), self.label(True)
        on_error = "skip" if self.job.on_error == "skip" else "error"
        options = replace(OPTIONS, label=label, on_error=on_error, name=f"{name}.{self.job.split}")
        stem = self._stem(name)
        path = self.workdir.evaluation(stem)

        def measure() -> list[Path]:
            encode_corpus(self.encoder, corpus, encoded_name, EncodeOptions(on_error=self.job.on_error))
            search_files(self.searcher, self._source(corpus), options, SearchOptions(), encoded_name)
            return [path, self.workdir.rankings(stem)]

        self.ledger.run_step(name, self._inputs(Path(corpus.source), self.job.on_error), measure)
        return read_set(path)

    def evaluate_bm25(self, name: str, corpus: Corpus) -> None:
        """Evaluate BM25 on the set in a corpus's folder, unless it is already evaluated."""
        settings, stem, workdir = BM25Settings(), f"{name}.{self.job.split}", Workdir(self.bm25_folder)
        options = replace(OPTIONS, on_error=self.job.on_error, name=stem)

        def measure() -> list[Path]:
            self.bm25_folder.parent.mkdir(parents=True, exist_ok=True)
            search_bm25(str(self.bm25_folder), corpus, self._source(corpus), settings, options)
            return [workdir.evaluation(stem), workdir.rankings(stem)]

        inputs = {"settings": asdict(settings), **_data_inputs(corpus.source, self.job.on_error)}
        self.ledger.run_step(f"{name} by BM25", inputs, measure)

    def _inputs(self, folder: Path, on_error: str) -> dict[str, Any]:
        """Return the values that the run's result on a set depends on, as JSON."""
        encode = self.searcher.config.encode
        system = {"checkpoint": self.searcher.checkpoint, "dtype": encode.dtype, "words": encode.words}
        return system | _data_inputs(folder, on_error)

    def _is_evaluated(self, member: str, folder: Path) -> bool:
        """Return whether an evaluation is complete. An evaluation with on_error "error" found no bad record, so it is
        valid for every policy."""
        return any(self.ledger.has(member, self._inputs(folder, on_error)) for on_error in {"error", self.job.on_error})

    def write_result(self) -> dict[str, Any]:
        """Write the results of all complete sets of the folder, including sets that other jobs evaluated, and return
        them."""
        sets = list_sets(Path(self.job.folder))
        reasons = unjudged_sets(sets, self.job.split)
        results = {}
        for name, members in sets.items():
            if name not in reasons and all(self._is_evaluated(*member) for member in members.items()):
                paths = {member: self.workdir.evaluation(self._stem(member)) for member in members}
                results[name] = combined_members({member: read_set(path) for member, path in paths.items()})
        means = {name: mean for name in paper_means() if (mean := mean_of(name, results))}
        query, passage = self.searcher.tokenizer.query_length, self.encoder.tokenizer.passage_length
        result = {
            "sets": results,
            "means": means,
            "missing": {name: missing_sets(name, results) for name in paper_means() if name not in means},
            "skipped": reasons,
            "checkpoint": self.searcher.checkpoint,
            "lengths": {"query": query, "passage": passage},
            "folder": shown_path(Path(self.job.folder).absolute()),
            "split": self.job.split,
        }
        write_json(self.job.result, result)
        return result


def _data_inputs(source: str | Path, on_error: str) -> dict[str, Any]:
    """Return the values, except the system, that a result on a set depends on, as JSON."""
    folder = Path(source)
    files = sorted(file for pattern in ("*.*", "qrels/*") for file in folder.glob(pattern) if file.is_file())
    return {"folder": shown_path(folder.absolute()), "files": stat_files(files), "on_error": on_error}


def read_set(path: Path) -> dict[str, Any]:
    """Return measures, number of queries, digest of judgements and path of an evaluation file. Raises ValueError for
    another file."""
    report = read_json(path)
    try:
        digests = report.get("provenance", {}).get("dataset", {})
        qrels = digests.get("sha256", digests).get("qrels", "")
        measures, queries = {m: report["mean"][m] for m in BEIR_MEASURES}, report["queries_expected"]
        return {"measures": measures, "queries": queries, "qrels": qrels, "evaluation": shown_path(path)}
    except (KeyError, TypeError, AttributeError) as error:
        names = " and ".join(BEIR_MEASURES)
        raise ValueError(f"{path} is not an evaluation with {names}: {error} is missing") from error


def combined_members(members: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of a set from the results of its members: the mean, if it has several (CQADupStack)."""
    if len(members) == 1:
        return dict(next(iter(members.values())))
    measures = {measure: fmean(result["measures"][measure] for result in members.values()) for measure in BEIR_MEASURES}
    queries = sum(result["queries"] for result in members.values())
    return {"measures": measures, "queries": queries, "members": dict(members)}


def missing_sets(mean: str, results: Mapping[str, Any]) -> list[str]:
    """Return the sets of a mean that have no result."""
    return [name for name in paper_means()[mean] if name not in results]


def mean_of(mean: str, results: Mapping[str, Any]) -> dict[str, float]:
    """Return measure -> mean over the sets of a mean; {} if one of the sets has no result."""
    if missing_sets(mean, results):
        return {}
    return {m: fmean(results[name]["measures"][m] for name in paper_means()[mean]) for m in BEIR_MEASURES}


def read_columns(columns: Sequence[str], results: Mapping[str, Any], split: str = "test") -> dict[str, dict[str, Any]]:
    """Return system -> set -> result, for other systems on the same sets.

    Args:
        columns: folders of runs, or of evaluation files (SET.SPLIT.json); NAME=FOLDER names a system.
        results: results of the run, with its sets, files and judgements.
        split: split of the judgements.

    Raises:
        FileNotFoundError: a folder has no evaluation of the sets.
        ValueError: an evaluation was made with other judgements.
    """
    systems: dict[str, dict[str, Any]] = {}
    for column in columns:
        name, folder = split_column(column)
        system_results: dict[str, Any] = {}
        for set_name, result in results.items():
            members = result.get("members") or {set_name: result}
            complete = {}
            for key, member in members.items():
                stems = [f"{key}.{split}", f"{key.removeprefix(f'{set_name}-')}.{split}"]
                if set_result := read_system_result(folder, stems, member):
                    complete[key] = set_result
            if len(complete) == len(members):
                system_results[set_name] = combined_members(complete)
        if not system_results:
            raise _no_evaluation(folder, f"{next(iter(results))}.{split}")
        systems[name] = system_results
    return systems


def read_system_result(folder: Path, stems: Sequence[str], run_result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return another system's result on a set; None without one.

    A file with the name of the run's file (checkpoint and lengths) is preferred to a file of `stems`.

    Args:
        folder: folder of a run, or of evaluation files.
        stems: names of the file without checkpoint, lengths and suffix. A forum of CQADupStack has two names, with and
            without the name of the set.
        run_result: the run's result on the set.

    Raises:
        ValueError: the result was made with other judgements.
    """
    names = dict.fromkeys((Path(run_result["evaluation"]).name, *(f"{stem}.json" for stem in stems)))
    paths = [path for place in (folder / "eval", folder) for name in names if (path := place / name).is_file()]
    if not paths:
        return None
    result = read_set(paths[0])
    has_other_qrels = run_result["qrels"] and result["qrels"] and run_result["qrels"] != result["qrels"]
    if has_other_qrels or run_result["queries"] != result["queries"]:
        raise ValueError(
            f"{paths[0]} was evaluated with other judgements ({result['queries']} queries) than "
            f"{run_result['evaluation']} ({run_result['queries']}); evaluate both with the same judgements"
        )
    return result


def beir_table(systems: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the results of systems on the sets of the first system. Below the sets are the means whose sets
    all have results; below the table are the missing sets of the other means."""
    first = next(iter(systems.values()))
    header = ["set", "queries", *(f"{measure} {name}" for measure in BEIR_MEASURES for name in systems)]

    def cells(values: Sequence[Mapping[str, float]]) -> list[str]:
        return [f"{means[m]:.{MEAN_DECIMALS}f}" if m in means else "-" for m in BEIR_MEASURES for means in values]

    rows = []
    for name, result in first.items():
        values = [results.get(name, {}).get("measures", {}) for results in systems.values()]
        rows.append([name, f"{result['queries']:,}", *cells(values)])
    means = [name for name in paper_means() if mean_of(name, first)]
    rows += [[name, "", *cells([mean_of(name, results) for results in systems.values()])] for name in means]
    gaps = {name: missing_sets(name, first) for name in paper_means() if name not in means}
    lines = [f"{name}: missing {', '.join(sets)}" for name, sets in gaps.items()]
    return "\n".join([aligned_table(header, rows), *lines])
