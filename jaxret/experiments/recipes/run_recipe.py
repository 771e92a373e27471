"""Run a recipe: mine, score by a teacher, train, encode and search for each stage of a config, then print a table.

WORKDIR/mined/STAGE.jsonl         mined training data of a stage
        mined/STAGE.scored.jsonl  training data with the teacher's scores
        STAGE/                    the run of a stage
        done/                     completed steps with their inputs (ledger.py)
        results.md                the table
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.configs import change_config
from jaxret.data.formats.sources import TrainingSource
from jaxret.data.lines import find_file
from jaxret.evaluation.evaluation_report import emit_table, evaluation_markdown, evaluation_text, read_evaluation
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.recipes.check_recipe import EvaluationSetup, check_recipe, on_error_of
from jaxret.experiments.recipes.ledger import Ledger
from jaxret.experiments.recipes.stages import TRAINING_DATA, Stage, referenced_files
from jaxret.experiments.score_examples import score_examples
from jaxret.experiments.searches.evaluation_measures import choose_measures
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.search_files import search_files
from jaxret.experiments.teachers import open_teacher, teacher_files
from jaxret.index.encoding.encode import corpus_name, encode_corpus
from jaxret.index.parts_list import read_parts
from jaxret.index.shard_set import open_shards
from jaxret.index.shards import ShardError
from jaxret.mining.mining_job import MiningJob, mine_negatives, parents_path
from jaxret.mining.pools import BM25_NAME
from jaxret.mining.training_queries import open_concatenated
from jaxret.runs.from_sentence_transformers import UNSET
from jaxret.runs.identity import RUN_KEYS, without_seeds
from jaxret.runs.lock import hold_folder
from jaxret.runs.mismatch import ContractError, flatten
from jaxret.runs.run import config_json, open_checkpoints, open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import atomic_write, sha256_file, sha256_json, write_json
from jaxret.storage.buckets.working_copy import shown_path
from jaxret.storage.folder_kinds import RECIPE, require_folder_kind
from jaxret.storage.unfinished import remove_leftovers
from jaxret.training.config_sources import training_data
from jaxret.training.loop import train


def run_recipe(stages: Sequence[Stage], workdir: str | Path, evaluation: EvaluationSetup) -> Path:
    """Run the steps that are not complete, print the table of results, and return its path.

    Args:
        stages: the stages in order.
        workdir: folder of the recipe.
        evaluation: data and measures that evaluate every stage.
    """
    table = run_stages(stages, workdir, evaluation)
    path = Workdir(workdir) / "results.md"
    print(f"\n{evaluation_text(table)}\ntable: {path}")
    emit_table(table, path)
    return path


def run_stages(
    stages: Sequence[Stage], workdir: str | Path, evaluation: EvaluationSetup, log: Callable[[str], None] | None = None
) -> dict[str, Evaluation]:
    """Run the steps that are not complete, write results.md, and return the evaluation of each stage that searches.

    Args:
        stages: the stages in order.
        workdir: folder of the recipe.
        evaluation: data and measures that evaluate every stage.
        log: called with a line for each step; None: lines are printed.
    """
    folder = Workdir(workdir).path
    require_folder_kind(folder, RECIPE)
    check_recipe(stages, folder, evaluation)
    with hold_folder(folder, "a recipe"):
        for part in ("mined", "done"):  # only this process writes to these folders
            remove_leftovers(folder / part)
        recipe = _Recipe(folder, {stage.name: stage for stage in stages}, evaluation, Ledger(folder, log))
        results = {stage.name: recipe.run_stage(stage) for stage in stages}
        table = {name: result for name, result in results.items() if result}
        with atomic_write(folder / "results.md") as file:
            file.write(evaluation_markdown(table) + "\n")
    return table


@dataclass
class _Recipe:
    """Runs the steps of a recipe's stages."""

    folder: Path  # folder of the recipe
    stages: Mapping[str, Stage]  # name -> stage
    evaluation: EvaluationSetup
    ledger: Ledger  # completed steps

    def __post_init__(self) -> None:
        self._digests: dict[Path, str] = {}
        self._outputs: dict[str, dict[str, str]] = {}  # step -> {file: digest} of its outputs
        self._lineage: dict[str, str] = {}  # stage -> digest of its inputs without seeds
        self._corpus = self.evaluation.corpus
        self._encoded_name = corpus_name(self._corpus)
        self._corpus_digest = self._digest(self._corpus.files)

    def run_stage(self, stage: Stage) -> Evaluation | None:
        """Run the steps of a stage, and return its evaluation; None for a reranker."""
        if stage.mining is not None:
            self._run_step(f"{stage.name}.mine", self._mining_inputs(stage), lambda: self._mine(stage))
        if stage.teacher:
            self._run_step(f"{stage.name}.score", self._scoring_inputs(stage), lambda: self._score(stage))
        config = stage.training_config(self.folder)
        self._run_step(f"{stage.name}.train", self._training_inputs(stage, config), lambda: self._train(stage, config))
        self._write_lineage(stage)
        if stage.is_reranker:
            return None
        encoding: dict[str, Any] = {"corpus": self._corpus_digest, "name": self._encoded_name}
        encoding |= {"run": self._outputs[f"{stage.name}.train"]}
        encoding |= {"dtype": config.encode.dtype, "words": config.encode.words}
        self._run_step(f"{stage.name}.encode", encoding, lambda: self._encode(stage), lambda: self._is_encoded(stage))
        self._run_step(f"{stage.name}.search", self._search_inputs(stage), lambda: self._search(stage))
        return self._order_measures(read_evaluation(self._result_path(stage)))

    def _order_measures(self, evaluation: Evaluation) -> Evaluation:
        """Return the evaluation with measures in the requested order, accuracies last. Files have alphabetical
        order."""
        mean, measures = evaluation.mean, choose_measures(self.evaluation.measures, self.evaluation.k)
        names = [*measures.names, *(f"Accuracy@{cutoff}" for cutoff in measures.cutoffs)]
        return replace(evaluation, mean={name: mean[name] for name in names if name in mean})

    def _run_step(
        self, step: str, inputs: Any, make: Callable[[], Iterable[Path]], is_complete: Callable[[], bool] = lambda: True
    ) -> None:
        try:
            self._outputs[step] = self.ledger.run_step(step, inputs, make, is_complete)
        except ShardError as error:
            if not (names := self._forget_damaged()):
                raise
            raise ShardError(
                f"{error}\nRun the same command again: it encodes the damaged shards of {' and '.join(names)} again."
            ) from error

    def _forget_damaged(self) -> list[str]:
        """Delete the encode steps of stages with damaged vectors from the ledger, and return the names of the
        stages."""
        names = []
        for stage in self.stages.values():
            try:
                if f"{stage.name}.encode" in self._outputs:
                    open_shards(self._embeddings(stage))
            except ShardError:
                self.ledger.forget(f"{stage.name}.encode")
                names.append(stage.name)
        return names

    def _embeddings(self, stage: Stage) -> Path:
        return Workdir(self.folder / stage.name).embeddings(self._encoded_name)

    def _training_file_digests(self, step: str) -> list[str]:
        """Return the digests of the training file that a step wrote, without the record of its sources."""
        return [digest for name, digest in self._outputs.get(step, {}).items() if name.endswith(".jsonl")]

    def _digest(self, files: Iterable[Path]) -> list[list[str]]:
        """Return [name without folder, digest] of each file. A file is read once per recipe."""
        name_digests = []
        for path in files:
            if path not in self._digests:
                self._digests[path] = sha256_file(path)
            name_digests.append([path.name, self._digests[path]])
        return name_digests

    # Mining

    def _mining_inputs(self, stage: Stage) -> dict[str, Any]:
        data = stage.config.data
        return {
            "settings": asdict(stage.mining) if stage.mining else {},
            "data": self._digest(stage.queries.files),
            "split": data.train_split,
            "subset": [data.subset, stage.config.seed.data],
            "corpus": self._corpus_digest,
            "pools": {pool: self._outputs.get(f"{pool}.encode", {}) for pool in stage.pools},
            "concat": {
                name: self._training_file_digests(f"{name}.mine") for name in stage.concat if name != TRAINING_DATA
            },
            "on_error": on_error_of(data),
        }

    def _mine(self, stage: Stage) -> list[Path]:
        assert stage.mining is not None
        out, data = stage.mined_path(self.folder), stage.config.data
        job = MiningJob(
            data=stage.queries,
            pools=tuple(pool if pool == BM25_NAME else str(self.folder / pool) for pool in stage.pools),
            out=str(out),
            corpus=self._corpus,
            encoded_name=self._encoded_name if set(stage.pools) - {BM25_NAME} else "",
            concat=tuple(
                open_concatenated(
                    data.train if name == TRAINING_DATA else str(self.stages[name].mined_path(self.folder))
                )
                for name in stage.concat
            ),
            settings=stage.mining,
            on_error=on_error_of(data),
            subset=(data.subset, stage.config.seed.data),
        )
        mine_negatives(job)
        return [out, parents_path(out)]

    # Scores of a teacher

    def _scoring_inputs(self, stage: Stage) -> dict[str, Any]:
        data, teacher = stage.scoring_config(self.folder).data, stage.teacher
        if teacher in self.stages:  # the scores of a retriever also depend on its encoded corpus
            teacher_digests: Any = [self._outputs.get(f"{teacher}.{step}", {}) for step in ("train", "encode")]
        else:
            teacher_digests = self._external_teacher(teacher)
        data_digests: Any = self._training_file_digests(f"{stage.name}.mine")
        data_digests = data_digests or self._digest(training_data(stage.scoring_config(self.folder)).files)
        inputs = {"teacher": teacher_digests, "data": data_digests}
        return inputs | {"split": data.train_split, "on_error": on_error_of(data)}

    def _external_teacher(self, teacher: str) -> Any:
        """Return the digests of a teacher that is not a stage; its name if it has no files on this machine."""
        return self._digest(teacher_files(teacher, self._encoded_name)) or teacher

    def _score(self, stage: Stage) -> list[Path]:
        data, out = stage.scoring_config(self.folder).data, stage.scored_path(self.folder)
        out.parent.mkdir(exist_ok=True)
        name = str(self.folder / stage.teacher) if stage.teacher in self.stages else stage.teacher
        teacher = open_teacher(name, self._encoded_name)
        examples = training_data(stage.scoring_config(self.folder))
        score_examples(teacher, examples, out, on_error_of(data))
        return [out]

    # Training, encoding, search

    def _training_inputs(self, stage: Stage, config: ConfigDict) -> dict[str, Any]:
        step_digests = (self._training_file_digests(f"{stage.name}.{step}") for step in ("score", "mine"))
        train: Any = next(filter(None, step_digests), None) or self._digest(training_data(config).files)
        return {
            "config": {key: value for key, value in flatten(config_json(config)).items() if key != "data.train"},
            "train": train,
            "dev": self._dev_digests(config),
            "runs": {key: self._outputs.get(f"{stage.run_of(key)}.train", {}) for key in RUN_KEYS},
            "referenced": self._digest(referenced_files(config, self.stages)),
            "explicit_keys": sorted(UNSET.keys() & stage.explicit_keys),
        }

    def _dev_digests(self, config: ConfigDict) -> list[list[str]]:
        """Return the digests of data.dev. `referenced_files` has data.dev_negatives_run."""
        if not config.data.dev:
            return []
        return self._digest(TrainingSource.open(config.data.dev, config.data.dev_split).files)

    def _train(self, stage: Stage, config: ConfigDict) -> list[Path]:
        workdir = Workdir(self.folder / stage.name)
        runs = {key: run for key in RUN_KEYS if (run := stage.run_of(key)) in self.stages}
        config = change_config(config, {key: shown_path(self.folder / run) for key, run in runs.items()}, stage.name)
        try:
            train(config, workdir.path, explicit_keys=stage.explicit_keys).require_finished()
        except ContractError as error:  # the stage was started with other settings or data
            raise ContractError(f"{error}\nDelete the folder {workdir} to train this stage again.") from error
        with open_checkpoints(workdir, config) as checkpoints:
            best = workdir.checkpoints / str(checkpoints.best())
        return [workdir.contract, workdir.data, best / "_CHECKPOINT_METADATA"]

    def _write_lineage(self, stage: Stage) -> None:
        """Write the lineage of a stage, a digest of all its inputs without seeds, into its run's folder.

        Each seed of a stage mines other data. `jaxret compare` recognizes the seeds of one system by their lineage.
        """
        keys, data = flatten(config_json(stage.config)), stage.config.data
        inputs: dict[str, Any] = {
            "config": {key: value for key, value in without_seeds(keys).items() if key not in RUN_KEYS},
            "data": self._digest(stage.queries.files),
            "dev": self._dev_digests(stage.config),
            "runs": {key: self._lineage.get(run := stage.run_of(key), run) for key in RUN_KEYS},
            "referenced": self._digest(referenced_files(stage.config, self.stages)),
        }
        if stage.teacher:
            inputs["teacher"] = self._lineage.get(stage.teacher) or self._external_teacher(stage.teacher)
        if stage.mining is not None:
            settings = {key: value for key, value in asdict(stage.mining).items() if key != "seed"}
            earlier = [[self._lineage.get(name, name) for name in names] for names in (stage.pools, stage.concat)]
            inputs["mine"] = [settings, self._corpus_digest, *earlier]
        elif data.negatives_run:
            inputs["negatives"] = self._digest(training_data(stage.config).files)
        self._lineage[stage.name] = sha256_json(inputs)
        write_json(Workdir(self.folder / stage.name).lineage, {"sha256": self._lineage[stage.name]})

    def _encode(self, stage: Stage) -> list[Path]:
        result = encode_corpus(open_run(self.folder / stage.name), self._corpus)
        if read_parts(result.folder):
            raise ContractError(
                f"{result.folder} differs from {self._corpus}: passages were appended or deleted (see parts.json). "
                "Remove parts.json to search the corpus without these changes, or choose another --workdir"
            )
        return [result.folder / "manifest.json"]

    def _is_encoded(self, stage: Stage) -> bool:
        """Return whether the encoded corpus has exactly the files of its manifest, with the same sizes.

        A search verifies digests. The ledger has the digest of the manifest, which lists the shards.
        """
        folder = self._embeddings(stage)
        try:
            open_shards(folder, verify=False)
        except ShardError:
            return False
        return not read_parts(folder)

    def _search_inputs(self, stage: Stage) -> dict[str, Any]:
        setup, source = self.evaluation, self.evaluation.source
        folders = [file.path.parent for file in source.queries.data_files]
        answers = [file for folder in folders if (file := find_file(folder, "answers.jsonl"))]
        judgements = source.judgements.files if source.judgements else []
        return {
            "queries": self._digest([*source.queries.files, *answers, *judgements]),
            "encoded": self._outputs[f"{stage.name}.encode"],
            "evaluation": [source.queries.split, setup.k, list(setup.measures or ()), setup.match],
            "name": setup.result_name,
        }

    def _search(self, stage: Stage) -> list[Path]:
        setup, run = self.evaluation, open_run(self.folder / stage.name)
        evaluation = EvaluationOptions(setup.k, setup.measures or None, setup.name, match=setup.match)
        search_files(run, setup.source, evaluation, encoded_name=self._encoded_name)
        return [run.workdir.rankings(setup.result_name), self._result_path(stage)]

    def _result_path(self, stage: Stage) -> Path:
        return Workdir(self.folder / stage.name).evaluation(self.evaluation.result_name)
