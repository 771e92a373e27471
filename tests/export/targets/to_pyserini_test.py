"""A FAISS index and its ids in Pyserini's format: equal to FAISS's own files to the byte."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.export.export import export
from jaxret.export.targets import to_pyserini
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.runs.run import open_run
from tests.export.export_test import make_run
from tests.pipeline import REPOSITORY

SAMPLE = REPOSITORY.parent / "shared" / "data" / "format-samples" / "pyserini" / "faiss"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pyserini")
    run = make_run(folder, normalize=True)
    encode_corpus(open_run(run), Corpus.open(folder / "data"), options=EncodeOptions(shard_rows=20), progress=False)
    return run


@pytest.mark.exhaustive
def test_faiss_reads_the_files(run: Path, tmp_path: Path) -> None:
    report = export(run, "pyserini", tmp_path / "out")
    assert "read back by FAISS, scores of the 10 best passages of 64 queries differ by" in report
    index = faiss.read_index(str(tmp_path / "out" / "index"))
    again = faiss.IndexFlatIP(index.d)
    again.add(index.reconstruct_n(0, index.ntotal))
    faiss.write_index(again, str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out" / "index").read_bytes()
    ids = (tmp_path / "out" / "docid").read_text().splitlines()
    assert len(ids) == index.ntotal == len(set(ids)) > 60
    assert (tmp_path / "out" / "query-encoder" / "tokenizer_config.json").is_file()


@pytest.mark.exhaustive
def test_control_swapped_ids_and_changed_vectors_are_errors(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ids are exchanged, or a vector is changed."""
    write_ids, write_index = to_pyserini.write_ids, to_pyserini.write_index

    def moved(shards: object, path: Path) -> None:
        write_ids(shards, path)  # type: ignore[arg-type]
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[1:] + lines[:1]))

    def scaled(shards: object, path: Path) -> None:
        write_index(shards, path)  # type: ignore[arg-type]
        data = bytearray(path.read_bytes())
        data[-4096:] = (np.frombuffer(bytes(data[-4096:]), "<f4") * 1.01).astype("<f4").tobytes()
        path.write_bytes(bytes(data))

    for name, broken, message in (
        ("write_ids", moved, r"passages differ: nothing was exported"),
        ("write_index", scaled, r"more than 1e-05: nothing was exported"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(to_pyserini, name, broken)
            with pytest.raises(ValueError, match=message):
                export(run, "pyserini", tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_missing_corpus(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"corpus 'other'; .*data"):
        export(run, "pyserini", tmp_path / "out", encoded_name="other")
    with pytest.raises(ValueError, match=r"--corpus=data is for --to=pyserini"):
        export(run, "hf", tmp_path / "out", encoded_name="data")


@pytest.mark.exhaustive
def test_several_vectors_per_passage_are_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path, head__name="me_bert", head__me_bert__count=2)
    encode_corpus(open_run(run), Corpus.open(tmp_path / "data"), progress=False)
    with pytest.raises(ValueError, match=r"passage .*2 .*, .*Pyserini's"):
        export(run, "pyserini", tmp_path / "out")


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="the shared samples are not on this machine")
def test_a_folder_of_pyserini_is_read() -> None:
    index = to_pyserini.open_pyserini_index(SAMPLE)
    assert to_pyserini.docids_of_rows(SAMPLE, np.array([[0, index.ntotal - 1]])).shape == (1, 2)
