"""Train a run from start to end. The same call resumes a run that was interrupted.

The parts, in the order in which `train` uses them:

1.  `tasks/` defines the training tasks: `get_task` returns the Task of `config.task`; the loop calls its functions.
    `tasks/retrieval.py` trains retrievers, `tasks/reranking.py` cross-encoders, `pretraining/` encoders.
2.  `prepare.py`, with `config_check.py`: config -> TrainingJob. Here settings that contradict each other, the model,
    the devices or the run in the folder are errors, before weights or data are read.
3.  `examples.py`: files -> tokenized examples, from their store (`Task.read_data` -> TrainingData).
4.  `optimizers.py`: the optimizer and its learning rate, over the steps that `schedule_steps` computes.
5.  The state (`train_state.py`): `starting_weights.py` makes the state of a new run, and a checkpoint has the state of
    a resumed one. `teacher.py` reads the parameters of train.teacher.
    A folder becomes a run (`runs/`) only when its data and its weights have been read.
6.  `make_trainer` puts together
    - the objective (`objective.py`, one of `tasks/`): how devices share the computation of a loss (`losses/`);
    - the plan: how examples become batches, each a pure function of its number (`data/tokens/batches.py`);
    - the training step (`step.py`): one program, batch -> loss -> gradients -> new state;
    - the recorder (`recorder.py`): validation (`validation.py`, `ranking.py`), checkpoints, metrics (`logging.py`);
    - the meter (`throughput.py`).
7.  `Trainer.run`, the loop:

        while step < total:
            take the batch of this step      prefetch.py makes batches ahead, in a thread
            state = train_step(state, batch)
            every log_every steps            write a line; if the loss is not finite, diagnosis.py finds the first cause
            every checkpoint_every steps     validate and save; the best checkpoint by `Criterion` and the last are kept
            on SIGTERM                       save and stop (signals.py)

A batch, a dropout mask and a learning rate depend only on config, data and step. A run that was interrupted therefore
ends with the same weights as a run that was not.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

import jax
import optax
from ml_collections import ConfigDict

from jaxret.data.tokens.batches import Examples, stack_batches
from jaxret.models.model import ModelT
from jaxret.parallel.events import emit
from jaxret.parallel.mesh import Program, row_parts, shard_batch
from jaxret.parallel.processes import any_process, wait_for_all
from jaxret.parallel.progress import COMPILATION, Progress
from jaxret.runs.identity import WEIGHTS
from jaxret.runs.lock import hold_folder
from jaxret.runs.resume import SCHEDULE, record_changes
from jaxret.runs.run import base_of_run, create_run, open_checkpoints, record_shapes
from jaxret.runs.run_warnings import RunWarning, keep_warnings
from jaxret.runs.trackers import tracker_names
from jaxret.runs.workdir import Workdir
from jaxret.storage.buckets.working_copy import publish
from jaxret.storage.checkpoint import REMEDY, Checkpoints, DamagedCheckpointError
from jaxret.storage.folder_kinds import RUN, require_folder_kind
from jaxret.storage.lockfile import LockedError
from jaxret.training.config_check import describe_unreached
from jaxret.training.data_warnings import data_warnings
from jaxret.training.logging import MetricsCallback, MetricsLog
from jaxret.training.losses.grad_cache import describe_rounding
from jaxret.training.optimizers import describe_long_warmup, make_optimizer
from jaxret.training.prefetch import Prefetcher
from jaxret.training.prepare import log_changes, prepare_job
from jaxret.training.profile import Profiler
from jaxret.training.recorder import Criterion, Inspector, Recorder, require_finite_parameters
from jaxret.training.signals import stop_on_sigterm
from jaxret.training.starting_weights import first_state, first_step
from jaxret.training.step import make_train_step
from jaxret.training.task import AnyData, AnyJob, ExamplesT, Task, TrainingData, TrainingJob, TrainingPlan
from jaxret.training.tasks import get_task
from jaxret.training.teacher import load_teacher
from jaxret.training.throughput import ThroughputMeter, countable_step, ideal_seconds
from jaxret.training.train_state import TrainState, make_update_rule, restore_state
from jaxret.types import BatchT


@dataclass
class TrainResult:
    """Outcome of a call of `train`."""

    step: int  # number of updates so far, earlier rounds included
    total_steps: int  # number of updates at the end of the run, earlier rounds included
    resumed_from: int | None  # step of the checkpoint; None for a new run
    programs: int  # number of programs that were compiled for the training step
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last validation

    def require_finished(self) -> None:
        """Raise SystemExit with the status of SIGTERM if training ended before its last step. The next steps of a
        script must not use a model whose training is incomplete."""
        if self.step < self.total_steps:
            raise SystemExit(128 + signal.SIGTERM)


def train(
    config: ConfigDict,
    workdir: str | Path,
    progress: bool = True,
    explicit_keys: Iterable[str] = (),
    task: Task[Any, Any, Any] | None = None,
    is_held: bool = False,
    callback: MetricsCallback | None = None,
) -> TrainResult:
    """Train the model that a config describes, in `workdir`; resume if the folder holds this run already.

    Args:
        config: the config of the run.
        workdir: folder of the run; it is made if it does not exist.
        progress: whether progress is printed.
        explicit_keys: keys that the user set. A sentence-transformers directory does not change them, even if their
            values are the defaults.
        task: the task to train, instead of the task that `config.task` names.
        is_held: whether the caller holds the lock of the folder.
        callback: called in process 0 with the step and the metrics of each line of metrics.jsonl.

    Raises:
        ContractError: the folder holds another run.
        DataError: a record is bad.
        CheckpointError: a checkpoint is damaged or could not be saved.
        NotFiniteError: the loss or a parameter is not finite.
        LockedError: another job writes to the folder.
    """
    require_folder_kind(Workdir(workdir).path, RUN)
    job = prepare_job(config, Workdir(workdir), progress, explicit_keys, task or get_task(config))
    # The lock also detects a read-only folder before any work is done.
    with contextlib.nullcontext() if is_held else hold_folder(job.workdir.path, "training"):
        if not job.has_begun and any_process(job.workdir.config.exists()):
            raise LockedError(f"another job has just begun a run in {workdir}; the same command continues it")
        return _train(job, callback)


def _train(job: TrainingJob[ModelT, ExamplesT, BatchT], callback: MetricsCallback | None) -> TrainResult:
    config, first = job.config, first_step(job)
    data = job.task.read_data(job)
    optimization = make_optimization(config, data.train, first)
    total, planned_steps = optimization.length.total, optimization.length.planned_steps
    epochs = planned_steps * optimization.length.epochs_per_batch * config.train.accumulate
    long_warmup = describe_long_warmup(config.optimizer, planned_steps)
    settings_warnings = []
    for text in filter(None, [long_warmup, *describe_unreached(config, planned_steps, epochs)]):
        job.log(text)
        settings_warnings.append(RunWarning("settings", text))
    teacher, teacher_record = load_teacher(job, data.contract)
    state = None
    if not job.has_begun:  # a folder becomes a run only when its data and its weights have been read
        state, start_record = first_state(job, data, optimization.optimizer)
        require_finite_parameters(state, f"the weights of {config.train.start_from or config.encoder.checkpoint}")
        if jax.process_index() == 0:
            record = data.record | start_record | teacher_record
            warnings = list(data_warnings(data.train, data.dev))
            keep_warnings(job.workdir, "train", [*data.warnings, *settings_warnings, *warnings])
            for warning in warnings:
                if warning.kind != "truncation":  # already logged when the data were read
                    job.log(warning.text)
            create_run(job.workdir, config, job.encoder, data.contract, record, job.encoder_settings)
            publish(job.workdir)  # another job must see the run before it trains one in the same folder
    with open_checkpoints(job.workdir, config, writing=True) as checkpoints:
        if state is None:
            state = resume_state(job, data, optimization, checkpoints)
        start = checkpoints.last()
        if jax.process_index() == 0:
            record_shapes(job.workdir, config, job.model)
        state = replace(state, teacher=teacher)
        tracking = tracker_names(config.train.trackers), config.train.tracker_project
        with closing(MetricsLog(job.workdir, first if start is None else start, callback, *tracking)) as metrics_log:
            trainer = make_trainer(job, data, optimization, state, checkpoints, metrics_log)
            step = trainer.run(state, start)
        checkpoints.wait()
    publish(job.workdir)
    wait_for_all()  # all processes see the files of process 0
    if step < total:
        job.log(f"stopped by SIGTERM after step {step}; the same command continues")
    programs = trainer.train_step.count
    if total:
        job.log(f"{step} of {total} steps done; the training step was compiled to {programs} program(s)")
    metrics = trainer.recorder.metrics
    emit("training", workdir=job.workdir.path, step=step, total=total, resumed_from=start, metrics=metrics)
    return TrainResult(step, total, start, programs, metrics)


@dataclass(frozen=True)
class RunLength:
    """The length of a run in steps. A step is an update from one or more batches."""

    total: int  # number of the last step
    checkpoint_every: int  # steps between checkpoints
    epochs_per_batch: float  # batch size / number of examples
    first: int  # steps of earlier rounds, which `total` includes
    planned_steps: int  # steps of all rounds, over which warm-up and decay extend


def schedule_steps(config: ConfigDict, data: Examples | None, first: int = 0) -> RunLength:
    """Return the length of a run whose config has steps or epochs.

    `first` is the number of steps of earlier rounds. Later rounds are assumed to be as long as this one.
    """
    batches_per_epoch = len(data) / config.train.batch_size if data else math.inf
    steps_per_epoch = batches_per_epoch / config.train.accumulate
    steps = config.train.steps if config.train.steps >= 0 else math.ceil(config.train.epochs * steps_per_epoch)
    checkpoint_every = config.train.checkpoint_every or (max(math.ceil(steps_per_epoch), 1) if data else 1)
    rounds = config.train.rounds - config.train.round + 1
    return RunLength(first + steps, checkpoint_every, 1 / batches_per_epoch, first, first + rounds * steps)


@dataclass(frozen=True)
class Optimization:
    """The optimizer of a run, its learning rate by step, and the run's length, which both depend on."""

    length: RunLength
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule


