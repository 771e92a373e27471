"""Comparing results of runs: which runs are one system, and which have other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.configs import base
from jaxret.evaluation.evaluation_report import write_evaluation
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.compare_runs import (
    compare_on_sets,
    compare_runs,
    comparison_notes,
    render_sets,
    split_argument,
    training_data_note,
)
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import config_json
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json

QUERIES = [f"q{i}" for i in range(10)]


SEARCH = ("index", "candidates", "query_length", "passage_length", "dtype", "words", "dimension", "max_passage")


def result(
    folder: Path, seed: int, head: str = "dual_encoder", name: str = "scifact.test", k: int = 100, **changed: Any
) -> str:
    """Write a run's folder with a result in the format of `jaxret search`. changed: digests of its data."""
    config = base.get_config()
    config.head.name = head
    config.seed.init = config.seed.data = seed
    config.train.log_every = seed  # a key that changes no result
    config.data.subset = changed.get("subset", 0)
    config.train.start_from = changed.get("start_from", "")
    config.update_from_flattened_dict(changed.get("keys", {}))
    random = np.random.default_rng([seed, len(head)])
    values = {m: dict(zip(QUERIES, random.random(10).tolist(), strict=True)) for m in ("nDCG@10", "RR")}
    weights = changed.get("weights", "5")
    data = {"queries": "1", "qrels": "2"} | {key: changed[key] for key in ("queries", "qrels") if key in changed}
    provenance = {
        "checkpoint": {"step": 5, "digest": f"{folder.name}"},
        "config": config_json(config),
        "training_data": {
            "train": changed.get("train", {"sha256": "3"}),
            "start": {"weights": weights},
            **({"validation": changed["validation"]} if "validation" in changed else {}),
        },
        **({"lineage": {"sha256": changed["lineage"]}} if "lineage" in changed else {}),
        "corpus": {"sha256": changed.get("corpus", "4"), "passages": 9},
        "search": {"k": k} | {key: changed[key] for key in (*SEARCH, "filter") if key in changed},
        "dataset": {"sha256": data, "self_matches": changed.get("self_matches", "kept")}
        | {key: changed[key] for key in ("match",) if key in changed},
    }
    accuracy = Evaluation({"Accuracy@5": 0.5}, {"Accuracy@5": dict.fromkeys(QUERIES, 0.5)}, 10, 10)
    evaluation = Evaluation({m: float(np.mean(list(v.values()))) for m, v in values.items()}, values, 10, 10)
    write_evaluation(Workdir(folder).evaluation(name), evaluation, provenance, accuracy)
    return str(folder)


@pytest.mark.parametrize("length", ["query_length", "passage_length"])
def test_other_lengths_are_another_system(length: str, tmp_path: Path) -> None:
    cut: dict[str, Any] = {"query_length": 32, "passage_length": 128}
    runs = [
        result(tmp_path / f"a-{seed}", seed, **({**cut, length: 512} if seed > 2 else cut)) for seed in (1, 2, 3, 4)
    ]
    _, systems = compare_runs(runs, resamples=100)
    assert [len(results) for results in systems.values()] == [2, 2]


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "float16"), ("words", 32), ("dimension", 64), ("max_passage", True)]
)
def test_what_was_searched_makes_the_system(name: str, value: Any, tmp_path: Path) -> None:
    """Configs may be equal, but vectors may have been encoded with other options."""
    stored: dict[str, Any] = {"dtype": "float32"}
    runs = [
        result(tmp_path / f"{seed}", seed, **stored, **({name: value} if seed == 2 and name != "dtype" else {}))
        for seed in (1, 2, 3)
    ]
    if name == "dtype":
        runs[1] = result(tmp_path / "other", 2, dtype=value)
    assert sorted(len(results) for results in compare_runs(runs, resamples=100)[1].values()) == [1, 2]


def test_runs_that_differ_only_in_seeds_are_one_system(tmp_path: Path) -> None:
    runs = [result(tmp_path / f"dual-{seed}", seed) for seed in (1, 2)]
    runs += [result(tmp_path / f"mlr-seed{seed}", seed, "mlr") for seed in (1, 2, 3)]
    comparison, systems = compare_runs(runs, resamples=1000)
    assert {name: len(of) for name, of in systems.items()} == {"dual": 2, "mlr": 3}
    assert comparison.measures == ("nDCG@10", "RR", "Accuracy@5"), "answer strings are compared, too"
    assert [one.system for one in comparison.tests] == ["mlr"] * 3
    assert comparison.tests[0].comparison.queries == 10


