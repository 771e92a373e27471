"""A command that writes a folder does not change one of another kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxret.data.formats import Corpus, DataSource, JudgementSource
from jaxret.data.formats.build_data_set import build_data_set
from jaxret.data.formats.convert import convert_data
from jaxret.data.split_judgements import write_judgement_sets
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_bm25 import search_bm25
from jaxret.export.export import export
from jaxret.export.import_model import import_model
from jaxret.runs.run import open_run
from jaxret.search.bm25_settings import BM25Settings
from jaxret.storage.buckets.copy_folder import copy_folder
from jaxret.storage.folder_kinds import (
    BM25_RESULTS,
    DATA_SET,
    GENERATED,
    JUDGEMENTS,
    MTEB,
    RECIPE,
    RUN,
    SWEEP,
    require_folder_kind,
    require_same_kind,
)
from jaxret.training.loop import train
from tests.pipeline import contents, tiny_config, untrained_run, write_data, write_encoder

MARKS = {
    RUN: "contract.json",
    SWEEP: "sweep.json",
    RECIPE: "done/encode.json",
    BM25_RESULTS: "bm25/data/manifest.json",
    DATA_SET: "passages/1.0.0/dataset_info.json",
    GENERATED: "generation.json",
    JUDGEMENTS: "qrels.set0.tsv",
    MTEB: "results/model/revision/SciFact.json",
}


def mark(folder: Path, kind: str) -> Path:
    """Create a folder of a kind, and return it."""
    (folder / MARKS[kind]).parent.mkdir(parents=True, exist_ok=True)
    (folder / MARKS[kind]).write_text("{}")
    return folder


@pytest.mark.parametrize("kind", MARKS)
def test_a_folder_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "it[1]"
    require_folder_kind(folder, kind)  # a missing folder, and an empty one
    (folder / MARKS[kind]).parent.mkdir(parents=True)
    require_folder_kind(folder, kind)
    mark(folder, kind)
    require_folder_kind(folder, kind)
    names = [MARKS[kind], "deeper/contract.json"]
    require_same_kind(names, names, "it")
    require_same_kind(names, ["deeper/contract.json"], "it")
    refusal = f" is {kind} (it has {MARKS[kind]}); give another folder"
    for other in MARKS.keys() - {kind}:
        with pytest.raises(FileExistsError, match=re.escape(f"{folder}{refusal}")):
            require_folder_kind(folder, other)
        with pytest.raises(FileExistsError, match=re.escape(f"it{refusal}")):
            require_same_kind([MARKS[other]], names, "it")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    untrained_run(folder / "run", write_encoder(folder / "encoder"), write_data(folder / "data"))
    return folder


MAKERS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {  # the kind of folder, and a call that writes it
    "train": (RUN, lambda root, it: train(tiny_config(root / "encoder", root / "data"), it, progress=False)),
    "data build": (DATA_SET, lambda root, it: build_data_set(DataSource.open(root / "data"), it, "1.0.0")),
    "data convert": ("", lambda root, it: convert_data(DataSource.open(root / "data"), it, "dpr")),
    "data split": (
        JUDGEMENTS,
        lambda root, it: write_judgement_sets(
            JudgementSource.open(root / "data", "train"), JudgementSource.open(root / "data", "test"), str(it)
        ),
    ),
    "bm25": (
        BM25_RESULTS,
        lambda root, it: search_bm25(
            str(it),
            Corpus.open(root / "data"),
            EvaluationSource.open(root / "data"),
            BM25Settings(),
            EvaluationOptions(),
            False,
        ),
    ),
    "export": ("", lambda root, it: export(root / "run", "sentence-transformers", it)),
    "open": ("", lambda root, it: import_model(str(root / "encoder"), it)),
    "copy": (RUN, lambda root, it: copy_folder(str(root / "run"), str(it))),
    "encode, search, index, beir, probe": (RUN, lambda root, it: open_run(it)),
}


@pytest.mark.table
@pytest.mark.parametrize("verb", MAKERS)
def test_a_command_leaves_a_folder_of_another_kind_as_it_is(verb: str, root: Path, tmp_path: Path) -> None:
    makes, make = MAKERS[verb]
    for number, kind in enumerate(MARKS.keys() - {makes}):
        folder = mark(tmp_path / f"it{number}", kind)
        with pytest.raises(FileExistsError, match=rf"it{number} (is|exists) "):
            make(root, folder)
        assert contents(folder) == {MARKS[kind]: b"{}"}


def test_a_copy_continues_in_a_folder_of_its_kind(root: Path, tmp_path: Path) -> None:
    copy_folder(str(root / "run"), str(tmp_path / "copy"))
    (tmp_path / "copy" / "data.json").unlink()
    copy_folder(str(root / "run"), str(tmp_path / "copy"))
    assert contents(tmp_path / "copy").keys() == {n for n in contents(root / "run") if not n.startswith(".")}


def write_files(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


OPENED = {"contract.json": "c", "config.json": "one", "checkpoints/0/x": "0"}
TRAINED = OPENED | {"metrics.jsonl": "a\nb\n", "checkpoints/4/x": "4"}
SWEPT = {"sweep.json": "s", "t=1/run/metrics.jsonl": "a\n", "t=1/run/contract.json": "c"}
OTHERS = {  # (source, destination, a file of both by which they are different)
    "trained": (TRAINED, TRAINED | {"metrics.jsonl": "x\nb\n", "checkpoints/8/x": "8"}, "metrics.jsonl"),
    "opened": (OPENED, OPENED | {"config.json": "two"}, "config.json"),
    "trained over opened": (TRAINED, OPENED | {"config.json": "two"}, "config.json"),
    "a run of a sweep": (SWEPT, SWEPT | {"t=1/run/metrics.jsonl": "x\n"}, "t=1/run/metrics.jsonl"),
    "sweep": (SWEPT, SWEPT | {"sweep.json": "other"}, "sweep.json"),
    "generated": ({"generation.json": "a"}, {"generation.json": "b"}, "generation.json"),
    "a part": (TRAINED, {"checkpoints/8/x": "8"}, "checkpoints/8/x"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_copy_over_another_of_its_kind_is_refused(name: str, tmp_path: Path) -> None:
    source, destination, file = OTHERS[name]
    write_files(tmp_path / "one", source)
    write_files(tmp_path / "other", destination)
    before = contents(tmp_path / "other")
    refusal = f"other has files of another source ({file}); give another folder, or remove it"
    with pytest.raises(FileExistsError, match=re.escape(refusal)):
        copy_folder(str(tmp_path / "one"), str(tmp_path / "other"))
    assert contents(tmp_path / "other") == before


@pytest.mark.parametrize(
    "destination",
    [
        {},
        {"notes.txt": "mine"},
        {"checkpoints/0/x": "0"},
        {"checkpoints/0/x": "damaged"},
        {"checkpoints/0/x": "0", "config.json": "one", "contract.json": "c"},
        OPENED,
        TRAINED,
        TRAINED | {"config.json": "fewer steps", "metrics.jsonl": "a\n", "checkpoints/2/x": "2"},
    ],
)
def test_a_copy_continues_an_earlier_one(destination: dict[str, str], tmp_path: Path) -> None:
    write_files(tmp_path / "one", TRAINED)
    write_files(tmp_path / "copy", destination)
    copy_folder(str(tmp_path / "one"), str(tmp_path / "copy"))
    expected = {name: text.encode() for name, text in {**destination, **TRAINED}.items()}
    assert contents(tmp_path / "copy") == expected


def test_copies_of_two_data_sets_are_not_mixed(tmp_path: Path) -> None:
    write_files(tmp_path / "one", {"corpus.jsonl": "one", "qrels/test.tsv": "same"})
    write_files(tmp_path / "copy", {"corpus.jsonl": "other", "qrels/test.tsv": "same", "qrels/dev.tsv": "other"})
    before = contents(tmp_path / "copy")
    refusal = "copy has other bytes in corpus.jsonl, and files that the source lacks, such as qrels/dev.tsv"
    with pytest.raises(FileExistsError, match=refusal):
        copy_folder(str(tmp_path / "one"), str(tmp_path / "copy"))
    assert contents(tmp_path / "copy") == before
    write_files(tmp_path / "one", {"qrels/dev.tsv": "new"})  # no file of the other folder would remain
    copy_folder(str(tmp_path / "one"), str(tmp_path / "copy"))
    assert contents(tmp_path / "copy") == contents(tmp_path / "one")
    (tmp_path / "one" / "qrels" / "dev.tsv").unlink()  # the folders are equal
    copy_folder(str(tmp_path / "one"), str(tmp_path / "copy"))
