"""Training from start to end: config, folder, data, state, steps; the same call resumes what was interrupted."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import jax
import optax
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxret.checkpoint import Checkpoints
from jaxret.data.batches import AnyExamples, stack
from jaxret.distributed import Program, any_process, shard_batch
from jaxret.lockfile import LockedError
from jaxret.runs.lock import hold
from jaxret.runs.resume import SCHEDULE, remember
from jaxret.runs.run import create, open_checkpoints
from jaxret.runs.workdir import Workdir
from jaxret.training.begin import Job, Texts, prepare, tell_changes
from jaxret.training.feed import Feed
from jaxret.training.grad_cache import rounded
from jaxret.training.logging import MetricsLog
from jaxret.training.optimizers import make_optimizer
from jaxret.training.recorder import Criterion, Inspector, Recorder, require_finite
from jaxret.training.signals import stop_on_sigterm
from jaxret.training.speed import Speed, counted_step, ideal_seconds
from jaxret.training.state import first_state, restore_state
from jaxret.training.step import TrainState, make_rule, make_train_step
from jaxret.training.task import Plan, Task
from jaxret.training.tasks import task_of
from jaxret.types import AnyBatch


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


def train(
    config: ConfigDict,
    workdir: str | Path,
    progress: bool = True,
    given: Iterable[str] = (),
    task: Task | None = None,
) -> TrainResult:
    """Trains the model that `config` describes, in `workdir`; resumes if the folder holds the same run. given: keys
    that a sentence-transformers directory may not decide, even where they are the base config's. task: what is trained,
    if it is none of `config.task`.

    Raises ContractError if it holds another run, DataError for bad records, CheckpointError for a checkpoint that is
    damaged or could not be saved, NotFiniteError if the loss breaks, LockedError if another job writes to the folder.
    """
    job = prepare(config, Workdir(workdir), progress, given, task or task_of(config))
    with hold(job.workdir.path, "training"):  # and a folder that cannot be written is told before there is work to lose
        if not job.begun and any_process(job.workdir.config.exists()):
            raise LockedError(f"another job began a run in {workdir} just now; the same command goes on with it")
        return _train(job)


def _train(job: Job) -> TrainResult:
    config, texts = job.config, job.task.read(job)
    length = schedule_steps(config, texts.train)
    optimizer, schedule = make_optimizer(config.optimizer, length.total)
    state = None
    if not job.begun:  # a folder is no run before its data and its weights could be read
        state, begin = first_state(job, texts, optimizer)
        require_finite(state, f"the weights of {config.train.start_from or config.encoder.checkpoint}")
        if jax.process_index() == 0:
            create(job.workdir, config, job.encoder, texts.contract, texts.record | begin, job.stated)
    with open_checkpoints(job.workdir, config, writing=True) as checkpoints:
        start = checkpoints.last()
        if state is None:
            state = resume(job, texts, length, optimizer, schedule, checkpoints)
        with closing(MetricsLog(job.workdir, start or 0)) as log:
            trainer = make_trainer(job, texts, length, state, optimizer, schedule, checkpoints, log)
            step = trainer.run(state, start)
        checkpoints.wait()
    if step < length.total:
        job.say(f"stopped by SIGTERM after step {step}; the same command continues")
    programs = trainer.train_step.count
    if length.total:
        job.say(f"{step} of {length.total} steps done; the training step was compiled to {programs} program(s)")
    return TrainResult(step, length.total, start, programs, trainer.recorder.metrics)


@dataclass(frozen=True)
class Length:
    """How long a run is, in steps, each an update from one or more batches."""

    total: int
    checkpoint_every: int
    epochs_per_batch: float


def schedule_steps(config: ConfigDict, data: AnyExamples | None) -> Length:
    """Steps or epochs of the config -> steps."""
    batches = len(data) / config.train.batch_size if data else math.inf  # of an epoch
    an_epoch = batches / config.train.accumulate
    total = config.train.steps if config.train.steps >= 0 else math.ceil(config.train.epochs * an_epoch)
    every = config.train.checkpoint_every or (max(math.ceil(an_epoch), 1) if data else 1)
    return Length(total, every, 1 / batches)


def resume(
    job: Job,
    texts: Texts,
    length: Length,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    checkpoints: Checkpoints,
) -> TrainState:
    """The state of the last checkpoint; the folder then says what the config has changed. Raises ValueError if the run
    is longer already."""
    start = checkpoints.last()
    begin = {key: value for key, value in job.recorded.items() if key == "start"}
    if start is None:  # interrupted before the first
        state, begin = first_state(job, texts, optimizer)
    elif start > length.total:
        raise ValueError(
            f"the config asks for {length.total} steps, but the run in {job.workdir} has made {start}; "
            "train.steps or train.epochs may grow on resuming, or shrink to what is not reached yet"
        )
    else:
        state = restore_state(checkpoints, start, job.mesh, job.model, optimizer, make_rule(job.config))
    require_finite(state, f"checkpoint {start} of {job.workdir}" if start is not None else "the initial weights")
    if checkpoints.half_written:
        job.say(f"removed what was half written or half deleted: {', '.join(checkpoints.half_written)}")
    if superseded := checkpoints.prune():
        job.say(f"removed checkpoints that are neither best nor last: {', '.join(map(str, superseded))}")
    tell_changes(job)
    if any(key in job.changes for key in SCHEDULE):
        rate = float(schedule((start or 0) - int(state.skipped or 0)))
        job.say(f"the learning rate is planned anew over {length.total} steps: it goes on with {rate:.3g}")
    any_process(False)  # nobody reads the old config any more
    if jax.process_index() == 0:
        remember(job.workdir, job.config, texts.contract, texts.record | begin, job.changes, start or 0)
    return state


@dataclass
class Trainer:
    """The steps, and what happens between them."""

    job: Job
    length: Length
    data: AnyExamples | None
    plan: Plan
    train_step: Program
    schedule: optax.Schedule
    inspector: Inspector
    recorder: Recorder
    speed: Speed
    checkpoints: Checkpoints
    log: MetricsLog

    def run(self, state: TrainState, start: int | None) -> int:
        """Steps until the end or SIGTERM; the number of the last one. `start`: that of the checkpoint, if there is."""
        step, total, log_every = start or 0, self.length.total, self.job.config.train.log_every
        if start is None and total == 0:
            self.recorder.save(state, step, validate=True)
        stopping, alone = False, jax.process_count() == 1
        self.speed.restart()
        bar = tqdm(total=total, initial=step, desc="train", unit="step", disable=not (self.job.progress and total))
        with stop_on_sigterm() as stop, bar, Feed(self.batch, step, total) as feed:
            while step < total and not stopping:
                batch = feed.take(step, state)
                state, values = self.train_step(state, batch)
                self.speed.add(batch, values.pop("real_tokens"))
                step += 1
                self.checkpoints.poll()
                # Read once a step: a signal in between waits for the next. Several processes agree where they log.
                stopping = (alone or step % log_every == 0) and any_process(stop.requested)
                bar.update()
                if step % log_every == 0 or step == total:
                    self.inspector.require_healthy(state)
                    found = {name: float(value) for name, value in values.items()} | self.rate(state, step)
                    self.log.write(step, found | self.speed.read() | {"data_wait": feed.waited()})
                    bar.set_postfix(loss=f"{float(values['loss']):.4f}")
                due = step % self.length.checkpoint_every == 0 or step == total
                if due or stopping:  # there may be little time to stop in, and an extra validation would change `best`
                    self.recorder.save(state, step, validate=due)
                    self.speed.restart()  # validation is not training time
                    feed.waited()
        return step

    def rate(self, state: TrainState, step: int) -> dict[str, float]:
        """The learning rate of the last update, and how many were skipped if any may be; those do not count for the
        schedule, whose state they leave alone."""
        if state.skipped is None:
            return {"learning_rate": float(self.schedule(step - 1))}
        skipped = int(state.skipped)
        return {"learning_rate": float(self.schedule(max(step - skipped - 1, 0))), "skipped_steps": skipped}

    def batch(self, step: int) -> AnyBatch:
        """This process's part of a step's batch, on the mesh; of its batches, stacked, if it takes several."""
        assert self.data is not None  # else there are no steps
        part, count = (jax.process_index(), jax.process_count()), self.job.config.train.accumulate
        numbers = range(step * count, (step + 1) * count)
        batches = [self.plan.training_batch(self.data, number, part) for number in numbers]
        return shard_batch(self.job.mesh, stack(batches, self.data.pad_id), stacked=count > 1)


def make_trainer(
    job: Job,
    texts: Texts,
    length: Length,
    state: TrainState,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    checkpoints: Checkpoints,
    log: MetricsLog,
) -> Trainer:
    """Compiles nothing yet."""
    config, dropout_key = job.config, jax.random.key(job.config.seed.dropout)
    objective = job.task.objective(config, job.model, job.mesh, length.epochs_per_batch)
    plan = job.task.plan(job, texts, objective)
    if plan.places > plan.batch_size:
        more = f"{plan.places - plan.batch_size} of {plan.places} places in each batch are empty"
        job.say(f"{plan.batch_size} of a batch on {job.mesh.size} devices: {more}")
    if told := rounded(plan.places, config.train.chunk_size, job.mesh.size):
        job.say(told)
    if plan.packer:
        job.say(str(plan.packer))
    rule = make_rule(config)
    inspector = Inspector(objective, plan, texts.train, dropout_key, checkpoints, rule)
    validate = job.task.validate(job, texts, objective, state.params)
    rest = optimizer, state, dropout_key, rule
    train_step = make_train_step(objective, *rest)
    counted = counted_step(train_step, objective, *rest)
    kind = job.mesh.devices.flat[0].device_kind
    return Trainer(
        job=job,
        length=length,
        data=texts.train,
        plan=plan,
        train_step=train_step,
        schedule=schedule,
        inspector=inspector,
        recorder=Recorder(checkpoints, log, inspector, validate, job.say, criterion(config, length)),
        speed=Speed(ideal_seconds(counted, state, job.mesh.size, kind), objective.bins(plan.places)),
        checkpoints=checkpoints,
        log=log,
    )


def criterion(config: ConfigDict, length: Length) -> Criterion:
    """Epochs of the config -> steps. The last step of an epoch may end a little after it: rounded down."""
    epochs_per_step = length.epochs_per_batch * config.train.accumulate
    steps = math.floor(config.validation.then_from / epochs_per_step) if epochs_per_step else 0
    return Criterion(config.validation.metric, config.validation.then, steps)
