"""Read and check the stages of a recipe, which a config's function `stages` returns (docs/mining.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.configs import change_config, load_config, load_stages
from jaxret.data.formats import QuerySource, TrainingSource, source_path
from jaxret.mining.mining_settings import MiningSettings
from jaxret.mining.pools import BM25_NAME
from jaxret.mining.training_queries import open_training_queries
from jaxret.models.encoders.pretrained import model_files
from jaxret.models.peft_files import adapter_files
from jaxret.runs.identity import RUN_KEYS
from jaxret.runs.workdir import Workdir
from jaxret.storage.working_copy import shown_path
from jaxret.training.config_sources import validation_corpus
from jaxret.training.losses.group_losses import distillation_keys

_KEYS = ("name", "suffix", "base", "mine", "teacher", "config", "rounds")
TRAINING_DATA = "data"  # in concat: the records of data.train itself
_MINING = ("pools", "concat")  # keys of a stage's "mine" besides those of MiningSettings
_SHARED_GROUPS = ("data.", "mesh.", "seed.")  # keys of the command line that stages of another config take, too


@dataclass(frozen=True)
class Stage:
    """A stage of a recipe: a run, the mining of its training data, and its teacher."""

    name: str  # name of the stage and of its run's folder
    config: ConfigDict
    mining: MiningSettings | None = None  # settings of mining; None if the stage trains on data.train as it is
    pools: tuple[str, ...] = ()  # "bm25" or names of earlier stages, whose rankings are mined
    # TRAINING_DATA or names of earlier stages, whose training records follow the mined ones
    concat: tuple[str, ...] = ()
    # an earlier stage, a run, or a cross-encoder in transformers' files, which scores the training data; "" for none
    teacher: str = ""
    # keys that the recipe or the command line set. The encoder's directory cannot change them.
    explicit_keys: tuple[str, ...] = ()

    @property
    def is_reranker(self) -> bool:
        """Return whether the stage trains a cross-encoder, which is neither encoded nor searched with."""
        return self.config.task == "reranking"

    def run_of(self, key: str) -> str:
        """Return the earlier stage or the run that a key of RUN_KEYS names; "" for none."""
        return self.config.train[key.removeprefix("train.")]

    @cached_property
    def queries(self) -> TrainingSource | QuerySource:
        """The training queries. Raises DataError for a missing file."""
        judged = self.mining is None or not self.mining.positives_from_retrieval
        return open_training_queries(self.config.data.train, self.config.data.train_split, judged)

    def mined_path(self, folder: Path) -> Path:
        """Return the path of the mined training data in the recipe's folder."""
        return folder / "mined" / f"{self.name}.jsonl"

    def scored_path(self, folder: Path) -> Path:
        """Return the path of the training data with the teacher's scores in the recipe's folder."""
        return folder / "mined" / f"{self.name}.scored.jsonl"

    def scoring_config(self, folder: Path) -> ConfigDict:
        """Return the config with the data that the teacher scores."""
        if self.mining is None:
            return self.config
        keys = {"data.train": shown_path(self.mined_path(folder)), "data.negatives_run": "", "data.subset": 0}
        return change_config(self.config, keys, self.name)

    def training_config(self, folder: Path) -> ConfigDict:
        """Return the config with the final training data."""
        if not self.teacher:
            return self.scoring_config(folder)
        keys = {"data.train": shown_path(self.scored_path(folder)), "data.negatives_run": ""}
        return change_config(self.scoring_config(folder), keys, self.name)


