"""The commands that reproduce a case of a paper's table, and the files that they need."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from jaxret.configs import load_config, load_stages
from jaxret.data.split_judgements import SETS
from jaxret.experiments.reproduce.papers import SEEDS, Case, PaperData, PaperRow, datasets, paper_rows, resolve_row
from jaxret.runs.mismatch import flatten

# A row's checkpoint -> the value of validation.best.
BEST = {"best": "metric", "last": "last"}
# Pattern of file names -> name of the format in docs/data.md; the first pattern that matches counts.
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
GENERATOR = "flan_t5_xl"  # entry of datasets.toml: the model that writes pseudo-queries


@dataclass(frozen=True)
class Reproduction:
    """The folders that a reproduction reads and writes, and its differences from the paper."""

    data: Path  # folder with a folder for each data set (tables/datasets.toml)
    workdir: Path  # folder with a run for each model and training set, and for each seed if a row has several
    # config keys whose values differ from the paper's, for example in a trial on less data
    overrides: Mapping[str, Any] = field(default_factory=dict)
    # fraction of the paper's steps or epochs to train; unless it is 1, all stages train equally long
    scale: float = 1.0

    def folder(self, name: str) -> Path:
        """Return the folder of a data set."""
        return self.data / (datasets()[name].folder or name)


def case_commands(case: Case, reproduction: Reproduction, seed: int | None = None) -> list[list[str]]:
    """Return the command lines of a case in order, each without the leading "jaxret".

    Args:
        case: the row and the data set.
        reproduction: folders, and keys that differ from the paper's.
        seed: number of the run, for rows that are a mean over runs.

    Raises:
        ValueError: the row has no config for the training set.
    """
    row = resolve_row(case.row)
    if row.verb == "count":
        files = dict.fromkeys(measure.rpartition(" of ")[2] for measure in case.measures)
        return [_check_command(case.target, str(_data_path(reproduction, case.target, file))) for file in files]
    if row.verb == "bm25":
        return [
            *_split_commands(case, reproduction),
            *(_bm25_command(case, reproduction, *set_files) for set_files in _search_files(case, reproduction)),
        ]
    training_case = next((same_source for same_source in row.cases() if same_source.source == case.source), case)
    if not training_case.config:
        raise ValueError(f"{row.id} has no config for a model that is trained on {case.source.name}")
    run = run_folder(case, reproduction, seed)
    warm_up_commands, keys = _warm_up_commands(case, reproduction, seed)
    config = [f"--config={training_case.config}", *_overrides(training_case, reproduction, seed, keys)]
    mine, training_data = _training_data(training_case, reproduction)
    train = []
    for key, path in {"train": training_data, "dev": _data_path(reproduction, case.source, case.source.dev)}.items():
        if key == "train" or case.source.dev:
            chunk, path = _chunk_commands(case, reproduction, path, case.source.on_error)
            mine += chunk
            train.append(f"--config.data.{key}={path}")
    if row.verb != "recipe":
        commands = [*mine, ["train", *config, f"--workdir={run}", *train]]
    else:
        recipe = ["recipe", *config, f"--workdir={run}", *train, *_recipe_flags(reproduction, case.source)]
        commands = [*mine, *warm_up_commands, recipe]
        run = run / row.stage
    if row.verb == "diversity":
        judged_pairs = _data_path(reproduction, case.source, case.source.dev or case.source.train)
        return [*commands, ["diversity", f"--workdir={run}", f"--data={judged_pairs}"]]
    sides = {"query": row.query_length, "passage": row.passage_length} if case.target != case.source else {}
    lengths = {side: [f"--{side}_length={sides[side]}"] if sides.get(side) else [] for side in ("query", "passage")}
    if case.sets:
        folder, sets = reproduction.folder(case.target.name), f"--sets={','.join(case.sets)}"
        beir = ["beir", str(folder), f"--workdir={run}", sets, "--on_error=keep"]  # some sets have empty passages
        return [*commands, [*beir, *lengths["query"], *lengths["passage"]]]
    for command in _search_commands(case, reproduction, run, lengths):
        if command not in commands:  # test sets may share a corpus
            commands.append(command)
    return [*commands[:1], *_split_commands(case, reproduction), *commands[1:]]


def _search_commands(
    case: Case, reproduction: Reproduction, run: Path, lengths: Mapping[str, list[str]]
) -> Iterator[list[str]]:
    """Yield the command lines that encode and search the corpus of each test set.

    Args:
        case: the row and the data set.
        run: folder of the run.
        lengths: the flags of the lengths of queries and passages.
    """
    for set_corpus, queries, qrels in _search_files(case, reproduction):
        chunk, corpus = _chunk_commands(case, reproduction, set_corpus)
        yield from chunk
        yield ["encode", f"--workdir={run}", f"--corpus={corpus}", *lengths["passage"]]
        search = ["search", f"--workdir={run}", f"--queries={queries}", *([f"--qrels={qrels}"] if qrels else [])]
        search += [f"--corpus={corpus}", f"--k={case.target.k}", *lengths["query"]]
        yield [*search, *(["--max_passage"] if chunk else []), *_measure_flags(case.measures)]


def _training_data(case: Case, reproduction: Reproduction) -> tuple[list[list[str]], Path]:
    """Return ([command that mines negatives], value of data.train). There is no command if the data have negatives, or
    if the row is a recipe whose first stage mines. All rows of a data set share the mined file."""
    source, row = case.source, resolve_row(case.row)
    data = _data_path(reproduction, source, source.train)
    if not source.mining or (row.verb == "recipe" and "mine" in load_stages(case.config)[0]):
        return [], data
    out = reproduction.workdir / f"bm25-negatives-{source.name}.jsonl"
    mine = ["mine", f"--data={data}", f"--corpus={_corpus_path(reproduction, source)}", "--pool=bm25"]
    return [[*mine, *(f"--{key}={value}" for key, value in source.mining.items()), f"--out={out}"]], out


def _chunk_commands(
    case: Case, reproduction: Reproduction, path: Path, on_error: str = ""
) -> tuple[list[list[str]], Path]:
    """Return ([command that splits the passages of a file], file that it writes). A row with whole passages has no
    command and keeps `path`."""
    if not (kind := resolve_row(case.row).chunks):
        return [], path
    out = reproduction.workdir / f"{path.stem}-{kind.replace('=', '-')}.jsonl"
    return [["data", "chunk", str(path), str(out), f"--{kind}", *([f"--on_error={on_error}"] if on_error else [])]], out


def _warm_up_commands(
    case: Case, reproduction: Reproduction, seed: int | None
) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the commands before a row's training, and the config keys that use their results. The commands generate
    pseudo-queries of the passages, and train I3's head on them."""
    if not (config := resolve_row(case.row).warm_up):
        return [], {}
    queries_folder = reproduction.workdir / f"generated-{case.source.name}"
    run = reproduction.workdir / re.sub("[/:]", "-", config) / case.source.name
    run = run if seed is None else run / f"seed-{seed}"
    model, corpus = reproduction.folder(GENERATOR), _corpus_path(reproduction, case.source)
    generate = ["generate", f"--model={model}", f"--corpus={corpus}", f"--out={queries_folder}"]
    generate += ["--write=pseudo_queries", "--write=training"]
    train = ["train", f"--config={config}", *_config_flags(config, {}, reproduction, seed), f"--workdir={run}"]
    train.append(f"--config.data.train={queries_folder / 'training'}")
    keys = {"train.start_from": run, "data.pseudo_queries": queries_folder / "pseudo-queries.jsonl"}
    return [generate, train], keys


