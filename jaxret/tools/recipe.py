"""What `jaxret recipe` does: the stages of a config, each mined, scored by a teacher, trained, encoded and searched;
and a table of them.

WORKDIR/mined/STAGE.jsonl  what the stage was trained on, where it mines
        mined/STAGE.scored.jsonl  the same with a teacher's scores, where it has one
        STAGE/             its run
        done/              which steps are done, and from what (ledger.py)
        results.md         the table
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.contract import ContractError, flatten
from jaxret.data.files import find_file
from jaxret.data.formats import corpus_file, example_files, files_of, found_queries
from jaxret.data.formats.readers import found_judgements
from jaxret.evaluation.metrics import Evaluation
from jaxret.evaluation.report import read_evaluation, to_markdown, to_text
from jaxret.mining.mine import Job, mine, parents_path
from jaxret.mining.pools import BM25_NAME
from jaxret.retrieval.encode import corpus_name, encode_corpus
from jaxret.retrieval.parts import read_parts
from jaxret.retrieval.shard_set import open_shards
from jaxret.retrieval.shards import ShardError
from jaxret.runs.adopt import UNSET
from jaxret.runs.lock import hold
from jaxret.runs.run import config_json, open_checkpoints, open_run
from jaxret.runs.system import without_seeds
from jaxret.runs.workdir import Workdir
from jaxret.shipped import changed
from jaxret.storage import atomic_write, sha256_file, sha256_json, sweep, write_json
from jaxret.tools.asked import result_name
from jaxret.tools.ledger import Ledger
from jaxret.tools.recipe_check import Evaluated, check_recipe, on_error_of
from jaxret.tools.rerank import score_examples
from jaxret.tools.search_files import measures_for, search_files
from jaxret.tools.stages import Stage, named_files
from jaxret.tools.teacher import open_teacher, teacher_files
from jaxret.training.loop import train


def _how(data: ConfigDict) -> dict[str, str]:
    """What else a step was made from: how bad records are met, where it is not as usual."""
    return {} if on_error_of(data) == "error" else {"on_error": on_error_of(data)}


def run_recipe(found: Sequence[Stage], workdir: str | Path, on: Evaluated, progress: bool = True) -> Path:
    """Does what is not done yet, and prints the table, whose path is returned. Raises what the steps raise."""
    folder = Workdir(workdir).path
    check_recipe(found, folder, on)
    with hold(folder, "a recipe"):
        for part in ("mined", "done"):  # where nothing else writes
            sweep(folder / part)
        recipe = _Recipe(folder, {stage.name: stage for stage in found}, on, Ledger(folder), progress)
        results = {stage.name: recipe.stage(stage) for stage in found}
        table = {name: result for name, result in results.items() if result}
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
        self._lineage: dict[str, str] = {}  # stage -> what it comes from, but for seeds
        self._corpus = self._digest(files_of(corpus_file(self.on.corpus)))

    def stage(self, stage: Stage) -> Evaluation | None:
        """What its search found; None of a reranker."""
        if stage.mining is not None:
            self._do(f"{stage.name}.mine", self._mining(stage), lambda: self._mine(stage))
        if stage.teacher:
            self._do(f"{stage.name}.score", self._scoring(stage), lambda: self._score(stage))
        config = stage.trained_on(self.folder)
        self._do(f"{stage.name}.train", self._training(stage, config), lambda: self._train(stage, config))
        self._note_lineage(stage)
        if stage.reranks:
            return None
        made = self._made[f"{stage.name}.train"]
        called = corpus_name(self.on.corpus)
        encoding = {"corpus": self._corpus, "name": called, "run": made, "dtype": config.encode.dtype}
        self._do(f"{stage.name}.encode", encoding, lambda: self._encode(stage), lambda: self._is_encoded(stage))
        self._do(f"{stage.name}.search", self._searching(stage), lambda: self._search(stage))
        return self._in_order(read_evaluation(self._result(stage)))

    def _in_order(self, found: Evaluation) -> Evaluation:
        """The measures as they were asked for, then accuracies by cut-off; a file has them by name."""
        accuracies = sorted(
            (name for name in found.mean if name.startswith("Accuracy@")), key=lambda name: int(name[9:])
        )
        names = [*(self.on.measures or measures_for(self.on.k)), *accuracies]
        return replace(found, mean={name: found.mean[name] for name in names if name in found.mean})

    def _do(
        self, step: str, made_from: Any, make: Callable[[], Iterable[Path]], whole: Callable[[], bool] = lambda: True
    ) -> None:
        try:
            self._made[step] = self.ledger.do(step, made_from, make, whole)
        except ShardError as error:
            names = self._forget_damaged()
            if not names:
                raise
            whose = " and ".join(names)
            raise ShardError(f"{error}\nThe same command again makes the damaged shards of {whose} anew.") from error

    def _forget_damaged(self) -> list[str]:
        """Lets the stages encode again whose vectors are not what was written; their names."""
        names = []
        for stage in self.stages.values():
            try:
                if f"{stage.name}.encode" in self._made:
                    open_shards(Workdir(self.folder / stage.name).embeddings(corpus_name(self.on.corpus)))
            except ShardError:
                self.ledger.forget(f"{stage.name}.encode")
                names.append(stage.name)
        return names

    def _records(self, step: str) -> list[str]:
        """Digests of the training file that a step made, not of its parents."""
        return [digest for name, digest in self._made.get(step, {}).items() if name.endswith(".jsonl")]

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
            "settings": asdict(stage.mining) if stage.mining else {},
            "data": self._digest(stage.questions()),
            "split": data.train_split,
            "subset": [data.subset, stage.config.seed.data],
            "corpus": self._corpus,
            "pools": {pool: self._made.get(f"{pool}.encode", {}) for pool in stage.pools},
            "concat": {name: self._records(f"{name}.mine") for name in stage.concat},
        } | _how(data)

    def _mine(self, stage: Stage) -> list[Path]:
        assert stage.mining is not None
        out, data = stage.mined(self.folder), stage.config.data
        job = Job(
            data=data.train,
            split=data.train_split,
            pools=tuple(pool if pool == BM25_NAME else str(self.folder / pool) for pool in stage.pools),
            out=str(out),
            corpus=self.on.corpus,
            encoded=corpus_name(self.on.corpus),
            concat=tuple(str(self.stages[name].mined(self.folder)) for name in stage.concat),
            settings=stage.mining,
            on_error=on_error_of(data),
            subset=(data.subset, stage.config.seed.data),
        )
        mine(job, self.progress)
        return [out, parents_path(out)]

    # A teacher's scores

    def _scoring(self, stage: Stage) -> dict[str, Any]:
        data, teacher = stage.taught_on(self.folder).data, stage.teacher
        if teacher in self.stages:  # a retriever scores as its search does
            who: Any = [self._made.get(f"{teacher}.{step}", {}) for step in ("train", "encode")]
        else:
            who = self._outside(teacher)
        found: Any = self._records(f"{stage.name}.mine")
        found = found or self._digest(example_files(data.train, data.train_split, data.negatives_run or None))
        return {"teacher": who, "data": found, "split": data.train_split} | _how(data)

    def _outside(self, teacher: str) -> Any:
        """What a teacher that is no stage is: its files, or the name of what is not in a folder."""
        return self._digest(teacher_files(teacher, corpus_name(self.on.corpus))) or teacher

    def _score(self, stage: Stage) -> list[Path]:
        data, out = stage.taught_on(self.folder).data, stage.scored(self.folder)
        out.parent.mkdir(exist_ok=True)
        where = str(self.folder / stage.teacher) if stage.teacher in self.stages else stage.teacher
        teacher = open_teacher(where, corpus_name(self.on.corpus))
        how = (data.train_split, data.negatives_run, on_error_of(data))
        score_examples(teacher, data.train, out, *how, self.progress)
        return [out]

    # Training, encoding, search

    def _training(self, stage: Stage, config: ConfigDict) -> dict[str, Any]:
        data = config.data
        dev = example_files(data.dev, data.dev_split) if data.dev else []
        train: Any = self._records(f"{stage.name}.score") or self._records(f"{stage.name}.mine")
        train = train or self._digest(example_files(data.train, data.train_split, data.negatives_run or None))
        keys = {key: value for key, value in flatten(config_json(config)).items() if key != "data.train"}
        start = config.train.start_from
        earlier = self._made.get(f"{start}.train", {}) if start in self.stages else {}
        named = self._digest(named_files(config, start not in self.stages))
        made = {"config": keys, "train": train, "dev": self._digest(dev), "start_from": earlier, "named": named}
        return made | {"given": sorted(UNSET.keys() & stage.given)}

    def _train(self, stage: Stage, config: ConfigDict) -> list[Path]:
        workdir = Workdir(self.folder / stage.name)
        if config.train.start_from in self.stages:
            config = changed(config, {"train.start_from": str(self.folder / config.train.start_from)}, stage.name)
        try:
            train(config, workdir.path, self.progress, stage.given).require_finished()
        except ContractError as error:  # of settings or data that the stage was not begun with
            raise ContractError(f"{error}\nWithout the folder {workdir}, the recipe trains this stage anew.") from error
        with open_checkpoints(workdir, config) as checkpoints:
            best = workdir.checkpoints / str(checkpoints.best())
        return [workdir.contract, workdir.data, best / "_CHECKPOINT_METADATA"]

    def _note_lineage(self, stage: Stage) -> None:
        """What makes the seeds of a recipe's stage one system, whatever their seeds made of its data, beside its run
        (`jaxret compare`)."""
        keys, data, start = flatten(config_json(stage.config)), stage.config.data, stage.config.train.start_from
        made: dict[str, Any] = {
            "config": {key: value for key, value in without_seeds(keys).items() if key != "train.start_from"},
            "data": self._digest(stage.questions()),
            "dev": self._digest(example_files(data.dev, data.dev_split)) if data.dev else [],
            "start_from": self._lineage.get(start, start),
            "named": self._digest(named_files(stage.config, start not in self.stages)),
        }
        if stage.teacher:
            made["teacher"] = self._lineage.get(stage.teacher) or self._outside(stage.teacher)
        if stage.mining is not None:
            settings = {key: value for key, value in asdict(stage.mining).items() if key != "seed"}
            earlier = [[self._lineage.get(one, one) for one in names] for names in (stage.pools, stage.concat)]
            made["mine"] = [settings, self._corpus, *earlier]
        elif data.negatives_run:
            made["negatives"] = self._digest(example_files(data.train, data.train_split, data.negatives_run))
        self._lineage[stage.name] = sha256_json(made)
        write_json(Workdir(self.folder / stage.name).lineage, {"sha256": self._lineage[stage.name]})

    def _encode(self, stage: Stage) -> list[Path]:
        done = encode_corpus(open_run(self.folder / stage.name), self.on.corpus, progress=self.progress)
        if read_parts(done.folder):
            raise ContractError(
                f"{done.folder} is not {self.on.corpus} any more: passages were appended or deleted, as its parts.json "
                "says; remove that to search what was encoded, or take another --workdir"
            )
        return [done.folder / "manifest.json"]

    def _is_encoded(self, stage: Stage) -> bool:
        """Whether the vectors that the manifest lists are there, by their sizes, and no others; a search compares
        digests. What they are of the manifest says, whose own digest the ledger has."""
        folder = Workdir(self.folder / stage.name).embeddings(corpus_name(self.on.corpus))
        try:
            open_shards(folder, verify=False)
        except ShardError:
            return False
        return not read_parts(folder)

    def _searching(self, stage: Stage) -> dict[str, Any]:
        on = self.on
        files = [found.path for found in found_queries(on.queries, on.split)]
        files += [answers for path in files if (answers := find_file(path.parent, "answers.jsonl"))]
        files += [found_judgements(on.qrels, on.split).path] if on.qrels else []
        return {
            "queries": self._digest(file for path in files for file in files_of(path)),
            "encoded": self._made[f"{stage.name}.encode"],
            "asked": [on.split, on.k, list(on.measures or ()), on.match],
            "name": self._name(),
        }

    def _search(self, stage: Stage) -> list[Path]:
        on, run = self.on, open_run(self.folder / stage.name)
        measures = list(on.measures) if on.measures else None
        corpus = corpus_name(on.corpus)
        asked = (on.queries, on.qrels, on.split, on.k, measures, corpus)
        search_files(run, *asked, progress=self.progress, match=on.match)
        return [run.workdir.rankings(self._name()), self._result(stage)]

    def _name(self) -> str:
        return result_name(self.on.queries, self.on.qrels, self.on.split)

    def _result(self, stage: Stage) -> Path:
        return Workdir(self.folder / stage.name).evaluation(self._name())
