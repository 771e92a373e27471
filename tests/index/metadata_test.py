"""Filters by metadata: they apply before the search, exactly; and the fields that they may name."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.data.records import Query
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import append_corpus, delete_passages
from jaxret.index.metadata import frequent_values
from jaxret.index.metadata_filters import Filter, matching_rows
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run, open_run
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.serving.filter_searchers import FilterSearchers
from jaxret.storage.atomic import read_json, read_with_digest, with_digest, write_json
from tests.pipeline import WORDS, untrained_run, write_data, write_encoder

COLOURS = ("red", "green", "a:b")


def record(i: int) -> dict[str, Any]:
    """Return a record with every kind of metadata. Every seventh has no metadata, and every eleventh is not a
    passage."""
    fields: dict[str, Any] = {"_id": f"p{i}", "title": WORDS[i % 7], "text": f"{WORDS[i % 18]} {WORDS[(i * 5) % 18]}"}
    if i % 7:
        own = {"colour": COLOURS[i % 3], "year": 2000 + i % 2, "tags": ["x", f"t{i % 4}"], "deep": {"er": i % 5 == 0}}
        fields |= {"metadata": own | {"none": None, "": "", "long": "y" * 300, "a:b": "c"}, "source": f"s{i % 2}"}
    return fields if i % 11 else fields | {"text": 3}


RECORDS = [record(i) for i in range(1, 90)]
KEPT = [one for one in RECORDS if one["text"] != 3]


def having(test: Any) -> list[str]:
    return [one["_id"] for one in KEPT if "metadata" in one and test(one["metadata"])]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metadata")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    untrained_run(folder / "run", folder / "encoder", folder / "data", head__token="mean", normalize=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*RECORDS, RECORDS[4]]))
    return folder


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    return open_run(root / "run")


@pytest.fixture(scope="module")
def folder(root: Path, run: Run) -> Path:
    return encode_corpus(
        run, Corpus.open(root / "corpus.jsonl"), options=EncodeOptions(on_error="skip", shard_rows=20), progress=False
    ).folder


@pytest.mark.table
@pytest.mark.parametrize(
    ("filters", "test"),
    [
        (["colour:red", "year:2001"], lambda m: m["colour"] == "red" and m["year"] == 2001),
        (["colour:red"], lambda m: m["colour"] == "red"),
        (["colour:a:b"], lambda m: m["colour"] == "a:b"),
        (["a:b:c"], lambda m: True),
        (["colour:red", "colour:green"], lambda m: m["colour"] in ("red", "green")),
        (["tags:t3", "tags:t1", "deep.er:true"], lambda m: m["tags"][1] in ("t1", "t3") and m["deep"]["er"]),
        (["source:s1", "year:2000"], None),
    ],
)
def test_a_filter_is_exact(filters: list[str], test: Any, run: Run, folder: Path) -> None:
    """The result equals that of a corpus of only the matching passages, down to the last one."""
    if test is None:
        with pytest.raises(ValueError, match=r"passage .*source:s1 year:2000"):
            Searcher(run, folder, SearchOptions("xla", filters=tuple(filters)))
        return
    ids = having(test)
    encoded_corpus = open_encoded(folder)
    rows = matching_rows(encoded_corpus, filters)
    assert encoded_corpus.ids(rows) == ids
    whole = Searcher(run, folder, SearchOptions("xla")).search([Query("0", "river stone")], len(KEPT)).rankings["0"]
    expected = [(key, score) for key, score in whole if key in ids]
    for k in (3, len(KEPT)):
        assert (
            Searcher(run, folder, SearchOptions("xla", filters=tuple(filters)))
            .search([Query("0", "river stone")], k)
            .rankings["0"]
            == expected[:k]
        )
    assert expected[:3] != whole[:3]  # control: they are not the best of all passages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour", "FIELD:VALUE, .*'FIELD>=BOUND'"),
        ("size:3", r"passage .*'size'; .*a:b, .*deep.er"),
        ("title:river", r"passage .*'title'; .*fields"),
        ("none:x", "no passage has a field 'none'"),
        ("long:" + "y" * 300, "no passage has a field 'long'"),
        (
            "colour:blue",
            r"passage .*'(red|green|a:b)', '(red|green|a:b)', '(red|green|a:b)'$",
        ),
        ("tags:t9", r"tags is 'x', 't"),
    ],
)
def test_unknown_fields_and_values_are_errors_that_list_existing_ones(
    text: str, message: str, run: Run, folder: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Searcher(run, folder, SearchOptions("xla", filters=(text,)))


def test_metadata_are_written_once_and_repaired(root: Path, run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "data")
    shutil.copyfile(root / "corpus.jsonl", tmp_path / "corpus.jsonl")
    expected = matching_rows(open_encoded(tmp_path / "data"), ["colour:red"]).tolist()
    column = tmp_path / "data" / "metadata" / "1.rows.flat.npy"
    good, made = column.read_bytes(), column.stat().st_mtime_ns
    assert matching_rows(open_encoded(tmp_path / "data"), ["colour:red"]).tolist() == expected
    assert column.stat().st_mtime_ns == made
    column.write_bytes(good[:-8] + b"\1" + good[-7:])
    assert matching_rows(open_encoded(tmp_path / "data"), ["colour:red"]).tolist() == expected
    assert column.read_bytes() == good
    manifest = tmp_path / "data" / "metadata" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("colour", "column"))
    assert matching_rows(open_encoded(tmp_path / "data"), ["colour:red"]).tolist() == expected
    written = read_with_digest(manifest)
    others = {"corpus": "f" * 64, "fields": written["fields"][::-1]}
    write_json(manifest, with_digest(written | others))  # the index of another corpus
    assert matching_rows(open_encoded(tmp_path / "data"), ["colour:red"]).tolist() == expected
    assert read_with_digest(manifest) == written


def test_the_corpus_file_is_read_once(root: Path, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    shutil.copyfile(root / "corpus.jsonl", path)
    folder = encode_corpus(run, Corpus.open(path), "once", EncodeOptions(on_error="skip"), progress=False).folder
    path.rename(tmp_path / "away.jsonl")
    with pytest.raises(FileNotFoundError, match="no longer at"):
        Searcher(run, folder, SearchOptions("xla", filters=("colour:red",)))
    path.write_text('{"_id": "p1", "text": "another"}\n')
    with pytest.raises(ContractError):
        Searcher(run, folder, SearchOptions("xla", filters=("colour:red",)))
    (tmp_path / "away.jsonl").rename(path)
    rows = matching_rows(open_encoded(folder), ["colour:red"]).tolist()
    path.unlink()
    assert matching_rows(open_encoded(folder), ["colour:red"]).tolist() == rows


def test_a_field_with_a_colon_hides_no_value_of_a_shorter_field(run: Run, tmp_path: Path) -> None:
    """A `Filter` is matched exactly. FIELD:VALUE uses the longest field name."""
    fields = [{"a": "b:c"}, {"a:b": "c"}]
    records = [{"_id": f"p{row}", "text": "river", "metadata": values} for row, values in enumerate(fields)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    encoded_corpus = open_encoded(encode_corpus(run, Corpus.open(path), "colons", progress=False).folder)
    assert matching_rows(encoded_corpus, [Filter("a", ":", "b:c")]).tolist() == [0]
    assert matching_rows(encoded_corpus, [Filter("a:b", ":", "c")]).tolist() == [1]
    assert matching_rows(encoded_corpus, ["a:b:c"]).tolist() == [1]
    filters = FilterSearchers(Searcher(run, encoded_corpus.folder, SearchOptions("xla")))
    assert filters.open({"a": "b:c"}).encoded_corpus.ids([0]) == ["p0"]


def test_a_vector_is_not_a_list_of_values(run: Run, tmp_path: Path) -> None:
    """A table of passages may have a column of vectors, each with as many numbers as a model has dimensions."""
    metadata = {"vector": [1, 0.5] * 17, "sizes": [1, 0.5] * 16, "tags": [f"t{n}" for n in range(40)]}
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"_id": "p0", "text": "river", "metadata": metadata}) + "\n")
    encoded_corpus = open_encoded(encode_corpus(run, Corpus.open(path), "vectors", progress=False).folder)
    assert matching_rows(encoded_corpus, ["tags:t39", "sizes:0.5"]).tolist() == [0]
    with pytest.raises(ValueError, match=r"the fields are sizes, tags$"):
        matching_rows(encoded_corpus, ["vector:0.5"])


@pytest.mark.parametrize(("on_error", "expected"), [("keep", ["p1", "p3"]), ("skip", ["p2", "p3"])])
def test_an_empty_passage_has_metadata_if_it_was_encoded(
    on_error: str, expected: list[str], run: Run, tmp_path: Path
) -> None:
    """Under "skip", a later record with a text and the same id is the passage, not the empty record."""
    records = [
        {"_id": "p1", "text": " ", "metadata": {"colour": "red"}},
        {"_id": "p2", "text": "river", "metadata": {"colour": "red" if on_error == "skip" else "green"}},
        {"_id": "p3", "text": "stone", "metadata": {"colour": "red"}},
        *([{"_id": "p1", "text": "music", "metadata": {"colour": "green"}}] if on_error == "skip" else []),
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    encoding = EncodeOptions(on_error=on_error)
    encoded_corpus = open_encoded(encode_corpus(run, Corpus.open(path), on_error, encoding, progress=False).folder)
    assert encoded_corpus.total_rows == 3
    assert encoded_corpus.ids(matching_rows(encoded_corpus, ["colour:red"])) == expected


def test_parts_and_deleted_passages(root: Path, run: Run, tmp_path: Path) -> None:
    for name, part in {"x": RECORDS[:40], "y": RECORDS[40:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in part))
    folder = encode_corpus(
        run, Corpus.open(tmp_path / "x.jsonl"), options=EncodeOptions(on_error="skip"), progress=False
    ).folder
    append_corpus(run, Corpus.open(tmp_path / "y.jsonl"), folder, EncodeOptions(on_error="skip"), progress=False)
    expected = having(lambda m: m["colour"] == "red")
    (tmp_path / "ids.txt").write_text(f"{expected[0]}\n{expected[-1]}\n")
    delete_passages(folder, tmp_path / "ids.txt")
    result = (
        Searcher(run, folder, SearchOptions("xla", filters=("colour:red",)))
        .search([Query("0", "river stone")], 99)
        .rankings["0"]
    )
    assert {key for key, _ in result} == set(expected[1:-1])
    first_part = open_encoded(folder).shards[0]
    deleted_row = first_part.ids(np.arange(first_part.total_rows)).index(expected[0])
    with pytest.raises(ValueError, match="no passage matches"):
        Searcher(run, folder, SearchOptions("xla")).among(np.array([deleted_row]))
    deleted = {expected[0], expected[-1]}
    colours = Counter(one["metadata"]["colour"] for one in KEPT if "metadata" in one and one["_id"] not in deleted)
    assert len(colours) > 1
    best = sorted(colours.items(), key=lambda item: (-item[1], item[0]))
    assert frequent_values(open_encoded(folder), 99)["colour"] == best
    assert frequent_values(open_encoded(folder), 1)["colour"] == best[:1]


@pytest.mark.parametrize("name", ["corpus.json", "corpus.csv", "collection.tsv"])
def test_other_formats(name: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith(".json"):
        path.write_text(json.dumps([{key: one[key] for key in one if key != "metadata"} for one in KEPT]))
    elif name.endswith(".csv"):
        with open(path, "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["_id", "title", "text", "source"])
            table.writerows([one["_id"], one["title"], one["text"], one.get("source", "")] for one in KEPT)
    else:
        path.write_text("".join(f"{n}\t{one['text']}\n" for n, one in enumerate(KEPT)))
    folder = encode_corpus(run, Corpus.open(path), name.replace(".", "-"), progress=False).folder
    if name.endswith(".tsv"):
        with pytest.raises(ValueError, match=r"metadata, .*id, title"):
            matching_rows(open_encoded(folder), ["source:s1"])
        return
    encoded_corpus = open_encoded(folder)
    assert encoded_corpus.ids(matching_rows(encoded_corpus, ["source:s1"])) == [
        one["_id"] for one in KEPT if one.get("source") == "s1"
    ]
    with pytest.raises(ValueError, match=r"the fields are source$"):
        matching_rows(encoded_corpus, ["colour:red"])


def test_filtered_results_have_their_own_files(
    root: Path, run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queries, qrels = tmp_path / "queries.jsonl", tmp_path / "test.tsv"
    queries.write_text('{"_id": "1", "text": "river"}\n')
    qrels.write_text("query-id\tcorpus-id\tscore\n1\tp3\t1\n")
    for filters in ((), ("colour:red",)):
        search_files(
            run,
            EvaluationSource.open(queries, qrels),
            EvaluationOptions(k=5, measures=("RR@5",)),
            options=SearchOptions(filters=tuple(filters)),
            encoded_name="corpus",
            progress=False,
        )
    name = tmp_path.name
    label = SearchOptions(filters=("colour:red",)).label
    plain, filtered = (run.workdir.evaluation(f"{name}.test{end}") for end in ("", f".{label}"))
    assert read_json(filtered)["provenance"]["search"]["filter"] == ["colour:red"]
    assert "filter" not in read_json(plain)["provenance"]["search"]
    red = having(lambda m: m["colour"] == "red")
    assert f"exact search of {len(red)} of {len(KEPT)} passages, those with colour:red" in capsys.readouterr().out
    lines = run.workdir.rankings(f"{name}.test.{label}").read_text().splitlines()
    assert {line.split()[2] for line in lines} <= set(red)
    assert np.unique([line.split()[2] for line in lines]).size == 5