def _check_command(data: PaperData, path: str) -> list[str]:
    """Return the command that counts a file's records. If training skips bad records, they are counted separately."""
    is_trained = data.on_error and path.endswith(".json")
    return ["data", "check", path, *([f"--on_error={data.on_error}"] if is_trained else [])]


def subset_folder(case: Case, reproduction: Reproduction) -> Path:
    """Return the folder into which `jaxret data split` writes the judgements of a row's subsets."""
    return reproduction.workdir / f"{case.target.name}-sets"


def _split_commands(case: Case, reproduction: Reproduction) -> list[list[str]]:
    """Return [command that writes the judgements of a row's subsets]; [] if the row has no subsets."""
    if not case.row.subsets:
        return []
    train, qrels = (_data_path(reproduction, case.target, path) for path in (case.target.train, case.target.qrels))
    return [["data", "split", f"--train={train}", f"--qrels={qrels}", f"--out={subset_folder(case, reproduction)}"]]


def run_folder(case: Case, reproduction: Reproduction, seed: int | None = None) -> Path:
    """Return the folder of the run (or recipe) that a case is measured with.

    Rows whose models are trained by the same command share a folder, which is named after the first of these rows. Such
    rows are stages of one recipe, or a system that is in several tables. Rows of BM25 with the same settings share an
    index.
    """
    row = resolve_row(case.row)
    if row.verb == "bm25":
        settings = (f"{key}-{value}" for key, value in _bm25_settings(case, reproduction).items())
        return reproduction.workdir / "-".join(["bm25", *settings])
    first = _first_rows().get(_training_settings(row, case.source), row.id)
    folder = reproduction.workdir / first.replace("/", "-") / case.source.name
    return folder if seed is None else folder / f"seed-{seed}"