@pytest.mark.parametrize(
    ("key", "value", "systems"),
    [
        ("encoder.download", True, 1),
        ("mesh.fsdp", 2, 1),
        ("data.dev_negatives_run", "elsewhere.trec", 1),
        ("mesh.reduce_dtype", "bfloat16", 2),
        ("encode.dtype", "float16", 2),
        ("encode.words", 32, 2),
        ("validation.corpus", "wiki", 2),
    ],
)
def test_settings_that_change_no_result_make_no_other_system(
    key: str, value: Any, systems: int, tmp_path: Path
) -> None:
    runs = [result(tmp_path / f"{seed}", seed, keys={key: value} if seed == 2 else {}) for seed in (1, 2)]
    assert len(compare_runs(runs, resamples=1000)[1]) == systems


def parts(seed: int) -> dict[str, Any]:
    return {"train": {"sha256": f"part {seed}", "subset_of": {"sha256": "3"}}, "subset": 100}


def lineage(seed: int, sha256: str = "7") -> dict[str, Any]:
    return {"train": {"sha256": f"mined {seed}"}, "lineage": sha256, "start_from": f"two-{seed}/stage1"}


@pytest.mark.parametrize("changed", [parts, lineage])
def test_seeds_that_draw_or_mine_their_own_data_are_one_system(changed: Any, tmp_path: Path) -> None:
    runs = [result(tmp_path / f"some-{seed}", seed, **changed(seed)) for seed in (1, 2, 3)]
    _, systems = compare_runs(runs, resamples=1000)
    assert {name: len(of) for name, of in systems.items()} == {"some": 3}
    assert "between the runs of some (3 sets for 3 runs)" in training_data_note(systems)


@pytest.mark.parametrize("name", ["corpus", "judgements"])
def test_other_contents_of_validation_are_another_system(name: str, tmp_path: Path) -> None:
    """They selected other checkpoints, although the path in the config is the same."""
    contents = {"corpus": "1", "judgements": "2"}
    runs = [
        result(tmp_path / f"a-{seed}", seed, validation={**contents, name: "3"} if seed > 2 else contents)
        for seed in (1, 2, 3, 4)
    ]
    _, systems = compare_runs(runs, resamples=100)
    assert [len(results) for results in systems.values()] == [2, 2]


def test_other_training_data_are_another_system(tmp_path: Path) -> None:
    of_another = {"train": {"sha256": "part 2", "subset_of": {"sha256": "8"}}, "subset": 100}
    more = {**parts(2), "subset": 200}
    for other in (of_another, more, {"train": {"sha256": "part 2"}}):
        one, two = result(tmp_path / "a", 1, **parts(1)), result(tmp_path / "b", 2, **other)
        _, systems = compare_runs([one, two], resamples=1000)
        assert len(systems) == 2, other
        assert not training_data_note(systems)
    one, two = result(tmp_path / "a", 1, **lineage(1)), result(tmp_path / "b", 2, **lineage(2, "8"))
    assert len(compare_runs([one, two], resamples=1000)[1]) == 2
    scores: list[dict[str, Any]] = [{"train": {"sha256": "3", "scores": digest}} for digest in ("x", "y")]
    one, two = (result(tmp_path / name, seed, **scores[seed]) for seed, name in enumerate("ab"))
    assert len(compare_runs([one, two], resamples=1000)[1]) == 2, "another teacher makes another system"


def test_runs_from_different_weights_under_one_path_are_two_systems(tmp_path: Path) -> None:
    runs = [result(tmp_path / f"dual-{seed}", seed, weights="ab" * 32 if seed > 2 else "cd" * 32) for seed in (1, 2, 3)]
    _, systems = compare_runs(runs, resamples=100)
    assert {name: len(of) for name, of in systems.items()} == {"dual": 2, "dual-3": 1}
    (note,) = comparison_notes(systems)
    results = [f"{run}/eval/scifact.test.json weights" for run in runs]
    assert f"{results[0]} cdcdcdcdcdcd; {results[2]} abababababab" in note
    assert not comparison_notes(compare_runs(runs[:2], resamples=100)[1])
    _, systems = compare_runs([f"all={','.join(runs)}"], resamples=100)
    assert "not seeds of one system" in comparison_notes(systems)[0], "also for a named system"


def test_stages_that_start_from_models_of_their_seed_are_one_system(tmp_path: Path) -> None:
    runs = [result(tmp_path / f"two-{seed}", seed, **lineage(seed), weights=f"{seed}") for seed in (1, 2)]
    _, systems = compare_runs(runs, resamples=100)
    assert [len(results) for results in systems.values()] == [2]
    assert not any("weights" in note for note in comparison_notes(systems))


