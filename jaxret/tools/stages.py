"""The stages of a config, as its function `stages` says them, read and checked; and the files that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.formats import corpus_file, files_of, source_path
from jaxret.mining.asked import question_files
from jaxret.mining.filters import Settings
from jaxret.mining.pools import BM25_NAME
from jaxret.models.encoders.pretrained import model_files
from jaxret.runs.workdir import Workdir
from jaxret.shipped import changed, load, stages
from jaxret.training.group_losses import taught_by

_KEYS = ("name", "suffix", "base", "mine", "teacher", "config")
_MINING = ("pools", "concat")  # keys of a stage's "mine" beside those of Settings
_HELD = ("data.", "mesh.", "seed.")  # of the command line, what a stage of another config takes


@dataclass(frozen=True)
class Stage:
    """mining: None where it trains on the data as it is. pools, concat: "bm25" or names of earlier stages, whose run is
    searched, or whose mined file follows. teacher: an earlier stage, a run, or a cross-encoder in transformers' files,
    whose scores are in what it is trained on; "": none. given: the keys of its config that somebody set, which the
    encoder's directory may not decide (runs/adopt.py)."""

    name: str
    config: ConfigDict
    mining: Settings | None = None
    pools: tuple[str, ...] = ()
    concat: tuple[str, ...] = ()
    teacher: str = ""
    given: tuple[str, ...] = ()

    @property
    def reranks(self) -> bool:
        """Whether it is a cross-encoder, which encodes and searches nothing."""
        return self.config.task == "reranking"

    def questions(self) -> list[Path]:
        """The files that its training queries are read from. Raises DataError for one that is missing."""
        judged = self.mining is None or not self.mining.positives_from_retrieval
        return question_files(self.config.data.train, self.config.data.train_split, judged)

    def mined(self, folder: Path) -> Path:
        """What it mines, in the recipe's folder."""
        return folder / "mined" / f"{self.name}.jsonl"

    def scored(self, folder: Path) -> Path:
        """The same with its teacher's scores."""
        return folder / "mined" / f"{self.name}.scored.jsonl"

    def taught_on(self, folder: Path) -> ConfigDict:
        """Its config, with the data that its teacher scores."""
        if self.mining is None:
            return self.config
        mined = {"data.train": str(self.mined(folder)), "data.negatives_run": "", "data.subset": 0}
        return changed(self.config, mined, self.name)

    def trained_on(self, folder: Path) -> ConfigDict:
        """Its config, with the data that it is trained on."""
        if not self.teacher:
            return self.taught_on(folder)
        scored = {"data.train": str(self.scored(folder)), "data.negatives_run": ""}
        return changed(self.taught_on(folder), scored, self.name)


def read_stages(config: str, given: Mapping[str, Any], match: str = "") -> list[Stage]:
    """The stages of a config, "NAME" or "FILE.py", with :SUFFIX or without. given: keys of the config that are to have
    other values in every stage. match: what answers are, in every stage that mines. Raises ValueError for a stage that
    is not as docs/mining.md says."""
    found: list[Stage] = []
    name, _, suffix = config.partition(":")
    for number, entry in enumerate(stages(config), 1):
        place = f"{config}: stage {number}"
        stage = _stage(entry, place, found)
        if base := entry.get("base"):
            keys = {key: value for key, value in given.items() if key.startswith(_HELD)} | (entry.get("config") or {})
        else:
            chosen = entry.get("suffix", suffix)
            base = f"{name}:{chosen}" if chosen else name
            keys = {**(entry.get("config") or {}), **given}
        made = changed(load(base), keys, base if "base" in entry else config)
        stage = replace(stage, config=made, given=tuple(sorted(keys)))
        if stage.mining and match:
            stage = replace(stage, mining=replace(stage.mining, match=match))
        if stage.teacher and not taught_by(stage.config):
            either = "loss.kl.weight or loss.margin_mse.weight"
            raise ValueError(f"{place} has the teacher {stage.teacher!r}, but no loss reads its scores: set {either}")
        readers = taught_by(stage.config)
        if stage.mining and readers and not stage.teacher and not stage.config.data.teacher_run:
            raise ValueError(
                f"{place}: {readers[0]} is set, and nobody is the teacher: what it mines has the scores of its pool, "
                "if any; give the stage a teacher, or set data.teacher_run"
            )
        if stage.teacher and stage.config.data.teacher_run:
            raise ValueError(f"{place} has the teacher {stage.teacher!r}, and data.teacher_run too: give one of them")
        found.append(stage)
    names = [stage.name for stage in found]
    for at, stage in enumerate(found):
        for what, other in (("teacher", stage.teacher), ("train.start_from", stage.config.train.start_from)):
            if other in names[at:]:
                raise ValueError(f"{config}: {what} of stage {stage.name!r} is {other!r}, which is no earlier one")
    if all(stage.reranks for stage in found):
        raise ValueError(f"{config}: none of its stages is a retriever, so there is nothing to evaluate")
    return found


