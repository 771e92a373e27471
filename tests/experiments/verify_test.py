"""An undamaged folder passes verification, and a flipped byte in any file with a digest is reported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.experiments.verify import verify_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import append_corpus, delete_passages
from jaxret.index.source import inspect_corpus
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_with_digest, with_digest, write_json
from tests.pipeline import WORDS, untrained_run, write_data, write_encoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose corpus has been appended to, deleted from, filtered and displayed."""
    root = tmp_path_factory.mktemp("verify")
    write_encoder(root / "encoder")
    write_data(root / "data")
    opened = untrained_run(root / "run", root / "encoder", root / "data", head__token="mean", normalize=True)
    for name in "ab":
        records = [{"_id": f"{name}{n}", "text": word, "metadata": {"kind": name}} for n, word in enumerate(WORDS)]
        (root / f"{name}.json").write_text(json.dumps(records))
    folder = encode_corpus(
        opened, Corpus.open(root / "a.json"), "corpus", EncodeOptions(shard_rows=10), progress=False
    ).folder
    inspect_corpus(opened, Corpus.open(root / "b.json"), "error", str(root / "store"), print).open_tokens(
        opened, False, print
    )
    append_corpus(
        opened, Corpus.open(root / "b.json"), folder, EncodeOptions(store=str(root / "store")), progress=False
    )
    (root / "ids.txt").write_text("a3\n")
    delete_passages(folder, root / "ids.txt")
    searcher = Searcher(opened, folder, SearchOptions("xla", filters=("kind:b",)))
    searcher.texts.read(["b1", "a1"])
    searcher.texts.metadata_of_rows(np.arange(2))
    return root / "run"


def problems(folder: Path) -> list[str]:
    return [one.problem for one in verify_folder(folder) if one.problem]


def flipped(path: Path) -> bytes:
    """Flip a byte in the middle of a file; return the original bytes."""
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :])
    return good


@pytest.mark.slow
def test_every_defect_is_named(run: Path) -> None:
    everything = list(verify_folder(run))
    assert [one for one in everything if one.problem] == []
    assert len({one.name for one in everything}) == len(everything) > 20
    folder = run / "embeddings" / "corpus"
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        good = flipped(path)
        named = re.sub(r"(passages|records)\.json$", r"\1.", path.name)
        assert any(named in problem for problem in problems(folder)), path
        path.write_bytes(good)
    arrays = max((run / "checkpoints").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    for path, named in {run / "config.json": "config.json", arrays: "checkpoints/0"}.items():
        good = flipped(path)
        assert any(named in problem for problem in problems(run)), path
        path.write_bytes(good)
    for name in ("manifest.json", "corpus.json", "shard-00000-of-00002.json", "ids-00001-of-00002.txt"):
        (folder / name).rename(folder / "away")
        assert any(name in problem for problem in problems(folder)), name
        (folder / "away").rename(folder / name)
    assert problems(run) == []


@pytest.mark.slow
def test_a_corpus_without_sidecars_is_valid(run: Path, tmp_path: Path) -> None:
    """Search does not need them; files are still compared with the manifest."""
    shutil.copytree(run / "embeddings" / "corpus", tmp_path / "corpus")
    part = next((tmp_path / "corpus").glob("part-*"))
    for path in part.glob("shard-*.json"):
        path.unlink()
    (part / "vectors-00000-of-00001.npy").unlink()
    damages = problems(part)
    for name in ("vectors-00000-of-00001.npy", "shard-00000-of-00001.json"):
        assert any(name in problem for problem in damages), name


def test_several_defects_are_all_named(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "embeddings" / "corpus", tmp_path / "corpus")
    wrong = sorted((tmp_path / "corpus").glob("*-of-00002.*"))[:3]
    for path in wrong:
        flipped(path)
    damages = problems(tmp_path / "corpus")
    assert len(damages) == 3
    assert all(any(str(path) in problem for problem in damages) for path in wrong)


def test_a_run_that_mixes_models(run: Path, tmp_path: Path) -> None:
    """A corpus of another checkpoint gives a warning; a shard of another checkpoint in the same folder is an error."""
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "embeddings" / "corpus"
    assert not [one.warning for one in verify_folder(tmp_path / "run") if "mixes models" in one.warning]
    shutil.copytree(folder, folder.with_name("again"))
    assert not [one.warning for one in verify_folder(tmp_path / "run") if "mixes models" in one.warning]
    for path in [folder / "shard-00001-of-00002.json", folder / "manifest.json"]:
        entry = read_with_digest(path)
        entry["fingerprint"]["checkpoint"] = {"step": 9, "digest": "0123"}
        write_json(path, with_digest(entry))
        if path.name != "manifest.json":
            assert problems(folder) == [
                f"{path} belongs to other vectors than the manifest; run encode again",
            ]
    warnings = [one.warning for one in verify_folder(tmp_path / "run") if "mixes models" in one.warning]
    assert len(warnings) == 1
    assert "by step 9 (0123)" in warnings[0]


def test_a_store_of_tokens(run: Path) -> None:
    folder = next((run.parent / "store").iterdir())
    assert problems(folder) == []
    good = flipped(folder / "ids.flat.npy")
    assert problems(folder) == [
        f"{folder}/ids.flat.npy: damaged (its SHA-256 differs from the manifest's); it is created again when needed"
    ]
    (folder / "ids.flat.npy").write_bytes(good)


def test_other_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"encoded corpus, .*index"):
        list(verify_folder(tmp_path))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/none .*folder; .*run"):
        list(verify_folder(tmp_path / "none"))
