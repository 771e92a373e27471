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
from jaxret.storage.buckets.working_copy import shown_path
from jaxret.training.config_sources import validation_corpus
from jaxret.training.losses.group_losses import distillation_keys

_STAGE_KEYS = ("name", "suffix", "base", "mine", "teacher", "config", "rounds")
TRAINING_DATA = "data"  # entry of "concat" for the records of data.train
_MINING_KEYS = ("pools", "concat")  # keys of a stage's "mine" in addition to the fields of MiningSettings
_SHARED_GROUPS = ("data.", "mesh.", "seed.")  # keys that, on the command line, also apply to stages with another config


@dataclass(frozen=True)
class Stage:
    """A stage of a recipe: a run, the mining of its training data, and its teacher."""

    name: str  # name of the stage and of its run's folder
    config: ConfigDict
    mining: MiningSettings | None = None  # settings of mining; None if the stage trains on data.train
    pools: tuple[str, ...] = ()  # "bm25" or names of earlier stages, whose rankings are mined
    # TRAINING_DATA or names of earlier stages whose training records are appended to the mined records
    concat: tuple[str, ...] = ()
    # an earlier stage, a run, or a cross-encoder in transformers' files, which scores the training data; "" for none
    teacher: str = ""
    # keys that the recipe or the command line sets; the encoder's directory does not change them
    explicit_keys: tuple[str, ...] = ()

    @property
    def is_reranker(self) -> bool:
        """Whether the stage trains a cross-encoder, which does not encode or search."""
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
        label = f"{config}: stage {number}"
        for entry, round_keys in _split_rounds(stage_keys, label):
            stage = _with_config(_parse_stage(entry, label, stages), entry, config, overrides, round_keys)
            if stage.mining and match:
                stage = replace(stage, mining=replace(stage.mining, match=match))
            _check_scores_have_use(stage, label)
            stages.append(stage)
    names = [stage.name for stage in stages]
    for index, stage in enumerate(stages):
        runs = {"teacher": stage.teacher, **{key: stage.run_of(key) for key in RUN_KEYS}}
        for role, run in runs.items():
            if run in names[index:]:
                raise ValueError(f"{config}: {role} of stage {stage.name!r} is {run!r}, not an earlier stage")
    if all(stage.is_reranker for stage in stages):
        raise ValueError(f"{config}: no stage is a retriever, so there is nothing to evaluate")
    return stages


def _split_rounds(entry: Any, label: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return (entry, additional config keys) for each round of a stage; [(entry, {})] for a stage without rounds.

    Round 1 mines with the pools of the entry. Every later round mines only with the previous round, draws another
    sample of its candidates, and continues its training.

    Raises ValueError for rounds without mining.
    """
    if not isinstance(entry, Mapping) or "rounds" not in entry:
        return [(entry, {})]
    shared_keys = {key: value for key, value in entry.items() if key != "rounds"}
    rounds, name, mine = entry["rounds"], entry.get("name", ""), entry.get("mine")
    if type(rounds) is not int or rounds < 2:
        raise ValueError(f"{label}: rounds is {rounds!r}; it must be a whole number of at least 2")
    if not name or not isinstance(mine, Mapping):
        raise ValueError(f"{label} has rounds, which all mine: it needs a name, and mine as a dict")
    parts: list[tuple[Any, dict[str, Any]]] = []
    for number in range(1, rounds + 1):
        keys = {"train.round": number, "train.rounds": rounds, "validation.best": "last"}
        settings, seed = dict(mine), mine.get("seed", MiningSettings().seed)
        if type(seed) is int:  # the check of mining raises an error for other types
            settings["seed"] = seed + number - 1
        if number > 1:
            previous_round = f"{name}-{number - 1}"
            keys["train.start_from"], settings["pools"] = previous_round, (previous_round,)
        parts.append(({**shared_keys, "name": f"{name}-{number}", "mine": settings}, keys))
    return parts


def _with_config(
    stage: Stage, entry: Mapping[str, Any], config: str, overrides: Mapping[str, Any], round_keys: Mapping[str, Any]
) -> Stage:
    """Return the stage with its config: the config of the recipe, or `base`, with the keys of the entry and overrides.

    Args:
        stage: the stage without its config.
        entry: the stage's entry in the recipe.
        config: name of the recipe's config.
        overrides: keys of the command line.
        round_keys: keys of a round, which cannot be changed.
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
            f"{config}: validation.best is {keys['validation.best']!r}, but stage {stage.name!r} is a round, which "
            "continues from the last checkpoint: remove the key"
        )
    keys |= round_keys
    return replace(stage, config=change_config(load_config(base), keys, source), explicit_keys=tuple(sorted(keys)))


