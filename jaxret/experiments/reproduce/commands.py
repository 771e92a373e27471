"""The commands that reproduce a case of a paper's table, and the files that they need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from jaxret.configs import load_config, load_stages
from jaxret.data.split_judgements import SETS
from jaxret.experiments.reproduce.papers import SEEDS, Case, PaperData, PaperRow, datasets, paper_rows, resolved
from jaxret.runs.mismatch import flatten

# A row's checkpoint -> the value of validation.best.
BEST = {"best": "metric", "last": "last"}
# Pattern of a file's name -> name of its format in docs/data.md; the first that fits counts.
FILE_FORMATS = {
    "psgs_w100.tsv": "dpr.passages",
    "biencoder-*.json": "dpr.examples",
    "*.qa.csv": "dpr.queries",
    "P*.test.json": "entity.questions",
    "collection.splitTitle.tsv": "rocketqa.passages",
    "collection.tsv": "msmarco.texts",
    "*queries*.tsv": "msmarco.texts",
    "*qrels*": "trec.qrels",
    "corpus.jsonl": "beir.texts",
}
GENERATOR = "flan_t5_xl"  # the folder of the model that writes pseudo-queries, of datasets.toml


@dataclass(frozen=True)
class Places:
    """Where a reproduction reads and writes."""

    data: Path  # folder with a folder for each data set (tables/datasets.toml)
    workdir: Path  # folder of the runs; one for each model, training set, and seed where there are several
    # keys of the config with other values than the paper's, as for a trial on less data
    overrides: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0  # part of the paper's steps or epochs to train for. All stages of a recipe train alike then.

    def folder(self, name: str) -> Path:
        """Return the folder of a data set."""
        return self.data / (datasets()[name].folder or name)


def case_commands(case: Case, places: Places, seed: int | None = None) -> list[list[str]]:
    """Return the command lines of a case in order, each without the leading "jaxret".

    Args:
        case: the row and the data set.
        places: folders, and keys that differ from the paper's.
        seed: number of the run, for rows that are the mean of several.

    Raises:
        ValueError: the row has no config for the data set.
    """
    row = resolved(case.row)
    if row.verb == "count":
        return [_check(places, case.target, str(path)) for path in _counted_files(case, places)]
    if row.verb == "bm25":
        return [*_split(case, places), *(_bm25(case, places, *one) for one in _sets(case, places))]
    how = next((other for other in row.cases() if other.source == case.source), case)
    if not how.config:
        raise ValueError(f"{row.id} has no config for a model that is trained on {case.source.name}")
    run = run_folder(case, places, seed)
    before, keys = _warm_up(case, places, seed)
    config = [f"--config={how.config}", *_overrides(how, places, seed, keys)]
    mine, training_data = _training_data(how, places)
    train = []
    for key, path in {"train": training_data, "dev": _inside(places, case.source, case.source.dev)}.items():
        if key == "train" or case.source.dev:
            chunk, path = _chunks(case, places, path, case.source.on_error)
            mine += chunk
            train.append(f"--config.data.{key}={path}")
    if row.verb != "recipe":
        commands = [*mine, ["train", *config, f"--workdir={run}", *train]]
    else:
        recipe = ["recipe", *config, f"--workdir={run}", *train, *_recipe_flags(places, case.source)]
        commands = [*mine, *before, recipe]
        run = run / row.stage
    if row.verb == "diversity":
        judged_pairs = _inside(places, case.source, case.source.dev or case.source.train)
        return [*commands, ["diversity", f"--workdir={run}", f"--data={judged_pairs}"]]
    other_domain = case.target != case.source
    lengths = _lengths(row.query_length * other_domain, row.passage_length * other_domain)
    if case.sets:
        folder, sets = places.folder(case.target.name), f"--sets={','.join(case.sets)}"
        beir = ["beir", str(folder), f"--workdir={run}", sets, "--on_error=keep"]  # some sets have empty passages
        return [*commands, [*beir, *lengths["query"], *lengths["passage"]]]
    for corpus, queries, qrels in _sets(case, places):
        chunk, corpus = _chunks(case, places, corpus)
        commands += [each for each in chunk if each not in commands]
        encode = ["encode", f"--workdir={run}", f"--corpus={corpus}", *lengths["passage"]]
        commands += [encode] if encode not in commands else []
        search = ["search", f"--workdir={run}", f"--queries={queries}", *([f"--qrels={qrels}"] if qrels else [])]
        search += [f"--corpus={corpus}", f"--k={case.target.k}", *lengths["query"], *["--max_passage"] * bool(chunk)]
        if names := _by_judgements(case.measures):
            search.append(f"--measures={','.join(names)}")
        commands.append(search)
    return [*commands[:1], *_split(case, places), *commands[1:]]


def _training_data(case: Case, places: Places) -> tuple[list[list[str]], Path]:
    """Return the value of data.train, and the command that makes it where the data set has no negatives. All rows of a
    data set share its file; a recipe whose first stage mines needs none."""
    source, row = case.source, resolved(case.row)
    data = _inside(places, source, source.train)
    if not source.mining or (row.verb == "recipe" and "mine" in load_stages(case.config)[0]):
        return [], data
    out = places.workdir / f"bm25-negatives-{source.name}.jsonl"
    mine = ["mine", f"--data={data}", f"--corpus={_corpus(places, source)}", "--pool=bm25"]
    return [[*mine, *(f"--{key}={value}" for key, value in source.mining.items()), f"--out={out}"]], out


def _chunks(case: Case, places: Places, path: Path, on_error: str = "") -> tuple[list[list[str]], Path]:
    """Return the command that splits the passages of a file, and the file that it writes; the file itself for rows with
    whole passages."""
    if not (kind := resolved(case.row).chunks):
        return [], path
    out = places.workdir / f"{path.stem}-{kind.replace('=', '-')}.jsonl"
    return [["data", "chunk", str(path), str(out), f"--{kind}", *([f"--on_error={on_error}"] * bool(on_error))]], out


def _warm_up(case: Case, places: Places, seed: int | None) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the commands that run before a row's training, and the keys that continue from them: pseudo-queries of the
    passages, and the training of I3's head on them."""
    if not (config := resolved(case.row).warm_up):
        return [], {}
    queries_folder = places.workdir / f"generated-{case.source.name}"
    run = places.workdir / re.sub("[/:]", "-", config) / case.source.name
    run = run if seed is None else run / f"seed-{seed}"
    generate = ["generate", f"--model={places.folder(GENERATOR)}", f"--corpus={_corpus(places, case.source)}"]
    generate += [f"--out={queries_folder}", "--write=pseudo_queries", "--write=training"]
    train = ["train", f"--config={config}", *_config_flags(config, {}, places, seed), f"--workdir={run}"]
    train.append(f"--config.data.train={queries_folder / 'training'}")
    keys = {"train.start_from": run, "data.pseudo_queries": queries_folder / "pseudo-queries.jsonl"}
    return [generate, train], keys


