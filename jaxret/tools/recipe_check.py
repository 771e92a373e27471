"""What a late step of a recipe would stumble over, told before its first one: it may be hours away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxret.contract import require_equal
from jaxret.data.files import Policy
from jaxret.data.formats import corpus_file, scan_corpus, source_path
from jaxret.data.formats.corpora import found_corpus
from jaxret.data.formats.places import has_passages, is_folder
from jaxret.data.formats.readers import has_scores
from jaxret.evaluation.answers import check_answers
from jaxret.mining.asked import read_asked as training_questions
from jaxret.mining.mine import require_meaning
from jaxret.mining.pools import is_run
from jaxret.retrieval.encode import corpus_name
from jaxret.runs.contract import make_contract, require_same
from jaxret.runs.run import USES, choose_checkpoint, load_tokenizer, open_checkpoints, stored_config
from jaxret.runs.workdir import Workdir
from jaxret.storage import read_json
from jaxret.tools.asked import read_asked
from jaxret.tools.search_files import check_measures
from jaxret.tools.stages import Stage
from jaxret.tools.teacher import check_teacher
from jaxret.training.begin import prepare
from jaxret.training.check import check
from jaxret.training.examples import TRAINING_PASSAGES, example_source
from jaxret.training.group_losses import taught_by
from jaxret.training.tasks import task_of


@dataclass(frozen=True)
class Evaluated:
    """On what stages are evaluated; measures: None for the usual ones; match: what answers are."""

    corpus: str
    queries: str
    qrels: str
    split: str = "test"
    k: int = 100
    measures: tuple[str, ...] | None = None
    match: str = "string"


def check_recipe(found: Sequence[Stage], folder: Path, on: Evaluated) -> None:
    """Raises what a step would raise for measures, queries, judgements and answers, and for each stage's settings,
    files, encoder, teacher, scores and run to start from. No weights are loaded, and nothing is written."""
    check_measures(on.measures, on.k)
    asked = read_asked(on.queries, on.qrels, on.split, Policy())
    check_answers(asked.queries, on.match)
    if not on.qrels and not any(query.answers for query in asked.queries):
        raise ValueError(f"{on.queries} has no answers, so there is nothing to measure stages with; give --qrels")
    for stage in found:
        with _naming(stage):
            check(stage.config)
            if stage.mining:
                _check_mining(stage)
    stages = {stage.name: stage for stage in found}
    contracts: dict[str, Contract] = {}
    for stage in found:
        with _naming(stage):
            _check_files(stage)
            if stage.teacher:
                _check_teacher(stage, stages, on)
            elif taught_by(stage.config) and not stage.config.data.teacher_run:
                _check_scores(stage)
    for stage in found:
        with _naming(stage):
            workdir = Workdir(folder / stage.name)
            if workdir.config.exists():  # a run that has begun was sound, and is complete in itself
                contracts[stage.name] = Contract(read_json(workdir.contract), "")
                continue
            contracts[stage.name] = _contract(stage, folder)
            if stage.config.train.start_from:
                _check_start(stage, contracts)


@contextmanager
def _naming(stage: Stage) -> Iterator[None]:
    """Errors of the block say of which stage they are."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"stage {stage.name!r}: {error}") from error
    except ValueError as error:
        raise ValueError(f"stage {stage.name!r}: {error}") from error


def on_error_of(data: ConfigDict) -> str:
    """How mining and scoring meet bad records: they keep none."""
    return "skip" if data.on_error == "skip" else "error"


def _check_mining(stage: Stage) -> None:
    assert stage.mining is not None
    require_meaning(stage.pools, stage.mining)
    if stage.mining.match == "regex":
        data = stage.config.data
        questions = training_questions(data.train, data.train_split, Policy(on_error_of(data)), positives=False)
        check_answers((one.query for one in questions.asked), "regex")


def _check_files(stage: Stage) -> None:
    """Raises DataError for a file that is missing, and for a teacher's run without scores."""
    config = stage.config
    train = example_source(config, "train")
    if stage.mining:
        stage.questions()
        train.beside()
    elif train.path:
        train.files()
    if config.data.dev:
        example_source(config, "dev").files()
    if config.validation.corpus not in ("", TRAINING_PASSAGES):
        found_corpus(config.validation.corpus)


def _check_teacher(stage: Stage, stages: Mapping[str, Stage], on: Evaluated) -> None:
    """A retriever scores the passages of the corpus that it encoded, by their ids: the texts must be those."""
    data = stage.config.data.train
    path = source_path(data)
    own = data if is_folder(path) and has_passages(path) else ""  # records have their texts with them
    texts = on.corpus if stage.mining else own
    if stage.teacher not in stages:
        check_teacher(stage.teacher, corpus_name(on.corpus), texts)
    elif texts and not stages[stage.teacher].reranks and corpus_file(texts) != corpus_file(on.corpus):
        encoded, given = ({"sha256": scan_corpus(corpus).sha256} for corpus in (on.corpus, texts))
        remedy = f"The teacher {stage.teacher!r} scores by ids: give the data's own corpus as --corpus."
        require_equal(encoded, given, f"--corpus={on.corpus}", f"the corpus of {texts}", remedy)


def _check_scores(stage: Stage) -> None:
    data, reader = stage.config.data, taught_by(stage.config)[0]
    if not has_scores(data.train, data.train_split, data.negatives_run or None, Policy(on_error_of(data))):
        raise ValueError(
            f"{reader} is set, but {data.train} has no teacher's scores, of a target and of a "
            "negative: give the stage a teacher, or set data.teacher_run"
        )


class Contract(NamedTuple):
    """What a run's vectors or scores depend on, and the digest of its tokenizer."""

    values: dict[str, Any]
    tokenizer: str


def _contract(stage: Stage, folder: Path) -> Contract:
    """Raises what `prepare` does, and the loading of a tokenizer."""
    job = prepare(stage.trained_on(folder), Workdir(folder / stage.name), False, stage.given, task_of(stage.config))
    tokenizer = load_tokenizer(job.config, job.encoder, job.model)
    return Contract(make_contract(job.model, tokenizer, job.encoder), tokenizer.digest)


def _check_start(stage: Stage, contracts: Mapping[str, Contract]) -> None:
    """Raises FileNotFoundError, CheckpointError, ValueError or ContractError for a run that the stage cannot start
    from."""
    start = stage.config.train.start_from
    if start in contracts:
        stored, where = contracts[start].values, f"stage {start!r}"
    elif not is_run(start):
        raise FileNotFoundError(f"train.start_from is {start!r}, which is no earlier stage and no run")
    else:
        folder, config = Workdir(start), stored_config(Workdir(start))
        if config.task != stage.config.task:
            raise ValueError(f"train.start_from is {start!r}, which is {USES.get(config.task, config.task)}")
        with open_checkpoints(folder, config) as checkpoints:
            choose_checkpoint(checkpoints, "best", folder)
        stored, where = read_json(folder.contract), str(folder.contract)
    remedy = "train.start_from must name a run with the same encoder, head, pooling and lengths."
    require_same(stored, contracts[stage.name].values, contracts[stage.name].tokenizer, where, "this stage", remedy)
