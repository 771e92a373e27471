"""Every export in every state of an encoded corpus: it writes the rows of the corpus, or refuses in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.data.formats import Corpus
from jaxret.export.export import EXPORT_KINDS, OF_CORPORA, export
from jaxret.export.stores.store_list import STORES
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import append_corpus, delete_passages
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.vectors.in_memory import vectors_of
from tests.export.stores.corpora import PACKAGES
from tests.pipeline import untrained_run, write_data, write_encoder

ROWS = 10  # rows of a shard
POOLER = {"pooler.dense.weight": np.full((32, 32), 0.25, np.float32), "pooler.dense.bias": np.ones(32, np.float32)}


class State(NamedTuple):
    """Changes to a corpus of 40 passages: the type of vectors, appended passages, deleted rows."""

    dtype: str = "float32"
    appended: int = 0  # files of 15 passages
    deleted: tuple[int, ...] = ()


STATES = {
    "one part": State(),
    "float16": State("float16"),
    "appended": State(appended=2),
    "deleted": State(deleted=(0, 7, 39)),
    "appended, deleted": State("float16", 2, (0, 7, 39, 40, 69)),
    "whole shards deleted": State(appended=1, deleted=tuple(range(20)) + tuple(range(40, 55))),
    "one left": State(deleted=tuple(range(39))),
    "none left": State(deleted=tuple(range(40))),
}
RUNS: dict[str, dict[str, Any]] = {
    "one vector": {"head__token": "mean", "normalize": True},
    "several vectors": {"head__name": "mlr", "head__mlr__chosen": (1, 3)},
    "late": {
        "head__name": "colbert",
        "head__colbert__late": True,
        "head__colbert__projection": 6,
        "normalize": True,
    },
    "weights of words": {"head__name": "splade", "head__splade__special_ids": (0, 2, 3)},
}
REFUSED = {  # (run, kind) -> why this export is refused in every state
    ("one vector", "pylate"): "PyLate needs a vector for every token of a query",
    ("several vectors", "pylate"): "PyLate needs a vector for every token of a query",
    ("several vectors", "pyserini"): "a passage has 2 vectors in",
    ("late", "pyserini"): "a passage has a vector for each token in",
    ("weights of words", "pyserini"): "are weights of words, but Pyserini's dense search needs dense",
    ("weights of words", "pylate"): "PyLate needs a vector for every token of a query",
    **dict.fromkeys(((kind, "peft") for kind in RUNS), "was trained without adapters"),
    **dict.fromkeys(
        ((kind, "anserini") for kind in ("one vector", "several vectors", "late")), "are dense, and Anserini"
    ),
    **dict.fromkeys(
        (("weights of words", store) for store in STORES), "are weights of words, but stores need dense vectors"
    ),
    **dict.fromkeys(
        ((kind, "milvus") for kind in ("several vectors", "late")), "a passage has several vectors, but a row"
    ),
}
DAILY = [
    ("late", "pylate", "appended, deleted"),
    ("weights of words", "anserini", "appended, deleted"),
    ("one vector", "pyserini", "appended, deleted"),
    ("one vector", "pyserini", "none left"),
    ("late", "parquet", "whole shards deleted"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    encoder = write_encoder(folder / "encoder") / "model.safetensors"
    save_file(load_file(encoder) | POOLER, encoder, {"format": "pt"})
    lines = (write_data(folder / "data") / "corpus.jsonl").read_text().splitlines(keepends=True)
    for name, part in {"a": lines[:40], "more0": lines[40:55], "more1": lines[55:70]}.items():
        (folder / f"{name}.jsonl").write_text("".join(part))
    return folder


def make_state(root: Path, kind: str, state: State, to: Path) -> tuple[Path, EncodedCorpus]:
    """Return a run of a kind whose corpus is in a state, and the corpus."""
    original = root / kind
    if not original.exists():
        untrained_run(original, root / "encoder", root / "data", **RUNS[kind])
    shutil.copytree(original, to)
    run = open_run(to)
    options = EncodeOptions(shard_rows=ROWS, dtype=state.dtype)
    encode_corpus(run, Corpus.open(root / "a.jsonl"), "a", options, progress=False)
    folder = Workdir(to).embeddings("a")
    for number in range(state.appended):
        append_corpus(run, Corpus.open(root / f"more{number}.jsonl"), folder, options, progress=False)
    if state.deleted:
        ids = [key for _, block in open_encoded(folder).id_blocks() for key in block]
        (root / "ids.txt").write_text("".join(f"{ids[row]}\n" for row in state.deleted))
        delete_passages(folder, root / "ids.txt")
    return to, open_encoded(folder)


@pytest.mark.table
@pytest.mark.parametrize(
    ("kind", "to", "name"),
    [
        pytest.param(kind, to, name, marks=[] if (kind, to, name) in DAILY else pytest.mark.exhaustive)
        for kind in RUNS
        for to in EXPORT_KINDS
        if to != "pgvector"  # pgvector needs a server (stores/stores_test.py)
        for name in STATES
        if to in OF_CORPORA or name == "appended, deleted"  # other exports read no corpus
    ],
)
def test_every_export_of_every_state(kind: str, to: str, name: str, root: Path, tmp_path: Path) -> None:
    workdir, corpus = make_state(root, kind, STATES[name], tmp_path / "run")
    out = tmp_path / "out"
    problem = REFUSED.get((kind, to))
    if name == "none left" and (to in ("pyserini", *STORES) or (not problem and to in OF_CORPORA)):
        problem = r"has no passage to (search|export): all were deleted"
    if to in PACKAGES and not problem:
        pytest.importorskip(PACKAGES[to], reason=f"needs jaxret[{to}]")
    if problem:
        with pytest.raises(ValueError, match=problem):
            export(workdir, to, out)
        assert not out.exists()
        return
    report = export(workdir, to, out)
    assert ("passages, counted" if to in STORES else "read back") in report
    ids = [key for _, block in corpus.id_blocks() for key in block]
    if to == "pyserini":
        assert (out / "docid").read_text().splitlines() == ids
        assert_same_vectors(corpus, out)
    if to == "parquet":
        table = pq.read_table(out)
        assert table["id"].to_pylist() == ids
        stored = vectors_of(corpus, np.arange(len(ids)))
        for row, vectors in zip(table.column(table.num_columns - 1).to_pylist(), stored, strict=True):
            np.testing.assert_array_equal(np.array(row, vectors.dtype).reshape(vectors.shape), vectors)
    if to == "anserini":
        files = sorted((out / "corpus").iterdir())
        assert [json.loads(line)["id"] for file in files for line in file.read_text().splitlines()] == ids
    for weights in out.rglob("model.safetensors"):
        if "embeddings.word_embeddings.weight" in (tensors := load_file(weights)):  # the encoder, not a Dense module
            for key, value in POOLER.items():
                np.testing.assert_array_equal(tensors[key], value)


def assert_same_vectors(encoded_corpus: EncodedCorpus, out: Path) -> None:
    """Assert that an index has the vectors of the remaining passages, in their order."""
    index = faiss.read_index(str(out / "index"))
    vectors = np.concatenate([np.asarray(shard[:], np.float32)[:, 0] for _, shard in encoded_corpus])
    np.testing.assert_array_equal(index.reconstruct_n(0, index.ntotal), vectors)


@pytest.mark.daily("hf")
@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["hf", "sentence-transformers"])
def test_transformers_reports_nothing_missing(to: str, root: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
    transformers = pytest.importorskip("transformers")
    workdir, _ = make_state(root, "one vector", State(), tmp_path / "run")
    export(workdir, to, tmp_path / "out")
    model, info = transformers.BertModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_array_equal(model.pooler.dense.bias.detach().numpy(), POOLER["pooler.dense.bias"])


def test_rows_of_a_shard_are_indexed_as_an_array() -> None:
    from jaxret.index.row_subset import RowSubset

    shard = np.arange(60, dtype=np.float32).reshape(5, 3, 4)
    rows = np.array([0, 2, 4])
    subset, expected = RowSubset(shard, rows), shard[rows]
    for key in (1, slice(1, 3), np.array([2, 0]), (slice(None), 0), (1, 2), (slice(0, 2), slice(1), 3), (Ellipsis,)):
        np.testing.assert_array_equal(subset[key], expected[key])
