"""`data build` writes a TFDS data set from any source; reading it gives the records of the source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import (
    Corpus,
    DataSource,
    JudgementSource,
    QuerySource,
    TrainingSource,
    list_files,
    open_role,
    source_exists,
    source_path,
    write_beir,
)
from jaxret.data.formats import build_data_set as build_module
from jaxret.data.formats.build_data_set import build_data_set
from jaxret.data.formats.built_records import BuiltExamples
from jaxret.data.formats.convert import Conversion
from jaxret.data.lines import PathLike
from jaxret.data.records import Judgement, Passage, Query
from jaxret.data.tokens.store import StoreOrigin
from jaxret.storage.lockfile import LockedError

pytest.importorskip("tensorflow_datasets", reason="the extra `data` has tensorflow-datasets and array_record")

PASSAGES = [Passage(f"p{i}", f"naïve café 東京 🎉 {i}", "a title" * (i % 2)) for i in range(7)]
QUERIES = [
    Query("q1", "what is it", ("an answer", "another")),
    Query("q2", "who", instruction="find people"),
    Query("q3", "nobody asked"),
]
JUDGED = {
    "dev": [Judgement("q1", "p1", 2), Judgement("q1", "p2", 0)],
    "test": [Judgement("q2", "p3", 1), Judgement("q2", "p6", -1)],
}
RECORDS: list[dict[str, Any]] = [
    {
        "query": "one",
        "pos": ["naïve café 東京 🎉 0"],
        "neg": ["not in the corpus"],
        "pos_scores": [2.5],
        "neg_scores": [0.125],
        "prompt": "find numbers",
    },
    {"query": "two", "pos": ["good", "better"], "neg": [], "pos_scores": [1, 2]},
]


def build(source: PathLike, *arguments: Any, **options: Any) -> Conversion:
    return build_data_set(DataSource.open(source), *arguments, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BEIR folder with judgements of dev and test, and training records with scores; most of their texts are not in
    the corpus."""
    write_beir(tmp_path / "given", PASSAGES, QUERIES, JUDGED)
    (tmp_path / "given" / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    return tmp_path / "given"


@pytest.fixture
def built(folder: Path) -> Path:
    build(folder, folder.parent / "made", "1.0.0")
    return folder.parent / "made"


@pytest.mark.slow
def test_a_built_set_has_the_records_of_its_source(folder: Path, built: Path) -> None:
    assert list(Corpus.open(built).read()) == list(Corpus.open(f"tfds:{built}").read()) == PASSAGES
    assert QuerySource.open(built).read() == QUERIES
    assert JudgementSource.open(built, "dev").read() == JUDGED["dev"]
    assert JudgementSource.open(built, "test").read() == JUDGED["test"]
    expected = {split: TrainingSource.open(folder, split).read() for split in ("train", "dev", "test")}
    assert {split: TrainingSource.open(built, split).read() for split in expected} == expected
    assert expected["train"] != expected["dev"] != expected["test"]
    assert TrainingSource.open(built, "train").read(targets=False) == TrainingSource.open(folder, "train").read(
        targets=False
    )
    assert open_role(DataSource.open(built), "passages").describe() == "BEIR corpus, table passages/full of made 1.0.0"
    assert (
        JudgementSource.open(f"tfds:{built}/test", "dev").read() == JUDGED["test"]
    )  # a split in the name takes precedence over the config


def test_built_records_are_counted(folder: Path) -> None:
    done = build(folder, folder.parent / "made", "1.0.0")
    assert done.records == {
        "passages/full": 7,
        "other_passages/full": 4,
        "queries/full": 3,
        "judgements/dev": 2,
        "judgements/test": 2,
        "judgements/train": 4,
        "examples/train": 2,
    }
    assert not +done.losses
    (folder / "train.jsonl").write_text(json.dumps({**RECORDS[0], "pos_scores": [0.1]}) + "\n")
    done = build(folder, folder.parent / "made", "1.0.1")
    assert +done.losses == {"digits of scores that float32 does not have": 1}
    assert TrainingSource.open(folder.parent / "made", "train").read()[0].positive_scores[0] == pytest.approx(
        0.1, rel=1e-7
    )


def test_examples_are_read_by_number(folder: Path, built: Path) -> None:
    expected = TrainingSource.open(folder, "train").read(targets=False)
    built_examples = BuiltExamples(Path(f"tfds:{built}/examples/train"))
    assert len(built_examples) == 2
    assert [built_examples[1], built_examples[0], built_examples[-1]] == [expected[1], expected[0], expected[1]]
    assert built_examples[0] != expected[1]
    assert built_examples[0:2] == list(built_examples) == expected
    assert (built_examples[0].positive_scores, built_examples[0].negative_scores) == ((2.5,), (0.125,))
    with pytest.raises(IndexError):
        built_examples[2]


def test_examples_refer_to_rows_of_the_corpus(folder: Path) -> None:
    record = {"query_id": "q1", "positive_document_ids": ["p5"], "negative_document_ids": ["p0", "p6"]}
    (folder / "train.jsonl").write_text(json.dumps(record) + "\n")
    made = folder.parent / "made"
    assert "other_passages/full" not in build(folder, made, "1.0.0").records
    (example,) = BuiltExamples(Path(f"tfds:{made}/examples/train"))
    assert (example.positives, example.negatives) == ((PASSAGES[5],), (PASSAGES[0], PASSAGES[6]))
    assert TrainingSource.open(made, "train").read(targets=False) == [example]


def test_dpr_records_keep_the_first_positive_as_target(tmp_path: Path) -> None:
    contexts = [{"title": "t", "text": f"text {i}", "passage_id": str(i)} for i in range(3)]
    records = [{"question": "a", "answers": ["x"], "positive_ctxs": contexts[:2], "hard_negative_ctxs": contexts[2:]}]
    (tmp_path / "dpr.json").write_text(json.dumps(records))
    build(tmp_path / "dpr.json", tmp_path / "made", "1.0.0", "train")
    assert TrainingSource.open(tmp_path / "made", "train").read() == TrainingSource.open(tmp_path / "dpr.json").read()
    assert len(TrainingSource.open(tmp_path / "made", "train").read()) == 1


def test_versions(folder: Path, built: Path) -> None:
    with pytest.raises(ValueError, match=r"version 1\.0\.0 .*\(it .*1\.0\.0\); .*--version"):
        build(folder, built, "1.0.0")
    write_beir(folder, PASSAGES[:6], QUERIES, {"dev": JUDGED["dev"]})
    build(folder, built, "1.9.0", policy=Policy("skip"))
    write_beir(folder, PASSAGES[:5], QUERIES, {"dev": JUDGED["dev"]})
    build(folder, built, "1.10.0", policy=Policy("skip"))
    assert list(Corpus.open(built).read()) == PASSAGES[:5]
    assert list(Corpus.open(f"tfds:{built}:1.0.0").read()) == PASSAGES
    with pytest.raises(DataError, match=r"version 2\.0\.0; .*1\.0\.0, 1\.9\.0, 1\.10\.0"):
        list(Corpus.open(f"tfds:{built}:2.0.0").read())


def test_an_unfinished_version_is_ignored(folder: Path, built: Path) -> None:
    write_beir(folder, PASSAGES[:3], QUERIES, {"test": JUDGED["test"][:1]})
    build(folder, built, "1.1.0")
    (built / "passages" / "1.1.0").rename(folder / "away")  # the passages come last
    assert list(Corpus.open(built).read()) == PASSAGES
    assert JudgementSource.open(built, "test").read() == JUDGED["test"]


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("Made", "1.0.0", "lowercase letters, digits and _"),
        ("made", "1.0", r"--version=1.0: .*version .*TFDS"),
    ],
)
def test_invalid_names_and_versions(name: str, version: str, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build(folder, folder.parent / name, version)
    (folder / "qrels" / "trec.dl.tsv").write_text("q1\tp1\t1\n")
    with pytest.raises(ValueError, match=r"TFDS .*named 'trec\.dl'"):
        build(folder, folder.parent / "made", "1.0.0")


def test_files_with_and_without_passages(folder: Path) -> None:
    made = folder.parent / "made"
    assert build(folder / "corpus.jsonl", made, "1.0.0").records == {"passages/full": 7}
    assert list(Corpus.open(made).read()) == PASSAGES
    with pytest.raises(ValueError, match=r"dev\.tsv .*3 .*judgements"):
        build(folder / "qrels" / "dev.tsv", made, "2.0.0")
    with pytest.raises(ValueError, match=r"queries\.jsonl .*BEIR .*, .*queries"):
        build(folder / "queries.jsonl", made, "2.0.0")
    assert [path.name for path in (made / "passages").iterdir()] == ["1.0.0"]


def test_nothing_is_written_after_a_bad_record(folder: Path) -> None:
    with open(folder / "corpus.jsonl", "a") as file:
        file.write('{"_id": "p0", "text": "again"}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl:8: passage id 'p0' was used before"):
        build(folder, folder.parent / "made", "1.0.0")
    assert [path.name for path in folder.parent.iterdir()] == ["given"]


def test_a_set_is_detected_by_its_files(built: Path) -> None:
    files = TrainingSource.open(built, "train").files
    assert {file.parent.parent.name for file in files} == {"examples", "passages", "other_passages"}
    record = next(file for file in files if "array_record" in file.name)
    before = StoreOrigin("made", tuple(files), {}).state()
    scan, stat = Corpus.open(built).scan(), Corpus.open(built).stat()
    assert StoreOrigin("made", tuple(files), {}).changed(before) is None
    assert stat["bytes"] == sum(file.stat().st_size for file in list_files(source_path(built) / "passages" / "full"))
    data = bytearray(record.read_bytes())
    data[len(data) // 2] ^= 1
    record.write_bytes(data)
    assert StoreOrigin("made", tuple(files), {}).changed(before) == record
    assert scan.passages == 7
    assert Corpus.open(built).stat() == stat or "passages" not in str(record)


def test_a_damaged_record_is_named(built: Path) -> None:
    (record,) = (built / "passages" / "1.0.0").glob("*array_record*")
    record.write_bytes(record.read_bytes()[:-70])
    with pytest.raises(DataError, match=r"passages/1\.0\.0: TFDS cannot read it"):
        list(Corpus.open(built).read())


def test_missing_tables_are_errors(built: Path) -> None:
    with pytest.raises(DataError, match=r"1\.0\.0 .*TFDS .*nothing; .*examples/train"):
        QuerySource.open(f"tfds:{built}/nothing").read()
    with pytest.raises(DataError, match=r"examples .*tables"):
        JudgementSource.open(built, "other").read()
    with pytest.raises(DataError, match=r"folder .*TFDS; .*VERSION"):
        QuerySource.open(f"tfds:{built.parent}/none").read()
    assert source_exists(built)
    assert not source_exists(f"tfds:{built}x")


def test_names(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(built.parent))
    assert JudgementSource.open("tfds:made", "dev").read() == JUDGED["dev"]
    assert JudgementSource.open("tfds:made:1.0.0/judgements/test").read() == JUDGED["test"]
    sources = ("tfds:made/test", built, f"tfds:{built}")
    assert [DataSource.open(source).name for source in sources] == ["made-test", "made", "made"]
    assert DataSource.open(f"tfds:{built}/test").name == "made-test"
    assert DataSource.open("tfds:made").absolute == "tfds:made"
    monkeypatch.chdir(built.parent)
    assert DataSource.open("made").absolute == DataSource.open(built).absolute == f"tfds:{built}"
    with pytest.raises(DataError, match=r"TFDS .*'wiki' .*nothing .*-c"):
        QuerySource.open("tfds:wiki/train").read()


def test_only_array_record_is_read(built: Path) -> None:
    path = built / "queries" / "1.0.0" / "dataset_info.json"
    path.write_text(path.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(DataError, match=r"tfrecord, .*TensorFlow .*file_format"):
        QuerySource.open(built).read()


def test_reading_imports_no_tensorflow_and_prints_nothing(folder: Path) -> None:
    made = folder.parent / "made"
    code = f"""if True:
        import sys
        sys.argv = ["jaxret", "data", "build", {str(folder)!r}, {str(made)!r}, "--version=2.0.0"]
        from jaxret.__main__ import main
        main()
        from jaxret.data.formats import Corpus
        assert len(list(Corpus.open({str(made)!r}).read())) == 7
        assert "tensorflow_datasets" in sys.modules
        assert "tensorflow" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    message = "BEIR corpus, JSON lines: 7 in passages/full, 4 in other_passages/full, 3 in queries/full, "
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(message)


@pytest.mark.parametrize("place", range(1, 5))
def test_a_killed_build_starts_again(place: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build succeeds, even from a source without training records: no table of the killed build is left."""
    replace, calls = os.replace, []

    def killed(one: Any, other: Any) -> None:
        if Path(other).name == "1.0.0":
            calls.append(other)
            if len(calls) == place:
                raise KeyboardInterrupt
        replace(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            build(folder, tmp_path / "made", "1.0.0")
    assert len(list((tmp_path / "made").glob("*/1.0.0"))) == place - 1
    write_beir(tmp_path / "other", PASSAGES[:3], QUERIES[:2], {"test": [Judgement("q2", "p2", 1)]})
    build(tmp_path / "other", tmp_path / "made", "1.0.0")
    assert list(Corpus.open(tmp_path / "made").read()) == PASSAGES[:3]
    assert JudgementSource.open(tmp_path / "made", "test").read() == [Judgement("q2", "p2", 1)]
    tables = sorted(path.parent.name for path in (tmp_path / "made").glob("*/1.0.0"))
    assert tables == ["judgements", "passages", "queries"]
    assert not [path.name for path in tmp_path.rglob(".*")]


def test_a_refused_build_removes_the_lock_of_a_killed_one(
    folder: Path, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from jaxret.storage.lockfile import FolderLock
        FolderLock(Path(sys.argv[1]), "building a data set")
        os._exit(9)"""
    assert subprocess.run([sys.executable, "-c", code, str(built)], check=False).returncode == 9
    (built.parent / f".{built.name}.{'0' * 24}.tmp").mkdir()
    os.utime(built.parent / f".{built.name}.{'0' * 24}.tmp", (0, 0))
    assert sorted(path.name for path in built.glob(".*")) == [".lock", ".lock.json"]
    with pytest.raises(ValueError, match=r"has version 1\.0\.0 already"):
        build(folder, built, "1.0.0")
    assert "that process is gone: taken over" in capsys.readouterr().err
    assert not [path.name for path in built.parent.rglob(".*")]


def test_a_second_build_of_one_folder_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second build is refused before it does any work, and the first one finishes normally."""
    write, refused = build_module.tfds.write_tfds_table, []

    def then(*args: Any) -> None:
        with pytest.raises(LockedError, match="building a data set") as error:
            build(folder, tmp_path / "made", "1.0.0")
        refused.append(error)
        write(*args)

    monkeypatch.setattr(build_module.tfds, "write_tfds_table", then)
    build(folder, tmp_path / "made", "1.0.0")
    assert refused
    assert list(Corpus.open(tmp_path / "made").read()) == PASSAGES


def test_a_failed_build_leaves_no_files(tmp_path: Path) -> None:
    write_beir(tmp_path / "none", [], QUERIES, {"test": []})
    with pytest.raises(ValueError, match="has no passage"):
        build(tmp_path / "none", tmp_path / "made", "1.0.0")
    assert [path.name for path in tmp_path.iterdir()] == ["none"]
    with pytest.raises(ValueError, match=r"FOLDER=.*: .*none/typo; .*correct"):
        build(tmp_path / "none", tmp_path / "none" / "typo" / "made", "1.0.0")
