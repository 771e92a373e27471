"""Conversion to another format and back gives the same records, except fields that the other format lacks, which are
counted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import (
    Corpus,
    DataSource,
    JudgementSource,
    QuerySource,
    RankingSource,
    TrainingSource,
    write_beir,
    write_run,
)
from jaxret.data.formats.convert import FOLDERS, Conversion, convert_data
from jaxret.data.formats.detect import FORMATS, FORMATS_BY_NAME
from jaxret.data.formats.example_writers import make_tevatron_record
from jaxret.data.formats.format import DataFile, content_id
from jaxret.data.formats.writers import WRITERS
from jaxret.data.lines import PathLike
from jaxret.data.records import Example, Judgement, Passage, Query

NASTY = ['say "hi" \\n', "naïve café 東京 🎉", "line\u2028separator", "{'x'}, [y]", "plain text"]


def convert(source: PathLike, *arguments: Any, **options: Any) -> Conversion:
    return convert_data(DataSource.open(source), *arguments, **options)


def detect(source: PathLike, role: str = "") -> DataFile:
    return DataSource.open(source).file(role)


def passage(text: str, title: str = "") -> Passage:
    return Passage(content_id(text, title), text, title)


def examples(scores: bool = False, titles: bool = False, ids: bool = True, answers: bool = False) -> list[Example]:
    """Five examples, with two or three positives and two negatives each."""
    result = []
    for i, text in enumerate(NASTY):
        texts = [passage(f"{text} {i} {j}", "a title" * titles) for j in range(4 + i % 2)]
        if ids:
            texts = [replace(one, id=f"p{i}-{j}") for j, one in enumerate(texts)]
        query = Query(f"q{i}" if ids else str(i), f"{text} query", (text,) * answers)
        numbers = tuple(1.5 - j for j in range(len(texts))) if scores else ()
        result.append(Example(query, tuple(texts[:-2]), tuple(texts[-2:]), numbers[:-2], numbers[-2:]))
    return result


def written(path: Path, name: str, originals: list[Example]) -> Counter[str]:
    return +WRITERS[name]["examples"](path, originals)


# Format of training files -> the fields of examples that it has.
HOLDS: dict[str, dict[str, bool]] = {
    "dpr.examples": {"titles": True, "answers": True},
    "tevatron.examples": {"titles": True, "answers": True, "scores": True},
    "tevatron.first": {"titles": True, "answers": True, "scores": True},
    "flag.examples": {"scores": True, "ids": False},
    "st.tuples": {"scores": True, "ids": False},
    "msmarco.triples": {"ids": False},
}


@pytest.mark.parametrize("name", HOLDS)
@pytest.mark.parametrize("other", HOLDS)
def test_training_files_round_trip(name: str, other: str, tmp_path: Path) -> None:
    both = {key: all(HOLDS[one].get(key, key == "ids") for one in (name, other)) for key in ("titles", "scores", "ids")}
    both["answers"] = HOLDS[name].get("answers", False) and HOLDS[other].get("answers", False)
    originals = examples(**both)
    if "dpr.examples" in (name, other):  # DPR's queries have no ids
        originals = [replace(e, query=replace(e.query, id=str(i))) for i, e in enumerate(originals)]
    # One row for each positive with each negative: ids belong to rows.
    if {name, other} & {"st.tuples", "msmarco.triples"}:
        originals = [replace(e, query=replace(e.query, id="")) for e in originals]
        write = [replace(e, query=replace(e.query, id=str(i))) for i, e in enumerate(originals)]
    else:
        write = originals
    assert not written(tmp_path / "a", name, write)
    assert detect(tmp_path / "a").format.name == name
    done = convert(tmp_path / "a", tmp_path / "b", other)
    assert detect(tmp_path / "b").format.name == other
    changed = {kind for kind in +done.losses if "targets" in kind}
    assert bool(changed) == (FORMATS_BY_NAME[name].every_positive != FORMATS_BY_NAME[other].every_positive)
    assert not set(+done.losses) - {"queries' ids"} - changed, str(done)
    assert f"{len(originals)} in {tmp_path / 'b'}" in str(done)
    convert(tmp_path / "b", tmp_path / "c", name)
    for path in ("a", "b", "c"):
        copies = TrainingSource.open(tmp_path / path).read(targets=False)
        if {name, other} & {"st.tuples", "msmarco.triples"}:
            copies = [replace(e, query=replace(e.query, id="")) for e in copies]
        assert copies == originals, path
    if not {name, other} & {"st.tuples", "msmarco.triples"}:
        assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("dpr.examples", {"queries' ids": 5, "scores": 22}),
        ("tevatron.examples", {}),
        (
            "flag.examples",
            {"queries' ids": 5, "queries' answers": 5, "titles (joined to the texts)": 22, "passages' ids": 22},
        ),
        (
            "msmarco.triples",
            {
                "queries' ids": 5,
                "queries' answers": 5,
                "scores": 22,
                "titles (joined to the texts)": 22,
                "passages' ids": 22,
            },
        ),
    ],
)
def test_lost_values_are_counted(name: str, lost: dict[str, int], tmp_path: Path) -> None:
    assert written(tmp_path / "a", name, examples(scores=True, titles=True, answers=True)) == lost


def test_scores_that_triplets_cannot_hold_are_counted(tmp_path: Path) -> None:
    """A triplet has scores for both passages or for neither."""
    first, second = examples(scores=True)[:2]
    nobody = (math.nan,) * len(second.negatives)
    originals = [first, replace(second, negative_scores=nobody)]
    lost = written(tmp_path / "a", "st.tuples", originals)
    assert lost["scores in records without one on the other side"] == len(second.positives)
    assert sum(e.score_count for e in TrainingSource.open(tmp_path / "a").read(targets=False)) == first.score_count
    late = replace(first, negative_scores=(math.nan, *first.negative_scores[1:]))
    assert written(tmp_path / "a", "st.tuples", [late])["scores in records without one on the other side"] == 0
    (example,) = TrainingSource.open(tmp_path / "a").read(targets=False)
    assert example.score_count == late.score_count, "also if the first row of a passage has no scores"
    alone = [replace(e, negatives=(), negative_scores=()) for e in originals]
    lost = written(tmp_path / "b", "st.tuples", alone)
    assert lost["scores in records without one on the other side"] == sum(len(e.positives) for e in originals)


def test_texts_with_tabs_are_refused_in_tables(tmp_path: Path) -> None:
    texts = [Passage("1", "a\tb\nc"), Passage("2", "d", "title")]
    write_beir(tmp_path / "data", texts, [Query("q", "a", ("x",))], {})
    done = convert(tmp_path / "data", tmp_path / "collection.tsv.gz", "msmarco.texts", role="passages")
    assert +done.losses == {"texts with tabs or line ends": 1, "titles (joined to the texts)": 1}
    assert list(Corpus.open(tmp_path / "collection.tsv.gz").read()) == [Passage("1", "a b c"), Passage("2", "title d")]
    assert "not held: " in str(done)
    assert +convert(tmp_path / "data", tmp_path / "q", "msmarco.texts", role="queries").losses == {
        "queries' answers": 1
    }


ONE = Example(Query("0", "question"), (passage("good"),), (passage("bad"),))
FIELDS: dict[str, dict[str, Any]] = {  # role -> field -> a record with this field
    "passages": {
        "id": Passage("p7", "good"),
        "title": passage("good", "a title"),
        "quotes": passage('"good"'),
    },
    "queries": {
        "id": Query("q7", "question"),
        "answers": Query("0", "question", ("an answer",)),
        "instruction": Query("0", "question", instruction="find songs"),
    },
}
FIELDS["examples"] = {
    **{f"query's {field}": replace(ONE, query=query) for field, query in FIELDS["queries"].items()},
    **{f"positive's {field}": replace(ONE, positives=(one,)) for field, one in FIELDS["passages"].items()},
    "no negatives": replace(ONE, negatives=()),
    "several positives": replace(ONE, positives=(*ONE.positives, passage("better"))),
    "scores": replace(ONE, positive_scores=(2.5,), negative_scores=(0.5,)),
    "score of one": replace(ONE, positive_scores=(2.5,), negative_scores=(math.nan,)),
}


@pytest.mark.parametrize(
    ("name", "role", "field"),
    [(name, role, field) for name, roles in WRITERS.items() for role in roles for field in FIELDS.get(role, ())],
)
def test_each_field_is_held_or_counted(name: str, role: str, field: str, tmp_path: Path) -> None:
    record = FIELDS[role][field]
    texts = [*record.positives, *record.negatives] if role == "examples" else []
    # Formats with ids read the texts of this folder.
    write_beir(tmp_path, texts, [replace(record.query, instruction="")] if texts else [], {})
    losses = WRITERS[name][role](tmp_path / "written", [record])
    source = f"{name}:{tmp_path / 'written'}"
    readers: dict[str, Any] = {"passages": Corpus, "queries": QuerySource, "examples": TrainingSource}
    copies = list(readers[role].open(source).read(**({"targets": False} if role == "examples" else {})))
    assert copies == [record] or any(losses.values())


@pytest.mark.parametrize("name", [*FOLDERS, *(name for name, roles in WRITERS.items() if "examples" in roles)])
def test_targets_stay_or_are_counted(name: str, tmp_path: Path) -> None:
    """A DPR record has its first positive as its target, however many it has."""
    one, folder = replace(ONE, positives=(*ONE.positives, passage("better"))), tmp_path / "folder"
    write_beir(folder, [*one.positives, *one.negatives], [one.query], {})
    WRITERS["dpr.examples"]["examples"](folder / "train.json", [one])
    source = folder if name in FOLDERS else folder / "train.json"
    made = folder.parent / "made" if name in FOLDERS else folder / "train.jsonl"
    done = convert(source, made, name)
    kept = len(TrainingSource.open(made if name in FOLDERS else f"{name}:{made}", "train").read()) == 1
    assert kept == (name in ("dpr", "dpr.examples", "tevatron.first"))
    assert sum(count for kind, count in done.losses.items() if "targets" in kind) == (not kept)


def test_a_tevatron_folder_holds_answers_and_instructions(tmp_path: Path) -> None:
    query = Query("q", "question", ("an answer",), "find songs")
    write_beir(tmp_path / "given", [passage("good")], [query], {"train": [Judgement("q", passage("good").id, 1)]})
    assert not +convert(tmp_path / "given", tmp_path / "made", "tevatron").losses
    assert QuerySource.open(tmp_path / "made").read() == [query]
    assert [one.query for one in TrainingSource.open(tmp_path / "made", "train").read()] == [query]
    lost = convert(tmp_path / "given", tmp_path / "dpr", "dpr").losses
    assert +lost == {"queries' ids": 1, "queries' instructions": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BEIR folder with three splits, titles, a query with two relevant passages, and a judgement of 0."""
    passages = [Passage(f"p{i}", f"{NASTY[i % 5]} {i}", "title" * (i % 2)) for i in range(12)]
    queries = [Query(f"q{i}", f"{NASTY[i]} asked") for i in range(5)]
    judged = {
        "train": [
            Judgement("q0", "p0", 1),
            Judgement("q0", "p1", 1),
            Judgement("q0", "p2", 0),
            Judgement("q1", "p3", 1),
        ],
        "dev": [Judgement("q2", "p4", 1), Judgement("q3", "p5", 1)],
        "test": [Judgement("q4", "p6", 1)],
    }
    write_beir(tmp_path / "source", passages, queries, judged)
    return tmp_path / "source"


