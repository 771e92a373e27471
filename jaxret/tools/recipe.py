"""What `jaxret recipe` does: the stages of a config, each mined, trained, encoded and searched; and a table of them.

WORKDIR/mined/STAGE.jsonl  what the stage was trained on, where it mines
        STAGE/             its run
        done/              which steps are done, and from what (ledger.py)
        results.md         the table
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.contract import flatten
from jaxret.data.files import find_file
from jaxret.data.formats import corpus_file, example_files, files_of, found_queries, is_named, source_path
from jaxret.data.formats.readers import found_judgements
from jaxret.evaluation.metrics import Evaluation
from jaxret.evaluation.report import read_evaluation, to_markdown, to_text
from jaxret.mining.filters import Settings
from jaxret.mining.mine import Job, mine, parents_path
from jaxret.mining.pools import BM25_NAME
from jaxret.retrieval.encode import corpus_name, encode_corpus
from jaxret.runs.lock import hold
from jaxret.runs.run import config_json, open_checkpoints, open_run
from jaxret.runs.workdir import Workdir
from jaxret.shipped import changed, load, stages
from jaxret.storage import atomic_write, sha256_file
from jaxret.tools.asked import result_name
from jaxret.tools.ledger import Ledger
from jaxret.tools.search_files import measures_for, search_files
from jaxret.training.loop import train

_MINING = ("pools", "concat")  # keys of a stage's "mine" beside those of Settings


@dataclass(frozen=True)
class Stage:
    """mining: None where it trains on the data as it is. pools, concat: "bm25" or names of earlier stages, whose run is
    searched, or whose mined file follows."""

    name: str
    config: ConfigDict
    mining: Settings | None = None
    pools: tuple[str, ...] = ()
    concat: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluated:
    """On what stages are evaluated; measures: None for the usual ones."""

    corpus: str
    queries: str
    qrels: str
    split: str = "test"
    k: int = 100
    measures: tuple[str, ...] | None = None


def read_stages(config: str, given: Mapping[str, Any]) -> list[Stage]:
    """The stages of a config, "NAME" or "FILE.py", with :SUFFIX or without. given: keys of the config that are to have
    other values in every stage. Raises ValueError for a stage that is not as docs/mining.md says."""
    found: list[Stage] = []
    name, _, suffix = config.partition(":")
    for number, entry in enumerate(stages(config), 1):
        stage = _stage(entry, f"{config}: stage {number}", [before.name for before in found])
        chosen = entry.get("suffix", suffix)
        base = load(f"{name}:{chosen}" if chosen else name)
        keys = {**entry.get("config", {}), **given}
        found.append(replace(stage, config=changed(base, keys, config)))
    return found


def _stage(entry: Mapping[str, Any], place: str, before: Sequence[str]) -> Stage:
    unknown = set(entry) - {"name", "suffix", "mine", "config"}
    name = entry.get("name", "")
    if unknown or not name or name in before or name in ("mined", "done"):
        raise ValueError(
            f"{place}: it has name (one of its own), and perhaps suffix, mine, config; it is {dict(entry)}"
        )
    if entry.get("mine") is None:
        return Stage(name, ConfigDict())
    settings = dict(entry["mine"])
    known = [field.name for field in fields(Settings)]
    if wrong := [key for key in settings if key not in (*known, *_MINING)]:
        raise ValueError(f"{place}: mine has no {wrong[0]!r}; it has {', '.join((*_MINING, *known))}")
    pools, concat = (tuple(settings.pop(key, ())) for key in _MINING)
    if wrong := [pool for pool in (*pools, *concat) if pool not in before and (pool != BM25_NAME or pool in concat)]:
        raise ValueError(f"{place}: {wrong[0]!r} is neither {BM25_NAME} nor an earlier stage; those are {list(before)}")
    return Stage(name, ConfigDict(), Settings(**settings), pools, concat)


def run_recipe(found: Sequence[Stage], workdir: str | Path, on: Evaluated, progress: bool = True) -> Path:
    """Does what is not done yet, and prints the table, whose path is returned. Raises what the steps raise."""
    folder = Workdir(workdir).path
    with hold(folder, "a recipe"):
        recipe = _Recipe(folder, {stage.name: stage for stage in found}, on, Ledger(folder), progress)
        table = {stage.name: recipe.stage(stage) for stage in found}
        with atomic_write(folder / "results.md") as file:
            file.write(to_markdown(table) + "\n")
    print(f"\n{to_text(table)}\ntable: {folder / 'results.md'}")
    return folder / "results.md"


@dataclass
class _Recipe:
    folder: Path
    stages: Mapping[str, Stage]
    on: Evaluated
    ledger: Ledger
    progress: bool

    def __post_init__(self) -> None:
        self._digests: dict[Path, str] = {}
        self._made: dict[str, dict[str, str]] = {}  # step -> digests of what it made: inputs of later ones
        self._corpus = self._digest(files_of(corpus_file(self.on.corpus)))

    def stage(self, stage: Stage) -> Evaluation:
        config = stage.config
        if stage.mining is not None:
            self._do(f"{stage.name}.mine", self._mining(stage), lambda: self._mine(stage))
            mined = {"data.train": str(self.mined(stage.name)), "data.negatives_run": "", "data.subset": 0}
            config = changed(config, mined, stage.name)
        self._do(f"{stage.name}.train", self._training(stage, config), lambda: self._train(stage, config))
        made = self._made[f"{stage.name}.train"]
        encoding = {"corpus": self._corpus, "run": made, "dtype": config.encode.dtype}
        self._do(f"{stage.name}.encode", encoding, lambda: self._encode(stage))
        self._do(f"{stage.name}.search", self._searching(stage), lambda: self._search(stage))
        return self._in_order(read_evaluation(self._result(stage)))

    def _in_order(self, found: Evaluation) -> Evaluation:
        """The measures as they were asked for, then accuracies by cut-off; a file has them by name."""
        accuracies = sorted(
            (name for name in found.mean if name.startswith("Accuracy@")), key=lambda name: int(name[9:])
        )
        names = [*(self.on.measures or measures_for(self.on.k)), *accuracies]
        return replace(found, mean={name: found.mean[name] for name in names if name in found.mean})

    def mined(self, name: str) -> Path:
        return self.folder / "mined" / f"{name}.jsonl"

    def _do(self, step: str, made_from: Any, make: Callable[[], Iterable[Path]]) -> None:
        self._made[step] = self.ledger.do(step, made_from, make)

    def _digest(self, files: Iterable[Path]) -> list[list[str]]:
        """Names and digests: where files are changes nothing. Each is read once."""
        found = []
        for path in files:
            if path not in self._digests:
                self._digests[path] = sha256_file(path)
            found.append([path.name, self._digests[path]])
        return found

    # Mining

    def _mining(self, stage: Stage) -> dict[str, Any]:
        data = stage.config.data
        return {
            "settings": _plain(stage.mining),
            "data": self._digest(_training_files(data.train, data.train_split)),
            "split": data.train_split,
            "subset": [data.subset, stage.config.seed.data],
            "corpus": self._corpus,
            "pools": {pool: self._made.get(f"{pool}.encode", {}) for pool in stage.pools},
            "concat": {name: self._made.get(f"{name}.mine", {}) for name in stage.concat},
        }

    def _mine(self, stage: Stage) -> list[Path]:
        assert stage.mining is not None
        out, data = self.mined(stage.name), stage.config.data
        job = Job(
            data=data.train,
            split=data.train_split,
            pools=tuple(pool if pool == BM25_NAME else str(self.folder / pool) for pool in stage.pools),
            out=str(out),
            corpus=self.on.corpus,
            encoded=corpus_name(self.on.corpus),
            concat=tuple(str(self.mined(name)) for name in stage.concat),
            settings=stage.mining,
            on_error="skip" if data.on_error == "skip" else "error",
            subset=(data.subset, stage.config.seed.data),
        )
        mine(job, self.progress)
        return [out, parents_path(out)]

    # Training, encoding, search

    def _training(self, stage: Stage, config: ConfigDict) -> dict[str, Any]:
        data = config.data
        dev = example_files(data.dev, data.dev_split) if data.dev else []
        mined = self._made.get(f"{stage.name}.mine", {})
        train: Any = [digest for name, digest in mined.items() if name.endswith(".jsonl")]  # not its parents
        train = train or self._digest(example_files(data.train, data.train_split, data.negatives_run or None))
        keys = {key: value for key, value in flatten(config_json(config)).items() if key != "data.train"}
        start = config.train.start_from
        earlier = self._made.get(f"{start}.train", {}) if start in self.stages else {}
        named = self._digest(_named_files(config, start not in self.stages))
        return {"config": keys, "train": train, "dev": self._digest(dev), "start_from": earlier, "named": named}

    def _train(self, stage: Stage, config: ConfigDict) -> list[Path]:
        workdir = Workdir(self.folder / stage.name)
        if config.train.start_from in self.stages:
            config = changed(config, {"train.start_from": str(self.folder / config.train.start_from)}, stage.name)
        train(config, workdir.path, self.progress).require_finished()
        with open_checkpoints(workdir, config) as checkpoints:
            best = workdir.checkpoints / str(checkpoints.best())
        return [workdir.contract, workdir.data, best / "_CHECKPOINT_METADATA"]

    def _encode(self, stage: Stage) -> list[Path]:
        done = encode_corpus(open_run(self.folder / stage.name), self.on.corpus, progress=self.progress)
        return [done.folder / "manifest.json"]

    def _searching(self, stage: Stage) -> dict[str, Any]:
        on = self.on
        files = [found.path for found in found_queries(on.queries, on.split)]
        files += [answers for path in files if (answers := find_file(path.parent, "answers.jsonl"))]
        files += [found_judgements(on.qrels, on.split).path] if on.qrels else []
        return {
            "queries": self._digest(file for path in files for file in files_of(path)),
            "encoded": self._made[f"{stage.name}.encode"],
            "asked": [on.split, on.k, list(on.measures or ())],
        }

    def _search(self, stage: Stage) -> list[Path]:
        on, run = self.on, open_run(self.folder / stage.name)
        measures = list(on.measures) if on.measures else None
        corpus = corpus_name(on.corpus)
        search_files(run, on.queries, on.qrels, on.split, on.k, measures, corpus, progress=self.progress)
        return [run.workdir.rankings(self._name()), self._result(stage)]

    def _name(self) -> str:
        return result_name(self.on.queries, self.on.qrels, self.on.split)

    def _result(self, stage: Stage) -> Path:
        return Workdir(self.folder / stage.name).evaluation(self._name())


def _plain(settings: Settings | None) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(Settings)}


def _training_files(source: str, split: str) -> list[Path]:
    """The files that training queries are read from."""
    path = source_path(source)
    if path.is_file() and not is_named(path):
        return [path]
    return example_files(source, split)


def _named_files(config: ConfigDict, start: bool) -> list[Path]:
    """The files on this machine that training reads beside its data: a config has their names alone. start: also those
    of the run that it starts from."""
    data, found = config.data, []
    for source in (data.teacher_run, data.pseudo_queries, data.dev_negatives_run):
        if source and source_path(source).is_file():
            found.append(source_path(source))
    if config.validation.corpus:
        found += files_of(corpus_file(config.validation.corpus))
    model = Path(config.encoder.checkpoint)
    found += [model / name for name in ("config.json", "model.safetensors") if (model / name).is_file()]
    if start and config.train.start_from:
        found += sorted(Workdir(config.train.start_from).checkpoints.glob("*/_CHECKPOINT_METADATA"))
    return found
