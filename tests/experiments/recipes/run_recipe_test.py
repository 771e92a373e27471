"""The stages of a config: their settings, steps that are done once, and steps that are done again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.configs import config_names, load_stages
from jaxret.data.formats import Corpus, TrainingSource
from jaxret.experiments.recipes.check_recipe import EvaluationSetup, check_recipe
from jaxret.experiments.recipes.ledger import Ledger
from jaxret.experiments.recipes.run_recipe import _Recipe, run_recipe
from jaxret.experiments.recipes.stages import read_stages
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.parts_list import CorpusPart, write_parts
from jaxret.index.shards import ShardError, ShardWriter
from jaxret.mining.mining_settings import MiningSettings
from jaxret.mining.pools import require_encoded
from jaxret.runs.mismatch import ContractError
from jaxret.storage.atomic import read_json, read_with_digest
from tests.pipeline import train_arguments, untrained_run, write_data, write_encoder
from tests.sentence_transformers import write_modules

CONFIG = """from jaxret.configs.base import get_config, two_stages


def stages():
    return {stages}
"""


STAGES = """[
    {"name": "stage1", "mine": {"pools": ["bm25"], "depth": 20, "keep": 4}},
    {"name": "stage2", "mine": {"pools": ["stage1"], "depth": 20, "keep": 4}, "teacher": "stage1",
     "config": {"loss.kl.weight": 1.0}},
]"""


class Steps:
    """A step that writes a file and counts its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done, self.said = folder, 0, []  # type: ignore[var-annotated]
        self.ledger = Ledger(folder, self.said.append)

    def do(self, inputs: Any = 1, fails: bool = False, whole: bool = True) -> dict[str, str]:
        def make() -> list[Path]:
            self.done += 1
            (self.folder / "made").write_text(f"{inputs}")
            if fails:
                raise OSError("full")
            return [self.folder / "made"]

        return self.ledger.run_step("step", inputs, make, lambda: whole)