def test_runs_of_one_system_are_checked_too(tmp_path: Path) -> None:
    one, two = result(tmp_path / "a", 1), result(tmp_path / "b", 2, qrels="7")
    with pytest.raises(ContractError, match="qrels: '2' in"):
        compare_runs([f"x={one},{two}"])
    three = result(tmp_path / "c", 3)
    path = Workdir(three).evaluation("scifact.test")
    path.write_text(path.read_text().replace('"q9"', '"q10"'))
    with pytest.raises(ValueError, match=r"query 'q10' .*nDCG@10 .*2 .*x, .*1 .*x"):
        compare_runs([f"x={one},{three}"])


def test_systems_can_be_named_and_files_given(tmp_path: Path) -> None:
    one, other = result(tmp_path / "a", 1), result(tmp_path / "b", 2)
    comparison, systems = compare_runs([f"before={one}", f"after={other}"], measures=["RR"], resamples=1000)
    assert (list(systems), comparison.measures) == (["before", "after"], ("RR",))
    _, systems = compare_runs([f"both={one},{other}"], resamples=1000)
    assert [len(of) for of in systems.values()] == [2]
    file = str(Workdir(one).evaluation("scifact.test"))
    assert list(compare_runs([file, f"after={other}"], resamples=1000)[1]) == ["a", "after"]


@pytest.mark.parametrize(
    "changed",
    [
        {"queries": "7"},
        {"qrels": "7"},
        {"corpus": "7"},
        {"filter": ["section:x"]},
        {"approximate": "IVF4,PQ4x4, candidates 200", "index": {"factory": "IVF4,PQ4x4", "candidates": 200}},
        {"approximate": "mean:6", "candidates": "mean:6"},
        {"self_matches": "removed"},
        {"match": "regex"},
    ],
    ids=lambda changed: list(changed)[-1],
)
def test_results_on_other_data_are_refused_with_both_digests(changed: dict[str, Any], tmp_path: Path) -> None:
    one, other = result(tmp_path / "a", 1), result(tmp_path / "b", 2, **changed)
    (key, value), before = next(iter(changed.items())), {"queries": "1", "qrels": "2", "corpus": "4"}
    expected: Any = (before | {"self_matches": "kept", "match": "string", "approximate": ""}).get(key, [])
    with pytest.raises(ContractError) as refused:
        compare_runs([one, other])
    assert f"  {key}: {expected!r} in {one}/eval/scifact.test.json, {value!r} in {other}/eval/scifact.test.json" in str(
        refused.value
    )


def test_a_run_counts_once(tmp_path: Path) -> None:
    one, other = result(tmp_path / "a", 1), result(tmp_path / "b", 1)
    with pytest.raises(ValueError, match=r"config, .*included, .*counts"):
        compare_runs([one, other])
    with pytest.raises(ValueError, match=r"checkpoint, .*counts once"):
        compare_runs([f"x={one},{one}"])
    assert len(compare_runs([f"x={one}", f"y={other}"], resamples=1000)[1]) == 2
    with pytest.raises(ValueError, match=r"a/eval/scifact\.test\.json .*systems, .*counts"):
        compare_runs([f"x={one}", f"y={other},{one}/"])


def test_filters_may_be_given_in_any_order(tmp_path: Path) -> None:
    runs = [
        result(tmp_path / f"{seed}", seed, filter=filters)
        for seed, filters in ((1, ["a:1", "b:2"]), (2, ["b:2", "a:1"]))
    ]
    assert len(compare_runs(runs, resamples=100)[1]) == 1


def test_the_result_of_a_run_is_selected_by_name(tmp_path: Path) -> None:
    one, other = result(tmp_path / "a", 1), result(tmp_path / "b", 2)
    (tmp_path / "a" / "eval" / "scifact.test.diversity.json").write_text("{}")  # written by another verb
    compare_runs([one, other], resamples=1000)
    for folder, seed in (("a", 1), ("b", 2)):
        result(tmp_path / folder, seed, name="fiqa.test")
    with pytest.raises(ValueError, match=r"several results, fiqa\.test, scifact\.test: choose some with --data=NAME"):
        compare_runs([one, other])
    assert "fiqa.test" in str(compare_runs([one, other], "fiqa.test", resamples=1000)[1]["a"][0].path)
    with pytest.raises(FileNotFoundError, match=r"nq\.test\.json .*exist; .*fiqa\.test, scifact\.test"):
        compare_runs([one, other], "nq.test")
    third = result(tmp_path / "c", 3, name="nq.test")
    with pytest.raises(ValueError, match=r"result .*/c .*nq\.test"):
        compare_runs([one, third])
    with pytest.raises(FileNotFoundError, match=r"result .*eval/; .*--workdir="):
        compare_runs([one, str(tmp_path)])


