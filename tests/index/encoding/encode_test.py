"""From a checkpoint and a corpus to shards: the vectors of RetrieverModel.encode, with and without interruptions."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.data.formats import Corpus, CorpusScan, DataError, write_beir
from jaxret.data.records import Passage
from jaxret.index.encoding import encode, encode_plan, worker
from jaxret.index.encoding.encode import corpus_name, encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.encode_plan import rows_a_minute, vector_dtype
from jaxret.index.encoding.token_reader import TextReader, open_token_reader
from jaxret.index.encoding.worker import EncodeWorker
from jaxret.index.shard_set import open_shards
from jaxret.index.shards import ShardError, ShardWriter, read_shard_json
from jaxret.index.source import inspect_corpus
from jaxret.parallel.mesh import make_mesh, replicated_sharding
from jaxret.runs.embedder import Embedder
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run, open_run
from jaxret.runs.run_warnings import RunWarning, keep_warnings, read_warnings
from jaxret.runs.workdir import Workdir
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_json, write_json
from jaxret.storage.checkpoint import CheckpointError
from jaxret.storage.leases import Lease, Leases, _numbers, this_process
from jaxret.types import Tokens
from tests.pipeline import PASSAGE_LENGTH, contents, untrained_run, write_data, write_encoder

READ, SCAN = Corpus.read, Corpus.scan  # the functions before any monkeypatch
ROWS = 50  # passages per shard; the corpus has more than two shards


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encode")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    untrained_run(folder / "run", folder / "encoder", folder / "data", head__name="mlr", head__mlr__chosen=(1, 3))
    return folder


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    return open_run(root / "run")


@pytest.fixture(scope="module")
def encoded(root: Path, run: Run) -> Path:
    """The folder of the corpus, encoded without interruption."""
    result = encode_corpus(run, Corpus.open(root / "data"), progress=False)
    assert (result.shards, result.shards_written) == (3, 3)
    return result.folder


@pytest.mark.exhaustive
def test_a_run_of_another_version_names_the_missing_key(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    config = read_json(tmp_path / "run" / "config.json")
    del config["encoder"]["layers"]
    write_json(tmp_path / "run" / "config.json", config)
    Workdir(tmp_path / "run").seal.unlink()
    with pytest.raises(ContractError, match=r"config\.json has no key 'layers': another version"):
        open_run(tmp_path / "run")


def with_run(run: Run, workdir: Path, **changes: Any) -> Run:
    """Return a run with another folder, in which its checkpoint has no files."""
    other = replace(run, workdir=Workdir(workdir), **changes)
    (other.workdir.checkpoints / str(other.checkpoint["step"])).mkdir(parents=True, exist_ok=True)
    return other


def test_vectors_equal_those_of_the_retriever(root: Path, run: Run, encoded: Path) -> None:
    passages = list(Corpus.open(root / "data").read())
    shards = open_shards(encoded)
    assert encoded == root / "run" / "embeddings" / "data"
    assert (shards.total_rows, shards.vectors_per_row, shards.dimension) == (len(passages), 2, 32)
    assert shards.ids(range(len(passages))) == [passage.id for passage in passages]
    ids, mask = run.tokenizer.passages(passages).padded(np.arange(len(passages)), PASSAGE_LENGTH, run.tokenizer.pad_id)
    expected = run.model.encode(run.params, Tokens(jnp.asarray(ids), jnp.asarray(mask)), "passage").vectors
    stored = np.concatenate([vectors for _, vectors in shards])
    np.testing.assert_allclose(stored, expected, atol=1e-5, rtol=0)
    assert not np.allclose(stored[1:], expected[:-1], atol=1e-2)  # control: compared with the next row


def test_content_of_the_manifest(root: Path, run: Run, encoded: Path) -> None:
    fingerprint = open_shards(encoded).fingerprint
    assert fingerprint["contract"] == run.contract
    assert fingerprint["checkpoint"] == run.checkpoint
    assert fingerprint["corpus"]["passages"] == open_shards(encoded).total_rows
    assert fingerprint["encode"]["shard_rows"] == ROWS
    file = (root / "data" / "corpus.jsonl").stat()
    written = {"path": str(root / "data"), "bytes": file.st_size, "modified": file.st_mtime_ns}
    assert read_shard_json(encoded / "corpus.json") == written


def test_cut_texts_are_counted_before_and_after_encoding(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("jaxret.parallel.progress.print_line", said.append)
    before: list[list[str]] = []  # the lines that were printed before each shard was written
    write = ShardWriter.write

    def writing(self: ShardWriter, *rest: Any) -> None:
        before.append(list(said))
        write(self, *rest)

    monkeypatch.setattr(ShardWriter, "write", writing)
    encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"))
    total = open_shards(tmp_path / "embeddings" / "data").total_rows
    printed = [line.partition(": ")[0] for line in said if " cut at " in line]
    assert printed == [f"{ROWS} passages", f"{total} passages"]
    assert any(line.startswith(f"{ROWS} passages: ") for line in before[0])


def test_the_name_of_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_beir(tmp_path / "beir", [Passage("a", "x")], [], {})
    (tmp_path / "beir" / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "beir")
    Path("psgs.tsv").write_text("1\ta text\ttitle\n")
    sources = (".", "inside/..", "../beir", "psgs.tsv", "dpr.passages:psgs.tsv")
    assert [corpus_name(Corpus.open(path)) for path in sources] == ["beir"] * 3 + ["psgs"] * 2


def test_interrupted_between_shards_and_resumed(
    root: Path, run: Run, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ShardWriter.write
    written: list[int] = []

    def dying(self: ShardWriter, shard: Any, *rest: Any) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt  # raised in the writing thread, it must also end the computing thread
        written.append(shard.index)
        write(self, shard, *rest)

    other = with_run(run, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", dying)
        with pytest.raises(KeyboardInterrupt):
            encode_corpus(other, Corpus.open(root / "data"), progress=False)
    folder = tmp_path / "embeddings" / "data"
    assert not (folder / "manifest.json").exists()
    # These are the files of a process that was killed while it wrote the second shard.
    (folder / "vectors-00001-of-00003.npy").write_bytes(b"half")
    result = encode_corpus(other, Corpus.open(root / "data"), progress=False)
    assert (result.shards, result.shards_written) == (3, 2)
    assert contents(folder) == contents(encoded)
    timing = read_json(tmp_path / "encoding" / "data.json")
    assert timing == result.timing
    assert timing["passages"] == result.passages - ROWS, "the shard of the first job does not count"
    assert timing["ms_per_passage"] == pytest.approx(1000 * timing["seconds"] / timing["passages"], rel=0.01)
    assert timing["passages_per_second"] == pytest.approx(timing["passages"] / timing["seconds"], rel=0.01)
    before = contents(folder)
    again = encode_corpus(other, Corpus.open(root / "data"), progress=False)
    assert (again.shards_written, again.timing) == (0, None)
    assert contents(folder) == before
    assert read_json(tmp_path / "encoding" / "data.json") == timing, "a job that encodes nothing records no time"


def test_a_corpus_that_changes_while_it_is_encoded(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path / "data")

    def scan(*arguments: Any) -> CorpusScan:
        result = SCAN(*arguments)
        write_data(tmp_path / "data", seed=1)
        return result

    monkeypatch.setattr("jaxret.data.formats.Corpus.scan", scan)
    with pytest.raises(DataError, match=r"corpus\.jsonl: .*corpus changed"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(tmp_path / "data"), progress=False)
    assert not list((tmp_path / "embeddings" / "data").glob("vectors-*"))


def test_a_corpus_that_was_tokenized_before_is_not_read_again(
    root: Path, run: Run, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards have the same bytes as without the store."""
    store = str(tmp_path / "stores")
    inspect_corpus(run, Corpus.open(root / "data"), "error", store, print).open_tokens(run, False, print)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("the corpus is read again")

    with monkeypatch.context() as patch:
        patch.setattr("jaxret.data.formats.Corpus.scan", refused)
        patch.setattr("jaxret.data.formats.Corpus.read", refused)
        folder = encode_corpus(
            with_run(run, tmp_path), Corpus.open(root / "data"), options=EncodeOptions(store=store), progress=False
        ).folder
        with pytest.raises(AssertionError, match="read again"):  # control: without the store, the corpus is read again
            encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), "b", progress=False)
    assert contents(folder) == contents(encoded)