def test_finished_steps_are_not_repeated(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    first = steps.do()
    assert first == steps.do() == Steps(tmp_path).do()
    assert steps.done == 1
    assert steps.said == ["== step", "== step: already done"]
    assert set(first) == {"made"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "made").unlink(), "its files changed"),
        (lambda folder: (folder / "made").write_text("other"), "its files changed"),
        (lambda folder: (folder / "done/step.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "done/step.json").write_text("{}"), "is damaged"),
        (lambda folder: (folder / "done/step.json").unlink(), "== step"),
    ],
)
def test_damaged_steps_are_repeated(spoil: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    first = steps.do()
    spoil(tmp_path)
    assert steps.do() == first
    assert steps.done == 2
    assert message in steps.said[-1]


def test_changed_inputs_and_failed_steps_are_repeated(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    assert steps.do(1) != steps.do(2)
    assert (steps.done, steps.said[-1]) == (2, "== step: runs again, because its inputs changed")
    with pytest.raises(OSError, match="full"):
        steps.do(3, fails=True)
    steps.do(3)
    assert steps.done == 4
    steps.do(3, whole=False)
    assert (steps.done, steps.said[-1]) == (5, "== step: runs again, because its files changed")


def test_every_recipe_defines_stages() -> None:
    for name in config_names():
        if name.startswith("recipes/"):
            assert load_stages(name), name
    assert [stage.name for stage in read_stages("recipes/mlr_beir", {})] == ["stage1"]
    assert read_stages("recipes/mvr_open_qa:bert", {})[0].mining is None
    first, second = read_stages("recipes/mlr_mined", {"train.batch_size": 32})
    assert (first.mining, second.pools, second.concat) == (None, ("stage1",), ("data",))
    assert (first.config.train.epochs, second.config.train.epochs) == (40.0, 20.0)
    assert first.config.train.batch_size == second.config.train.batch_size == 32
    assert second.mining == MiningSettings(depth=100, keep=50, draw="top", positives_from_retrieval=True)
    _, both = read_stages("minilm:dual_encoder", {})
    assert (both.pools, both.config.data.negatives, both.config.head.name) == (("bm25", "stage1"), 1, "dual_encoder")


def test_a_suffix_applies_to_stages_without_a_parameter(tmp_path: Path) -> None:
    written = "from jaxret.configs.minilm import get_config\ndef stages():\n    return [{'name': 'a'}]\n"
    (tmp_path / "c.py").write_text(written)
    (stage,) = read_stages(f"{tmp_path / 'c.py'}:me_bert", {})
    assert stage.config.head.name == "me_bert"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[{}]", r"stage 1: .*unique"),
        ("[{'name': 'a'}, {'name': 'a'}]", r"stage 2: .*unique"),
        ("[{'name': 'bm25'}]", r"stage 1: .*unique"),
        ("[{'name': 'a/b'}]", r"stage 1: .*unique"),
        ("['a']", r"1 .*'a'; .*config"),
        ("[{'name': 'a', 'mine': ['bm25']}]", r"stage .*dict, .*config"),
        ("[{'name': 'a', 'mine': {'pools': ['bm25'], 'depth': '9'}}]", "stage 1: mine: "),
        ("two_stages(1, 2, 3, 4, 5)", r"c\.py: .*positional arguments"),
        ("[{'name': 'a', 'train': 1}]", r"optionally suffix, .*teacher"),
        ("[{'name': 'a', 'mine': {'rank': 1}}]", r"'rank'; .*pools, concat"),
        ("[{'name': 'a', 'mine': {'pools': ['b']}}]", r"'b' .*bm25 .*searches"),
        (
            "[{'name': 'a', 'mine': {'pools': ['bm25'], 'concat': ['bm25']}}]",
            r"'bm25' .*neither 'data'",
        ),
        ("[{'name': 'a', 'mine': {'pools': ['bm25'], 'keep': 0}}]", "keep is 0"),
        ("[{'name': 'a', 'teacher': 'b'}]", r"1 .*teacher 'b', .*loss.kl"),
        (
            "[{'name': 'a', 'teacher': 'b', 'config': {'loss.kl.weight': 1.0, 'data.teacher_run': 'c'}}]",
            "has the teacher 'b' and data.teacher_run",
        ),
        (
            "[{'name': 'a', 'teacher': 'b', 'config': {'loss.kl.weight': 1.0}}, {'name': 'b'}]",
            r"teacher .*'a' .*'b'",
        ),
        (
            "[{'name': 'a', 'config': {'train.start_from': 'b'}}, {'name': 'b'}]",
            r"train.start_from .*'a' .*'b', .*earlier",
        ),
        (
            "[{'name': 'a', 'mine': {'pools': ['bm25']}, 'config': {'loss.margin_mse.weight': 1.0}}]",
            r"1: loss.margin_mse.weight .*teacher",
        ),
        (
            "[{'name': 'a', 'base': 'mlr', 'suffix': 'b'}]",
            r"belongs .*recipe's .*base='mlr:S",
        ),
        ("[{'name': 'a', 'base': 'cross_encoder'}]", r"no stage .*retriever"),
        (
            "[{'name': 'a', 'base': 'cross_encoder'}, {'name': 'b', 'mine': {'pools': ['a']}}]",
            r"'a' .*bm25 .*searches; .*\[\]",
        ),
        ("[{'name': 'a', 'config': {'train.epoch': 1}}]", r"key; .*mean train\.epochs"),
    ],
)
def test_invalid_stages_are_errors(written: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text(CONFIG.format(stages=written))
    with pytest.raises(ValueError, match=message):
        read_stages(str(tmp_path / "c.py"), {})


def test_a_stage_of_another_config_is_a_teacher(tmp_path: Path) -> None:
    """It takes data, devices and seeds from the command line, unless its own config sets them."""
    taught = "{'name': 'b', 'teacher': 'a', 'config': {'loss.kl.weight': 1.0}, 'mine': {'pools': ['bm25']}}"
    first = "{'name': 'a', 'base': 'cross_encoder:minilm', 'mine': {'pools': ['bm25']}, 'config': {'data.dev': ''}}"
    (tmp_path / "c.py").write_text(CONFIG.format(stages=f"[{first}, {taught}]"))
    overrides = {"data.train": "X", "data.dev": "Y", "train.steps": 7, "seed.init": 3, "normalize": True}
    overrides["loss.kl.weight"] = 2.0  # the command line takes precedence over a stage of the recipe's config
    cross, student = read_stages(str(tmp_path / "c.py"), overrides, "regex")
    assert (cross.is_reranker, student.is_reranker, student.teacher) == (True, False, "a")
    assert (cross.config.data.train, cross.config.data.dev, cross.config.seed.init) == ("X", "", 3)
    assert (cross.config.train.steps, cross.config.normalize) == (-1, False)
    assert (student.config.data.dev, student.config.train.steps, student.config.normalize) == ("Y", 7, True)
    assert student.config.loss.kl.weight == 2.0
    assert {stage.mining.match for stage in (cross, student) if stage.mining} == {"regex"}


FIRST: dict[str, Any] = {"name": "a", "mine": {"pools": ["bm25"]}}
SECOND = {"name": "b", "mine": {"pools": ["a"], "concat": ["a"]}, "teacher": "a", "config": {"loss.kl.weight": 1.0}}


@pytest.mark.slow
def test_the_digest_of_a_step_covers_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It covers everything that the result depends on, but not the paths of files."""
    data = write_data(tmp_path / "data", train=4, dev=2)
    shutil.copytree(data, tmp_path / "elsewhere" / "data")
    shutil.copytree(data, tmp_path / "renamed")

    def steps(on: Path = data, keys: Any = None, made: Any = None, split: str = "test", **setup: Any) -> dict[str, Any]:
        (tmp_path / "c.py").write_text(CONFIG.format(stages=[FIRST, SECOND]))
        stages = read_stages(str(tmp_path / "c.py"), {"data.train": str(data), **(keys or {})}, setup.get("match", ""))
        evaluated = EvaluationSetup(Corpus.open(on), EvaluationSource.open(on, on, split), **{"k": 10, **setup})
        recipe = _Recipe(tmp_path, {stage.name: stage for stage in stages}, evaluated, Ledger(tmp_path))
        recipe._outputs = {
            f"{name}.{step}": {"x.jsonl": "1"} for name in "ab" for step in ("mine", "score", "train", "encode")
        }
        recipe._outputs |= made or {}
        second = stages[1]
        encoding: list[Any] = []
        monkeypatch.setattr(recipe, "_run_step", lambda step, inputs, *_: encoding.append([step, inputs]))
        monkeypatch.setattr(recipe, "_write_lineage", lambda stage: None)
        monkeypatch.setattr(recipe, "_result_path", lambda stage: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recipe.run_stage(second)
        return {step.partition(".")[2]: json.dumps(inputs) for step, inputs in encoding}

    def differ(**changes: Any) -> set[str]:
        now = steps(**changes)
        return {step for step, inputs in steps().items() if inputs != now[step]}

    every = {"mine", "score", "train", "encode", "search"}
    assert set(steps()) == every
    assert differ(on=tmp_path / "elsewhere" / "data") == set()
    assert differ(on=tmp_path / "renamed") == {"encode", "search"}, "results and vectors have the name of the folder"
    assert differ(keys={"data.subset": 3}) == {"mine"}, "the subset is mined"
    assert differ(keys={"seed.data": 3}) == {"mine", "train"}
    assert differ(keys={"data.on_error": "skip"}) == {"mine", "score", "train"}
    assert differ(match="regex") == {"mine", "search"}
    assert differ(k=5) == differ(measures=("RR@5",)) == {"search"}
    assert differ(keys={"encode.dtype": "float16"}) == {"encode", "train"}
    assert differ(keys={"data.dev": str(data)}) == {"train"}
    assert differ(keys={"normalize": False}) == {"train"}, "the encoder's directory may no longer decide this"
    start = {"encoder.checkpoint": str(write_encoder(tmp_path / "encoder"))}
    before = steps(keys=start)
    (tmp_path / "encoder" / "tokenizer.json").write_text("{}")
    after = steps(keys=start)
    assert {step for step in every if before[step] != after[step]} == {"train"}
    assert differ(made={"a.mine": {"x.jsonl": "2"}}) == {"mine"}, "the digest covers the file of the step"
    assert differ(made={"a.mine": {"x.jsonl": "1", "x.parents.json": "2"}}) == set()
    assert differ(made={"a.encode": {"x": "2"}}) == {"mine", "score"}
    assert differ(made={"a.train": {"x": "2"}}) == {"score"}
    assert differ(made={"b.mine": {"x.jsonl": "2"}}) == {"score"}
    assert differ(made={"b.score": {"x.jsonl": "2"}}) == {"train"}
    assert differ(made={"b.train": {"x": "2"}}) == {"encode"}


def test_the_identity_of_a_stage_ignores_seeds(tmp_path: Path) -> None:
    """It covers everything except seeds, results of other seeds, and paths of files."""
    data, teacher = write_data(tmp_path / "data", train=4, dev=2), write_encoder(tmp_path / "teacher")
    shutil.copytree(data, tmp_path / "elsewhere" / "data")
    shutil.copytree(teacher, tmp_path / "elsewhere" / "teacher")
    folder = tmp_path / "two" / "a"
    folder.mkdir(parents=True)

    def lineage(keys: dict[str, Any], teacher: Path = teacher) -> str:
        stage = FIRST | {"teacher": str(teacher), "config": {"loss.kl.weight": 1.0}}
        (tmp_path / "c.py").write_text(CONFIG.format(stages=[stage]))
        (only_stage,) = read_stages(str(tmp_path / "c.py"), {"data.train": str(data), "data.dev": str(data), **keys})
        on = EvaluationSetup(Corpus.open(data), EvaluationSource.open(data, data))
        _Recipe(tmp_path / "two", {"a": only_stage}, on, Ledger(tmp_path))._write_lineage(only_stage)
        return read_json(folder / "lineage.json")["sha256"]

    first, moved = lineage({}), tmp_path / "elsewhere"
    assert first == lineage({"seed.init": 3, "seed.data": 3})
    assert first == lineage({"data.dev": str(moved / "data")}, moved / "teacher")
    assert first != lineage({"train.batch_size": 7})
    (moved / "teacher" / "tokenizer.json").write_text("{}")
    assert first != lineage({}, moved / "teacher"), "another teacher makes another stage"
    (moved / "data" / "qrels" / "dev.tsv").write_text((data / "qrels" / "test.tsv").read_text())
    assert first != lineage({"data.dev": str(moved / "data")}), "other queries select the best checkpoint"


def test_a_config_without_stages() -> None:
    with pytest.raises(ValueError, match=r"has no function stages\(\)"):
        read_stages("mvr", {})


@pytest.fixture
def two(tmp_path: Path) -> Callable[..., list[Any]]:
    """Return a function that runs a tiny recipe of two stages."""
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    (tmp_path / "c.py").write_text(CONFIG.format(stages=STAGES))
    flags = [flag.removeprefix("--config.").partition("=") for flag in train_arguments(encoder, data, tmp_path)[2:]]
    flag_keys = {key: _value(value) for key, _, value in flags}
    paths = {"queries": data, "qrels": data, "split": "test"}

    def run(on: dict[str, Any] | None = None, **changes: Any) -> list[Any]:
        values = {"k": 10, "measures": ("RR@10",), **paths, **(on or {})}
        source = EvaluationSource.open(**{key: values.pop(key) for key in paths})
        setup = EvaluationSetup(Corpus.open(data), source, **values)
        keys = flag_keys | {key.replace("__", "."): value for key, value in changes.items()}
        run_recipe(read_stages(str(tmp_path / "c.py"), keys), tmp_path / "two", setup)
        return sorted((tmp_path / "two" / "done").glob("*.json"))

    return run


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


@pytest.mark.parametrize(
    ("setup", "keys", "message"),
    [
        ({"measures": ("R@100",)}, {}, "R@100 needs --k=100 or more"),
        (
            {"qrels": "", "queries": "unanswered.jsonl"},
            {},
            r"unanswered.jsonl .*answers, .*measured",
        ),
        ({"qrels": "", "queries": "broken.qa.csv", "match": "regex"}, {}, r"'\(a' .*regular expression"),
        ({"split": "other"}, {}, r"qrels.*other"),
        ({}, {"optimizer__learning_rate": 0.0}, "optimizer.learning_rate is 0.0"),
        ({}, {"teacher": "nobody"}, r"teacher 'nobody' .*stage"),
    ],
)
def test_an_error_of_a_late_step_is_raised_first(
    setup: dict[str, Any],
    keys: dict[str, Any],
    message: str,
    two: Callable[..., list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unanswered.jsonl").write_text('{"_id": "q", "text": "which river"}\n')
    (tmp_path / "broken.qa.csv").write_text("which river\t['(a']\n")
    if teacher := keys.get("teacher"):
        (tmp_path / "c.py").write_text(
            (tmp_path / "c.py").read_text().replace('"teacher": "stage1"', f'"teacher": "{teacher}"')
        )
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        two(setup, **{key: value for key, value in keys.items() if key != "teacher"})
    assert not (tmp_path / "two").exists()


def write_records(path: str, passages: Mapping[str, str]) -> None:
    """Write a training record: the last passage is a negative, the others are positives, of which the second has a
    score."""
    texts: list[dict[str, Any]] = [{"docid": key, "text": text} for key, text in passages.items()]
    sides = {"positive_passages": texts[:-1], "negative_passages": [texts[-1] | {"score": 0}]}
    sides["positive_passages"][-1]["score"] = 1
    Path(path).write_text(json.dumps({"query_id": "q", "query": "river", **sides}) + "\n")


CROSS = {"name": "cross", "base": "cross_encoder", "mine": {"pools": ["bm25"]}}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"name": "b", "config": {"train.start_from": "nowhere"}},
            r"'b': train.start_from .*'nowhere', .*neither",
        ),
        (
            {"name": "b", "config": {"train.start_from": "a", "normalize": True}},
            "stage 'b': (.*\n)*.*normalize: (.*\n)*.*train.start_from",
        ),
        (
            {"name": "b", "config": {"encoder.checkpoint": "no/such"}},
            "stage 'b': encoder.checkpoint='no/such' is neither",
        ),
        (
            CROSS | {"config": {"tokens.packing": True}},
            r"'cross': tokens.packing .*True, .*'reranking' .*False",
        ),
        (
            {"name": "b", "config": {"loss.kl.weight": 1.0}},
            r"'b': loss.kl.weight .*teacher's",
        ),
        (
            {"name": "b", "config": {"loss.kl.weight": 1.0, "data.teacher_run": "ranks.tsv"}},
            r"'b': ranks.tsv: .*, .*teacher's",
        ),
        (
            {"name": "b", "teacher": "a", "config": {"loss.kl.weight": 1.0, "data.train": "other"}},
            "stage 'b': (.*\n)*.*sha256: (.*\n)*.*teacher 'a' scores by ids",
        ),
        (
            {"name": "b", "teacher": "a", "config": {"loss.kl.weight": 1.0, "data.train": "turned.jsonl"}},
            "stage 'b': the teacher 'a' scores by ids, but 3 of 3 passages .*'p0'",
        ),
        (
            {"name": "b", "teacher": "a", "config": {"loss.kl.weight": 1.0, "data.train": "absent.jsonl"}},
            "stage 'b': the teacher 'a' cannot score passage 'x', one of 1",
        ),
        (
            {"name": "b", "teacher": "a", "mine": {"pools": ["bm25"], "concat": ["data"]}}
            | {"config": {"loss.kl.weight": 1.0, "data.train": "turned.jsonl"}},
            "stage 'b': the teacher 'a' scores by ids, but 3 of 3 passages .*'p0'",
        ),
        ({"name": "b", "config": {"data.dev": "gone.jsonl"}}, "stage 'b': gone.jsonl"),
        ({"name": "b", "config": {"data.negatives_run": "gone.trec"}}, "stage 'b': gone.trec"),
        ({"name": "b", "config": {"data.pseudo_queries": "gone.jsonl"}}, "stage 'b': gone.jsonl"),
    ],
)
def test_an_error_of_a_late_stage_is_raised_before_the_first(
    stage: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder, data = write_encoder(Path("encoder")), write_data(Path("data"), train=4, dev=2)
    Path("ranks.tsv").write_text("".join(f"q0\tp{n}\t{n}\n" for n in range(1, 9)))
    write_data(Path("other"), train=4, dev=2, seed=1)
    write_records("turned.jsonl", {key: f"other {key}" for key in ("p0", "p1", "n0")})
    write_records("absent.jsonl", {"p0": "any", "x": "any"})
    small = {"encoder.checkpoint": str(encoder), "tokens.query_length": 12, "tokens.passage_length": 24}
    small |= {"data.train": str(data)}
    first, late = (one | {"config": {**small, "data.negatives": 1, **one.get("config", {})}} for one in (FIRST, stage))
    Path("c.py").write_text(CONFIG.format(stages=[first, late]))
    stages = read_stages("c.py", {})
    on = EvaluationSetup(Corpus.open(data), EvaluationSource.open(data, data), k=10, measures=("RR@10",))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_recipe(stages, tmp_path / "two", on)
    check_recipe(stages[:1], tmp_path / "two", on)


def test_a_stage_is_not_lengthened_under_its_vectors(
    two: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe trained first, and then stopped at the vectors of the shorter run."""
    (tmp_path / "c.py").write_text(CONFIG.format(stages=[{"name": "a"}]))
    two(train__steps=0, data__dev="")
    folder = tmp_path / "two" / "a" / "embeddings" / "data"

    def train(*_: Any, **__: Any) -> None:
        raise RuntimeError("the stage trains")

    monkeypatch.setattr("jaxret.experiments.recipes.run_recipe.train", train)
    longer: dict[str, Any] = {"train__steps": 2, "data__dev": ""}
    with pytest.raises(ValueError, match=rf"stage 'a': (.*\n)*.*steps: (.*\n)*Delete {folder}"):
        two(**longer)
    with pytest.raises(RuntimeError, match="trains"):  # the best of a dev set may stay the best
        two(**longer | {"data__dev": str(tmp_path / "data")})
    shutil.rmtree(folder)
    with pytest.raises(RuntimeError, match="trains"):
        two(**longer)


def test_a_teacher_outside_the_recipe_scores_no_other_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records contain their texts, so these are compared with the texts of the run's vectors before the first
    step."""
    monkeypatch.chdir(tmp_path)
    encoder, data = write_encoder(Path("encoder")), write_data(Path("data"), train=4, dev=2)
    run, corpus = untrained_run(Path("run"), encoder, data), Corpus.open(data)
    encode_corpus(run, corpus, progress=False)
    texts = {passage.id: passage.text for passage in islice(corpus.read(), 3)}
    write_records("own.jsonl", texts)
    write_records("turned.jsonl", {key: f"other {key}" for key in texts})
    write_records("absent.jsonl", {**texts, "x": "any"})
    small = {"encoder.checkpoint": str(encoder), "tokens.query_length": 12, "tokens.passage_length": 24}
    small |= {"data.negatives": 1, "loss.kl.weight": 1.0}
    on = EvaluationSetup(corpus, EvaluationSource.open(data, data), k=10, measures=("RR@10",))

    def check(records: str) -> None:
        stage = {"name": "a", "teacher": "run", "config": small | {"data.train": records}}
        Path("c.py").write_text(CONFIG.format(stages=[stage]))
        check_recipe(read_stages("c.py", {}), tmp_path / "one", on)

    check("own.jsonl")
    with pytest.raises(ValueError, match=r"stage 'a': the teacher 'run' .*3 of 3 passages"):
        check("turned.jsonl")
    with pytest.raises(ValueError, match=r"stage 'a': the teacher 'run' .*'x', one of 1"):
        check("absent.jsonl")


def test_valid_data_pass_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions without positives, whose negatives are mined from rankings; records with texts in a folder without a
    corpus; scores of a positive that is not the first."""
    monkeypatch.chdir(tmp_path)
    encoder, data = write_encoder(Path("encoder")), write_data(Path("data"), train=4, dev=2)
    Path("questions").mkdir()
    shutil.copy(data / "queries.jsonl", "questions")
    Path("records").mkdir()
    write_records("records/train.jsonl", {passage.id: passage.text for passage in islice(Corpus.open(data).read(), 3)})
    small = {"encoder.checkpoint": str(encoder), "tokens.query_length": 12, "tokens.passage_length": 24}
    small |= {"data.negatives": 1}
    taught = small | {"data.train": "records", "loss.kl.weight": 1.0}
    mined = {"pools": ["bm25"], "positives_from_retrieval": True}
    written = [
        {"name": "a", "mine": mined, "config": small | {"data.train": "questions"}},
        {"name": "b", "teacher": "a", "config": taught},
        {"name": "c", "config": taught},
    ]
    Path("c.py").write_text(CONFIG.format(stages=written))
    stages = read_stages("c.py", {})
    on = EvaluationSetup(Corpus.open(data), EvaluationSource.open(data, data), k=10, measures=("RR@10",))
    check_recipe(stages, tmp_path / "two", on)
    recipe = _Recipe(tmp_path / "two", {stage.name: stage for stage in stages}, on, Ledger(tmp_path))
    assert [name for name, _ in recipe._mining_inputs(stages[0])["data"]] == ["queries.jsonl"]
    (tmp_path / "two" / "a").mkdir(parents=True)
    recipe._write_lineage(stages[0])


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    """They are removed before the first stage."""
    data = write_data(tmp_path / "data", train=4, dev=2)
    left = [tmp_path / "run" / part / ".one.json.0123456789abcdef01234567.tmp" for part in ("mined", "done")]
    for path in left:
        path.parent.mkdir(parents=True)
        path.write_text("half")
    (tmp_path / "run" / "mined" / "one.jsonl").write_text("")
    with suppress(StopIteration):  # without a stage, there is no table
        run_recipe(
            [],
            tmp_path / "run",
            EvaluationSetup(Corpus.open(data), EvaluationSource.open(data, data), k=10, measures=("RR@10",)),
        )
    assert not any(path.exists() for path in left)
    assert (tmp_path / "run" / "mined" / "one.jsonl").exists()


def test_encoded_passages_count_only_with_their_vectors(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", train=4, dev=2)
    (tmp_path / "c.py").write_text(CONFIG.format(stages=[FIRST]))
    (stage,) = read_stages(str(tmp_path / "c.py"), {"data.train": str(data)})
    recipe = _Recipe(
        tmp_path,
        {"a": stage},
        EvaluationSetup(Corpus.open(data), EvaluationSource.open(data, data)),
        Ledger(tmp_path),
    )
    folder = tmp_path / "a" / "embeddings" / "data"
    writer = ShardWriter(folder, 4, 2, {"corpus": {"sha256": "ab", "passages": 4}})
    for shard in writer.shards:
        writer.write(shard, np.ones((2, 1, 3), np.float32), [f"p{shard.start}", f"p{shard.start + 1}"])
    assert not recipe._is_encoded(stage)
    writer.finish()
    assert recipe._is_encoded(stage)
    require_encoded(open_encoded(folder), Corpus.open(data), "ab", "")
    with pytest.raises(ContractError, match=r"data .*encoded .*SHA-256 .*x"):
        require_encoded(open_encoded(folder), Corpus.open(data), "cd", "x")
    vectors = writer.shards[1].array(folder, "vectors")
    whole = vectors.read_bytes()
    vectors.write_bytes(whole[:-1])
    assert not recipe._is_encoded(stage)
    vectors.unlink()
    assert not recipe._is_encoded(stage)
    vectors.write_bytes(whole)
    assert recipe._is_encoded(stage)
    write_parts(folder, [CorpusPart("", "0", 4).with_deleted([1])])
    assert not recipe._is_encoded(stage), "search would use the files that are left"


def test_vectors_that_a_step_finds_damaged_are_made_again(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", train=4, dev=2)
    (tmp_path / "c.py").write_text(CONFIG.format(stages=[{"name": "a"}, {"name": "b"}]))
    stages = {one.name: one for one in read_stages(str(tmp_path / "c.py"), {"data.train": str(data)})}
    ledger = Ledger(tmp_path)
    recipe = _Recipe(tmp_path, stages, EvaluationSetup(Corpus.open(data), EvaluationSource.open(data, data)), ledger)
    shards = {}
    for name in stages:
        folder = tmp_path / name / "embeddings" / "data"
        writer = ShardWriter(folder, 2, 2, {"corpus": {"sha256": "ab", "passages": 2}})
        writer.write(writer.shards[0], np.ones((2, 1, 3), np.float32), ["p0", "p1"])
        writer.finish()
        shards[name] = writer.shards[0].array(folder, "vectors")
        manifest = folder / "manifest.json"
        recipe._run_step(f"{name}.encode", 1, partial(list, [manifest]))

    def search() -> list[Path]:
        for name in stages:
            open_encoded(tmp_path / name / "embeddings" / "data", verify=True)
        raise AssertionError

    whole = shards["b"].read_bytes()
    shards["b"].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one bit is flipped, and the size is unchanged
    with pytest.raises(ShardError, match=r"damaged (.*\n)*Run .*b"):
        recipe._run_step("b.search", 1, search)
    assert (tmp_path / "done" / "a.encode.json").exists()
    assert not (tmp_path / "done" / "b.encode.json").exists()


def test_explicit_keys_override_the_encoders_directory(two: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text(CONFIG.format(stages=[{"name": "a"}]))
    encoder = str(write_modules(tmp_path / "modules", normalize=True))
    with pytest.raises(ValueError, match="normalize"):
        two(encoder__checkpoint=encoder, normalize=False)


@pytest.mark.exhaustive
def test_two_stages_run_to_the_table(
    two: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no dev set, because validation is part of training and tested there."""
    keys = {"train__steps": 2, "data__dev": ""}
    records = {path.stem: read_with_digest(path) for path in two(**keys)}
    steps = ["mine", "train", "encode", "search"]
    assert records.keys() == {"stage2.score", *(f"stage{n}.{step}" for n in (1, 2) for step in steps)}
    table = (tmp_path / "two" / "results.md").read_text()
    assert "| stage1 |" in table
    assert "| stage2 |" in table
    assert records["stage2.mine"]["inputs"]["pools"] == {"stage1": records["stage1.encode"]["files"]}
    for number in (1, 2):
        config = read_json(tmp_path / "two" / f"stage{number}" / "config.json")
        ending = ".scored.jsonl" if number == 2 else ".jsonl"
        assert config["data"]["train"] == str(tmp_path / "two" / "mined" / f"stage{number}{ending}")
        assert config["train"]["start_from"] == "", "training starts from the beginning"
        cost = read_json(tmp_path / "two" / f"stage{number}" / "eval" / "data.test.json")["cost"]
        assert cost["bytes_per_passage"] > 0
        assert {"encode_ms", "search_ms"} <= cost["latency"].keys()
    mined = [TrainingSource.open(tmp_path / "two" / "mined" / f"stage{number}.jsonl").read() for number in (1, 2)]
    assert [e.negatives for e in mined[0]] != [e.negatives for e in mined[1]]
    scored = TrainingSource.open(tmp_path / "two" / "mined" / "stage2.scored.jsonl").read()
    assert [(e.query.id, e.negatives) for e in scored] == [(e.query.id, e.negatives) for e in mined[1]]
    own = {e.query.id: dict(zip((p.id for p in e.negatives), e.negative_scores)) for e in mined[1] if e.negative_scores}
    assert own, "the teacher mines, so the scores are known"
    for e in scored:
        assert dict(zip((p.id for p in e.negatives), e.negative_scores)) == own.get(e.query.id, {}) or not e.negatives
    lineage = (tmp_path / "two" / "stage2" / "lineage.json").read_text()
    assert json.loads(lineage)["sha256"] in (tmp_path / "two" / "stage2" / "eval" / "data.test.json").read_text()
    capsys.readouterr()
    two(**keys)
    assert capsys.readouterr().out.count("already done") == 9
    assert lineage == (tmp_path / "two" / "stage2" / "lineage.json").read_text()
    with pytest.raises(ContractError, match=r"learning_rate: (.*\n)*Delete .*folder .*/stage1"):
        two(**keys, optimizer__learning_rate=0.5)