@cache
def _first_rows() -> dict[tuple[object, ...], str]:
    """Return settings of a training (`_training_settings`) -> id of the first row that has them."""
    first_rows: dict[tuple[object, ...], str] = {}
    for row in paper_rows().values():
        for case in row.cases():
            if row.config:
                first_rows.setdefault(_training_settings(row, case.source), row.id)
    return first_rows


def _training_settings(row: PaperRow, source: PaperData) -> tuple[object, ...]:
    """Return the settings that a row's model depends on, except the seed and the values of `Reproduction`."""
    config = row.config if isinstance(row.config, str) else row.config.get(source.name, "")
    checkpoint = row.checkpoint if isinstance(row.checkpoint, str) else row.checkpoint.get(source.name, "best")
    keys = tuple(sorted((key, str(value)) for key, value in _changed_keys(row, config).items()))
    return row.verb == "recipe", config, keys, row.warm_up, row.chunks, source.name, checkpoint if source.dev else ""


def _changed_keys(row: PaperRow, config: str) -> dict[str, Any]:
    """Return a row's keys whose values differ from its config. For a recipe these are all keys, because its stages have
    their own values."""
    if row.verb == "recipe" or not config:
        return dict(row.set)
    values = _config_values(config)
    return {key: value for key, value in row.set.items() if _flag_text(values.get(key)) != _flag_text(value)}


@cache
def _config_values(config: str) -> dict[str, Any]:
    """Return the values of a config by dotted keys."""
    return flatten(load_config(config).to_dict())


def missing_files(case: Case, reproduction: Reproduction) -> list[str]:
    """Return a line (path, origin, format) for each file that a case's commands read and that does not exist."""
    words = [word.rpartition("=")[2] for command in case_commands(case, reproduction) for word in command]
    read_paths = [Path(word) for word in words if Path(word).is_relative_to(reproduction.data)]
    names = [case.source.name, case.target.name, *([GENERATOR] if resolve_row(case.row).warm_up else [])]
    names += [data.corpus for data in (case.source, case.target) if data.corpus in datasets()]
    lines = []
    for name in dict.fromkeys(names):
        for file, origin in datasets()[name].files.items():
            path = reproduction.folder(name) / file
            is_read = any(path == read_path or read_path in path.parents for read_path in read_paths)
            if is_read and not path.exists():  # a file of a model has no format
                form = next((form for pattern, form in FILE_FORMATS.items() if fnmatchcase(path.name, pattern)), "")
                lines.append(f"{path}: {origin}" + (f" (format {form})" if form else ""))
    return lines


def _bm25_settings(case: Case, reproduction: Reproduction) -> dict[str, Any]:
    """Return the settings of BM25 by the names of its flags."""
    return {**resolve_row(case.row).set, **reproduction.overrides}