def test_missing_or_different_measures(tmp_path: Path) -> None:
    one, other = result(tmp_path / "a", 1), result(tmp_path / "b", 2, k=1000)
    with pytest.raises(ValueError, match=r"scifact\.test\.json has no 'R@5'; it has nDCG@10, RR, Accuracy@5"):
        compare_runs([one, other], measures=["R@5"])
    with pytest.raises(ValueError, match=r"RR .*rankings, .*100 .*1000"):
        compare_runs([one, other], measures=["RR"])
    compare_runs([one, other], measures=["nDCG@10", "Accuracy@5"], resamples=1000)


def test_queries_without_a_ranking_are_noted(tmp_path: Path) -> None:
    runs = [result(tmp_path / "a", 1), result(tmp_path / "b", 2)]
    path = Workdir(runs[1]).evaluation("scifact.test")
    path.write_text(json.dumps(read_json(path) | {"queries_found": 3}))
    (note,) = comparison_notes(compare_runs(runs, resamples=100)[1])
    assert note.endswith("b/eval/scifact.test.json has rankings of 3 of 10 queries: the missing ones count as zero.")


def test_invalid_result_files(tmp_path: Path) -> None:
    one = result(tmp_path / "a", 1)
    path = Workdir(one).evaluation("scifact.test")
    path.write_text(path.read_text().replace('"sha256": {"', '"was": {"').replace('"sha256": {\n', '"was": {\n'))
    with pytest.raises(ValueError, match=r"digests .*queries .*judgements"):
        compare_runs([one])
    whole = read_json(Path(result(tmp_path / "a", 1), "eval", "scifact.test.json"))
    query = min(whole["per_query"]["RR"])
    for value, message in (
        ("a", "RR of query 'q0' is 'a'"),
        (float("nan"), "is nan"),
        (True, "is True"),
        (None, "is None"),
    ):
        spoiled = {**whole, "per_query": {"RR": whole["per_query"]["RR"] | {query: value}}}
        path.write_text(json.dumps(spoiled))
        with pytest.raises(ValueError, match=rf"a/eval/scifact\.test\.json: .*{message}, not a finite number"):
            compare_runs([one])
    wrong: tuple[Any, ...] = ([], {"RR": []}, "a")
    for changes in [
        *({"per_query": w} for w in wrong),
        *({"answers": {"per_query": w}} for w in wrong),
        {"answers": []},
    ]:
        path.write_text(json.dumps({**whole, **changes}))
        with pytest.raises(ValueError, match=r"per_query .*measures .*values"):
            compare_runs([one])
    path.write_text('{"pairs": 5}')
    with pytest.raises(ValueError, match=r"result .*jaxret search"):
        compare_runs([str(path)])
    with pytest.raises(ValueError, match="'x=' names no runs; write NAME=RUN"):
        compare_runs(["x="])


def test_a_named_folder_may_have_a_comma(tmp_path: Path) -> None:
    path = str(tmp_path / "lr=1,batch=2")
    assert split_argument(f"x={path}") == ("x", [str(tmp_path / "lr=1"), "batch=2"])  # control: no such folder
    Path(path).mkdir()
    assert split_argument(f"x={path}") == ("x", [path])


def test_several_data_sets(tmp_path: Path) -> None:
    runs = [result(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2))]
    for folder, seed in (("a", 1), ("b", 2)):
        result(tmp_path / folder, seed, name="fiqa.test", queries="other")
    named = [f"{Path(run).name}={run}" for run in runs]
    sets = compare_on_sets(named, ["all"], resamples=100)
    assert list(sets) == ["fiqa.test", "scifact.test"]
    assert "| b | " in render_sets(sets, "markdown")
    assert "| mean |" in render_sets(sets, "markdown")
    assert render_sets(sets, "csv").count("scifact.test,b,") == 3
    (one,) = compare_on_sets(named, ["fiqa.test"], resamples=100)
    assert one == "fiqa.test"
    only = compare_on_sets([result(tmp_path / "c", 3)], [], resamples=100)
    assert render_sets(only, "csv").startswith("data,system,measure")
    with pytest.raises(ValueError, match=r"--data=fiqa.test,x needs .*json"):
        compare_on_sets([f"{runs[0]}/eval/fiqa.test.json"], ["fiqa.test", "x"])
