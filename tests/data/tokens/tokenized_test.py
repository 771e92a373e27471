"""Tokens from a store equal those of the tokenizer, and the text is read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data import lines
from jaxret.data.formats import (
    Corpus,
    DataError,
    Policy,
    TrainingSource,
    write_beir,
    write_dpr_examples,
    write_run,
)
from jaxret.data.records import Judgement, Passage, Query
from jaxret.data.tokens.batches import BatchPlan, TrainingSet, tokenize_examples
from jaxret.data.tokens.known_positives import KnownPositives
from jaxret.data.tokens.tokenized import (
    ExampleSource,
    load_or_tokenize_corpus,
    load_or_tokenize_examples,
    load_tokenized_corpus,
)
from jaxret.data.tokens.tokenizer import TextTokenizer, Truncation
from jaxret.training.examples import load_examples
from jaxret.types import Ragged
from tests.data.tokens.batches_test import same
from tests.pipeline import PASSAGE_LENGTH, QUERY_LENGTH, contents, tiny_config, write_data, write_encoder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with encoder/, a BEIR folder data/, dpr.json, run.trec and imagined.jsonl."""
    folder = tmp_path_factory.mktemp("tokenized")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    write_dpr_examples(folder / "dpr.json", TrainingSource.open(folder / "data", "train").read())
    write_run(folder / "run.trec", {f"q{i}": [(f"n{i + 1}", 2.0), (f"p{i}", 1.0)] for i in range(30)}, "tag")
    rows = [f'{{"_id": "p{i}", "text": "music {i}"}}\n' for i in range(0, 30, 2)]
    (folder / "imagined.jsonl").write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> TextTokenizer:
    return TextTokenizer.load(root / "encoder", QUERY_LENGTH, PASSAGE_LENGTH)


def quiet(_: str) -> None:
    pass


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the text is read again")


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, KnownPositives):
        return equal(one.sets, two.sets) and equal(one.rows, two.rows)
    if isinstance(one, Ragged):
        return np.array_equal(one.flat, two.flat) and np.array_equal(one.offsets, two.offsets)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    return tuple(one) == tuple(two) if isinstance(one, tuple) else one == two


