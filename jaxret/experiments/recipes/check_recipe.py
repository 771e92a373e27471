"""Check a recipe before its first step, so that a mistake is not found after hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.data.errors import Policy
from jaxret.data.formats import TrainingSource, source_path
from jaxret.data.formats.corpus import Corpus
from jaxret.data.formats.data_source import DataSource
from jaxret.data.libraries.named import is_named
from jaxret.evaluation.answer_matching import check_answers
from jaxret.experiments.recipes.evaluation_request import EvaluationRequest
from jaxret.experiments.recipes.stages import TRAINING_DATA, Stage
from jaxret.experiments.searches.evaluate_search import require_answers
from jaxret.experiments.searches.evaluation_measures import choose_measures
from jaxret.experiments.searches.evaluation_queries import EvaluationSource, read_evaluation_queries
from jaxret.experiments.teachers import check_teacher, require_passages
from jaxret.index.encoding.encode import corpus_name
from jaxret.mining.mining_job import require_meaning
from jaxret.mining.pools import is_run_folder
from jaxret.mining.training_queries import read_training_queries as training_questions
from jaxret.models.peft_files import adapter_files
from jaxret.runs.contract import make_contract, require_same_contract
from jaxret.runs.encoded_steps import announcement_files
from jaxret.runs.mismatch import require_equal
from jaxret.runs.run import USES, choose_checkpoint, load_tokenizer, open_checkpoints, stored_config
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json
from jaxret.storage.buckets.working_copy import shown_path
from jaxret.training.config_check import check_config
from jaxret.training.config_sources import training_corpus, training_data, validation_corpus
from jaxret.training.examples import example_source
from jaxret.training.losses.group_losses import distillation_keys
from jaxret.training.prepare import prepare_job
from jaxret.training.tasks import get_task
from jaxret.training.teacher import require_run, require_same_tokens


@dataclass(frozen=True)
class EvaluationSetup:
    """The data and measures that evaluate every stage of a recipe."""

    corpus: Corpus
    source: EvaluationSource  # queries and judgements
    k: int = 100  # passages per query
    measures: tuple[str, ...] | None = None  # names such as "nDCG@10"; None for the default measures
    match: str = "string"  # how answers are read, "string" or "regex"
    name: str = ""  # name of the result files; "": the name of the source

    @property
    def result_name(self) -> str:
        """The name of the result files: `name`, or the name of the source."""
        return self.name or self.source.name

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a JSON value."""
        queries, judgements = self.source.queries, self.source.judgements
        return {
            "corpus": str(self.corpus),
            "queries": str(queries),
            "qrels": str(judgements or ""),
            "split": queries.split,
            "k": self.k,
            "measures": [*(self.measures or ())],
            "match": self.match,
        }


def complete_evaluation(request: EvaluationRequest, config: ConfigDict) -> EvaluationSetup:
    """Return the setup of a request. Missing sources are taken from the config's data.train, if that is a folder.

    Raises FileNotFoundError if data.train does not exist, DataError if a path has no such data, ValueError if a source
    is missing.
    """
    train = config.data.train
    if train and not is_named(path := source_path(train)) and not path.exists():
        raise FileNotFoundError(f"--config.data.train={train}: {path} does not exist")
    folder = train if train and DataSource.open(train).is_folder else ""
    queries = request.queries or folder
    for flag, value in (("--config.data.train", train), ("--corpus", request.corpus or folder), ("--queries", queries)):
        if not value:
            if not train:
                raise ValueError("--config.data.train must be given: the training data of the stages")
            raise ValueError(f"{flag} must be given: --config.data.train={train} is not a folder that has it")
    qrels = request.qrels or (queries if DataSource.open(queries).is_folder else "")
    corpus = Corpus.open(request.corpus) if request.corpus else training_corpus(config)
    source = EvaluationSource.open(queries, qrels, request.split)
    return EvaluationSetup(corpus, source, request.k, request.measures, request.match or "string", request.name)