def test_the_text_of_a_shard_is_read_while_the_one_before_is_computed(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads it, and has begun when the texts before it go to the device."""
    starts = range(0, 120, 20)
    begun = {start: threading.Event() for start in starts}
    part, read = TextReader.part, EncodeWorker.read

    def reading(self: TextReader, start: int, *rest: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        begun[start].set()
        return part(self, start, *rest)

    def giving(self: EncodeWorker, *rest: Any) -> Any:
        for shard, lease, result in read(self, *rest):
            assert shard.stop not in begun or begun[shard.stop].wait(30), "the next shard is not being read"
            yield shard, lease, result

    monkeypatch.setattr(TextReader, "part", reading)
    monkeypatch.setattr(EncodeWorker, "read", giving)
    assert encode_corpus(
        with_run(run, tmp_path), Corpus.open(root / "data"), options=EncodeOptions(shard_rows=20), progress=False
    ).shards == len(starts)


def test_an_error_does_not_wait_for_the_reader(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard fails while the second one is being read: the reader ends, and the error is raised."""
    read, failed = 0, threading.Event()

    def slow(*rest: Any, **options: Any) -> Any:
        nonlocal read
        for passage in READ(*rest, **options):
            read += 1
            if read > ROWS + 1:
                assert failed.wait(30)
                time.sleep(0.05)
            yield passage

    def failing(*_: Any) -> Any:
        while read < ROWS + 2:
            time.sleep(0.01)
        failed.set()
        raise ArithmeticError("the device is broken")

    monkeypatch.setattr("jaxret.data.formats.Corpus.read", slow)
    monkeypatch.setattr(Embedder, "_batches", failing)
    with pytest.raises(ArithmeticError, match="the device is broken"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)
    assert read < 2 * ROWS - 10


def test_an_idle_job_takes_reserved_shards(
    root: Path, run: Run, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs, three shards. One job computes the first and has read the second. The other job takes the third, which
    is not reserved, and then the second."""
    monkeypatch.setattr(worker, "LEASE_PAUSE", 0.01)
    folder = tmp_path / "embeddings" / "data"
    results: list[encode.EncodeResult] = []
    job = threading.Thread(
        target=lambda: results.append(
            encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)
        )
    )
    times: list[int] = []  # when the second and third shards were written
    read = EncodeWorker.read

    def slow(self: EncodeWorker, *rest: Any) -> Any:
        for each in read(self, *rest):
            if threading.current_thread() is not job and not job.ident:
                job.start()
                end = time.monotonic() + 30
                paths = [shard.sidecar(folder) for shard in self.writer.shards]
                while not all(path.exists() for path in paths[1:]):
                    assert time.monotonic() < end, "the other job waits for a shard that no job has begun"
                    time.sleep(0.01)
                times.extend(path.stat().st_mtime_ns for path in paths[1:])
            yield each

    monkeypatch.setattr(EncodeWorker, "read", slow)
    try:
        result = encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)
    finally:
        job.join()
    assert (result.shards_written, results[0].shards_written) == (1, 2)
    assert times[0] > times[1]
    assert contents(folder) == contents(encoded)


def test_a_job_stops_reading_a_shard_that_its_owner_begins(
    root: Path, run: Run, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job has reserved all shards. This job reads the first until the other job begins it, and then computes
    the others."""
    monkeypatch.setattr(worker, "LEASE_PAUSE", 0.01)
    folder, part = tmp_path / "embeddings" / "data", TextReader.part
    ended: list[int] = []

    def noting(self: TextReader, start: int, *rest: Any) -> Any:
        try:
            return part(self, start, *rest)
        except CancelledError:
            ended.append(start)
            raise

    monkeypatch.setattr(TextReader, "part", noting)
    with Leases(folder) as others:
        assert all(others.claim(f"next-0000{number}-of-00003") for number in range(3))
        begun: list[Lease] = []

        def slow(*rest: Any, **options: Any) -> Any:
            for number, passage in enumerate(READ(*rest, **options)):
                if number == 10 and not begun:
                    lease = others.claim("00000-of-00003")
                    assert lease
                    begun.append(lease)
                if begun and number < ROWS and not ended:
                    time.sleep(0.05)
                yield passage

        def sleep(_: float) -> None:
            assert len(list(folder.glob("shard-*.json"))) == 2
            others.release(begun[0])

        monkeypatch.setattr("jaxret.data.formats.Corpus.read", slow)
        monkeypatch.setattr("jaxret.index.encoding.worker.time", SimpleNamespace(sleep=sleep))
        result = encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)
    assert (result.shards_written, ended) == (3, [0])
    assert contents(folder) == contents(encoded)


@pytest.mark.parametrize("kind", ["text", "store"])
def test_parts_read_out_of_order_equal_one_pass(kind: str, root: Path, run: Run, tmp_path: Path) -> None:
    """Shards of a dead job, and damaged shards, are encoded out of order. To go back, the reader starts again at the
    beginning of the text."""
    source = inspect_corpus(run, Corpus.open(root / "data"), "error", str(tmp_path), print)
    expected = run.tokenizer.passages(Corpus.open(root / "data").read())
    ids = [passage.id for passage in Corpus.open(root / "data").read()]
    if kind == "store":
        source.open_tokens(run, False, print)
    texts = open_token_reader(source, run.tokenizer)
    assert isinstance(texts, TextReader) == (kind == "text")
    for start, stop in ((50, 100), (0, 50), (20, 40), (100, len(ids)), (30, 31), (31, 40)):
        part = texts.part(start, stop)
        assert list(part.ids) == ids[start:stop]
        np.testing.assert_array_equal(part.passages.flat, expected.part(start, stop).flat)
        np.testing.assert_array_equal(part.passages.lengths, expected.lengths[start:stop])


def test_reading_continues_after_an_abandoned_part(root: Path, run: Run) -> None:
    source, unwanted = inspect_corpus(run, Corpus.open(root / "data"), "error", "", print), threading.Event()
    texts = TextReader(source, run.tokenizer)
    unwanted.set()
    with pytest.raises(CancelledError):
        texts.part(0, 50, unwanted)
    assert list(texts.part(1, 3).ids) == [passage.id for passage in Corpus.open(root / "data").read()][1:3]
    assert list(texts.part(0, 1).ids) == [next(Corpus.open(root / "data").read()).id]


def test_shards_of_a_changed_corpus_are_removed(
    root: Path, run: Run, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size and time are the same, so if there are shards, only the digest of the whole corpus shows the change. When
    the old text is restored, the folder has no passage of the other text."""
    corpus = write_data(tmp_path / "data") / "corpus.jsonl"
    before, time_of = corpus.read_bytes(), corpus.stat().st_mtime_ns
    lines = before.splitlines(keepends=True)
    record = json.loads(lines[1])
    lines[1] = lines[1].replace(record["text"].encode(), record["text"][::-1].encode())

    def put(content: bytes) -> None:
        corpus.write_bytes(content)
        os.utime(corpus, ns=(time_of, time_of))

    def scan(*arguments: Any) -> CorpusScan:
        result = SCAN(*arguments)
        put(b"".join(lines))
        return result

    folder = tmp_path / "embeddings" / "data"
    with monkeypatch.context() as patch:
        patch.setattr("jaxret.data.formats.Corpus.scan", scan)
        with pytest.raises(DataError, match=r"corpus\.jsonl: the corpus changed: its SHA-256"):
            encode_corpus(with_run(run, tmp_path), Corpus.open(tmp_path / "data"), progress=False)
    put(before)
    encode_corpus(with_run(run, tmp_path), Corpus.open(tmp_path / "data"), progress=False)
    written, expected = contents(folder), contents(encoded)
    # Only corpus.json differs, which has the path of the corpus.
    assert {name for name in expected if written[name] != expected[name]} == {"corpus.json"}


def test_a_corpus_that_changes_while_it_is_encoded_gives_no_shard(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path / "data")
    part = TextReader.part

    def changing(self: TextReader, *rest: Any) -> Any:
        result = part(self, *rest)
        os.utime(tmp_path / "data" / "corpus.jsonl", (1, 1))  # not all bytes have been read again at this time
        return result

    monkeypatch.setattr(TextReader, "part", changing)
    with pytest.raises(DataError, match=r"corpus\.jsonl: .*changed .*encoded"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(tmp_path / "data"), progress=False)
    assert not list((tmp_path / "embeddings" / "data").glob("vectors-*"))


def test_kept_empty_passages_are_rows(root: Path, run: Run, tmp_path: Path) -> None:
    rows = [{"_id": f"p{i}", "text": "" if i % 2 else f"river {i}"} for i in range(7)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="passage 'p1' is empty"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(tmp_path), progress=False)
    folder = encode_corpus(
        with_run(run, tmp_path), Corpus.open(tmp_path), "kept", EncodeOptions(on_error="keep"), progress=False
    ).folder
    shards = open_shards(folder)
    assert shards.ids(range(shards.total_rows)) == [row["_id"] for row in rows]
    vectors = np.concatenate([vectors for _, vectors in shards])
    np.testing.assert_allclose(vectors[1], vectors[3], atol=1e-6)  # both texts have only the markers
    assert not np.allclose(vectors[1], vectors[0], atol=1e-3)
    searcher = Searcher(with_run(run, tmp_path), folder)
    assert searcher.texts.read({"p0", "p1"}) == {"p0": Passage("p0", "river 0"), "p1": Passage("p1", "")}


def test_control_other_text_gives_other_bytes(root: Path, run: Run, encoded: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "data", seed=1)
    written = contents(encode_corpus(with_run(run, tmp_path), Corpus.open(tmp_path / "data"), progress=False).folder)
    expected = contents(encoded)
    assert {name for name in expected if written[name] == expected[name]} <= {
        name for name in expected if name.startswith("ids-")
    }


def test_shards_of_another_kind_are_not_mixed(root: Path, run: Run, encoded: Path, tmp_path: Path) -> None:
    other_data = write_data(tmp_path / "other", seed=1)
    shutil.copytree(root / "run", tmp_path / "run")
    checkpoint = {"step": 9, "digest": "0123456789abcdef"}
    contract = {**run.contract, "normalize": True}
    cases = [
        (root / "data", {"checkpoint": checkpoint}, r"checkpoint\.digest: '0123456789abcdef' in .*'[0-9a-f]{16}' in"),
        (root / "data", {"contract": contract}, r"contract\.normalize: True in .* False in"),
        (other_data, {}, r"corpus\.sha256: '[0-9a-f]{64}' in what is to be encoded now, '[0-9a-f]{64}' in"),
    ]
    before = contents(tmp_path / "run" / "embeddings" / "data")
    for corpus, changes, message in cases:
        changed = with_run(run, tmp_path / "run", **changes)
        with pytest.raises(ContractError, match=message):
            encode_corpus(changed, Corpus.open(corpus), name="data", progress=False)
    assert contents(tmp_path / "run" / "embeddings" / "data") == before


@pytest.mark.slow
def test_float16(root: Path, encoded: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run" / "checkpoints", tmp_path / "run" / "checkpoints")
    for name in ("contract.json", "data.json", "env.json"):
        shutil.copyfile(root / "run" / name, tmp_path / "run" / name)
    shutil.copytree(root / "run" / "encoder", tmp_path / "run" / "encoder")
    config = read_json(root / "run" / "config.json")
    config["encode"]["dtype"] = "float16"
    write_json(tmp_path / "run" / "config.json", config)
    half = open_shards(encode_corpus(open_run(tmp_path / "run"), Corpus.open(root / "data"), progress=False).folder)
    whole = open_shards(encoded)
    assert half.manifest.dtype == "float16"
    actual, expected = (np.concatenate([vectors for _, vectors in shards]) for shards in (half, whole))
    np.testing.assert_array_equal(actual, expected.astype(np.float16))
    with pytest.raises(ValueError, match=r"encode\.dtype is 'bfloat16'; .*float32, float16"):
        vector_dtype("bfloat16")


def test_bad_records_stop_or_are_counted(
    root: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (root / "data" / "corpus.jsonl").read_text().splitlines()[:20]
    lines[3] = "{broken"
    lines[7] = json.dumps({"_id": "two words", "text": "river"})
    corpus = tmp_path / "bad.jsonl"
    corpus.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:4: this is not JSON"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(corpus), progress=False)
    assert not (tmp_path / "embeddings").exists()
    result = encode_corpus(
        with_run(run, tmp_path), Corpus.open(corpus), options=EncodeOptions(on_error="skip"), progress=True
    )
    assert result.passages == 18
    assert "skipped 2 records" in capsys.readouterr().out
    kept = [json.loads(line)["_id"] for i, line in enumerate(lines) if i not in (3, 7)]
    assert open_shards(tmp_path / "embeddings" / "bad").ids(range(18)) == kept


def test_a_finished_folder_is_not_written_to(
    root: Path, run: Run, encoded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be read-only."""

    def refused(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    before = {path.name: path.stat().st_mtime_ns for path in encoded.iterdir()}
    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(f"os.{name}", refused)
    again = encode_corpus(run, Corpus.open(root / "data"), progress=False)
    assert again.shards_written == 0
    assert {path.name: path.stat().st_mtime_ns for path in encoded.iterdir()} == before


@pytest.mark.parametrize(
    ("lost", "half"),
    [
        (
            "ids-00001-of-00003.txt",
            ".lease-00001-of-00003/0123456789abcdef/.ids-00001-of-00003.txt.0123456789abcdef01234567.tmp",
        ),
        (
            "manifest.json",
            ".lease-manifest/0123456789abcdef/.manifest.json.0123456789abcdef01234567.tmp",
        ),  # only the manifest is missing
        # A folder that was about to become a lease.
        ("manifest.json", ".lease.0123456789abcdef/0123456789abcdef/owner.json"),
        ("manifest.json", ".manifest.json.0123456789abcdef01234567.tmp"),
    ],
)
def test_leftovers_of_a_killed_writer_are_removed(
    lost: str, half: str, root: Path, run: Run, encoded: Path, tmp_path: Path
) -> None:
    shutil.copytree(encoded, tmp_path / "embeddings" / "data")
    if lost:
        (tmp_path / "embeddings" / "data" / lost).unlink()
    half_written = tmp_path / "embeddings" / "data" / half
    half_written.parent.mkdir(parents=True, exist_ok=True)
    half_written.write_bytes(b"half")
    if half.startswith(".lease-"):  # the lease belongs to a process of this host that has ended
        (half_written.parent / "owner.json").write_text(
            json.dumps({**this_process(), "numbers": _numbers(), "started": "before"})
        )
    os.utime(half_written, (0, 0))
    encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)
    assert contents(tmp_path / "embeddings" / "data") == contents(encoded)


def test_a_damaged_shard_is_written_again(root: Path, run: Run, encoded: Path, tmp_path: Path) -> None:
    """The sizes are right, so only digests show the damage."""
    shutil.copytree(encoded, tmp_path / "embeddings" / "data")
    path = tmp_path / "embeddings" / "data" / "vectors-00001-of-00003.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False).shards_written == 1
    assert contents(tmp_path / "embeddings" / "data") == contents(encoded)


def test_a_job_waits_for_shards_of_other_jobs(
    root: Path, run: Run, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job has the first shard, and stops. This job takes it over when the lease has ended; the other job can no
    longer publish it."""
    monkeypatch.setattr(worker, "LEASE_PAUSE", 0.01)
    folder = tmp_path / "embeddings" / "data"
    with Leases(folder) as others:
        lease = others.claim("00000-of-00003")
        assert lease
        owner, slept = lease.work / "owner.json", []
        owner.write_text(json.dumps(this_process() | {"host": "another-host"}))

        def sleep(_: float) -> None:
            slept.append(len(list(folder.glob("shard-*.json"))))
            os.utime(owner, (0, 0))

        monkeypatch.setattr("jaxret.index.encoding.worker.time.sleep", sleep)
        result = encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)
        assert not lease.publish(lambda: pytest.fail("a lost lease publishes"))
    assert (slept[0], result.shards_written) == (2, 3)
    assert contents(folder) == contents(encoded)


def test_a_second_job_with_other_settings_is_refused(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find an empty folder. The first one records its settings, and the other writes nothing."""
    other = with_run(run, tmp_path, checkpoint={"step": 9, "digest": "0123456789abcdef"})
    begin, results = worker.announce, []

    def second(writer: ShardWriter, leases: Leases) -> None:
        monkeypatch.setattr(worker, "announce", begin)
        results.append(encode_corpus(other, Corpus.open(root / "data"), progress=False))
        begin(writer, leases)

    monkeypatch.setattr(worker, "announce", second)
    with pytest.raises(ContractError, match=r"checkpoint\.digest: '[0-9a-f]{16}' in what .* '0123456789abcdef' in"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)
    assert open_shards(results[0].folder).fingerprint["checkpoint"]["step"] == 9


def test_a_job_that_fails_at_once_leaves_no_files(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)
    assert not (tmp_path / "embeddings" / "data").exists()


@pytest.mark.parametrize("name", ["../../escape", "a/b", "..", ".hidden", "a\\b", "a\0b"])
def test_a_name_outside_the_run_is_refused(name: str, root: Path, run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name .*corpus"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), name, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_passage_without_finite_vectors_is_named_with_its_line(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = json.loads((root / "data" / "corpus.jsonl").read_text().splitlines()[2])["_id"]
    embed = Embedder.encode_stream

    def broken(self: Embedder, *rest: Any, **more: Any) -> Any:
        for vectors in embed(self, *rest, **more):
            vectors.flat[2 * 2 + 1, 5] = np.nan  # the second vector of passage 2
            yield vectors

    monkeypatch.setattr(Embedder, "encode_stream", broken)
    with pytest.raises(ValueError, match=rf"corpus\.jsonl:3: passage '{third}' \(row 2\) has a NaN"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)


def test_a_folder_removed_during_encoding_is_an_error(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ShardWriter.write

    def taken(self: ShardWriter, shard: Any, *rest: Any) -> None:
        write(self, shard, *rest)
        if shard.index == 1:
            shard.sidecar(self.folder).unlink()

    monkeypatch.setattr(ShardWriter, "write", taken)
    with pytest.raises(ShardError, match=r"1 .*3 shards, .*50 .*99 .*changed.*Run"):
        encode_corpus(with_run(run, tmp_path), Corpus.open(root / "data"), progress=False)


def test_passages_per_shard(root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number comes from the option, from the folder's shards, or from the run, which limits the work that an
    interruption loses."""
    other = with_run(run, tmp_path)
    monkeypatch.setattr(encode_plan, "SHARD_ROWS", 40)
    assert (
        encode_corpus(other, Corpus.open(root / "data"), "asked", EncodeOptions(shard_rows=100), progress=False).shards
        == 2
    )
    assert encode_corpus(other, Corpus.open(root / "data"), "asked", progress=False).shards_written == 0
    manifest = open_shards(encode_corpus(other, Corpus.open(root / "data"), "limited", progress=False).folder).manifest
    assert manifest.rows_per_shard == manifest.fingerprint["encode"]["shard_rows"] == 40
    monkeypatch.setattr(encode_plan, "SHARD_ROWS", 8192)
    assert encode_corpus(other, Corpus.open(root / "data"), "limited", progress=False).shards_written == 0


def test_a_shard_is_at_most_a_minute_of_cpu_work(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is computed from the products of the layers, so that it is the same on all machines with a CPU."""
    leaves = jax.tree_util.tree_leaves_with_path(run.params)
    products = 2 * sum(leaf.size for path, leaf in leaves if "kernel" in jax.tree_util.keystr(path))
    work = products * run.tokenizer.passage_length // (1 if run.config.encoder.tied else 2)
    for minutes, rows in ((100, 64), (200, 128), (255, 128), (1e9, 8192), (3, 8)):
        monkeypatch.setitem(encode_plan.FLOP_RATES, "cpu", work * minutes / 60)
        assert rows_a_minute(run) == rows, minutes


def test_a_checkpoint_that_training_deleted_encodes_nothing(root: Path, run: Run, tmp_path: Path) -> None:
    """The checkpoint was deleted after the run was opened, and before its vectors were announced."""
    other = with_run(run, tmp_path)
    (other.workdir.checkpoints / "0").rmdir()
    with pytest.raises(CheckpointError, match=r"checkpoints/0 was deleted: .* run encode again"):
        encode_corpus(other, Corpus.open(root / "data"), progress=False)
    assert not list((tmp_path / "embeddings").rglob("*.json")), "nothing is announced"


def test_a_checkpoint_that_training_deletes_during_encoding_is_an_error(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training read the announced vectors just before these were announced."""
    other = with_run(run, tmp_path)
    checkpoint = other.workdir.checkpoints / "0"
    write = EncodeWorker.write

    def write_and_delete(*arguments: Any) -> None:
        write(*arguments)
        if checkpoint.exists():
            checkpoint.rmdir()

    monkeypatch.setattr(EncodeWorker, "write", write_and_delete)
    folder = tmp_path / "embeddings" / "data"
    with pytest.raises(CheckpointError, match=rf"checkpoints/0 was deleted: .*Delete {folder}"):
        encode_corpus(other, Corpus.open(root / "data"), progress=False)
    assert not (folder / "manifest.json").exists()
    assert list(folder.glob("shard-*.json")), "control: a shard was written"


def test_shard_rows_may_change_while_there_is_no_shard(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The announcement of a killed job does not fix the number; that of a living job does, and so do shards."""
    other, folder = with_run(run, tmp_path), tmp_path / "embeddings" / "data"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "write", killed)
    monkeypatch.setattr(ShardWriter, "withdraw_announcement", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(other, Corpus.open(root / "data"), options=EncodeOptions(shard_rows=20), progress=False)
    monkeypatch.undo()
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["begun.json"]
    changed = EncodeOptions(shard_rows=30)
    with Leases(folder, 300.0) as leases:
        assert leases.claim("00000-of-00006")
        with pytest.raises(ContractError, match=r"rows_per_shard: 30 .*encoded .*20"):
            encode_corpus(other, Corpus.open(root / "data"), options=changed, progress=False)
    assert encode_corpus(other, Corpus.open(root / "data"), options=changed, progress=False).shards == 4
    with pytest.raises(ContractError, match=r"rows_per_shard: 20 .*encoded .*30"):
        encode_corpus(other, Corpus.open(root / "data"), options=EncodeOptions(shard_rows=20), progress=False)


@pytest.mark.parametrize("name", ["shard_rows", "shard_mb"])
def test_negative_shard_rows_are_refused(name: str, root: Path, run: Run, tmp_path: Path) -> None:
    other, corpus = with_run(run, tmp_path), Corpus.open(root / "data")
    with pytest.raises(ValueError, match=rf"{name} .*-1; .*least 0"):
        encode_corpus(other, corpus, options=EncodeOptions(**{name: -1}), progress=False)  # type: ignore[arg-type]
    assert not (tmp_path / "embeddings").exists()


@pytest.mark.table
@pytest.mark.parametrize("head", ["mlr", "colbert"])
def test_shard_mb_limits_the_bytes_of_a_shard(head: str, root: Path, tmp_path: Path) -> None:
    """The bytes are those of vectors, whether all passages have the same number of them or not. A single passage may
    have more."""
    chosen = {"head__mlr__chosen": (1, 3)} if head == "mlr" else {}
    config = {"head__name": head, "encode__shard_rows": 50, "encode__shard_mb": 1, **chosen}
    run = untrained_run(tmp_path / "run", root / "encoder", root / "data", **config)
    source = inspect_corpus(run, Corpus.open(root / "data"), "error", "", print)
    vector = run.model.dimension * 4
    counts = run.model.vector_counts(source.open_tokens(run, False, print).passages, "passage")
    assert encode_plan.rows_per_shard(run, source, EncodeOptions(), "float32") == 50
    for limit in (1, 3 * vector, 30 * vector, 300 * vector):
        rows = encode_plan.rows_within(counts, 50, limit // vector)
        sums = [counts[start : start + rows].sum() * vector for start in range(0, len(counts), rows)]
        assert rows == 1 or max(sums) <= limit
        twice = [counts[start : start + 2 * rows].sum() * vector for start in range(0, len(counts), 2 * rows)]
        assert rows == 50 or max(twice) > limit  # not smaller than necessary


@pytest.mark.slow
def test_shard_rows_and_shard_mb_together(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with shards keeps their size, even if it was begun with more rows than the limit allows now."""
    other = with_run(run, tmp_path)
    row = 2 * run.model.dimension * 4
    assert (
        encode_corpus(other, Corpus.open(root / "data"), "old", EncodeOptions(shard_rows=100), progress=False).shards
        == 2
    )
    monkeypatch.setattr(encode_plan, "MEGABYTE", row * 7)  # a shard has 7 passages
    for options, expected in (
        (EncodeOptions(), 7),
        (EncodeOptions(shard_mb=2), 14),
        (EncodeOptions(shard_mb=2, shard_rows=9), 9),
        (EncodeOptions(shard_mb=99), 50),
    ):
        source = inspect_corpus(run, Corpus.open(root / "data"), "error", "", print)
        with other.config.unlocked():
            other.config.encode.shard_mb = 1
        assert encode_plan.rows_per_shard(other, source, options, "float32") == expected
    assert encode_plan.rows_per_shard(other, source, EncodeOptions(shard_mb=1), "float16") == 14
    assert (
        encode_corpus(
            other, Corpus.open(root / "data"), "old", EncodeOptions(shard_rows=100), progress=False
        ).shards_written
        == 0
    )
    assert encode_corpus(other, Corpus.open(root / "data"), "old", progress=False).shards_written == 0
    assert (
        encode_corpus(other, Corpus.open(root / "data"), "new", EncodeOptions(shard_rows=100), progress=False).shards
        == 17
    )
    assert (
        encode_corpus(
            other, Corpus.open(root / "data"), "new", EncodeOptions(shard_rows=100), progress=False
        ).shards_written
        == 0
    )
    with pytest.raises(ContractError, match=r"rows_per_shard: 14 .*encoded .*7"):
        encode_corpus(other, Corpus.open(root / "data"), "new", EncodeOptions(shard_mb=2), progress=False)


def test_progress_covers_the_whole_job(root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Bar(worker.Progress):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.began = self.done
            bars.append(self)

    other = with_run(run, tmp_path)
    result = encode_corpus(other, Corpus.open(root / "data"), progress=False)
    next(result.folder.glob("ids-00001*")).unlink()
    monkeypatch.setattr(worker, "Progress", Bar)
    encode_corpus(other, Corpus.open(root / "data"))
    bar = bars[-1]
    assert (bar.began, bar.done, bar.total) == (result.passages - ROWS, result.passages, result.passages)


@pytest.mark.slow
def test_shards_of_other_devices_are_reported(
    root: Path, run: Run, encoded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(encoded, tmp_path / "embeddings" / "data")
    (tmp_path / "embeddings" / "data" / "ids-00001-of-00003.txt").unlink()
    mesh = make_mesh(devices=jax.devices()[:4])
    params = jax.device_put(jax.tree.map(np.asarray, run.params), replicated_sharding(mesh))
    fewer = with_run(run, tmp_path, mesh=mesh, params=params, program_cache={})
    encode_corpus(fewer, Corpus.open(root / "data"))
    made_on = [entry["made_on"]["devices"] for entry in open_shards(tmp_path / "embeddings" / "data").manifest.shards]
    assert made_on == [8, 4, 8]
    assert "their last digits differ by rounding" in capsys.readouterr().out


def test_names(tmp_path: Path) -> None:
    write_beir(tmp_path / "nfcorpus.v1", [Passage("a", "x")], [], {})
    (tmp_path / "psgs_w100.tsv.gz").write_bytes(gzip.compress(b"1\ta text\ttitle\n"))
    assert corpus_name(Corpus.open(tmp_path / "nfcorpus.v1")) == "nfcorpus.v1"
    assert corpus_name(Corpus.open(tmp_path / "psgs_w100.tsv.gz")) == "psgs_w100"


def test_collapsed_vectors_are_reported(
    root: Path, run: Run, encoded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_warnings(run.workdir, "encode data", [RunWarning("truncation", "of the job that encoded them")])
    for limit, expected in ((1.1, False), (-1.1, True), (1.1, False)):
        monkeypatch.setattr("jaxret.index.encoding.collapse.COSINE_LIMIT", limit)
        encode_corpus(run, Corpus.open(root / "data"))
        assert ("alarm: " in capsys.readouterr().out) == expected
        kept = [one.kind for one in read_warnings(run.workdir)["encode data"]]
        assert kept == ["truncation"] + ["collapse"] * expected, "warnings of the encoding job stay for reports"


def test_an_empty_corpus(run: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(ValueError, match=r"corpus\.jsonl has no passage to encode"):
        encode_corpus(run, Corpus.open(tmp_path / "corpus.jsonl"), progress=False)