def _stage(entry: Any, place: str, found: Sequence[Stage]) -> Stage:
    groups = ("mine", "config")
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key) or {}, Mapping) for key in groups):
        raise ValueError(f"{place} is {entry!r}; a stage is a dict, and so are its {' and '.join(groups)}")
    before = [stage.name for stage in found]
    searched = [stage.name for stage in found if not stage.reranks]
    unknown = set(entry) - set(_KEYS)
    name = entry.get("name", "")
    taken = (*before, "mined", "done", BM25_NAME)
    if unknown or not name or name in taken or name != Path(name).name:
        raise ValueError(
            f"{place}: it has name (one of its own), and perhaps {', '.join(_KEYS[1:])}; it is {dict(entry)}"
        )
    if "base" in entry and "suffix" in entry:
        raise ValueError(f"{place}: suffix is of the recipe's own config; of {entry['base']!r} write it there")
    if not isinstance(entry.get("teacher", ""), str):
        raise ValueError(f"{place}: teacher is {entry['teacher']!r}; it must be a name or a path")
    stage = Stage(name, ConfigDict(), teacher=entry.get("teacher", ""))
    if entry.get("mine") is None:
        return stage
    settings = dict(entry["mine"])
    known = [field.name for field in fields(Settings)]
    if wrong := [key for key in settings if key not in (*known, *_MINING)]:
        raise ValueError(f"{place}: mine has no {wrong[0]!r}; it has {', '.join((*_MINING, *known))}")
    pools, concat = (tuple(settings.pop(key, ())) for key in _MINING)
    if wrong := [pool for pool in pools if pool not in (BM25_NAME, *searched)]:
        raise ValueError(
            f"{place}: {wrong[0]!r} is neither {BM25_NAME} nor an earlier stage that searches; those are {searched}"
        )
    mined = [stage.name for stage in found if stage.mining is not None]
    if wrong := [one for one in concat if one not in mined]:
        raise ValueError(f"{place}: concat {wrong[0]!r} is no earlier stage that mines; those are {mined}")
    try:
        return replace(stage, mining=Settings(**settings), pools=pools, concat=concat)
    except TypeError as error:
        raise ValueError(f"{place}: mine: {error}") from error


def named_files(config: ConfigDict, start: bool) -> list[Path]:
    """The files on this machine that training reads beside its data: a config has their names alone. start: also those
    of the run that it starts from."""
    data, found = config.data, []
    for source in (data.teacher_run, data.pseudo_queries, data.dev_negatives_run):
        if source and source_path(source).is_file():
            found.append(source_path(source))
    if config.validation.corpus:
        found += files_of(corpus_file(config.validation.corpus))
    found += model_files(config.encoder.checkpoint)
    if start and config.train.start_from:
        found += sorted(Workdir(config.train.start_from).checkpoints.glob("*/_CHECKPOINT_METADATA"))
    return found
