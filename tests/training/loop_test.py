"""Training end to end on a tiny model: a run that is interrupted and resumed equals an uninterrupted one, to the
byte."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from jaxret.data.formats import Corpus, TrainingSource
from jaxret.data.tokens.batches import BatchPlan, tokenize_examples
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.index.encoding.encode import encode_corpus
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.retriever_model import make_retriever_model
from jaxret.parallel.mesh import make_mesh
from jaxret.runs.lock import hold_folder
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_checkpoints, open_run
from jaxret.runs.run_warnings import read_warnings
from jaxret.runs.workdir import Workdir
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_json, sha256_file, write_json
from jaxret.storage.checkpoint import CheckpointError, Checkpoints, path_name
from jaxret.storage.lockfile import LockedError
from jaxret.training import loop
from jaxret.training.diagnosis import NotFiniteError
from jaxret.training.logging import MetricsLog
from jaxret.training.loop import Trainer, TrainResult, schedule_steps, train
from jaxret.training.optimizers import make_optimizer
from jaxret.training.prefetch import Prefetcher
from jaxret.training.prepare import prepare_job
from jaxret.training.recorder import require_finite_parameters
from jaxret.training.task import TrainingData
from jaxret.training.tasks.retrieval import RETRIEVAL, make_validation
from jaxret.training.tasks.retrieval import make_retrieval_objective as make_objective_of
from jaxret.training.train_state import TrainState, make_update_rule, restore_state
from tests.pipeline import (
    CLOCKS,
    REPOSITORY,
    SPECIAL,
    command,
    environment,
    run_script,
    tiny_config,
    train_arguments,
    write_data,
    write_encoder,
)
from tests.tiny import (
    relative_error,
)

STEPS = 6  # a checkpoint is written after 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with encoder/ and data/."""
    folder = tmp_path_factory.mktemp("loop")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    return folder


def config_of(root: Path, **overrides: Any) -> ConfigDict:
    return tiny_config(root / "encoder", root / "data", **overrides)


@pytest.fixture(scope="module")
def whole(root: Path) -> tuple[Path, TrainResult]:
    """A run without interruptions."""
    return root / "whole", train(config_of(root), root / "whole", progress=False)


def state_at(workdir: Path, config: ConfigDict, step: int = STEPS) -> TrainState:
    """The state of a checkpoint."""
    bert, _ = load_pretrained(config.encoder.checkpoint)
    optimizer, _ = make_optimizer(config.optimizer, STEPS)
    with open_checkpoints(Workdir(workdir), config) as checkpoints:
        retriever = make_retriever_model(config, bert)
        return restore_state(checkpoints, step, make_mesh(), retriever, optimizer, make_update_rule(config))