def _bm25_command(case: Case, reproduction: Reproduction, corpus: Path, queries: Path, qrels: Path | None) -> list[str]:
    command = ["bm25", f"--workdir={run_folder(case, reproduction)}", f"--corpus={corpus}", f"--queries={queries}"]
    command += [f"--qrels={qrels}"] if qrels else []
    command += ["--on_error=keep"] if case.sets else []
    settings = (f"--{key}={value}" for key, value in _bm25_settings(case, reproduction).items())
    return [*command, f"--k={case.target.k}", *settings, *_measure_flags(case.measures)]


def _overrides(case: Case, reproduction: Reproduction, seed: int | None, extra_keys: Mapping[str, Any]) -> list[str]:
    keys = _changed_keys(resolve_row(case.row), case.config)
    if case.source.dev:
        keys["validation.best"] = BEST[case.checkpoint]
    if case.source.on_error:
        keys["data.on_error"] = case.source.on_error
    return _config_flags(case.config, {**keys, **extra_keys}, reproduction, seed)


def _config_flags(config: str, keys: dict[str, Any], reproduction: Reproduction, seed: int | None) -> list[str]:
    """Return flags that set the given keys, the overrides and scale of `reproduction`, and the seed."""
    if reproduction.scale != 1:
        train = _config_values(config) | keys
        if train["train.steps"] > 0:
            keys["train.steps"] = max(1, math.ceil(train["train.steps"] * reproduction.scale))
        else:
            keys["train.epochs"] = train["train.epochs"] * reproduction.scale
        if train["validation.then"]:
            keys["validation.then_from"] = train["validation.then_from"] * reproduction.scale
        if train["loss.sparsity.query"] or train["loss.sparsity.passage"]:
            keys["loss.sparsity.steps"] = int(train["loss.sparsity.steps"] * reproduction.scale)
    keys |= reproduction.overrides
    if seed is not None:
        keys |= dict.fromkeys(SEEDS, seed)
    return [f"--config.{key}={_flag_text(value)}" for key, value in keys.items()]


def _flag_text(value: Any) -> str:
    return f"({','.join(map(str, value))},)" if isinstance(value, (list, tuple)) else str(value)


def _data_path(reproduction: Reproduction, data: PaperData, path: str) -> Path:
    return reproduction.folder(data.name) / path


def _recipe_flags(reproduction: Reproduction, source: PaperData) -> list[str]:
    """Return flags for the corpus, queries and judgements that a recipe's stages are evaluated on."""
    queries = _data_path(reproduction, source, source.queries)
    flags = [f"--corpus={_corpus_path(reproduction, source)}", f"--queries={queries}"]
    flags += [f"--qrels={_data_path(reproduction, source, source.qrels)}"] if source.qrels else []
    return [*flags, f"--k={source.k}", *_measure_flags(source.measures)]


def _corpus_path(reproduction: Reproduction, data: PaperData) -> Path:
    if data.corpus in datasets():
        return _data_path(reproduction, datasets()[data.corpus], datasets()[data.corpus].corpus)
    return _data_path(reproduction, data, data.corpus)


def _search_files(case: Case, reproduction: Reproduction) -> list[tuple[Path, Path, Path | None]]:
    """Return (corpus, queries, judgements) of each search: one for the target or for each set of its mean, and one for
    each subset."""
    target = case.target
    if case.sets:
        folders = [reproduction.folder(target.name) / name for name in target.folders(case.sets)]
        return [(folder, folder, folder) for folder in folders]
    corpus, queries = _corpus_path(reproduction, target), _data_path(reproduction, target, target.queries)
    judgement_files = [_data_path(reproduction, target, target.qrels) if target.qrels else None]
    if case.row.subsets:
        judgement_files += [subset_folder(case, reproduction) / f"qrels.{name}.tsv" for name in SETS]
    return [(corpus, queries, qrels) for qrels in judgement_files]


def _measure_flags(measures: Sequence[str]) -> list[str]:
    """Return [flag with the measures that need it]. Accuracies are always computed if queries have answers."""
    names = [name for name in measures if not name.startswith("Accuracy@")]
    return [f"--measures={','.join(names)}"] if names else []