def read_stages(config: str, overrides: Mapping[str, Any], match: str = "") -> list[Stage]:
    """Read the stages of a config.

    Args:
        config: "NAME" or "FILE.py", with or without ":SUFFIX".
        overrides: key of the config -> value in every stage.
        match: how answers are read in every stage that mines; "" keeps the stages' own setting.
    Raises:
        ValueError: a stage is not as docs/mining.md describes.
    """
    stages: list[Stage] = []
    for number, stage_keys in enumerate(load_stages(config), 1):
        where = f"{config}: stage {number}"
        for entry, round_keys in _rounds(stage_keys, where):
            stage = _with_config(_parse_stage(entry, where, stages), entry, config, overrides, round_keys)
            if stage.mining and match:
                stage = replace(stage, mining=replace(stage.mining, match=match))
            _check_scores_have_use(stage, where)
            stages.append(stage)
    names = [stage.name for stage in stages]
    for index, stage in enumerate(stages):
        others = {"teacher": stage.teacher, **{key: stage.run_of(key) for key in RUN_KEYS}}
        for role, other in others.items():
            if other in names[index:]:
                raise ValueError(f"{config}: {role} of stage {stage.name!r} is {other!r}, not an earlier stage")
    if all(stage.is_reranker for stage in stages):
        raise ValueError(f"{config}: none of its stages is a retriever, so there is nothing to evaluate")
    return stages