def _check_scores_have_use(stage: Stage, label: str) -> None:
    """Raise ValueError for a teacher that no loss reads, for a loss without a teacher, and for two teachers."""
    keys, teacher_run = distillation_keys(stage.config), stage.config.data.teacher_run
    if stage.teacher and not keys:
        either = "loss.kl.weight or loss.margin_mse.weight"
        raise ValueError(f"{label} has the teacher {stage.teacher!r}, but no loss reads its scores: set {either}")
    if stage.mining and keys and not stage.teacher and not teacher_run:
        raise ValueError(
            f"{label}: {keys[0]} is set, but there is no teacher, and mined data have no teacher's scores. Give the "
            "stage a teacher, or set data.teacher_run"
        )
    if stage.teacher and teacher_run:
        raise ValueError(f"{label} has the teacher {stage.teacher!r} and data.teacher_run: remove one")


def _parse_stage(entry: Any, label: str, earlier: Sequence[Stage]) -> Stage:
    """Return the stage of an entry, without its config. Raises ValueError for an invalid entry."""
    groups = ("mine", "config")
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key) or {}, Mapping) for key in groups):
        raise ValueError(f"{label} is {entry!r}; a stage is a dict, and so are its {' and '.join(groups)}")
    unknown = set(entry) - set(_STAGE_KEYS)
    name = entry.get("name", "")
    reserved_names = (*(stage.name for stage in earlier), "mined", "done", BM25_NAME, TRAINING_DATA)
    if unknown or not name or name in reserved_names or name != Path(name).name:
        keys = ", ".join(_STAGE_KEYS[1:])
        raise ValueError(f"{label}: a stage has a unique name, and optionally {keys}; this one is {dict(entry)}")
    if "base" in entry and "suffix" in entry:
        raise ValueError(f"{label}: suffix belongs to the recipe's own config; write base='{entry['base']}:SUFFIX'")
    if not isinstance(entry.get("teacher", ""), str):
        raise ValueError(f"{label}: teacher is {entry['teacher']!r}; it must be a name or a path")
    stage = Stage(name, ConfigDict(), teacher=entry.get("teacher", ""))
    return stage if entry.get("mine") is None else _with_mining(stage, dict(entry["mine"]), label, earlier)


def _with_mining(stage: Stage, settings: dict[str, Any], label: str, earlier: Sequence[Stage]) -> Stage:
    """Return the stage with mining settings, pools and concatenated data. Raises ValueError for invalid settings."""
    setting_names = [field.name for field in fields(MiningSettings)]
    if invalid := [key for key in settings if key not in (*setting_names, *_MINING_KEYS)]:
        raise ValueError(f"{label}: mine has no {invalid[0]!r}; it has {', '.join((*_MINING_KEYS, *setting_names))}")
    pools, concat = (tuple(settings.pop(key, ())) for key in _MINING_KEYS)
    retrievers = [stage.name for stage in earlier if not stage.is_reranker]
    if invalid := [pool for pool in pools if pool not in (BM25_NAME, *retrievers)]:
        raise ValueError(
            f"{label}: {invalid[0]!r} is neither {BM25_NAME} nor an earlier stage that searches; these are {retrievers}"
        )
    mining_stages = [stage.name for stage in earlier if stage.mining is not None]
    if invalid := [name for name in concat if name not in (TRAINING_DATA, *mining_stages)]:
        raise ValueError(
            f"{label}: concat {invalid[0]!r} is neither {TRAINING_DATA!r} nor an earlier stage that mines; these are "
            f"{mining_stages}"
        )
    try:
        return replace(stage, mining=MiningSettings(**settings), pools=pools, concat=concat)
    except TypeError as error:
        raise ValueError(f"{label}: mine: {error}") from error


def referenced_files(config: ConfigDict, stages: Collection[str] = ()) -> list[Path]:
    """Return the files on this machine that training reads in addition to its data, such as the encoder's.

    Checkpoints of runs in `stages` are left out. Raises FileNotFoundError for missing adapters.
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
