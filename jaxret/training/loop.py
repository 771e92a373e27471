"""Training from start to end: data, model, state, steps; the same call resumes what was interrupted."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxret.checkpoint import Checkpoints
from jaxret.contract import require_equal
from jaxret.data.batches import BatchPlan, TrainingSet
from jaxret.data.tokenizer import TextTokenizer
from jaxret.distributed import any_process, make_mesh, place_rows, shard_batch
from jaxret.models.encoders.pretrained import Params, stores_mlm_head
from jaxret.models.retriever import Retriever, build_retriever, load_encoder
from jaxret.runs import run
from jaxret.runs.embedder import Embedder
from jaxret.training.check import check, check_model, reference_options
from jaxret.training.diagnosis import diagnose
from jaxret.training.examples import load_examples, record_data
from jaxret.training.logging import MetricsLog
from jaxret.training.losses import loss_settings
from jaxret.training.optimizers import make_optimizer
from jaxret.training.state import init_state, place, restore_state
from jaxret.training.step import Objective, TrainState, make_eval_step, make_train_step
from jaxret.training.validation import Validation, make_pool


class NotFiniteError(ArithmeticError):
    """The loss or a gradient became NaN or infinite."""


@dataclass
class TrainResult:
    """What a call of `train` did."""

    step: int  # updates made since the run began
    total_steps: int
    resumed_from: int | None
    programs: int  # compiled for the training step
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation

    def require_finished(self) -> None:
        """Ends the process with the status of one that SIGTERM ended, if that is what ended training: what comes next
        must not take a half-trained model for the result."""
        if self.step < self.total_steps:
            raise SystemExit(128 + signal.SIGTERM)


def train(config: ConfigDict, workdir: str | Path, progress: bool = True) -> TrainResult:
    """Trains the retriever that `config` describes, in `workdir`; resumes if the folder holds the same run.

    Raises ContractError if it holds another run, DataError for bad records, NotFiniteError if the loss breaks.
    """
    workdir = Path(workdir)
    mesh = make_mesh(config.mesh.fsdp)
    check(config, mesh)
    say = tqdm.write if progress and jax.process_index() == 0 else lambda _: None

    directory, encoder, pretrained = load_encoder(config)
    retriever = build_retriever(config, encoder)
    tokenizer = run.load_tokenizer(config, directory, retriever)
    check_model(config, retriever)
    announce(config, retriever, directory, say)
    contract = run.make_contract(config, retriever, tokenizer)
    new = run.is_new(workdir, config, contract)

    data = load_examples(config, "train", tokenizer, progress, say)
    dev = load_examples(config, "dev", tokenizer, progress, say) if config.data.dev else None
    total_steps, checkpoint_every = schedule_steps(config, len(data))
    settings = loss_settings(config, retriever, config.train.batch_size / len(data))
    objective = Objective(retriever, settings, mesh, config.train.chunk_size)
    optimizer, schedule = make_optimizer(config.optimizer, total_steps)
    jax.eval_shape(optimizer.init, jax.eval_shape(retriever.init, jax.random.key(0)))  # its patterns match something
    begin: run.Run | None = None
    if new:  # only now: a folder is no run before its data, its settings and its start could be read
        if config.train.start_from:
            begin = open_start(config.train.start_from, contract)
        run.create(workdir, config, directory, contract)
    record_data(workdir, {"train": data, "dev": dev})
    dropout_key = jax.random.key(config.seed.dropout)

    with run.open_checkpoints(workdir, config, writing=True) as checkpoints:
        start = checkpoints.last()
        if start is None:
            state = init_state(config, mesh, retriever, pretrained, optimizer)
            if config.train.start_from:
                begin = begin or open_start(config.train.start_from, contract)
                state = with_params(state, begin.params)
        else:
            state = restore_state(checkpoints, start, mesh, retriever, optimizer)
        del pretrained, begin  # copies of the parameters
        log = MetricsLog(workdir, start or 0)
        train_step = make_train_step(objective, optimizer, state, dropout_key)
        validate = make_validation(config, objective, state.params, dev, data, tokenizer, progress) if dev else None
        plan = batch_plan(config, retriever, config.train.batch_size)
        inspector = Inspector(objective, plan, data, dropout_key)
        recorder = Recorder(checkpoints, log, inspector, validate, say)

        step = start or 0
        if start is None and total_steps == 0:
            recorder.save(state, step, validate=True)
        clock = Stopwatch(step)
        bar = tqdm(total=total_steps, initial=step, desc="train", unit="step", disable=not progress)
        with stop_on_sigterm() as stop, bar:
            stopping, alone = False, jax.process_count() == 1
            while step < total_steps and not stopping:
                batch = plan.training_batch(data, step, (jax.process_index(), jax.process_count()))
                state, values = train_step(state, shard_batch(mesh, batch))
                step += 1
                # Read once a step: a signal in between waits for the next. Several processes agree where they log.
                stopping = (alone or step % config.train.log_every == 0) and any_process(stop.requested)
                bar.update()
                if step % config.train.log_every == 0 or step == total_steps:
                    inspector.require_healthy(state)
                    rate = {"learning_rate": float(schedule(step - 1)), "seconds_per_step": clock.per_step(step)}
                    log.write(step, {**{name: float(value) for name, value in values.items()}, **rate})
                    bar.set_postfix(loss=f"{float(values['loss']):.4f}")
                due = step % checkpoint_every == 0 or step == total_steps
                if due or stopping:  # there may be little time to stop in, and an extra validation would change `best`
                    recorder.save(state, step, validate=due)
                    clock = Stopwatch(step)  # validation is not training time
        if step < total_steps:
            say(f"stopped by SIGTERM after step {step}; the same command continues")
        checkpoints.wait()
        log.close()
    say(f"{step} of {total_steps} steps done; the training step was compiled to {train_step.count} program(s)")
    return TrainResult(step, total_steps, start, train_step.count, recorder.metrics)


def announce(config: ConfigDict, retriever: Retriever, directory: Path, say: Callable[[str], None]) -> None:
    """Says what a user of the config might not expect: new parts of the encoder, options that follow published code."""
    if getattr(retriever.module.config, "mlm_head", False) and not stores_mlm_head(directory):
        say(f"{directory} has no MLM head: a new one is drawn, whose output matrix is the pre-trained word table")
    for option in reference_options(config, retriever):
        say(f"as a published implementation does it, not its paper: {option}")


def open_start(workdir: str, contract: dict[str, Any]) -> run.Run:
    """Another run, at its best checkpoint, to begin with. Raises ContractError if that is another model."""
    other = run.open_run(workdir)
    remedy = "train.start_from must name a run with the same encoder, head, pooling and lengths."
    require_equal(other.contract, contract, f"{workdir}/contract.json", "this run", remedy)
    return other


def with_params(state: TrainState, params: Params) -> TrainState:
    """The state with other parameters, placed as its own are."""
    places = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    return replace(state, params=jax.tree.map(place, jax.device_get(params), places))


@dataclass
class Inspector:
    """Notices a loss that broke, and looks for the place."""

    objective: Objective
    plan: BatchPlan
    data: TrainingSet
    dropout_key: jax.Array

    def require_healthy(self, state: TrainState) -> None:
        """Raises NotFiniteError naming step, queries and place if an update failed; the state is that before it."""
        if bool(state.healthy):
            return
        step = int(state.step)
        batch = self.plan.training_batch(self.data, step)
        key = jax.random.fold_in(self.dropout_key, step)
        batch = place_rows(self.objective.mesh, batch)
        where = diagnose(self.objective, state.params, batch, key, state.step)
        queries = ", ".join(self.data.query_ids[i] for i in self.plan.examples_of(step, len(self.data))[:8])
        raise NotFiniteError(
            f"step {step + 1}: {where}. The batch begins with queries {queries}. The last checkpoint is good; "
            f"a lower optimizer.learning_rate or encoder.dtype=float32 may help"
        )


@dataclass
class Recorder:
    """Validates and saves."""

    checkpoints: Checkpoints
    log: MetricsLog
    inspector: Inspector
    validate: Validation | None
    say: Callable[[str], None]
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation

    def save(self, state: TrainState, step: int, validate: bool) -> None:
        """A checkpoint of `state`, never of a broken one; with validation, if asked and there is a dev set."""
        self.inspector.require_healthy(state)
        metrics = None
        if self.validate and validate:
            metrics = self.metrics = self.validate(state.params)
            self.log.write(step, self.metrics, "validation/")
            self.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items()))
        progress = {"opt_state": state.opt_state, "step": state.step, "healthy": state.healthy}
        self.checkpoints.save(step, state.params, progress, metrics)


class Stopwatch:
    """Seconds per step since the last reading."""

    def __init__(self, step: int) -> None:
        self._time, self._step = time.perf_counter(), step

    def per_step(self, step: int) -> float:
        seconds = (time.perf_counter() - self._time) / max(step - self._step, 1)
        self._time, self._step = time.perf_counter(), step
        return seconds


def schedule_steps(config: ConfigDict, examples: int) -> tuple[int, int]:
    """(total steps, steps between checkpoints)."""
    an_epoch = examples / config.train.batch_size
    total = config.train.steps if config.train.steps >= 0 else math.ceil(config.train.epochs * an_epoch)
    return total, config.train.checkpoint_every or max(math.ceil(an_epoch), 1)


def batch_plan(config: ConfigDict, retriever: Retriever, batch_size: int) -> BatchPlan:
    return BatchPlan(
        batch_size=batch_size,
        negatives=config.data.negatives,
        length_multiple=config.tokens.length_multiple,
        max_query_length=config.tokens.query_length,
        max_passage_length=config.tokens.passage_length,
        pseudo_length=retriever.module.head.pseudo_query_length(),
        data_seed=config.seed.data,
        negatives_seed=config.seed.negatives,
    )


def make_validation(
    config: ConfigDict,
    objective: Objective,
    params: Params,
    dev: TrainingSet,
    data: TrainingSet,
    tokenizer: TextTokenizer,
    progress: bool = False,
) -> Validation:
    embedder = Embedder(
        retriever=objective.retriever,
        params=params,
        mesh=objective.mesh,
        pad_id=tokenizer.pad_id,
        max_lengths={"query": config.tokens.query_length, "passage": config.tokens.passage_length},
        tokens_per_batch=config.encode.tokens_per_batch,
    )
    pool, places = make_pool(dev, data, config.validation.pool_size, config.seed.data)
    plan = batch_plan(config, objective.retriever, config.validation.batch_size)
    return Validation(dev, pool, places, plan, make_eval_step(objective, params), embedder, progress)


@dataclass
class Stop:
    requested: bool = False


@contextmanager
def stop_on_sigterm() -> Iterator[Stop]:
    """Lets the step under way finish and be saved when the machine is taken away."""
    stop = Stop()

    def handle(*_: object) -> None:
        stop.requested = True

    try:
        before = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread: the owner of the process decides
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