def _counted_files(case: Case, places: Places) -> list[Path]:
    """Return the files whose records a table counts."""
    names = [measure.rpartition(" of ")[2] for measure in case.measures]
    return [_inside(places, case.target, name) for name in dict.fromkeys(names)]


def _check(places: Places, data: PaperData, path: str) -> list[str]:
    """Return the command that counts a file's records. Where training leaves bad ones out, they are counted apart."""
    is_trained = data.on_error and path.endswith(".json")
    return ["data", "check", path, *([f"--on_error={data.on_error}"] if is_trained else [])]


def subset_folder(case: Case, places: Places) -> Path:
    """Return the folder of the judgements of a row's subsets, which `jaxret data split` writes."""
    return places.workdir / f"{case.target.name}-sets"


def _split(case: Case, places: Places) -> list[list[str]]:
    """Return the command that writes the judgements of a row's subsets; none where a row has no subsets."""
    if not case.row.subsets:
        return []
    train, qrels = (_inside(places, case.target, path) for path in (case.target.train, case.target.qrels))
    return [["data", "split", f"--train={train}", f"--qrels={qrels}", f"--out={subset_folder(case, places)}"]]


def run_folder(case: Case, places: Places, seed: int | None = None) -> Path:
    """Return the folder of the run (or recipe) that a case is measured with.

    Rows whose models are trained by the same command share the folder that is named after the first of them: stages of
    one recipe, a system that several tables have. BM25 has one index of a corpus for all rows with the same settings.
    """
    if resolved(case.row).verb == "bm25":  # one index of a corpus for all rows with the same settings
        return places.workdir / "-".join(
            ["bm25", *(f"{key}-{value}" for key, value in _settings(case, places).items())]
        )
    row = resolved(case.row)
    first = _first_rows().get(_training(row, case.source), row.id)
    folder = places.workdir / first.replace("/", "-") / case.source.name
    return folder if seed is None else folder / f"seed-{seed}"


@cache
def _first_rows() -> dict[tuple[object, ...], str]:
    """Return what decides how a model is trained -> id of the first row that has it."""
    first: dict[tuple[object, ...], str] = {}
    for row in paper_rows().values():
        for case in row.cases():
            if row.config:
                first.setdefault(_training(row, case.source), row.id)
    return first


def _training(row: PaperRow, source: PaperData) -> tuple[object, ...]:
    """Return the settings that decide how a row's model is trained, except the seed and the values of `Places`."""
    config = row.config if isinstance(row.config, str) else row.config.get(source.name, "")
    checkpoint = row.checkpoint if isinstance(row.checkpoint, str) else row.checkpoint.get(source.name, "best")
    keys = tuple(sorted((key, str(value)) for key, value in _changed_keys(row, config).items()))
    return row.verb == "recipe", config, keys, row.warm_up, row.chunks, source.name, checkpoint if source.dev else ""


def _changed_keys(row: PaperRow, config: str) -> dict[str, Any]:
    """Return a row's keys whose values its config does not have; of a recipe all: its stages have their own values."""
    if row.verb == "recipe" or not config:
        return dict(row.set)
    values = _config_values(config)
    return {key: value for key, value in row.set.items() if _flag(values.get(key)) != _flag(value)}


