"""The bookkeeping of bench/evidence/run.py: the order of steps, each done once, and the rows. Nothing is trained."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from bench.evidence import run
from bench.evidence.claims import CLAIMS, COMMON, PERPLEXITY, STEPS, Claim, Pretrain, Train
from bench.evidence.run import collect, order
from bench.evidence.steps import Work, digest, make, needs, passages_of, read_values, winning, write_values
from bench.evidence.table import HOLDS, NOT_RUN, NOT_SEEN, OPPOSITE, SO_FAR, judged, row_of, to_markdown
from jaxret.configs.minilm import get_config
from jaxret.configs.pretraining.mlm import get_config as pretraining_config
from jaxret.data.formats import JudgementSource
from jaxret.training.pretraining.wordpiece import train_wordpiece

CLAIM = Claim("A paper", "it is better", "dual", "mlr-2")
ANSWERS = {str(i): f"passage {i}" for i in range(9)}
# A script that replaces training: MLR is better by seed / 100 on average. One step always fails.
SCRIPT = """
import pathlib, sys
sys.path.insert(0, {root!r})
from bench.evidence.steps import Work, write_values
from jaxret.storage.atomic import write_json
folder, name, seed = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with open(folder / "made", "a") as file:
    file.write(f"{{name}} {{seed}}\\n")
if name == "stage-1":
    sys.exit("no such luck")
work = Work(folder, "data", folder / "values", {{}})
work.path(name, seed).mkdir(parents=True)
if name != "bm25":
    values = {{str(i): i / 10 + seed / 100 + (name == "mlr-2") * seed * (6 + i) / 1000 for i in range(9)}}
    write_values(work.measured(name, seed), name, dict.fromkeys(("nDCG@10", "RR@10", "R@100"), values), 1)