def check_recipe(stage_list: Sequence[Stage], folder: Path, evaluation: EvaluationSetup) -> None:
    """Raise the errors of later steps.

    It checks measures, queries, judgements and answers, and for each stage its settings, files, encoder, teacher,
    scores and the run to start from. Weights are not loaded, and files are not written.
    """
    _check_evaluation(evaluation)
    for stage in stage_list:
        with _with_stage_name(stage):
            check_config(stage.config)
            if stage.mining:
                _check_mining(stage)
    stages = {stage.name: stage for stage in stage_list}
    contracts: dict[str, Mapping[str, Any]] = {}
    for stage in stage_list:
        with _with_stage_name(stage):
            _check_files(stage)
            if stage.teacher:
                _check_teacher(stage, stages, evaluation)
            elif distillation_keys(stage.config) and not stage.config.data.teacher_run:
                _check_scores(stage)
    for stage in stage_list:
        with _with_stage_name(stage):
            workdir = Workdir(folder / stage.name)
            if workdir.config.exists():  # a run that has begun was checked before, and has copies of its files
                contracts[stage.name] = read_json(workdir.contract)
                _check_length(stage, workdir, corpus_name(evaluation.corpus))
                continue
            contracts[stage.name] = _stage_contract(stage, folder)
            if stage.config.train.start_from:
                _check_start(stage, contracts)
            if stage.config.train.teacher:
                _check_in_batch_teacher(stage, stages, contracts)


def _check_evaluation(evaluation: EvaluationSetup) -> None:
    measures, source = choose_measures(evaluation.measures, evaluation.k), evaluation.source
    queries = read_evaluation_queries(source, Policy()).queries
    check_answers(queries, evaluation.match)
    require_answers(source.queries.source, queries, measures)
    if source.judgements is None and not any(query.answers for query in queries):
        raise ValueError(f"{source.queries} has no answers, so stages cannot be measured; give --qrels")


@contextmanager
def _with_stage_name(stage: Stage) -> Iterator[None]:
    """Put the name of a stage in front of the errors of a block."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"stage {stage.name!r}: {error}") from error
    except ValueError as error:
        raise ValueError(f"stage {stage.name!r}: {error}") from error


def on_error_of(data: ConfigDict) -> str:
    """Return the on_error of mining and scoring, "skip" or "error": they do not have "keep"."""
    return "skip" if data.on_error == "skip" else "error"


def _check_mining(stage: Stage) -> None:
    assert stage.mining is not None
    require_meaning(stage.pools, stage.mining)
    if stage.mining.match == "regex":
        questions = training_questions(stage.queries, Policy(on_error_of(stage.config.data)))
        check_answers((training_query.query for training_query in questions.queries), "regex")


def _check_files(stage: Stage) -> None:
    """Raise DataError for a missing file, and for a teacher's run without scores; FileNotFoundError for missing
    adapters."""
    config = stage.config
    train = example_source(config, "train")
    if stage.mining:
        _ = stage.queries.files  # raises for a missing file
        train.extra_files()
    elif train.path:
        train.files()
    if config.data.dev:
        example_source(config, "dev").files()
    validation_corpus(config)
    if config.lora.adapters:
        adapter_files(config.lora.adapters)


def _check_teacher(stage: Stage, stages: Mapping[str, Stage], evaluation: EvaluationSetup) -> None:
    """Raise an error if a teacher cannot score a stage's data. A retriever scores passages by their ids in the corpus
    that it encoded, so the data must have the same texts as this corpus."""
    corpus, policy = evaluation.corpus, Policy(on_error_of(stage.config.data))
    for texts in _scored_texts(stage, corpus):
        if stage.teacher not in stages:
            check_teacher(stage.teacher, corpus_name(corpus), texts, policy)
        elif stages[stage.teacher].is_reranker:
            return
        elif isinstance(texts, TrainingSource):
            require_passages(f"the teacher {stage.teacher!r}", texts, [corpus], policy)
        elif texts.file.path != corpus.file.path:
            corpus_digest, own_digest = {"sha256": corpus.scan().sha256}, {"sha256": texts.scan().sha256}
            remedy = f"The teacher {stage.teacher!r} scores by ids: give the data's own corpus as --corpus."
            require_equal(corpus_digest, own_digest, f"--corpus={corpus}", f"the corpus of {texts}", remedy)


def _scored_texts(stage: Stage, corpus: Corpus) -> list[Corpus | TrainingSource]:
    """Return the source of the passages that a stage's teacher scores: a corpus, or training records with texts. Mined
    passages are from `corpus`."""
    if stage.mining:
        return [corpus, *([training_data(stage.config)] if TRAINING_DATA in stage.concat else [])]
    layout = DataSource.open(stage.config.data.train).layout
    if layout.is_folder and layout.find_passages():
        return [training_corpus(stage.config)]
    data = training_data(stage.config)
    return [data if data.has_texts else data.corpus]


def _check_in_batch_teacher(
    stage: Stage, stages: Mapping[str, Stage], contracts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise FileNotFoundError, ValueError or ContractError if the run in train.teacher cannot teach the stage."""
    teacher = stage.config.train.teacher
    if teacher not in stages:
        require_run(teacher, contracts[stage.name])
        return
    if stages[teacher].is_reranker:
        raise ValueError(f"train.teacher is {teacher!r}, which is {USES['reranking']}; a retriever is needed")
    require_same_tokens(contracts[teacher], contracts[stage.name], f"stage {teacher!r}")