@pytest.mark.parametrize(
    "changes", [{}, {"negatives_run": "run.trec"}, {"pseudo_queries": "imagined.jsonl"}, {"path": "dpr.json"}]
)
def test_a_stored_training_set_equals_one_tokenized_from_text(
    changes: dict[str, Any], root: Path, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: dict[str, Any] = {"path": "data"} | changes
    places: dict[str, Any] = {key: str(root / name) for key, name in paths.items()}
    source = ExampleSource(split="train", on_error="error", **places)
    examples = TrainingSource.open(source.path, "train", source.negatives_run or None).read()
    imagined = {f"p{i}": f"music {i}" for i in range(0, 30, 2)} if source.pseudo_queries else None
    expected = tokenize_examples(examples, tokenizer, pseudo_queries=imagined)
    made, _ = load_or_tokenize_examples(source, tokenizer, tmp_path, False, quiet)
    monkeypatch.setattr(TrainingSource, "read", refuse)
    again, _ = load_or_tokenize_examples(source, tokenizer, tmp_path, False, quiet)
    plan = BatchPlan(8, 1, 4, QUERY_LENGTH, PASSAGE_LENGTH, pseudo_length=4)
    for actual in (made, again):
        for field in fields(TrainingSet):
            one, two = getattr(expected, field.name), getattr(actual, field.name)
            assert equal(one, tuple(two) if field.name == "query_ids" else two), field.name
        assert same(plan.training_batch(actual, 3), plan.training_batch(expected, 3))
    other = tokenize_examples(examples[::-1], tokenizer, pseudo_queries=imagined)
    assert not equal(other.queries, made.queries)  # control: another order of examples differs
    assert other.digest != made.digest


@pytest.mark.slow
def test_positives_of_a_query_are_stored_once(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """Each positive is an example, but the query's set of positives is stored once, so that the store grows
    linearly."""
    queries = [Query(f"q{number}", "silver river") for number in range(4)]
    sizes = []
    for count in (100, 400):
        passages = {f"p{number}": Passage(f"p{number}", "stone music") for number in range(count)}
        judgements = [Judgement("q0", key, 1) for key in passages]
        judgements += [Judgement(query.id, "p1", 1) for query in queries[1:]]
        write_beir(tmp_path / str(count), passages.values(), queries, {"train": judgements})
        said: list[str] = []
        source, root = ExampleSource(str(tmp_path / str(count)), "train", "error"), tmp_path / f"store{count}"
        data, _ = load_or_tokenize_examples(source, tokenizer, root, False, said.append)
        sizes.append(sum(path.stat().st_size for path in root.rglob("*.npy")))
        assert len(data) == count + 3
        assert sorted(data.known_positives[0]) == list(range(count))
        assert data.known_positives[count].tolist() == [1]
        table = data.known_positives.table(np.array([0, count, -1]))
        assert table.shape == (3, count)
        assert table[1:].tolist() == [[1, *[-1] * (count - 1)], [-1] * count]
        assert data.truncations[0].texts == 4, "a query counts once"
    small, large = sizes
    assert large < 4 * small, "a table of positives would be sixteen times as large"
    assert large < 150 * 400


def test_pseudo_queries_have_no_markers(root: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    source = ExampleSource(str(root / "data"), "train", "error")
    data, _ = load_or_tokenize_examples(source, tokenizer, tmp_path, False, quiet)
    bare = [[id for id in query.tolist() if id not in tokenizer.marker_ids] for query in data.queries]
    assert [query.tolist() for query in data.queries_without_markers] == bare
    assert bare[0] != data.queries[0].tolist()  # control: a query has markers


def test_messages_are_repeated_from_the_store(
    root: Path, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path / "data")
    with open(tmp_path / "data" / "qrels" / "train.tsv", "a") as file:
        file.write("nobody\tp1\t1\n")
    config = tiny_config(
        root / "encoder", tmp_path / "data", data__on_error="skip", data__store=str(tmp_path / "stores")
    )
    config.data.negatives = 2
    short = replace(tokenizer, passage_length=8)
    first: list[str] = []
    load_examples(config, "train", short, False, first.append)
    monkeypatch.setattr(TrainingSource, "read", refuse)
    second: list[str] = []
    load_examples(config, "train", short, False, second.append)
    assert second == first[1:]
    assert first[0].startswith(f"tokens of data.train are kept in {tmp_path}/stores/data.train-")
    message = "\n".join(second)
    for part in (
        "train: 48 examples",
        "passages: ",
        "fewer than 2 hard negatives",
        "skipped 1 record: 1 unknown query id",
    ):
        assert part in message
    assert " 0.0% cut" not in second[2]


def test_bytes_do_not_depend_on_the_number_of_threads(
    root: Path, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ExampleSource(str(root / "data"), "train", "error")
    actual = []
    for threads in ("false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
        load_or_tokenize_examples(source, tokenizer, tmp_path / threads, False, quiet)
        actual.append(contents(tmp_path / threads))
    assert actual[0] == actual[1]


def test_every_file_that_is_read_is_checked_for_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers open no other file, so a change in any file is noticed."""
    read, opened = lines.read_chunks, set()

    def reading(path: Path, *rest: Any) -> Iterator[bytes]:
        opened.add(path)
        return read(path, *rest)

    monkeypatch.setattr(lines, "read_chunks", reading)
    for path, run in (("data", None), ("data", "run.trec"), ("dpr.json", None)):
        opened.clear()
        arguments: dict[str, Any] = {"negatives_run": None if run is None else root / run}
        TrainingSource.open(root / path, "train", **arguments).read()
        assert opened == set(TrainingSource.open(root / path, "train", **arguments).files)
    assert len(TrainingSource.open(root / "data", "train").files) == 4  # qrels, queries, corpus, answers


def test_missing_files(root: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    source = ExampleSource(str(root / "data"), "train", "error")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"path": str(root / "nowhere")}, "nowhere: this file does not exist"),
        ({"split": "nosplit"}, r"nosplit\.tsv: neither this file"),
        ({"negatives_run": str(root / "no.trec")}, r"no\.trec: this file does not exist"),
        ({"pseudo_queries": str(root / "no.jsonl")}, r"no\.jsonl: this file does not exist"),
    ]
    for change, message in cases:
        with pytest.raises(DataError, match=message):
            load_or_tokenize_examples(replace(source, **change), tokenizer, tmp_path, False, quiet)
    assert not list(tmp_path.iterdir())


def test_a_split_without_examples_is_named(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    (data / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n")
    source = ExampleSource(str(data), "dev", "error")
    with pytest.raises(DataError, match=r"training example.*'dev'"):
        load_or_tokenize_examples(source, tokenizer, tmp_path / "store", False, quiet)


def test_a_file_without_examples_is_named(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    source = ExampleSource(str(tmp_path / "empty.jsonl"), "train", "error")
    with pytest.raises(DataError, match=r"empty\.jsonl: .*training example"):
        load_or_tokenize_examples(source, tokenizer, tmp_path / "store", False, quiet)


def test_a_stored_corpus_equals_one_tokenized_from_text(root: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    corpus, policy = tmp_path / "corpus.jsonl", Policy("skip")
    lines = (root / "data" / "corpus.jsonl").read_text().splitlines()
    # One bad line, and one repeated id.
    corpus.write_text("\n".join([*lines[:5], "{broken", lines[2], *lines[5:]]) + "\n")
    scan, cut = Corpus.open(corpus).scan(policy), Truncation("passages", PASSAGE_LENGTH)
    passages = list(Corpus.open(corpus).read(Policy("skip")))
    expected = tokenizer.passages(passages, truncation=cut)
    assert load_tokenized_corpus(Corpus.open(corpus), policy, tokenizer, tmp_path / "stores") is None
    made = load_or_tokenize_corpus(Corpus.open(corpus), scan, policy, tokenizer, tmp_path / "stores", False, quiet)
    again = load_tokenized_corpus(Corpus.open(corpus), policy, tokenizer, tmp_path / "stores")
    assert again is not None
    for actual in (made, again):
        assert equal(actual.passages, expected)
        assert list(actual.ids) == [passage.id for passage in passages]
        assert (actual.scan.passages, actual.scan.sha256, actual.scan.stat) == (len(passages), scan.sha256, scan.stat)
        assert (actual.truncation, actual.report) == (cut, policy.report())
    assert "skipped 2 records" in again.report
    assert (
        load_tokenized_corpus(Corpus.open(corpus), policy, replace(tokenizer, passage_length=8), tmp_path / "stores")
        is None
    )
    assert (
        load_tokenized_corpus(Corpus.open(corpus), policy, replace(tokenizer, query_length=8), tmp_path / "stores")
        is not None
    )
    assert load_tokenized_corpus(Corpus.open(corpus), Policy(), tokenizer, tmp_path / "stores") is None


def test_the_store_depends_on_the_tokenizer(root: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """The settings include everything that changes the ids of a text."""
    other = TextTokenizer.load(write_encoder(tmp_path / "encoder"), QUERY_LENGTH, PASSAGE_LENGTH)
    settings = tokenizer.settings("query", "passage")
    assert other.settings("query", "passage") == settings
    other.backend.add_tokens(["more"])
    changes: dict[str, Any] = {field.name: 90 for field in fields(TextTokenizer)} | {"backend": other.backend}
    changes |= dict.fromkeys(("query_prompt", "passage_prompt", "title_separator", "task"), "river ")
    changes |= {"expand_queries": True, "skip_prompt": True, "ends_texts": False}
    for name, value in changes.items():
        assert replace(tokenizer, **{name: value}).settings("query", "passage") != settings, name
    assert tokenizer.settings("passage") != replace(tokenizer, passage_length=9).settings("passage")
    assert tokenizer.settings("passage") == replace(tokenizer, query_length=9).settings("passage")
    assert tokenizer.settings("passage") != replace(tokenizer, title_separator=" ").settings("passage")
    assert tokenizer.settings("passage") == replace(tokenizer, query_prompt="river ").settings("passage")
    assert not {"query_prompt", "passage_prompt", "title_separator"} & settings.keys()  # existing stores remain valid
    assert tokenizer.passages([Passage("1", "river", "stone")])[0].tolist()  # the original is unchanged