def make_optimization(config: ConfigDict, data: Examples | None, first: int) -> Optimization:
    """Return the optimizer of a config for the steps of a run on these examples. `first` is the number of steps of
    earlier rounds."""
    length = schedule_steps(config, data, first)
    return Optimization(length, *make_optimizer(config.optimizer, length.planned_steps))


def resume_state(job: AnyJob, data: AnyData, optimization: Optimization, checkpoints: Checkpoints) -> TrainState:
    """Return the state of the last checkpoint, and record in the folder the keys that the config has changed. A run
    that was interrupted before its first checkpoint gets the first state again.

    Args:
        job: a job whose run has begun.
        data: the data of the run.
        optimization: the optimizer and schedule of the current config.
        checkpoints: the checkpoints of the run.

    Raises:
        ValueError: the run has made more steps than the config has.
        NotFiniteError: a parameter is NaN or infinite.
    """
    length = optimization.length
    weights_record = {key: value for key, value in job.data_record.items() if key in WEIGHTS}
    if checkpoints.last() is None:
        state, start_record = first_state(job, data, optimization.optimizer)
        weights_record |= start_record
    elif (newest := max(checkpoints.last() or 0, *checkpoints.damage, 0)) > length.total:
        raise ValueError(
            f"the config has {length.total} steps, but the run in {job.workdir} has made {newest}: "
            f"set train.steps or train.epochs so that there are at least {newest} steps"
        )
    else:
        state = restore_newest(job, optimization, checkpoints)
    start = checkpoints.last()
    step = length.first if start is None else start
    name = f"checkpoint {start} of {job.workdir}" if start is not None else "the initial weights"
    require_finite_parameters(state, name)
    if checkpoints.half_written:
        job.log(f"removed incomplete checkpoints: {', '.join(checkpoints.half_written)}")
    if old_steps := checkpoints.prune():
        job.log(f"removed checkpoints that are neither best nor last nor of vectors: {', '.join(map(str, old_steps))}")
    log_changes(job, data.record)
    if any(key in job.changes for key in SCHEDULE):
        rate = float(optimization.learning_rate(step - int(state.skip_count or 0)))
        job.log(f"the learning rate has a new schedule over {length.planned_steps} steps: it continues at {rate:.3g}")
    any_process(False)  # barrier: no process may still read the old config
    if jax.process_index() == 0:
        record_changes(job.workdir, job.config, data.contract, data.record | weights_record, job.changes, step)
    return state