@cache
def _config_values(config: str) -> dict[str, Any]:
    """Return the values of a config by dotted keys."""
    return flatten(load_config(config).to_dict())


def missing_files(case: Case, places: Places) -> list[str]:
    """Return a line for each file that a case's commands read and --data lacks: path, origin and format."""
    words = [word.rpartition("=")[2] for command in case_commands(case, places) for word in command]
    read = [Path(word) for word in words if Path(word).is_relative_to(places.data)]
    names = [case.source.name, case.target.name, *([GENERATOR] if resolved(case.row).warm_up else [])]
    names += [data.corpus for data in (case.source, case.target) if data.corpus in datasets()]
    lines = []
    for name in dict.fromkeys(names):
        for file, origin in datasets()[name].files.items():
            path = places.folder(name) / file
            is_read = any(path == one or one in path.parents for one in read)
            if is_read and not path.exists():
                lines.append(f"{path}: {origin}{_format(path.name)}")
    return lines


def _format(file: str) -> str:
    """Return " (format NAME)" of docs/data.md; "" for a file of a model."""
    name = next((name for pattern, name in FILE_FORMATS.items() if fnmatchcase(file, pattern)), "")
    return f" (format {name})" if name else ""


def _settings(case: Case, places: Places) -> dict[str, Any]:
    """Return settings of BM25 by the names of its flags."""
    return {**resolved(case.row).set, **places.overrides}


def _bm25(case: Case, places: Places, corpus: Path, queries: Path, qrels: Path | None) -> list[str]:
    command = ["bm25", f"--workdir={run_folder(case, places)}", f"--corpus={corpus}", f"--queries={queries}"]
    command += [f"--qrels={qrels}"] if qrels else []
    command += ["--on_error=keep"] if case.sets else []
    command += [f"--k={case.target.k}", *(f"--{key}={value}" for key, value in _settings(case, places).items())]
    if names := _by_judgements(case.measures):
        command.append(f"--measures={','.join(names)}")
    return command


def _overrides(case: Case, places: Places, seed: int | None, more: Mapping[str, Any]) -> list[str]:
    keys = _changed_keys(resolved(case.row), case.config)
    if case.source.dev:
        keys["validation.best"] = BEST[case.checkpoint]
    if case.source.on_error:
        keys["data.on_error"] = case.source.on_error
    return _config_flags(case.config, {**keys, **more}, places, seed)


def _config_flags(config: str, keys: dict[str, Any], places: Places, seed: int | None) -> list[str]:
    """Return flags of the config's keys, with those of `places` and of the seed."""
    if places.scale != 1:
        train = _config_values(config) | keys
        if train["train.steps"] > 0:
            keys["train.steps"] = max(1, math.ceil(train["train.steps"] * places.scale))
        else:
            keys["train.epochs"] = train["train.epochs"] * places.scale
    keys |= places.overrides
    if seed is not None:
        keys |= dict.fromkeys(SEEDS, seed)
    return [f"--config.{key}={_flag(value)}" for key, value in keys.items()]


def _flag(value: Any) -> str:
    return f"({','.join(map(str, value))},)" if isinstance(value, (list, tuple)) else str(value)


def _inside(places: Places, data: PaperData, path: str) -> Path:
    return places.folder(data.name) / path


def _recipe_flags(places: Places, source: PaperData) -> list[str]:
    """Return flags for the corpus, queries and judgements that a recipe's stages are evaluated on."""
    flags = [f"--corpus={_corpus(places, source)}", f"--queries={_inside(places, source, source.queries)}"]
    if source.qrels:
        flags.append(f"--qrels={_inside(places, source, source.qrels)}")
    flags.append(f"--k={source.k}")
    if names := _by_judgements(source.measures):
        flags.append(f"--measures={','.join(names)}")
    return flags


def _corpus(places: Places, data: PaperData) -> Path:
    if data.corpus in datasets():
        return _inside(places, datasets()[data.corpus], datasets()[data.corpus].corpus)
    return _inside(places, data, data.corpus)


def _sets(case: Case, places: Places) -> list[tuple[Path, Path, Path | None]]:
    """Return (corpus, queries, judgements) of the target, of each set that it is the mean of, of each of its
    subsets."""
    target = case.target
    if case.sets:
        folders = [places.folder(target.name) / name for name in target.folders(case.sets)]
        return [(folder, folder, folder) for folder in folders]
    corpus, queries = _corpus(places, target), _inside(places, target, target.queries)
    judgement_files = [_inside(places, target, target.qrels) if target.qrels else None]
    if case.row.subsets:
        judgement_files += [subset_folder(case, places) / f"qrels.{name}.tsv" for name in SETS]
    return [(corpus, queries, qrels) for qrels in judgement_files]


def _by_judgements(measures: Sequence[str]) -> list[str]:
    """Return the measures that --measures takes; accuracies by answers are computed wherever queries have answers."""
    return [name for name in measures if not name.startswith("Accuracy@")]


def _lengths(query: int, passage: int) -> dict[str, list[str]]:
    return {
        "query": [f"--query_length={query}"] if query else [],
        "passage": [f"--passage_length={passage}"] if passage else [],
    }