@pytest.mark.parametrize("name", ["beir", "msmarco", "tevatron"])
def test_folders_round_trip(name: str, folder: Path, tmp_path: Path) -> None:
    done = convert(folder, tmp_path / name, name)
    if name == "msmarco":
        assert set(+done.losses) == {"titles (joined to the texts)"}
        assert [(p.id, p.text.removeprefix("title ")) for p in Corpus.open(tmp_path / name).read()] == [
            (p.id, p.text) for p in Corpus.open(folder).read()
        ]
    else:
        assert not +done.losses
        assert list(Corpus.open(tmp_path / name).read()) == list(Corpus.open(folder).read())
    convert(tmp_path / name, tmp_path / "back", "beir")
    assert sorted(q.id for q in QuerySource.open(tmp_path / "back").read()) == [
        q.id for q in QuerySource.open(folder).read()
    ]
    for split in ("train", "dev", "test"):
        judged = set(JudgementSource.open(folder, split).read())
        assert set(JudgementSource.open(tmp_path / "back", split).read()) == judged
        assert {j for j in JudgementSource.open(tmp_path / name, split).read() if j.relevance > 0} == {
            j for j in judged if j.relevance > 0
        }
        ids = [
            [
                (e.query.id, [p.id for p in e.positives], [p.id for p in e.negatives])
                for e in TrainingSource.open(one, split).read()
            ]
            for one in (folder, tmp_path / name, tmp_path / "back")
        ]
        assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("beir", {}),
        ("msmarco", {"titles (joined to the texts)": 6, "queries without judgements": 1}),
        ("tevatron", {"grades above 1": 1, "judgements of what is in no training record": 1}),
        (
            "dpr",
            {
                "queries' ids": 6,  # five queries, one of them in two splits
                "queries without judgements": 1,
                "grades above 1": 1,
                "judgements of what is in no training record": 1,
                "further positives as targets of records (now only the first is a target)": 1,
            },
        ),
    ],
)
def test_values_lost_in_a_folder_are_counted(name: str, lost: dict[str, int], folder: Path, tmp_path: Path) -> None:
    lines = (folder / "queries.jsonl").read_text()
    (folder / "queries.jsonl").write_text(lines + '{"_id": "q5", "text": "nobody judged this"}\n')
    (folder / "qrels" / "test.tsv").write_text("q4\tp6\t2\nq3\tp7\t0\n")
    done = convert(folder, tmp_path / name, name)
    assert dict(+done.losses) == lost