def _check_scores(stage: Stage) -> None:
    data, reader = stage.config.data, distillation_keys(stage.config)[0]
    if not training_data(stage.config).has_teacher_scores(Policy(on_error_of(data))):
        raise ValueError(
            f"{reader} is set, but {data.train} has no teacher's scores of a query's target and negative: give the "
            "stage a teacher, or set data.teacher_run"
        )


def _stage_contract(stage: Stage, folder: Path) -> dict[str, Any]:
    """Return the contract of a stage's run. Raises the errors of `prepare_job` and of loading a tokenizer."""
    workdir, task = Workdir(folder / stage.name), get_task(stage.config)
    job = prepare_job(stage.training_config(folder), workdir, False, stage.explicit_keys, task)
    return make_contract(job.model, load_tokenizer(job.config, job.encoder, job.model), job.encoder)


def _check_length(stage: Stage, workdir: Workdir, encoded_name: str) -> None:
    """Raise ContractError if the stage trains to another step than that which encoded its corpus. If a metric of a dev
    set selects the checkpoint, the same one may stay the best, so the training decides."""
    folder, config = workdir.embeddings(encoded_name), stage.config
    old, new = ({key: values.train[key] for key in ("steps", "epochs")} for values in (stored_config(workdir), config))
    if old == new or not any(path.exists() for path in announcement_files(folder)):
        return
    if not config.data.dev or config.validation.best == "last":
        remedy = f"Delete {shown_path(folder)}, whose vectors are from another step, to train and encode again."
        require_equal(old, new, str(workdir.config), "the recipe", remedy)


def _check_start(stage: Stage, contracts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise FileNotFoundError, CheckpointError, ValueError or ContractError if the stage cannot start from its run."""
    start = stage.config.train.start_from
    if start in contracts:
        contract, owner = contracts[start], f"stage {start!r}"
    elif not is_run_folder(start):
        raise FileNotFoundError(f"train.start_from is {start!r}, which is neither an earlier stage nor a run")
    else:
        folder, config = Workdir(start), stored_config(Workdir(start))
        if config.task != stage.config.task:
            raise ValueError(f"train.start_from is {start!r}, which is {USES.get(config.task, config.task)}")
        with open_checkpoints(folder, config) as checkpoints:
            choose_checkpoint(checkpoints, "best", folder)
        contract, owner = read_json(folder.contract), str(folder.contract)
    remedy = "train.start_from must name a run with the same encoder, head, pooling and lengths."
    require_same_contract(contract, contracts[stage.name], owner, "this stage", remedy)