write_json(work.result(name, seed), {{}})
"""


def test_order_of_seeds_and_claims() -> None:
    first, second, late = CLAIM, replace(CLAIM, says="b"), replace(CLAIM, says="c", later=2)
    turns = [(seed, claim.says) for seed, claim in order([late, first, second], 3)]
    better = first.says
    early = [(1, better), (1, "b"), (2, better), (2, "b")]
    assert turns == [*early, (1, "c"), (3, better), (3, "b"), (2, "c"), (3, "c")]


def test_claims_name_existing_steps_and_keys() -> None:
    for claim in CLAIMS:
        assert isinstance(STEPS[claim.baseline], Train)
        assert isinstance(STEPS[claim.treated], Train)
    named = [(claim.baseline, claim.treated, claim.measure) for claim in CLAIMS]
    assert len(set(named)) == len(named)
    for name, step in STEPS.items():
        assert all(not STEPS[one].seeded or step.seeded for one in needs(name)), f"{name} has no seed"
        if isinstance(step, Train):
            get_config(step.system).lock().update_from_flattened_dict({**COMMON, **step.keys})
        elif isinstance(step, Pretrain):
            pretraining_config().lock().update_from_flattened_dict(dict(step.keys))


def test_every_stored_run_belongs_to_a_step() -> None:
    """When a config key is renamed, the digests in file names change: rename the files, and the runs in
    results.json."""
    results = json.loads(run.RESULTS.read_text())
    values = run.RESULTS.with_name("values")
    work = Work(Path(), results["data"], values, {})
    steps = [name for name, step in STEPS.items() if isinstance(step, Train)]
    paths = {work.measured(name, seed) for name in steps for seed in range(1, 6)}
    assert set(values.glob("*.npz")) <= paths
    assert {path.stem for path in values.glob("*.npz")} == set(results["runs"])


def test_imagined_queries_begin_with_the_mask_of_the_tokenizer_made_here() -> None:
    tokenizer = train_wordpiece(lambda: ["words of a text", "words"], 30, True)
    assert STEPS["i3"].keys["head.i3.mask_id"] == tokenizer.token_to_id("[MASK]")  # type: ignore[union-attr]


def test_a_passage_answers_the_query_of_its_keywords(tmp_path: Path) -> None:
    work = Work(tmp_path, "data", tmp_path, {})
    texts = {"a": "The lantern of a lighthouse", "b": "The harvest of barley", "c": "The of"}
    lines = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
    Path(work.questions).mkdir(parents=True)
    (Path(work.questions) / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    make(work, "keywords", 1)
    pairs = work.path("keywords", 1) / "pairs"
    lines = (pairs / "queries.jsonl").read_text().splitlines()
    queries = {query["_id"]: query["text"] for query in map(json.loads, lines)}
    answered = {queries[one.query_id]: one.passage_id for one in JudgementSource.open(pairs, "train").read()}
    assert answered == {"lantern lighthouse": "a", "barley harvest": "b"}  # passage c has only stop words
    assert needs("bert-i3-warm-up") == ["keywords"]
    assert needs("keywords") == []


def test_a_changed_step_and_its_dependants_get_new_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: digest.__wrapped__(name, "data") for name in ("stage-1", "own", "stage-2", "dual")}
    digest.cache_clear()
    monkeypatch.setitem(STEPS, "stage-1", Train(keys={"data.train": "@bm25/mined.jsonl", "train.steps": 7}))
    after = {name: digest(name, "data") for name in before}
    digest.cache_clear()
    assert [name for name in before if before[name] == after[name]] == ["dual"]
    assert digest("dual", "other data") != after["dual"]


def values(baseline: list[float], treated: list[float]) -> list[np.ndarray]:
    return [np.array(baseline), np.array(treated)]


def made(shift: tuple[float, ...], margin: float = 0.0) -> dict[str, Any]:
    """A row with one seed per shift. In each, the treated system is better by the shift plus noise."""
    rng = np.random.default_rng(0)
    pairs = {}
    for seed, by in enumerate(shift, 1):
        before = rng.uniform(size=200)
        pairs[seed] = values(before.tolist(), (before + by + rng.normal(0, 0.01, 200)).tolist())
    return row_of(replace(CLAIM, margin=margin), pairs, [str(i) for i in range(200)], ["a run"])


def test_a_row_is_the_mean_over_seeds_and_questions() -> None:
    pairs = {1: values([0.0, 0.5, 1.0], [0.3, 0.5, 1.0]), 3: values([0.2, 0.5, 0.0], [0.2, 0.8, 0.3])}
    row = row_of(CLAIM, pairs, list("xyz"), ["a"])
    assert (row["seeds"], row["ids"], row["by_seed"]) == ([1, 3], 3, [0.1, 0.2])
    assert row["difference"] == pytest.approx(0.15, abs=1e-6)
    assert row["before"] == pytest.approx(np.mean([0.5, 0.7 / 3]), abs=1e-6)
    assert row["p"] == pytest.approx(2 / 8)  # three gains of .15: only if all signs agree is the sum as large
    assert row["p_seeds"] == pytest.approx(ttest_rel([0.5, 0.7 / 3], [0.6, 1.3 / 3]).pvalue, abs=1e-6)
    allowed = row_of(replace(CLAIM, margin=0.2), pairs, list("xyz"), ["a"])
    assert {key: allowed[key] for key in ("difference", "low", "high", "by_seed")} == {
        key: row[key] for key in ("difference", "low", "high", "by_seed")
    }


def test_questions_about_one_passage_are_flipped_and_drawn_together() -> None:
    """Forty questions about two passages count as two draws, not as forty."""
    rng = np.random.default_rng(0)
    pair = values([0.0] * 40, rng.uniform(0.1, 0.2, 40).tolist())
    apart = row_of(CLAIM, {1: pair}, [str(i) for i in range(40)], ["a"])
    together = row_of(CLAIM, {1: pair}, ["x"] * 10 + ["y"] * 30, ["a"])
    assert apart["difference"] == together["difference"] == pytest.approx(np.mean(pair[1]), abs=1e-6)
    assert (together["ids"], together["passages"], together["p"]) == (40, 2, 0.5)
    assert apart["p"] < 1e-3
    assert together["low"] == pytest.approx(2 * pair[1][:10].sum() / 40, abs=1e-6)


def test_stored_values_meet_the_passages_of_their_questions(tmp_path: Path) -> None:
    answers = {"q10": "a", "q9": "b", "q1": "a"}
    work = Work(tmp_path, "data", tmp_path, answers)
    scores = {"q9": 0.25, "q1": 0.5, "q10": 1.0}
    write_values(tmp_path / "dual.npz", "dual", dict.fromkeys(run.MEASURES, scores), 1)
    digest, stored = read_values(tmp_path / "dual.npz", CLAIM.measure)
    assert stored.tolist() == [0.5, 1.0, 0.25]
    assert passages_of(work, CLAIM.measure, digest, 3) == ["a", "a", "b"]
    with pytest.raises(ValueError, match=r"nDCG@10 .*questions .*2"):
        passages_of(replace(work, answers={"q1": "a", "q9": "b"}), CLAIM.measure, digest, 3)
    assert len(set(passages_of(work, PERPLEXITY, digest, 3))) == 3, "each of the three passages is a group"


def test_of_vectors_equal_up_to_rounding_the_first_wins() -> None:
    scores = np.array([[0.5, 0.5 + 1e-7, 0.1], [0.5, 0.6, 0.1], [0.1, 0.2, 0.2 + 1e-7]])
    assert winning(scores).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("shift", "margin", "expected"),
    [
        ((0.01, 0.02, 0.01), 0.0, HOLDS),
        ((0.01, 0.02), 0.0, HOLDS + SO_FAR),
        ((-0.01, -0.02, -0.03), 0.0, OPPOSITE),
        ((-0.01,), 0.0, OPPOSITE + SO_FAR),
        ((0.0, 0.0), 0.0, NOT_SEEN),
        ((0.05, -0.005), 0.0, NOT_SEEN),  # the two seeds have differences of opposite signs
        ((0.0, 0.0, 0.0), 0.01, HOLDS),  # not worse by more than the margin
        ((-0.02, -0.02), 0.01, OPPOSITE + SO_FAR),
        ((), 0.0, NOT_RUN),
    ],
)
def test_verdicts(shift: tuple[float, ...], margin: float, expected: str) -> None:
    assert judged([made(shift, margin)])[0]["verdict"] == expected


def test_holm_counts_the_rows_that_were_run() -> None:
    row = {**made((0.01,)), "p": 0.02}
    alone, unrun = judged([row, made(())])
    assert (alone["holm"], alone["verdict"], unrun["verdict"]) == (0.02, HOLDS + SO_FAR, NOT_RUN)
    assert [one["verdict"] for one in judged([row, row, row])] == [NOT_SEEN] * 3  # the corrected p of each is .06


@pytest.mark.exhaustive
def test_finished_steps_are_skipped_and_a_failure_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CLAIMS", (CLAIM, Claim("", "b", "stage-1", "stage-2"), replace(CLAIM, says="c")))
    work, script = Work(tmp_path, "data", tmp_path / "values", ANSWERS), tmp_path / "step.py"
    results = tmp_path / "results.json"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[1])))
    command = [sys.executable, str(script), str(tmp_path)]
    run.work_through(work, 2, results, command)
    attempts = (tmp_path / "made").read_text().splitlines()
    expected = ["dual 1", "mlr-2 1", "bm25 1", "stage-1 1", "dual 2", "mlr-2 2", "stage-1 2"]
    assert attempts == expected  # bm25 has no seed; the steps that need stage-1 do not begin
    written = json.loads(results.read_text())
    assert written["rows"][0]["by_seed"] == pytest.approx([0.01, 0.02])
    assert written["rows"][1]["verdict"] == NOT_RUN
    assert "no such luck" in written["failed"][work.path("stage-1", 1).name]
    assert "a step that it needs failed" in written["failed"][work.path("stage-2", 1).name]
    assert "no such luck" in capsys.readouterr().out
    table = to_markdown(written, run.CLAIMS)
    assert "+0.0150 [" in table
    assert "2 of 3 claims were run" in table

    run.work_through(work, 2, results, command)
    assert (tmp_path / "made").read_text().splitlines() == [*expected, "stage-1 1", "stage-1 2"]
    shutil.rmtree(tmp_path / "steps")  # without the runs, as on another machine, the stored values are enough
    run.work_through(work, 2, results, command)
    assert not {"dual 1", "mlr-2 1"} & set((tmp_path / "made").read_text().splitlines()[len(expected) :])
    assert json.loads(results.read_text()) == written


def test_rows_use_the_existing_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CLAIMS", (CLAIM,))
    work = Work(tmp_path, "data", tmp_path / "values", ANSWERS)

    def finish(name: str, seed: int, ids: int = 9) -> None:
        scores = {str(i): i % 3 + (name == "mlr-2") * (6 + i) / 10 for i in range(ids)}
        write_values(work.measured(name, seed), name, dict.fromkeys(run.MEASURES, scores), 1)

    assert collect(work, 2, {})["rows"][0]["verdict"] == NOT_RUN
    for name in ("dual", "mlr-2"):
        finish(name, 1)
    assert collect(work, 2, {})["rows"][0]["seeds"] == [1]
    for name in ("dual", "mlr-2"):
        finish(name, 2)
    (row,) = collect(work, 2, {})["rows"]
    assert (row["seeds"], row["difference"]) == ([1, 2], pytest.approx(1.0))
    finish("dual", 1, ids=8)
    with pytest.raises(ValueError, match=r"mlr-2 .*nDCG@10 .*different"):
        collect(work, 2, {})