def restore_newest(job: AnyJob, optimization: Optimization, checkpoints: Checkpoints) -> TrainState:
    """Return the state of the newest intact checkpoint. Newer checkpoints are damaged; they are renamed, and this is
    logged.

    Args:
        job: a job whose run has begun.
        optimization: the optimizer and schedule of the current config.
        checkpoints: the checkpoints of the run, at least one.

    Raises:
        CheckpointError: all checkpoints are damaged; the message is about the newest.
    """
    rule, errors = make_update_rule(job.config), dict(checkpoints.damage)
    base = base_of_run(job.workdir, job.config, job.model) if rule.base else None
    for step in reversed(checkpoints.steps()):
        try:
            state = restore_state(checkpoints, step, job.mesh, job.model, optimization.optimizer, rule, base)
        except DamagedCheckpointError as error:
            errors[step] = error
            continue
        for later, problem in sorted(errors.items()):
            path = checkpoints.set_aside(later)
            job.log(
                f"{str(problem).removesuffix(REMEDY)}it is now {path}, and training continues from checkpoint {step}"
            )
        return state
    raise errors[max(errors)]


@dataclass
class Trainer(Generic[ExamplesT, BatchT]):
    """The training loop: steps, and logs, validation and checkpoints between them."""

    job: AnyJob
    optimization: Optimization  # length and learning rate
    data: ExamplesT | None  # training examples; None if there are no steps
    plan: TrainingPlan[ExamplesT, BatchT]  # how examples become batches
    train_step: Program  # (state, batch) -> (state, metrics)
    recorder: Recorder  # validation and checkpoints
    meter: ThroughputMeter  # measurements of speed

    def run(self, state: TrainState, start: int | None) -> int:
        """Make steps until the end or SIGTERM, and return the number of the last one.

        Args:
            state: state before the first of these steps; its memory is reused.
            start: step of the checkpoint that the state was read from; None for a new run.
        """
        length, log_every = self.optimization.length, self.job.config.train.log_every
        step, total, recorder = length.first if start is None else start, length.total, self.recorder
        if start is None and step == total:
            recorder.save(state, step, validate=True)
        stopping, single_process = False, jax.process_count() == 1
        previous_values: dict[str, Any] = {}  # metrics of the step before the last one
        values: dict[str, Any] = {}
        self.meter.restart()
        bar = Progress("train", total, "step", step, self.job.progress, COMPILATION)
        profiler = Profiler(self.job.workdir.profile, self.job.config.train.profile)
        with stop_on_sigterm() as stop, bar, profiler, Prefetcher(self.batch, step, total) as prefetcher:
            while step < total and not stopping:
                batch = prefetcher.take(step, state)
                # More than two unfinished steps use memory and, on CPUs, can deadlock.
                jax.block_until_ready(previous_values)
                previous_values = values
                profiler.begin(step + 1, state)
                state, values = self.train_step(state, batch)
                self.meter.add(batch, values.pop("real_tokens"))
                step += 1
                profiler.end(step, state)
                # Several processes exchange signals and errors only at the steps that they log.
                is_exchange = single_process or step % log_every == 0
                recorder.checkpoints.poll(is_exchange)
                # The event is read once per step, so that the whole step uses one value.
                stopping = is_exchange and any_process(stop.is_set())
                bar.update()
                if step % log_every == 0 or step == total:
                    recorder.inspector.require_healthy(state)
                    metrics = {name: float(value) for name, value in values.items()} | self.rate(state, step)
                    metrics |= self.meter.read() | {"data_wait": prefetcher.wait_share()}
                    recorder.metrics_log.write(step, metrics)
                    bar.note(f"loss {metrics['loss']:.4f}")
                due = step % length.checkpoint_every == 0 or step == total
                # No validation when training is stopped: the time may be short, and it would change the best
                # checkpoint.
                if due or stopping:
                    recorder.save(state, step, validate=due)
                    self.meter.restart()  # validation is not training time
                    prefetcher.wait_share()
        return step

    def rate(self, state: TrainState, step: int) -> dict[str, float]:
        """Return the learning rate of the last update and, if updates may be skipped, the number of skipped ones. A
        skipped update does not advance the schedule."""
        if state.skip_count is None:
            return {"learning_rate": float(self.optimization.learning_rate(step - 1))}
        skip_count = int(state.skip_count)
        rate = float(self.optimization.learning_rate(max(step - skip_count - 1, 0)))
        return {"learning_rate": rate, "skipped_steps": skip_count}

    def batch(self, step: int) -> BatchT:
        """Return this process's part of a step's batch, on the mesh. If a step has several batches, they are
        stacked."""
        assert self.data is not None  # the data are None only if there are no steps
        part, count = (jax.process_index(), jax.process_count()), self.job.config.train.accumulate
        numbers = range(step * count, (step + 1) * count)
        batches = [self.plan.training_batch(self.data, number, part) for number in numbers]
        return shard_batch(self.job.mesh, stack_batches(batches, self.data.pad_id), stacked=count > 1)