def _rounds(entry: Any, where: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return the entry of each round of a stage, and the keys that make its config one of a round; a stage without
    rounds is returned as it is.

    Round 1 mines as written. Every later round mines only with the previous round, draws another sample of its
    candidates, and continues its training.

    Raises ValueError for rounds that refresh nothing.
    """
    if not isinstance(entry, Mapping) or "rounds" not in entry:
        return [(entry, {})]
    rest = {key: value for key, value in entry.items() if key != "rounds"}
    rounds, name, mine = entry["rounds"], entry.get("name", ""), entry.get("mine")
    if type(rounds) is not int or rounds < 2:
        raise ValueError(f"{where}: rounds is {rounds!r}; it must be a whole number from 2 on")
    if not name or not isinstance(mine, Mapping):
        raise ValueError(f"{where} has rounds, each of which mines: it needs a name, and mine as a dict")
    parts: list[tuple[Any, dict[str, Any]]] = []
    for number in range(1, rounds + 1):
        keys = {"train.round": number, "train.rounds": rounds, "validation.best": "last"}
        settings, seed = dict(mine), mine.get("seed", MiningSettings().seed)
        if type(seed) is int:  # anything else is an error of mining
            settings["seed"] = seed + number - 1
        if number > 1:
            before = f"{name}-{number - 1}"
            keys["train.start_from"], settings["pools"] = before, (before,)
        parts.append(({**rest, "name": f"{name}-{number}", "mine": settings}, keys))
    return parts


def _with_config(
    stage: Stage,
    entry: Mapping[str, Any],
    config: str,
    overrides: Mapping[str, Any],
    round_keys: Mapping[str, Any],
) -> Stage:
    """Return the stage with its config: that of the recipe, or of `base`, with the keys of the entry and overrides.

    Args:
        stage: without its config.
        config: of the recipe.
        overrides: keys of the command line.
        round_keys: keys of a round, which nothing changes.
    """
    name, _, recipe_suffix = config.partition(":")
    entry_keys = entry.get("config") or {}
    if base := entry.get("base"):
        keys = {key: value for key, value in overrides.items() if key.startswith(_SHARED_GROUPS)} | entry_keys
        source = base
    else:
        suffix = entry.get("suffix", recipe_suffix)
        base = f"{name}:{suffix}" if suffix else name
        keys = {**entry_keys, **overrides}
        source = config
    if round_keys and keys.get("validation.best", "last") != "last":
        raise ValueError(
            f"{config}: validation.best is {keys['validation.best']!r}, but stage {stage.name!r} is a round, and its "
            "last checkpoint is the one that goes on: leave it out"
        )
    keys |= round_keys
    return replace(stage, config=change_config(load_config(base), keys, source), explicit_keys=tuple(sorted(keys)))


def _check_scores_have_use(stage: Stage, where: str) -> None:
    """Raise ValueError for a teacher that no loss reads, for a loss without a teacher, and for two teachers."""
    keys, teacher_run = distillation_keys(stage.config), stage.config.data.teacher_run
    if stage.teacher and not keys:
        either = "loss.kl.weight or loss.margin_mse.weight"
        raise ValueError(f"{where} has the teacher {stage.teacher!r}, but no loss reads its scores: set {either}")
    if stage.mining and keys and not stage.teacher and not teacher_run:
        raise ValueError(
            f"{where}: {keys[0]} is set, but there is no teacher: mined data have at most the scores of their pool; "
            "give the stage a teacher, or set data.teacher_run"
        )
    if stage.teacher and teacher_run:
        raise ValueError(f"{where} has the teacher {stage.teacher!r}, and data.teacher_run too: give one of them")


def _parse_stage(entry: Any, where: str, earlier: Sequence[Stage]) -> Stage:
    """Return a stage without its config. Raises ValueError for a wrong entry."""
    groups = ("mine", "config")
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key) or {}, Mapping) for key in groups):
        raise ValueError(f"{where} is {entry!r}; a stage is a dict, and so are its {' and '.join(groups)}")
    unknown = set(entry) - set(_KEYS)
    name = entry.get("name", "")
    reserved_names = (*(stage.name for stage in earlier), "mined", "done", BM25_NAME, TRAINING_DATA)
    if unknown or not name or name in reserved_names or name != Path(name).name:
        raise ValueError(
            f"{where}: a stage has a unique name, and optionally {', '.join(_KEYS[1:])}; this one is {dict(entry)}"
        )
    if "base" in entry and "suffix" in entry:
        raise ValueError(f"{where}: suffix belongs to the recipe's own config; write base='{entry['base']}:SUFFIX'")
    if not isinstance(entry.get("teacher", ""), str):
        raise ValueError(f"{where}: teacher is {entry['teacher']!r}; it must be a name or a path")
    stage = Stage(name, ConfigDict(), teacher=entry.get("teacher", ""))
    return stage if entry.get("mine") is None else _with_mining(stage, dict(entry["mine"]), where, earlier)


def _with_mining(stage: Stage, settings: dict[str, Any], where: str, earlier: Sequence[Stage]) -> Stage:
    """Return the stage with its mining settings, pools and concatenated data. Raises ValueError for wrong settings."""
    setting_names = [field.name for field in fields(MiningSettings)]
    if wrong := [key for key in settings if key not in (*setting_names, *_MINING)]:
        raise ValueError(f"{where}: mine has no {wrong[0]!r}; it has {', '.join((*_MINING, *setting_names))}")
    pools, concat = (tuple(settings.pop(key, ())) for key in _MINING)
    retrievers = [stage.name for stage in earlier if not stage.is_reranker]
    if wrong := [pool for pool in pools if pool not in (BM25_NAME, *retrievers)]:
        raise ValueError(
            f"{where}: {wrong[0]!r} is neither {BM25_NAME} nor an earlier stage that searches; those are {retrievers}"
        )
    mining_stages = [stage.name for stage in earlier if stage.mining is not None]
    if wrong := [name for name in concat if name not in (TRAINING_DATA, *mining_stages)]:
        raise ValueError(
            f"{where}: concat {wrong[0]!r} is neither {TRAINING_DATA!r} nor an earlier stage that mines; those are "
            f"{mining_stages}"
        )
    try:
        return replace(stage, mining=MiningSettings(**settings), pools=pools, concat=concat)
    except TypeError as error:
        raise ValueError(f"{where}: mine: {error}") from error


def referenced_files(config: ConfigDict, stages: Collection[str] = ()) -> list[Path]:
    """Return the files on this machine that training reads besides its data, such as the encoder's.

    stages: values of RUN_KEYS whose checkpoints are left out: names of stages. Raises FileNotFoundError for missing
    adapters.
    """
    data, paths = config.data, []
    for source in (data.teacher_run, data.pseudo_queries, data.dev_negatives_run):
        if source and source_path(source).is_file():
            paths.append(source_path(source))
    if corpus := validation_corpus(config):
        paths += corpus.files
    paths += model_files(config.encoder.checkpoint)
    if config.lora.adapters:
        paths += adapter_files(config.lora.adapters)
    for run in (config.train.start_from, config.train.teacher):
        if run and run not in stages:
            paths += sorted(Workdir(run).checkpoints.glob("*/_CHECKPOINT_METADATA"))
    return paths