def final_state(workdir: Path, config: ConfigDict, step: int = STEPS) -> dict[str, bytes]:
    """Map each leaf of a checkpoint's state to its bytes."""
    leaves = jax.tree_util.tree_leaves_with_path(state_at(workdir, config, step))
    return {path_name(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def lines(workdir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without measured times."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    text = (workdir / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=refuse) for line in text]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in parsed]


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> None:
    """Call `act` when step `at` (from 0) takes its batch."""
    take = Prefetcher.take

    def taking(self: Prefetcher, step: int, running: Any = None) -> Any:
        if step == at:
            act()
        return take(self, step, running)

    monkeypatch.setattr(Prefetcher, "take", taking)


def crash() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_uninterrupted_run(whole: tuple[Path, TrainResult], root: Path) -> None:
    workdir, result = whole
    assert (result.step, result.total_steps, result.resumed_from, result.programs) == (STEPS, STEPS, None, 1)
    steps = [line["step"] for line in lines(workdir) if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    validations = [line for line in lines(workdir) if "validation/nll" in line]
    assert [line["step"] for line in validations] == [3, 6]
    assert {f"validation/{name}": value for name, value in result.metrics.items()} == {
        key: value for key, value in validations[-1].items() if key != "step"
    }
    assert all(math.isfinite(value) for line in lines(workdir) for value in line.values())
    waits = [line["data_wait"] for line in map(json.loads, (workdir / "metrics.jsonl").open()) if "loss" in line]
    assert len(waits) == STEPS
    assert all(0 <= wait <= 1 for wait in waits)
    rates = [line["learning_rate"] for line in lines(workdir) if "loss" in line]
    assert rates == sorted(rates, reverse=True)
    assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
    assert {"config.json", "contract.json", "data.json", "env.json", "encoder"} <= {p.name for p in workdir.iterdir()}
    assert read_json(workdir / "data.json")["train"]["examples"] == 48  # 40 queries, 8 of them with two positives


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_the_metric(whole: tuple[Path, TrainResult]) -> None:
    values = {line["step"]: line["validation/RR@10"] for line in lines(whole[0]) if "validation/RR@10" in line}
    best = max(values, key=lambda step: (values[step], step))
    assert open_run(whole[0], "best").checkpoint["step"] == best
    assert open_run(whole[0], "last").checkpoint["step"] == STEPS


@pytest.mark.exhaustive
def test_stopped_between_checkpoints_and_resumed(
    whole: tuple[Path, TrainResult], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGTERM in step 2 saves a checkpoint after step 2; the next call resumes from it, to the same bytes."""
    workdir, config = root / "stopped", config_of(root)
    with monkeypatch.context() as patch:
        interrupt(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        result = train(config, workdir, progress=False)
    assert (result.step, result.total_steps) == (2, STEPS)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    result = train(config, workdir, progress=False)
    assert (result.step, result.resumed_from) == (STEPS, 2)
    assert final_state(workdir, config) == final_state(whole[0], config)
    assert lines(workdir) == lines(whole[0])
    assert train(config, workdir, progress=False).resumed_from == STEPS  # the run is complete: nothing more happens
    assert lines(workdir)[-2:] == lines(whole[0])[-2:]


def test_crashed_and_resumed(whole: tuple[Path, TrainResult], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 4 and 5 are lost and repeated: each is in metrics.jsonl once."""
    workdir, config = root / "crashed", config_of(root)
    with monkeypatch.context() as patch:
        interrupt(patch, 5, crash)
        with pytest.raises(KeyboardInterrupt):
            train(config, workdir, progress=False)
    assert lines(workdir)[-1]["step"] == 5
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # half a line, as a machine leaves it that dies
    assert train(config, workdir, progress=False).resumed_from == 3
    assert final_state(workdir, config) == final_state(whole[0], config)
    assert lines(workdir) == lines(whole[0])


@pytest.mark.exhaustive
def test_control_another_seed_is_another_run(whole: tuple[Path, TrainResult], root: Path) -> None:
    config = config_of(root, seed__dropout=1, data__dev="")
    train(config, root / "seed", progress=False)
    expected, other = final_state(whole[0], config_of(root)), final_state(root / "seed", config)
    assert other.keys() == expected.keys()
    differing = [name for name in other if other[name] != expected[name]]
    assert len(differing) > len(other) / 2
    losses = [[line["loss"] for line in lines(w) if "loss" in line] for w in (whole[0], root / "seed")]
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_warmup_that_never_ends_is_reported_and_recorded(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config_of(root, train__steps=1, optimizer__warmup_steps=9, data__dev=""), tmp_path / "run")
    kept = [one.text for one in read_warnings(Workdir(tmp_path / "run"))["train"] if one.kind == "settings"]
    assert len(kept) == 1
    assert kept[0].startswith("optimizer.warmup_steps is 9, ")
    assert kept[0] in capsys.readouterr().out


@pytest.mark.slow
def test_other_passages_of_validation_are_reported_when_resuming(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run continues, and data.json describes the new passages."""
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    shutil.copytree(root / "data", corpus)
    keys = {"validation__corpus": str(corpus), "train__checkpoint_every": 1}
    train(config_of(root, train__steps=1, **keys), run)
    before = read_json(run / "data.json")
    with (corpus / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "new", "text": "silver river"}\n')
    capsys.readouterr()
    assert train(config_of(root, train__steps=2, **keys), run).resumed_from == 1
    after, said = read_json(run / "data.json"), capsys.readouterr().out
    assert {key for key in after if before[key] != after[key]} == {"validation"}
    assert after["validation"]["corpus"] == sha256_file(corpus / "corpus.jsonl") != before["validation"]["corpus"]
    assert after["validation"]["judgements"] == before["validation"]["judgements"]
    assert f"the passages of validation.corpus, {corpus}, have changed\nvalidation has changed: " in said


@pytest.mark.slow
def test_vectors_keep_their_checkpoint_when_training_goes_on(root: Path, tmp_path: Path) -> None:
    """Two checkpoints encode two corpora. A search by the newest one names the vectors' checkpoint, which exists."""
    run, corpus, keys = tmp_path / "run", Corpus.open(root / "data"), {"data__dev": "", "train__checkpoint_every": 1}
    for steps, name in ((1, "first"), (2, "second"), (4, "")):
        train(config_of(root, train__steps=steps, **keys), run, progress=False)
        if name:
            encode_corpus(open_run(run), corpus, name, progress=False)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2", "4"]
    for step, name in ((1, "first"), (2, "second")):
        folder = Workdir(run).embeddings(name)
        Searcher(open_run(run, str(step)), folder)
        with pytest.raises(ContractError, match=f"--checkpoint={step}"):
            Searcher(open_run(run), folder)
    shutil.rmtree(run / "embeddings" / "first")
    train(config_of(root, train__steps=5, **keys), run, progress=False)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2", "5"]


def test_another_config_cannot_resume(whole: tuple[Path, TrainResult], root: Path) -> None:
    before = (whole[0] / "config.json").read_bytes()
    with pytest.raises(ContractError) as caught:
        train(config_of(root, optimizer__b1=0.8, seed__data=1), whole[0], progress=False)
    message = str(caught.value)
    assert f"optimizer.b1: 0.9 in {whole[0] / 'config.json'}, 0.8 in the config given" in message
    assert f"seed.data: 12345 in {whole[0] / 'config.json'}, 1 in the config given" in message
    assert "--workdir" in message
    assert len(message.splitlines()) == 4
    assert (whole[0] / "config.json").read_bytes() == before


def test_other_data_cannot_resume(whole: tuple[Path, TrainResult], root: Path, tmp_path: Path) -> None:
    """The path is the same, but the files have changed."""
    shutil.copytree(root / "data", tmp_path / "original")
    expected = read_json(whole[0] / "data.json")["train"]
    try:
        text = (root / "data" / "corpus.jsonl").read_text()
        (root / "data" / "corpus.jsonl").write_text(text.replace("river", "rivers"))
        message = f"train.sha256: '{expected['sha256']}' in .*data.json, '\\w+' in {root / 'data'}"
        with pytest.raises(ContractError, match=message):
            train(config_of(root), whole[0], progress=False)
    finally:
        shutil.copytree(tmp_path / "original", root / "data", dirs_exist_ok=True)


def test_another_tokenizer_cannot_resume(whole: tuple[Path, TrainResult], root: Path, tmp_path: Path) -> None:
    """The run is refused with its seal, and also without it."""
    shutil.copytree(whole[0], tmp_path / "run")
    settings = (tmp_path / "run" / "encoder" / "tokenizer.json").read_text()
    (tmp_path / "run" / "encoder" / "tokenizer.json").write_text(settings.replace('"river"', '"rivet"'))
    with pytest.raises(ContractError, match=r"encoder/tokenizer\.json is damaged or was edited"):
        open_run(tmp_path / "run")
    Workdir(tmp_path / "run").seal.unlink()
    for use in (lambda: open_run(tmp_path / "run"), lambda: train(config_of(root), tmp_path / "run", progress=False)):
        with pytest.raises(ContractError, match=r"tokenizer\.tokenizer\.json: '"):
            use()


def test_zero_steps_save_the_encoder_unchanged(root: Path) -> None:
    workdir, config = root / "untrained", config_of(root, train__steps=0)
    result = train(config, workdir, progress=False)
    assert (result.step, result.programs) == (0, 0)
    assert [line["step"] for line in lines(workdir)] == [0]
    run = open_run(workdir)
    assert run.checkpoint["step"] == 0
    _, encoder = load_pretrained(root / "encoder")
    saved = jax.tree.leaves(run.params["encoder"])
    for leaf, expected in zip(saved, jax.tree.leaves(encoder), strict=True):
        np.testing.assert_array_equal(leaf, expected)
    assert train(config, workdir, progress=False).resumed_from == 0


def test_hard_negatives_that_are_not_used_are_counted(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ({"query": f"stone {i}", "pos": [f"river {i}"], "neg": ["winter", f"market {i}"][:i]} for i in range(3))
    (tmp_path / "mined.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for negatives in (0, 1):
        values = {"data__train": str(tmp_path / "mined.jsonl"), "data__negatives": negatives, "data__dev": ""}
        train(config_of(root, train__steps=0, train__batch_size=2, **values), tmp_path / f"run-{negatives}")
        printed = capsys.readouterr().out
        assert ("2 examples have hard negatives, which data.negatives=0 does not use" in printed) == (negatives == 0)


@pytest.mark.exhaustive
def test_unexpected_conditions_are_printed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new MLM head, options that follow published code, missing negatives, and the share of truncated text."""
    changes = {
        "head__name": "aggretriever",
        "head__aggretriever__lexical_dim": 8,
        "head__aggretriever__cls_dim": 4,
        "data__negatives": 2,
    }
    config = config_of(root, train__steps=0, optimizer__reference_processes=4, tokens__query_length=4, **changes)
    train(config, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "has no MLM head: a new one is drawn" in printed
    assert "this follows a published implementation, not its paper: optimizer.reference_processes=4" in printed
    assert "48 examples have fewer than 2 hard negatives; their slots stay empty" in printed
    # 48 examples, because 8 of the 40 queries have two positives.
    assert re.search(r"40 queries: \d+\.\d% cut at 4 tokens, \d+\.\d% of tokens lost", printed)


@pytest.mark.exhaustive
def test_a_nonfinite_loss_names_step_and_layer(root: Path) -> None:
    """The first update has a learning rate of 0, the second an enormous one."""
    workdir = root / "broken"
    config = config_of(
        root, optimizer__learning_rate=1e30, optimizer__warmup_fraction=0.2, train__checkpoint_every=1, data__dev=""
    )
    with pytest.raises(NotFiniteError, match=r"2: .*update .*queries q\d+, .*of .*1"):
        train(config, workdir, progress=False)
    run = open_run(workdir)  # digests are verified
    assert run.checkpoint["step"] == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
    assert [line["step"] for line in lines(workdir)] == [1]


@pytest.mark.exhaustive
def test_a_nonfinite_loss_between_logged_steps_is_detected(root: Path) -> None:
    config = config_of(root, optimizer__learning_rate=1e30, train__log_every=5, data__dev="")
    with pytest.raises(NotFiniteError, match=r"1: .*There .*checkpoint"):
        train(config, root / "unlogged", progress=False)


@pytest.fixture(scope="module")
def odd(root: Path) -> Path:
    """Data whose passage p7 has a word that no other text has; its vector is finite, but its norm overflows."""
    folder = root / "odd"
    write_encoder(folder / "encoder")
    shutil.copytree(root / "data", folder / "data")
    lines = (folder / "data" / "corpus.jsonl").read_text().splitlines()
    passages = [json.loads(line) for line in lines]
    for passage in passages:
        if passage["_id"] == "p7":
            passage["text"] += " @"  # [UNK], which no other text has
    (folder / "data" / "corpus.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    file = folder / "encoder" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name][SPECIAL.index("[UNK]")] = 3e38
    save_file(weights, file)
    return folder


SKIPS: dict[str, Any] = {"train__skip_nonfinite": 1, "data__dev": "", "optimizer__ema": 0.5}


@pytest.fixture(scope="module")
def skips(odd: Path) -> tuple[Path, int]:
    """A run with one step over that passage, and the number of the step that was skipped."""
    train(config_of(odd, **SKIPS), odd / "skips", progress=False)
    (bad,) = [line["step"] for line in lines(odd / "skips") if "loss" not in line]
    return odd / "skips", int(bad)


@pytest.mark.exhaustive
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    skips: tuple[Path, int], odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count continues after an interruption. The schedule does not count the skipped step."""
    (workdir, bad), config = skips, config_of(odd, **SKIPS)
    assert 1 < bad < STEPS
    counts = [line["skipped_steps"] for line in lines(workdir)]
    assert counts == [int(step >= bad) for step in range(1, STEPS + 1)]
    _, schedule = make_optimizer(config.optimizer, STEPS)
    made = [line["learning_rate"] for line in lines(workdir) if "loss" in line]
    assert made == [float(schedule(step)) for step in range(STEPS - 1)], "the learning rates of five updates"
    often = config_of(odd, train__checkpoint_every=1, **SKIPS)
    with monkeypatch.context() as patch:
        interrupt(patch, bad, crash)
        with pytest.raises(KeyboardInterrupt):
            train(often, odd / "again", progress=False)
    assert train(often, odd / "again", progress=False).resumed_from == bad
    assert final_state(odd / "again", config) == final_state(workdir, config)
    assert lines(odd / "again") == lines(workdir)


@pytest.mark.exhaustive
def test_too_many_skipped_steps_stop_the_run(skips: tuple[Path, int], odd: Path, tmp_path: Path) -> None:
    """The run stops in the second epoch: all skipped steps count, not only consecutive ones."""
    shutil.copytree(skips[0], tmp_path / "run")
    longer = config_of(odd, train__steps=12, **SKIPS)
    message = (
        r"step (7|8|9|10|11|12): the embedding layer of .*; 1 step\(s\) were already skipped, as many as train.skip"
    )
    with pytest.raises(NotFiniteError, match=message):
        train(longer, tmp_path / "run", progress=False)


@pytest.mark.exhaustive
def test_a_stopped_run_continues_with_skip_nonfinite(skips: tuple[Path, int], odd: Path) -> None:
    """Once a checkpoint holds the count, the run also continues without the option, and keeps the count."""
    (whole, bad), workdir = skips, odd / "stops"
    changes = SKIPS | {"train__checkpoint_every": 1}
    message = rf"step {bad}: the embedding layer of the passage encoder is not finite\..*train\.skip_nonfinite=N"
    with pytest.raises(NotFiniteError, match=message):
        train(config_of(odd, **changes | {"train__skip_nonfinite": 0}), workdir, progress=False)
    assert lines(workdir)[-1]["step"] == bad - 1
    assert train(config_of(odd, **changes), workdir, progress=False).resumed_from == bad - 1
    resumed, expected = (state_at(folder, config_of(odd, **SKIPS)) for folder in (workdir, whole))
    assert int(resumed.step) == STEPS
    assert resumed.skip_count == 1
    # Another program computed the first steps of the resumed run.
    assert relative_error(resumed.params, expected.params) <= 1e-4
    without = config_of(odd, **changes | {"train__skip_nonfinite": 0})
    assert train(without, workdir, progress=False).resumed_from == STEPS
    assert state_at(workdir, without).skip_count == 1


@pytest.mark.exhaustive
def test_skipped_steps_count_after_skip_nonfinite_is_unset(
    skips: tuple[Path, int], odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the learning rates of the updates."""
    (whole, bad), workdir = skips, odd / "withdrawn"
    often = SKIPS | {"train__checkpoint_every": 1}
    with monkeypatch.context() as patch:
        interrupt(patch, bad, crash)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(odd, **often), workdir, progress=False)
    without = config_of(odd, **often | {"train__skip_nonfinite": 0})
    assert train(without, workdir, progress=False).resumed_from == bad
    for name in ("learning_rate", "skipped_steps"):
        assert [line[name] for line in lines(workdir)] == [line[name] for line in lines(whole)]


@pytest.mark.exhaustive
def test_the_moving_average_is_validated_and_saved(
    whole: tuple[Path, TrainResult], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average is resumed to the byte, and training is the same as without it."""
    config, workdir = config_of(root, optimizer__ema=0.5), root / "ema"
    with monkeypatch.context() as patch:
        interrupt(patch, 4, crash)
        with pytest.raises(KeyboardInterrupt):
            train(config, workdir, progress=False)
    result = train(config, workdir, progress=False)
    assert result.resumed_from == 3
    train(config, root / "ema_whole", progress=False)
    assert final_state(workdir, config) == final_state(root / "ema_whole", config)
    assert lines(workdir) == lines(root / "ema_whole")
    state, plain = state_at(workdir, config), state_at(whole[0], config_of(root))
    assert relative_error(state.params, plain.params) <= 1e-4, (
        "training is the same as without the average, except for rounding"
    )
    run = open_run(workdir, "last")
    jax.tree.map(np.testing.assert_array_equal, run.params, state.ema)
    folder = root / "data"
    dev, data = (
        tokenize_examples(TrainingSource.open(folder, split).read(), run.tokenizer) for split in ("dev", "train")
    )
    objective = make_objective_of(config, run.model, run.mesh)
    validation = make_validation(config, objective, run.params, TrainingData(run.tokenizer, {}, data, dev, None))
    assert validation(state.ema)["nll"] == pytest.approx(result.metrics["nll"], rel=1e-6)
    assert abs(validation(state.params)["nll"] - result.metrics["nll"]) > 1e-4, (
        "control: the NLL of the weights themselves"
    )


@pytest.mark.slow
def test_the_last_checkpoint_counts_as_the_best(tmp_path: Path, root: Path) -> None:
    """The learning rate ruins the model, so its last checkpoint is not the best by NLL."""
    ruined = {
        "train__checkpoint_every": 1,
        "train__steps": 3,
        "optimizer__learning_rate": 0.3,
        "optimizer__decay": "none",
    }
    steps = {}
    for rule in ("metric", "last"):
        config = config_of(root, validation__metric="nll", validation__best=rule, **ruined)
        train(config, tmp_path / rule, progress=False)
        steps[rule] = open_run(tmp_path / rule).checkpoint["step"]
    assert steps["last"] == 3
    assert steps["metric"] < 3
    assert [path.name for path in (tmp_path / "last" / "checkpoints").iterdir() if path.name.isdigit()] == ["3"]


@pytest.mark.slow
def test_values_before_and_after_a_change_of_validation_are_not_compared(root: Path, tmp_path: Path) -> None:
    """A query that is alone in its batch has an NLL near 0, which no later value with more passages reaches."""
    for steps, size in ((1, 1), (3, 8)):
        keys = {"validation__metric": "nll", "validation__batch_size": size, "data__negatives": 0}
        config = config_of(root, train__checkpoint_every=1, train__steps=steps, **keys)
        train(config, tmp_path, progress=False)
        with open_checkpoints(Workdir(tmp_path), config) as checkpoints:
            best = checkpoints.best()
            assert best is not None
            assert (best > 1) is (steps > 1)
    first, *others = [line["validation/nll"] for line in lines(tmp_path) if "validation/nll" in line]
    assert first < min(others), "control: the first value is the lowest"


@pytest.mark.exhaustive
def test_the_selecting_metric_changes_during_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NLL selects for half an epoch, then the average rank, across an interruption; the best checkpoint by NLL is
    forgotten."""
    late = {"validation__metric": "nll", "validation__then": "average_rank", "validation__then_from": 0.5}
    config, workdir = config_of(root, train__checkpoint_every=1, **late), root / "late"
    with monkeypatch.context() as patch:
        interrupt(patch, 3, crash)
        with pytest.raises(KeyboardInterrupt):
            train(config, workdir, progress=False)
    train(config, workdir, progress=False)
    validations = {line["step"]: line for line in lines(workdir) if "validation/nll" in line}
    with open_checkpoints(Workdir(workdir), config) as checkpoints:
        best = checkpoints.best()
        assert checkpoints.last() == STEPS
    ranks = {step: validations[step]["validation/average_rank"] for step in (3, 4, 5, 6)}
    assert best == max(ranks, key=lambda step: (-ranks[step], step))
    chosen = read_json(workdir / "checkpoints" / str(best) / "metrics" / "metrics")
    assert chosen["criterion"] == "average_rank"


@pytest.mark.exhaustive
def test_several_batches_make_a_step_and_it_is_resumed_between_steps(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption between two batches of a step loses the step, and changes no result."""
    config = config_of(root, train__accumulate=2, train__checkpoint_every=1, data__dev="")
    train(config, root / "accumulated", progress=False)
    with monkeypatch.context() as patch:
        draw = BatchPlan.training_batch

        def drawing(self: BatchPlan, data: Any, number: int, part: tuple[int, int] = (0, 1)) -> Any:
            if number == 7:  # the second batch of the fourth step
                crash()
            return draw(self, data, number, part)

        patch.setattr(BatchPlan, "training_batch", drawing)
        with pytest.raises(KeyboardInterrupt):
            train(config, root / "accumulated_again", progress=False)
    result = train(config, root / "accumulated_again", progress=False)
    assert (result.resumed_from, result.step, result.programs) == (3, STEPS, 1)
    assert final_state(root / "accumulated_again", config) == final_state(root / "accumulated", config)
    assert lines(root / "accumulated_again") == lines(root / "accumulated")


def test_an_epoch_has_as_many_steps_as_updates(root: Path) -> None:
    data = tokenize_examples(
        TrainingSource.open(root / "data", "train").read(), TextTokenizer.load(root / "encoder", 12, 24)
    )  # 48 examples, 8 in a batch
    for accumulate, total in ((1, 12), (2, 6), (5, 3)):
        epochs = config_of(
            root, train__steps=-1, train__epochs=2.0, train__accumulate=accumulate, train__checkpoint_every=0
        )
        length = schedule_steps(epochs, data)
        assert (length.total, length.checkpoint_every) == (total, -(-6 // accumulate))
        assert length.epochs_per_batch == 1 / 6
        assert schedule_steps(config_of(root, train__accumulate=accumulate), data).total == STEPS, "steps count updates"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train__batch_size", 0, r"train\.batch_size is 0"),
        ("train__chunk_size", -1, r"train\.chunk_size is -1"),
        ("validation__batch_size", 0, r"validation\.batch_size is 0"),
        ("validation__metric", "MRR", r"validation\.metric is 'MRR'.*RR@10"),
        ("train__log_every", 0, r"train\.log_every is 0"),
        ("data__train", "", r"data\.train is empty"),
        ("optimizer__decay", "exponential", r"optimizer\.decay is 'exponential'"),
        ("head__name", "last", r"head\.name is 'last'"),
        ("head__token", "first", r"head\.token is 'first'"),
        ("encoder__dtype", "float16", r"encoder\.dtype is 'float16'"),
        ("encoder__layers", 4, r"encoder\.layers is 4"),
        ("tokens__passage_length", 41, r"tokens\.passage_length is 41; the encoder has 40 positions"),
        ("mesh__fsdp", 3, r"mesh\.fsdp is 3"),
        ("pooling", "average", r"pooling is 'average'"),
        ("loss__temperature", 0.0, r"loss\.temperature is 0\.0"),
        ("loss__local_weight", 0.1, r"loss\.local_weight is 0\.1, but pooling 'none'"),
        ("optimizer__name", "adam", r"optimizer\.name is 'adam'"),
        ("optimizer__frozen", "nothing/", r"optimizer\.frozen is 'nothing/', which matches none"),
        ("optimizer__frozen", "(", r"optimizer\.frozen .*'\(', .*expression: .*\)"),
    ],
)
def test_invalid_settings_are_errors_before_data_are_read(
    key: str, value: Any, message: str, root: Path, tmp_path: Path
) -> None:
    """The errors come before weights, tokenizer and data are read: there is no data here, and the weights are zeros."""
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    shutil.copyfile(root / "encoder" / "config.json", encoder / "config.json")
    weights = (root / "encoder" / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")
    (encoder / "model.safetensors").write_bytes(weights[:header] + bytes(len(weights) - header))
    overrides = {"data__train": "nowhere", "data__dev": "nowhere"} | {key: value}
    with pytest.raises(ValueError, match=message):
        train(tiny_config(encoder, "nowhere", **overrides), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists(), "a refused command leaves no folder that would refuse the corrected one"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("encoder__sha256", "ab", r"encoder\.sha256 .* ab: "),
        ("train__start_from", "nowhere", r"nowhere is not a run"),
    ],
)
def test_an_invalid_start_run(key: str, value: Any, message: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(config_of(root, **{key: value}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists(), "a refused command leaves no folder that would refuse the corrected one"


@pytest.mark.slow
def test_an_epoch_that_the_steps_do_not_reach_is_a_warning(root: Path, tmp_path: Path) -> None:
    """The number of epochs is known only when the data have been read."""
    train(config_of(root, train__steps=2, validation__then="nll"), tmp_path / "run", progress=False)
    (text,) = [w.text for w in read_warnings(Workdir(tmp_path / "run"))["train"] if "then_from" in w.text]
    assert re.search(r"0\.\d+ epochs: validation.then='nll' never", text)


def test_the_weights_of_the_encoder_are_verified_with_a_start_run(
    whole: tuple[Path, TrainResult], root: Path, tmp_path: Path
) -> None:
    keys = {"train__start_from": str(whole[0]), "train__steps": 0, "data__dev": ""}
    with pytest.raises(ValueError, match=r"encoder\.sha256 .* ab: "):
        train(config_of(root, encoder__sha256="ab", **keys), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists(), "a refused command leaves no folder that would refuse the corrected one"
    digest = sha256_file(root / "encoder" / "model.safetensors")
    assert train(config_of(root, encoder__sha256=digest, **keys), tmp_path / "run", progress=False).step == 0


def test_a_metric_that_is_not_finite_is_an_error(root: Path, tmp_path: Path) -> None:
    """Such a metric cannot rank checkpoints. The parameters are finite, because no step was trained."""
    with pytest.raises(NotFiniteError, match=r"step 0: nll .*(inf|nan)"):
        train(config_of(root, loss__temperature=1e-38, train__steps=0), tmp_path / "run", progress=False)


def test_a_tokenizer_with_more_words_than_the_encoder_is_an_error(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "encoder", tmp_path / "encoder")
    tokenizer = Tokenizer.from_file(str(tmp_path / "encoder" / "tokenizer.json"))
    tokenizer.add_tokens([f"word{i}" for i in range(99)])
    tokenizer.save(str(tmp_path / "encoder" / "tokenizer.json"))
    config = tiny_config(tmp_path / "encoder", root / "data")
    words = tokenizer.get_vocab_size()
    with pytest.raises(ValueError, match=rf"{words} .*99 embeddings"):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_nonfinite_weights_are_an_error(root: Path, tmp_path: Path) -> None:
    """They are an error even in a run without steps."""
    shutil.copytree(root / "encoder", tmp_path / "encoder")
    weights = load_file(tmp_path / "encoder" / "model.safetensors")
    name = next(name for name in weights if "layer.1" in name and name.endswith("dense.weight"))
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, tmp_path / "encoder" / "model.safetensors")
    config = tiny_config(tmp_path / "encoder", root / "data", train__steps=0, data__dev="")
    with pytest.raises(ValueError, match=r"model\.safetensors: \S*layer\.1\.\S+ holds NaN"):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_needs_the_same_start_weights(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no other parameters to continue from."""
    shutil.copytree(root / "encoder", tmp_path / "encoder")
    file = tmp_path / "encoder" / "model.safetensors"
    config = tiny_config(tmp_path / "encoder", root / "data", train__steps=0, data__dev="")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", progress=False)
    assert read_json(tmp_path / "run" / "data.json")["start"] == {"weights": sha256_file(file)}
    weights = load_file(file)
    save_file({name: value + np.float32(1e-3) for name, value in weights.items()}, file)
    with pytest.raises(ContractError, match=r"(?s)safetensors does not match .*data\.json:\n  start\.weights: "):
        train(config, tmp_path / "run", progress=False)
    shutil.copyfile(root / "encoder" / "model.safetensors", file)
    assert train(config, tmp_path / "run", progress=False).step == 0
    file.unlink()
    assert train(config, tmp_path / "run", progress=False).resumed_from == 0
    assert "start" in read_json(tmp_path / "run" / "data.json")


def test_parameters_that_are_not_finite_are_named() -> None:
    params = {"encoder": {"bias": jnp.zeros(3), "kernel": jnp.array([0.0, jnp.inf])}, "head": {"scale": jnp.ones(2)}}
    state = TrainState(params, {}, jnp.int32(4), jnp.array(True))
    with pytest.raises(NotFiniteError, match=r"step 4: .*encoder/kernel \(1 .*NaN"):
        require_finite_parameters(state, "step 4")


def test_two_jobs_do_not_train_in_one_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_folder(tmp_path / "run", "training"), pytest.raises(LockedError):
        train(config_of(root), tmp_path / "run", progress=False)

    def begun_meanwhile(*_: Any) -> Any:
        job = prepare_job(*_)
        write_json(Workdir(tmp_path / "run").config, {})
        return job

    monkeypatch.setattr("jaxret.training.loop.prepare_job", begun_meanwhile)
    with pytest.raises(LockedError, match=r"another .*just begun"):
        train(config_of(root), tmp_path / "run", progress=False)


def test_zero_steps_need_no_data(root: Path, tmp_path: Path) -> None:
    config = tiny_config(root / "encoder", "", train__steps=0, data__dev="")
    assert train(config, tmp_path / "run", progress=False).step == 0
    run = open_run(tmp_path / "run", query_length=5, tokens_per_batch=96)
    assert run.contract["query_length"] == run.config.tokens.query_length == 5
    assert read_json(run.workdir.contract)["query_length"] == 12, "the length that it was trained with"
    assert run.embedder()(run.tokenizer.queries(["river stone music light paper"]), "query").lengths.tolist() == [1]
    assert run.embedder().tokens_per_batch == 96
    for length in (2, 41):
        with pytest.raises(ValueError, match=rf"passage_length is {length}; it must be 3 to 40"):
            open_run(tmp_path / "run", passage_length=length)
    with pytest.raises(ValueError, match=r"encoder.attention .*'flash', .*TPU, .*JAX runs .*CPU"):
        open_run(tmp_path / "run", attention="flash")
    with pytest.raises(ValueError, match=r"encoder.attention .*'flash', .*TPU, .*JAX runs .*CPU"):
        train(tiny_config(root / "encoder", "", train__steps=0, encoder__attention="flash"), tmp_path / "other")
    config = tiny_config(root / "encoder", "", train__steps=0, data__dev="", encoder__attention_dropout=0.0)
    shapes: Any = prepare_job(config, Workdir(tmp_path / "third"), False, (), RETRIEVAL).model.module.config
    assert shapes.attention_dropout == 0


@pytest.mark.parametrize("name", ["encoder/config.json", "config.json", "data.json", "contract.json"])
def test_an_edited_run_is_neither_resumed_nor_opened(
    name: str, whole: tuple[Path, TrainResult], root: Path, tmp_path: Path
) -> None:
    # The run ends before its first checkpoint.
    shutil.copytree(whole[0], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    path = tmp_path / "run" / name
    text = path.read_text()
    digit = re.search(r"\d", text)
    assert digit
    path.write_text(text[: digit.start()] + str((int(digit[0]) + 1) % 10) + text[digit.end() :])
    for use in (lambda: open_run(tmp_path / "run"), lambda: train(config_of(root), tmp_path / "run", progress=False)):
        with pytest.raises(ContractError, match=rf"{path} .*damaged .*edited"):
            use()


@pytest.mark.exhaustive
def test_a_lengthened_run_does_not_need_the_original_encoder(
    whole: tuple[Path, TrainResult], root: Path, tmp_path: Path
) -> None:
    """The run is resumed in another process, with changes of the settings that may change."""
    shutil.copytree(whole[0], tmp_path / "run")
    arguments = train_arguments(root / "encoder", root / "data", tmp_path / "run", train__steps=8, train__log_every=2)
    (root / "encoder").rename(root / "renamed")
    try:
        done = run_script("train.py", *arguments)
    finally:
        (root / "renamed").rename(root / "encoder")
    assert done.returncode == 0, done.stderr
    assert "train.steps was 6 and is 8 from here on" in done.stdout
    assert "train.log_every was 1 and is 2 from here on" in done.stdout
    assert "the learning rate has a new schedule over 8 steps: it continues at 0.00025" in done.stdout
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4, 5, 6, 8]
    assert read_json(tmp_path / "run" / "config.json")["train"]["steps"] == 8
    assert open_run(tmp_path / "run", "last").checkpoint["step"] == 8
    with pytest.raises(ValueError, match=r"7 steps, .*8"):
        train(config_of(root, train__steps=7), tmp_path / "run", progress=False)
    assert read_json(tmp_path / "run" / "config.json")["train"]["steps"] == 8


def test_a_failed_save_ends_the_next_step(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes at the next step, not at the next save."""
    polled = []

    def poll(self: Checkpoints, all_processes: bool) -> None:
        polled.append(self._current_save is not None)
        if polled[-1]:
            raise CheckpointError("the disk is full")

    monkeypatch.setattr(Checkpoints, "poll", poll)
    config = config_of(root, train__checkpoint_every=2, data__dev="")
    with pytest.raises(CheckpointError, match="the disk is full"):
        train(config, tmp_path / "run", progress=False)
    assert polled == [False, False, True]


def test_the_second_sigterm_ends_at_once() -> None:
    code = """
import os, signal
from jaxret.training.signals import stop_on_sigterm
with stop_on_sigterm() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.is_set(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_resumed_in_another_process(sent: signal.Signals, root: Path) -> None:
    """After a signal in the middle of the run, the same command gives the parameters and metrics of an uninterrupted
    run."""
    long = {"train__steps": 60, "train__checkpoint_every": 5, "data__dev": ""}
    expected, workdir = root / "long", root / sent.name
    if not expected.exists():
        train(config_of(root, **long), expected, progress=False)
    arguments = train_arguments(root / "encoder", root / "data", workdir, **long)
    process = subprocess.Popen(command("train.py", *arguments), cwd=REPOSITORY, env=environment())
    try:
        while not (workdir / "checkpoints" / "5").exists() and process.poll() is None:
            time.sleep(0.001)  # pause between two looks at the files
        process.send_signal(sent)
        code = process.wait(timeout=120)
    finally:
        process.kill()
    reached = sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())[-1]
    assert reached < 60  # the signal came in the middle of the run
    assert code == (-sent if sent == signal.SIGKILL else 128 + sent)
    if sent == signal.SIGTERM:
        assert lines(workdir)[-1]["step"] == reached  # no step was lost
    done = run_script("train.py", *arguments)
    assert done.returncode == 0, done.stderr
    config = config_of(root, **long)
    assert final_state(workdir, config, 60) == final_state(expected, config, 60)
    assert lines(workdir) == lines(expected)


@pytest.mark.daily("_CHECKPOINT_METADATA")
@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "params/manifest.ocdbt",
        *(
            pytest.param(file, marks=pytest.mark.exhaustive)
            for file in ("_CHECKPOINT_METADATA", "progress/d/*", "metrics/metrics")
        ),
    ],
)
def test_a_damaged_newest_checkpoint_is_set_aside(
    file: str, whole: tuple[Path, TrainResult], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is empty, as after a power cut: the run resumes from the checkpoint before, says so, and ends with the
    same result."""
    config, workdir = config_of(root, validation__best="metric"), tmp_path / "run"
    shutil.copytree(whole[0], workdir)
    checkpoints = workdir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["3", "6"], "the best and the last checkpoint"
    for path in (checkpoints / "6").glob(file):
        path.write_bytes(b"")
    if not file.startswith("progress"):  # a reader of weights does not open the state of the optimizer
        with pytest.raises(CheckpointError, match=r"/6 (is damaged|cannot be read)"):
            open_run(workdir, "last")
    result = train(config, workdir)
    assert (result.resumed_from, result.step) == (3, STEPS)
    said = capsys.readouterr().out
    assert re.search(rf"{checkpoints}/6 (is damaged|cannot be read).*; it is now {checkpoints}/damaged-6", said)
    assert "training continues from checkpoint 3" in said
    assert final_state(workdir, config) == final_state(whole[0], config)
    assert lines(workdir) == lines(whole[0])
    assert open_run(workdir, "last").checkpoint["step"] == STEPS


def test_without_an_intact_checkpoint_nothing_is_set_aside(
    whole: tuple[Path, TrainResult], root: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole[0], tmp_path / "run")
    for step in (3, 6):
        (tmp_path / "run" / "checkpoints" / str(step) / "params" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="/6 "):
        train(config_of(root), tmp_path / "run", progress=False)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["3", "6"]


@pytest.mark.slow
def test_every_line_of_metrics_is_flushed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each line, fsync was called when the file had this line."""
    fsync, flushed, written = os.fsync, [0], []
    write = MetricsLog.write

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/metrics.jsonl"):
            flushed.append(os.fstat(descriptor).st_size)

    def then(self: MetricsLog, *args: Any) -> None:
        write(self, *args)
        written.append(((tmp_path / "run" / "metrics.jsonl").stat().st_size, flushed[-1]))

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(MetricsLog, "write", then)
    train(config_of(root, train__steps=2), tmp_path / "run", progress=False)
    assert written
    assert all(size == on_disk for size, on_disk in written)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_folder_without_its_sealed_files_is_no_run(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job moves a file of the encoder away while the run begins."""
    shutil.copytree(root / "encoder", tmp_path / "encoder")
    create = loop.create_run

    def late(*args: Any) -> None:
        (tmp_path / "encoder" / name).rename(tmp_path / "taken")
        create(*args)

    monkeypatch.setattr(loop, "create_run", late)
    config = tiny_config(tmp_path / "encoder", root / "data")
    with pytest.raises(ContractError, match=rf"{tmp_path}/encoder .*changed .*began"):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "config.json").exists()
    (tmp_path / "taken").rename(tmp_path / "encoder" / name)
    monkeypatch.undo()
    assert train(config_of(root), tmp_path / "run", progress=False).step == STEPS