def test_judgements_come_before_training_records(folder: Path, tmp_path: Path) -> None:
    (folder / "qrels" / "train.tsv").write_text("q0\tp0\t3\nq0\tp2\t0\n")
    record = {
        "query_id": "q0",
        "query_text": None,
        "positive_document_ids": ["p0"],
        "negative_document_ids": ["p9", "p2"],
    }
    (folder / "train.jsonl").write_text(json.dumps(record) + "\n")
    judged = [Judgement("q0", "p0", 3), Judgement("q0", "p2", 0)]
    assert JudgementSource.open(folder, "train").read() == judged
    assert [p.id for p in TrainingSource.open(folder, "train").read()[0].negatives] == ["p9", "p2"]
    done = convert(folder, tmp_path / "beir", "beir")
    assert JudgementSource.open(tmp_path / "beir", "train").read() == judged
    assert +done.losses == {"passages of training records that nobody judged": 1}
    assert (+convert(folder, tmp_path / "ms", "msmarco").losses)["passages of training records that nobody judged"] == 1
    assert (+convert(folder, tmp_path / "tevatron", "tevatron").losses)["grades above 1"] == 1


@pytest.mark.slow
def test_a_parquet_file_that_begins_with_empty_lists(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install pyarrow")
    rows = [{"query": f"q {i}", "pos": [f"good {i}"], "neg": []} for i in range(1500)]
    rows += [{"query": "last", "pos": ["good"], "neg": ["bad"]}]
    (tmp_path / "a").write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(tmp_path / "a", tmp_path / "b.parquet", "flag.examples")
    assert TrainingSource.open(tmp_path / "b.parquet").read() == TrainingSource.open(tmp_path / "a").read()
    convert(f"flag.examples:{tmp_path / 'a'}", tmp_path / "none.parquet", "flag.examples")


def test_a_parquet_file_whose_passages_have_scores_late(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install pyarrow")
    without, scored = examples()[0], examples(scores=True)[0]
    for count, originals in ((1023, [*[without] * 1023, scored]), (1024, [*[without] * 1024, scored])):
        rows = [
            json.dumps(make_tevatron_record(replace(one, query=replace(one.query, id=str(number)))))
            for number, one in enumerate(originals)
        ]
        (tmp_path / "given.jsonl").write_text("\n".join(rows) + "\n")
        if count == 1024:  # the columns of the Parquet file are fixed after 1,024 rows
            with pytest.raises(DataError, match="'score'"):
                convert(tmp_path / "given.jsonl", tmp_path / "late.parquet", "tevatron.examples")
            assert not (tmp_path / "late.parquet").exists()
        else:
            convert(tmp_path / "given.jsonl", tmp_path / "early.parquet", "tevatron.examples")
            assert TrainingSource.open(tmp_path / "early.parquet").read()[-1].score_count == scored.score_count


def test_a_folder_as_dpr_and_a_training_file_as_a_folder(folder: Path, tmp_path: Path) -> None:
    done = convert(folder, tmp_path / "dpr", "dpr")
    assert done.records["train.json"] == 2
    assert list(Corpus.open(tmp_path / "dpr").read()) == list(Corpus.open(folder).read())
    texts = [
        [(e.query.text, e.positives, e.negatives) for e in TrainingSource.open(one, "train").read(targets=False)]
        for one in (folder, tmp_path / "dpr")
    ]
    assert texts[0] == texts[1]
    originals = examples(scores=True, ids=False)
    written(tmp_path / "flag.jsonl", "flag.examples", originals)
    done = convert(tmp_path / "flag.jsonl", tmp_path / "new", "beir", split="train")
    assert +done.losses == {"scores": 22}
    assert TrainingSource.open(tmp_path / "new", "train").read(targets=False) == examples(ids=False)


def test_rankings_and_judgements_round_trip(tmp_path: Path) -> None:
    run = {"q1": [("p1", 2.5), ("p2", 1.25)], "q2": [(f"p{i}", 9.5 - i) for i in range(1, 8)]}
    write_run(tmp_path / "a", run, "t")
    for name in ("trec.run", "tevatron.run"):
        convert(tmp_path / "a", tmp_path / "b", name)
        assert detect(tmp_path / "b").format.name == name
        assert RankingSource.open(tmp_path / "b").read() == run
    done = convert(tmp_path / "a", tmp_path / "b", "msmarco.run")
    assert +done.losses == {"scores": 9}
    assert [key for key, _ in RankingSource.open(f"msmarco.run:{tmp_path / 'b'}").read()["q2"]] == [
        key for key, _ in run["q2"]
    ]
    (tmp_path / "qrels").write_text("q1 0 p1 3\nq1 0 p2 0\nq2 0 p1 1\n")
    for name in ("trec.qrels", "beir.qrels", "st.labels"):
        convert(tmp_path / "qrels", tmp_path / "b", name)
        assert detect(tmp_path / "b").format.name == name
        assert JudgementSource.open(tmp_path / "b").read() == JudgementSource.open(tmp_path / "qrels").read()


@pytest.mark.parametrize("name", sorted(name for name, writers in WRITERS.items() if "passages" in writers))
def test_corpora_and_queries_round_trip(name: str, folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "a", name, role="passages")
    assert detect(tmp_path / "a", "passages").format.name == name
    texts = [(p.id, p.text.removeprefix("title ")) for p in Corpus.open(tmp_path / "a").read()]
    assert texts == [(p.id, p.text) for p in Corpus.open(folder).read()]


@pytest.mark.parametrize("name", ["beir.texts", "msmarco.texts", "tevatron.queries"])
def test_queries_round_trip(name: str, folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "a", name, role="queries")
    assert detect(tmp_path / "a", "queries").format.name == name
    assert QuerySource.open(tmp_path / "a").read() == QuerySource.open(folder).read()


@pytest.mark.parametrize("end", [".gz", ".zst", ".parquet"])
def test_other_containers(end: str, tmp_path: Path) -> None:
    if end == ".parquet":
        pytest.importorskip("pyarrow", reason="pip install pyarrow")
    if end == ".zst":
        pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    originals = examples(scores=True, ids=False)
    written(tmp_path / "a", "flag.examples", originals)
    convert(tmp_path / "a", tmp_path / f"b{end}", "flag.examples")
    assert (tmp_path / f"b{end}").read_bytes() != (tmp_path / "a").read_bytes()
    assert TrainingSource.open(tmp_path / f"b{end}").read(targets=False) == originals


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_does_not_hold_the_scores_of_pairs(name: str, tmp_path: Path) -> None:
    pairs = [{"anchor": "a river", "positive": text, "score": score} for text, score in (("stone", 0.5), ("sea", 0.25))]
    (tmp_path / "a").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert convert(tmp_path / "a", tmp_path / "b", name).losses["queries' rankings"] == 1
    written(tmp_path / "c", "st.tuples", examples(ids=False))
    assert not convert(tmp_path / "c", tmp_path / "d", name).losses["queries' rankings"]  # control: no rankings


def test_unsupported_targets_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("q1 0 p1 1\n{\n")
    with pytest.raises(ValueError, match=r"--to=brr: .*format .*written"):
        convert(tmp_path / "a", tmp_path / "b", "brr")
    with pytest.raises(ValueError, match=r"judgements, .*trec\.run .*rankings"):
        convert(tmp_path / "a", tmp_path / "b", "trec.run")
    with pytest.raises(DataError, match=r"a:2: this line has 1 columns"):
        convert(tmp_path / "a", tmp_path / "b", "trec.qrels")
    assert not (tmp_path / "b").exists()
    policy = Policy("skip")
    assert convert(tmp_path / "a", tmp_path / "b", "trec.qrels", policy=policy).records == {str(tmp_path / "b"): 1}
    assert policy.skip_counts == {"wrong columns": 1}


def test_a_source_without_records_is_an_error(tmp_path: Path) -> None:
    for name in ("corpus.jsonl", "queries.jsonl", "ranks.tsv"):
        (tmp_path / name).touch()
    for source, name in (
        ("corpus.jsonl", "tevatron.corpus"),
        ("beir.texts:corpus.jsonl", "beir.texts"),
        ("trec.run:ranks.tsv", "msmarco.run"),
        ("", "beir"),
    ):
        kind, _, file = source.rpartition(":")
        path = tmp_path / file
        with pytest.raises(DataError, match="no records") as error:
            convert(f"{kind}:{path}" if kind else path, tmp_path / "out", name)
        assert error.value.location.path == path
    (tmp_path / "corpus.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"no records.*corpus\.jsonl:1"):
        convert(f"beir.texts:{tmp_path}/corpus.jsonl", tmp_path / "out", "tevatron.corpus", policy=Policy("skip"))
    assert not (tmp_path / "out").exists()


def test_formats_that_can_be_written() -> None:
    """The formats of six families. Other formats of these are search results with texts, or scores of pairs."""
    families = {"beir", "tevatron", "dpr", "msmarco", "st", "flag", "trec"}
    formats = {one.name for one in FORMATS if one.name.partition(".")[0] in families}
    assert formats - {"dpr.results", "msmarco.candidates", "st.scored"} == WRITERS.keys()
    assert set(FOLDERS) == {"beir", "msmarco", "tevatron", "dpr"}


@pytest.mark.parametrize("name", ["beir", "msmarco", "tevatron", "dpr"])
def test_a_folder_is_complete_or_absent(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is killed after any file, the folder does not exist, and the same command works; an existing data set is
    not overwritten."""
    rename, left = os.replace, [0]  # renames that are left before the process is killed

    def killed(one: Any, other: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        rename(one, other)

    monkeypatch.setattr(os, "replace", killed)
    kills = 0
    while not (tmp_path / "out").exists():
        left[0] = kills
        with contextlib.suppress(KeyboardInterrupt):
            convert(folder, tmp_path / "out", name)
        kills += 1
    assert kills > 3, "the data set has several files"
    assert list(Corpus.open(tmp_path / "out").read())
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match=f"{tmp_path}/out exists already"):
        convert(folder, tmp_path / "out", name)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