def make_trainer(
    job: TrainingJob[ModelT, ExamplesT, BatchT],
    data: TrainingData[ExamplesT],
    optimization: Optimization,
    state: TrainState,
    checkpoints: Checkpoints,
    metrics_log: MetricsLog,
) -> Trainer[ExamplesT, BatchT]:
    """Return the trainer of a job. Nothing is compiled yet.

    Args:
        job: the job.
        data: the data of the job.
        optimization: optimizer and schedule.
        state: the first state, for its shapes and shardings.
        checkpoints: the checkpoints of the run.
        metrics_log: the logs of the run.
    """
    config, length, dropout_key = job.config, optimization.length, jax.random.key(job.config.seed.dropout)
    objective = job.task.make_objective(config, job.model, job.mesh, length.epochs_per_batch)
    plan = job.task.make_plan(job, data, objective)
    if plan.padded_size > plan.batch_size:
        empty = f"{plan.padded_size - plan.batch_size} of {plan.padded_size} rows in each batch are empty"
        job.log(f"batches of {plan.batch_size} on {row_parts(job.mesh)} devices: {empty}")
    if description := describe_rounding(plan.padded_size, config.train.chunk_size, row_parts(job.mesh)):
        job.log(description)
    if plan.packer:
        job.log(str(plan.packer))
    rule = make_update_rule(config)
    inspector = Inspector(objective, plan, data.train, dropout_key, checkpoints, rule)
    validator = job.task.make_validator(job, data, objective, state.weights)
    step_arguments = optimization.optimizer, state, dropout_key, rule
    train_step = make_train_step(objective, *step_arguments)
    countable = countable_step(train_step, objective, *step_arguments)
    ideal = ideal_seconds(countable, state, job.mesh.size, job.mesh.devices.flat[0].device_kind)
    return Trainer(
        job=job,
        optimization=optimization,
        data=data.train,
        plan=plan,
        train_step=train_step,
        recorder=Recorder(checkpoints, metrics_log, inspector, validator, job.log, make_criterion(config, length)),
        meter=ThroughputMeter(ideal, objective.bins(plan.padded_size)),
    )


def make_criterion(config: ConfigDict, length: RunLength) -> Criterion:
    """Return the criterion that compares the checkpoints of a run. Its epochs become steps, rounded down, because the
    last step of an epoch may end a little after it."""
    epochs_per_step = length.epochs_per_batch * config.train.accumulate
    steps = math.floor(config.validation.then_from / epochs_per_step) if epochs_per_step else 0
    return Criterion(config.validation.metric, config.validation.then, steps)
