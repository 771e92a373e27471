"""jaxret from Python: the functions that users call, what is kept between calls, and every error as one sentence."""

from __future__ import annotations

import doctest
import gc
import json
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxret
from jaxret.data.errors import DataError
from jaxret.data.formats import Corpus
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.mismatch import ContractError
from jaxret.storage.temporary import TemporaryFolder
from tests.pipeline import REPOSITORY, environment, tiny_config, untrained_run, write_data, write_encoder
from tests.sentence_transformers import write_modules

FAMILIES: dict[str, dict[str, Any]] = {
    "one vector": {"head__token": "mean", "normalize": True},
    "several vectors": {"head__name": "mlr", "head__mlr__chosen": (1, 3)},
    "late interaction": {"head__name": "colbert", "head__colbert__late": True},
}
QUESTIONS = ["river stone music", "silver garden"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    run = untrained_run(folder / "run", folder / "encoder", folder / "data", **FAMILIES["one vector"])
    encode_corpus(run, Corpus.open(folder / "data"), progress=False)
    return folder


@pytest.fixture(scope="module")
def retriever(root: Path) -> jaxret.Retriever:
    return jaxret.Retriever.open(root / "run")


@pytest.fixture(scope="module")
def index(retriever: jaxret.Retriever) -> jaxret.Index:
    return jaxret.Index.open(retriever)


def test_import_jaxret_imports_no_jax() -> None:
    """JAX is imported when a name is first used. An unknown name gives the usual AttributeError."""
    code = "import sys, jaxret; print('jax' in sys.modules, sorted(jaxret.__all__)); jaxret.nothing"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    assert done.stdout == "False ['EncodeOptions', 'Hit', 'Index', 'Passage', 'Retriever', 'SearchOptions']\n"
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'jaxret' has no attribute 'nothing'"
    assert set(jaxret.__all__) <= set(dir(jaxret))


@pytest.mark.parametrize(
    "family",
    ["one vector", *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("several vectors", "late interaction"))],
)
def test_hits_equal_a_numpy_search(family: str, root: Path, retriever: jaxret.Retriever, tmp_path: Path) -> None:
    if family != "one vector":
        untrained_run(tmp_path / "run", root / "encoder", root / "data", **FAMILIES[family])
        retriever = jaxret.Retriever.open(tmp_path / "run")
    index = jaxret.Index.build(retriever, root / "data", progress=False)
    passages = list(Corpus.open(root / "data").read())
    assert len(index) == len(passages)
    queries, passage_vectors = retriever.encode_queries(QUESTIONS), retriever.encode_passages(passages)
    if family == "one vector":
        assert isinstance(queries, np.ndarray)
        assert queries.dtype == np.float32
    for query, hits in zip(queries, index.search(QUESTIONS, k=5), strict=True):
        vectors = np.atleast_2d(query).astype(np.float64)  # [U,D]
        products = [passage.astype(np.float64) @ vectors.T for passage in passage_vectors]  # [V,U]
        scores = np.array([product.max(axis=0).sum() for product in products])
        best = np.argsort(-scores, kind="stable")[:5]
        assert [hit.id for hit in hits] == [passages[i].id for i in best]
        assert [(hit.title, hit.text) for hit in hits] == [(passages[i].title, passages[i].text) for i in best]
        np.testing.assert_allclose([hit.score for hit in hits], scores[best], atol=1e-5)
        assert [hit.vectors for hit in hits] == [tuple(products[i].argmax(axis=0)) for i in best]
    won = {number for hits in index.search(QUESTIONS, k=len(passages)) for hit in hits for number in hit.vectors}
    assert won == {0} if family == "one vector" else len(won) > 1, "control: other vectors win for other passages"
    if family != "one vector":
        every, one = (
            jaxret.Index.open(retriever, options=jaxret.SearchOptions(candidates=f"mean:{count}"))
            for count in (len(passages), 1)
        )
        assert every.search(QUESTIONS, 5) == index.search(QUESTIONS, 5)
        assert [len(hits) for hits in one.search(QUESTIONS, 1)] == [1, 1]
        assert "1 candidates a query by mean" in repr(one)


class Compilations:
    """A listener that counts the programs that XLA compiles."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def test_a_second_search_compiles_nothing_and_reads_only_its_passages(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    index = jaxret.Index.open(tmp_path / "run")
    compilations, searcher = Compilations(), index._searcher
    try:
        index.search(["river stone"], k=3)
        assert compilations.count > 0
        first, read, opened = compilations.count, searcher.texts.bytes_read, searcher.encoded_corpus
        (hits,) = index.search(["paper light"], k=3)
        assert compilations.count == first
        texts = sum(len(hit.text) + len(hit.title) for hit in hits)
        assert texts < searcher.texts.bytes_read - read < texts + 3 * 60, "three lines of the corpus's file are read"
        assert index._searcher.encoded_corpus is opened
        index.search(["river stone music light paper forest market winter silver garden"], k=3)
        assert compilations.count > first, "control: a longer question is another program"
    finally:
        jax.monitoring.unregister_event_duration_listener(compilations)


@pytest.mark.slow
def test_an_index_of_texts(retriever: jaxret.Retriever, root: Path, tmp_path: Path) -> None:
    """The vectors are stored with the run and encoded once; other texts under the same name overwrite nothing."""
    shutil.copytree(root / "run", tmp_path / "run")
    mine = jaxret.Retriever.open(tmp_path / "run")
    texts = ["river stone", "music light paper", "silver garden bridge"]
    index = jaxret.Index.build(mine, texts, progress=False)
    assert index.search([texts[2]])[0][0].text == texts[2]
    assert {hit.id for hit in index.search(["river"])[0]} == {"0", "1", "2"}
    folder = tmp_path / "run" / "embeddings" / "passages"
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = jaxret.Index.build(mine, iter(texts), progress=False)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert again.search(QUESTIONS) == index.search(QUESTIONS)
    with pytest.raises(ContractError, match=r"(?s)fingerprint.corpus.*Delete .* or choose another name"):
        jaxret.Index.build(mine, ["others"], progress=False)
    assert jaxret.Index.open(mine, "passages").search(QUESTIONS) == index.search(QUESTIONS)
    named = [jaxret.Passage("a1", "winter meadow", "castle"), jaxret.Passage("b2", "copper")]
    other = jaxret.Index.build(mine, named, "named", progress=False)
    assert other.search(["castle winter meadow"], k=1)[0][0].title == "castle"
    without = other.search(["copper"], texts=False)[0]
    assert {(hit.id, hit.text) for hit in without} == {("a1", ""), ("b2", "")}
    with pytest.raises(ValueError, match=r"several corpora, .*passages"):
        jaxret.Index.open(mine)


@pytest.mark.exhaustive
def test_from_model_without_training(tmp_path: Path) -> None:
    """Without a workdir, all files are in a temporary folder that is deleted with the retriever; with one, they
    stay."""
    model = write_modules(tmp_path / "model", normalize=True)
    retriever = jaxret.Retriever.from_model(model)
    folder = retriever.run.workdir.path
    index = jaxret.Index.build(retriever, ["river stone", "paper"], progress=False)
    before = index.search(["river stone"])
    del retriever
    gc.collect()
    assert folder.is_dir(), "the index still needs the folder"
    assert index.search(["river stone"]) == before
    del index
    gc.collect()
    assert not folder.exists()


FORKED = """
import atexit, os, pickle, sys
import jaxret
from jaxret.storage.temporary import TemporaryFolder

retriever = jaxret.Retriever.open(sys.argv[1])
index = jaxret.Index.open(retriever)
before = index.search(["river stone"], 2)
temporary, pickled = TemporaryFolder(), pickle.dumps(index)
child = os.fork()
if not child:
    for work in (lambda: index.search(["river stone"]), lambda: retriever.encode_passages(["x"]),
                 lambda: jaxret.Retriever.open(sys.argv[1]), lambda: jaxret.Index.open(retriever),
                 lambda: pickle.loads(pickled), lambda: jaxret.Index.build(retriever, ["river"], "forked")):
        try:
            work()
        except RuntimeError as error:
            print(str(error)[:36], flush=True)
    atexit._run_exitfuncs()  # as sys.exit does; JAX's own end would wait for its threads for ever
    os._exit(0)
os.waitpid(child, 0)
print(temporary.path.is_dir(), index.search(["river stone"], 2) == before)
del temporary
"""


@pytest.mark.slow
def test_a_forked_process_raises_and_removes_no_files(root: Path) -> None:
    """A forked process would wait for JAX's threads forever, and would delete the temporary files of its parent."""
    program = [sys.executable, "-c", FORKED, str(root / "run")]
    done = subprocess.run(program, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    *refused, last = done.stdout.splitlines()
    assert refused == ["this process was forked from process"] * 6
    assert not (root / "run" / "embeddings" / "forked").exists()
    assert last == "True True"


def test_unpickling_opens_the_run_again(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle has the run's folder, checkpoint, lengths and options, and works in any working directory."""
    monkeypatch.chdir(root)
    retriever = jaxret.Retriever.open("run", query_length=5)
    index = jaxret.Index.open(retriever, options=jaxret.SearchOptions(backend="xla"))
    data, expected = pickle.dumps((retriever, index)), index.search(QUESTIONS, 5)
    assert len(data) < 1000, "the pickle has no parameters"
    monkeypatch.chdir(tmp_path)
    again, index_again = pickle.loads(data)
    assert index_again.retriever is again
    assert again.run.tokenizer.query_length == 5
    assert index_again.search(QUESTIONS, 5) == expected
    assert index.search(QUESTIONS, 5) == expected, "an open index does not read relative paths either"
    assert repr(index_again) == repr(index)


def test_a_temporary_retriever_cannot_be_pickled(retriever: jaxret.Retriever) -> None:
    temporary = jaxret.Retriever(retriever.run, TemporaryFolder())
    with pytest.raises(TypeError, match="give from_model a workdir"):
        pickle.dumps(temporary)


@pytest.mark.slow
def test_the_callback_gets_every_line_of_the_log(root: Path, tmp_path: Path) -> None:
    """An error in the callback ends the training; the same call resumes from the last checkpoint."""
    config, calls = tiny_config(root / "encoder", root / "data"), list[dict[str, float]]()
    changes = {"train.steps": 4, "train.log_every": 1, "train.checkpoint_every": 2}

    def callback(step: int, metrics: dict[str, float]) -> None:
        calls.append({"step": step, **metrics})
        if len(calls) == 4:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        jaxret.Retriever.train(config, tmp_path / "run", changes, progress=False, callback=callback)
    assert [line["step"] for line in calls] == [1, 2, 2, 3]
    assert "loss" in calls[0]
    assert all(name == "step" or name.startswith("validation/") for name in calls[2])
    jaxret.Retriever.train(config, tmp_path / "run", changes, progress=False, callback=callback)
    assert [line["step"] for line in calls] == [1, 2, 2, 3, 3, 4, 4]
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert logged == [*calls[:3], *calls[4:]]


def test_training(root: Path, tmp_path: Path) -> None:
    """The config may be a file with changes, or an object. The same call again opens the existing run."""
    config = tiny_config(root / "encoder", root / "data")
    changes: dict[str, Any] = {"train.steps": 0, "data.dev": ""}  # training steps are tested elsewhere
    trained = jaxret.Retriever.train(config, tmp_path / "run", changes, progress=False)
    assert trained.run.checkpoint["step"] == 0
    assert config.train.steps == 6, "the caller's config is unchanged"
    again = jaxret.Retriever.train(config, tmp_path / "run", changes, progress=False)
    np.testing.assert_array_equal(again.encode_queries(QUESTIONS), trained.encode_queries(QUESTIONS))
    (tmp_path / "mine.py").write_text("from jaxret.configs.base import get_config\n")
    changes = {"encoder.checkpoint": "nobody/knows", "data.train": str(root / "data")}
    with pytest.raises(FileNotFoundError, match="nobody/knows"):
        jaxret.Retriever.train(str(tmp_path / "mine.py"), tmp_path / "other", changes, progress=False)


def with_metadata(metadata: Any) -> Callable[..., jaxret.Index]:
    return lambda r, i, p: jaxret.Index.build(r, [jaxret.Passage("a", "x", metadata=metadata)], "metadata")


DEEP_METADATA: dict[str, Any] = {}
for _ in range(5000):
    DEEP_METADATA = {"a": DEEP_METADATA}
ERRORS: dict[str, tuple[Callable[[jaxret.Retriever, jaxret.Index, Path], Any], type[Exception], str]] = {
    "no run": (
        lambda r, i, p: jaxret.Retriever.open(p / "nothing"),
        FileNotFoundError,
        "nothing is not a run; Retriever.from_model opens a model",
    ),
    "no model": (
        lambda r, i, p: jaxret.Retriever.from_model(p / "nothing"),
        FileNotFoundError,
        "nothing is neither the directory of a model nor a model",
    ),
    "an empty folder": (lambda r, i, p: jaxret.Retriever.from_model(p), FileNotFoundError, "has no config.json"),
    "a package": (
        lambda r, i, p: jaxret.Retriever.from_model("package:not_there/x"),
        FileNotFoundError,
        "the Python package not_there is not installed",
    ),
    "a run as a model": (
        lambda r, i, p: jaxret.Retriever.from_model(r.run.workdir, p),
        ValueError,
        "is a run: Retriever.open opens it",
    ),
    "a checkpoint": (lambda r, i, p: jaxret.Retriever.open(r.run.workdir, "7"), ValueError, "7"),
    "a length": (lambda r, i, p: jaxret.Retriever.open(r.run.workdir, query_length=1), ValueError, "query_length is 1"),
    "one question": (lambda r, i, p: i.search("river"), ValueError, "queries must be a list of texts, not one str"),
    "a blank": (lambda r, i, p: i.search(["river", " "]), ValueError, "queries[1]: the question is blank"),
    "half a pair": (lambda r, i, p: r.encode_queries(["\udc80"]), ValueError, "queries[0]: the question holds"),
    "one passage": (lambda r, i, p: r.encode_passages("river"), ValueError, "passages must be a list of texts"),
    "an empty passage": (lambda r, i, p: r.encode_passages(["x", ""]), DataError, "passages[1]: passage '1' is empty"),
    "no passages": (lambda r, i, p: jaxret.Index.build(r, []), ValueError, "there is no passage to encode"),
    "an id": (
        lambda r, i, p: jaxret.Index.build(r, [jaxret.Passage("a b", "x")], "ids"),
        DataError,
        "passage id 'a b' contains white space",
    ),
    "an id twice": (
        lambda r, i, p: jaxret.Index.build(r, [jaxret.Passage("a", "x"), jaxret.Passage("a", "y")], "ids"),
        DataError,
        "'a'",
    ),
    "a number as a key": (with_metadata({"a": {1: "b"}}), ValueError, "metadata is {'a': {1: 'b'}}; it must be a dict"),
    "a date": (with_metadata({"when": date(2024, 5, 1)}), ValueError, "write a date as a text"),
    "a NaN in metadata": (with_metadata({"a": float("nan")}), ValueError, "corpus[0].metadata is {'a': nan}"),
    "deep metadata": (
        with_metadata(DEEP_METADATA),
        ValueError,
        "metadata is a value with too many levels; it must be a dict",
    ),
    "half a pair in metadata": (with_metadata({"a": "\udc80"}), ValueError, "corpus[0].metadata is {'a': '\\udc80'}"),
    "k": (lambda r, i, p: i.search(["river"], k=0), ValueError, "k is 0; it must be at least 1"),
    "a backend": (
        lambda r, i, p: jaxret.Index.open(r, options=jaxret.SearchOptions(backend="fais")),
        ValueError,
        "backend is 'fais'; it must be one of 'auto', 'faiss-gpu'",
    ),
    "a corpus": (
        lambda r, i, p: jaxret.Index.open(r, "other"),
        FileNotFoundError,
        "has no corpus 'other'; it has data",
    ),
    "a corpus that is not encoded": (
        lambda r, i, p: jaxret.Index.open(r, p),
        FileNotFoundError,
        "; jaxret encode --workdir=",
    ),
    "a precision": (
        lambda r, i, p: jaxret.Index.open(r, options=jaxret.SearchOptions(backend="faiss-cpu", precision="int8")),
        ValueError,
        "computes in float32, not in int8",
    ),
    "candidates": (
        lambda r, i, p: jaxret.Index.open(r, options=jaxret.SearchOptions(candidates="mean:9")),
        ValueError,
        "candidates=mean:9 is for passages with several vectors; these have one",
    ),
    "a config": (lambda r, i, p: jaxret.Retriever.train("minilmm", p), ValueError, "did you mean minilm?"),
    "a key": (
        lambda r, i, p: jaxret.Retriever.train("mlr", p, {"train.step": 1}),
        ValueError,
        "mlr has no such key; did you mean train.steps?",
    ),
    "a value": (
        lambda r, i, p: jaxret.Retriever.train("mlr", p, {"train.steps": "many"}),
        ValueError,
        "train.steps cannot be 'many'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name: str, retriever: jaxret.Retriever, index: jaxret.Index, tmp_path: Path) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind) as raised:
        call(retriever, index, tmp_path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


WRONG_ARGUMENTS = {
    "R.open(7)": "workdir is 7; it must be a path",
    "R.open(run, 2.5)": 'checkpoint is 2.5; it must be "best", "last" or a step',
    "R.open(run, None)": 'checkpoint is None; it must be "best", "last" or a step',
    "R.open(run, True)": 'checkpoint is True; it must be "best", "last" or a step',
    "R.open(run, query_length='9')": "query_length is '9'; it must be a whole number",
    "R.open(run, passage_length=9.5)": "passage_length is 9.5; it must be a whole number",
    "R.from_model(None)": "source is None; it must be a path or a name",
    "R.from_model(run, 3)": "workdir is 3; it must be a path or None",
    "R.from_model(run, token=None)": "token is None; it must be a text",
    "R.from_model(run, normalize=1)": "normalize is 1; it must be True or False or None",
    "R.from_model(run, title_separator=None)": "title_separator is None; it must be a text",
    "R.from_model(run, download='yes')": "download is 'yes'; it must be True or False",
    "R.train(3, run)": "config is 3; it must be a name, a path or a ConfigDict",
    "R.train(ConfigDict({'a': 1}), run)": "this config lacks keys, such as data, encode, encoder: change the "
    "result of jaxret.configs.load_config(NAME)",
    "R.train('mlr', None)": "workdir is None; it must be a path",
    "R.train('mlr', run, 5)": 'changes is 5; it must be a dict of keys and values, such as {"train.steps": 10}',
    "R.train('mlr', run, {5: 1})": "a key of changes is 5; it must be a text",
    "R.train('mlr', run, progress=None)": "progress is None; it must be True or False",
    "R.train('mlr', run, callback='f')": "callback is 'f'; it must be a function of a step and metrics",
    "r.encode_queries(None)": "queries is None; it must be a list of texts",
    "r.encode_queries(np.array(3))": "queries is array(3); it must be a list of texts",
    "R.open('x' * 5000)": "workdir has 5,000 bytes; 4,095 are allowed",
    "R.open('')": "workdir is ''; it must be a path, in UTF-8 and not empty",
    "I.open(r, '\\0')": "corpus is '\\x00'; it must be the name or the path of a corpus, in UTF-8",
    "r.encode_queries([None])": "queries[0] is None; it must be a text",
    "r.encode_queries({'a': 1})": "queries must be a list of texts, not one dict: give its values",
    "r.encode_passages(3)": "passages is 3; it must be a list of texts",
    "r.encode_passages(['x', 7])": "passages[1] is 7; it must be a text, or a jaxret.Passage(id, text)",
    "r.encode_passages([P(1, 'x')])": "passages[0].id is 1; it must be a text",
    "r.encode_passages(['x', P('1', None)])": "passages[1].text is None; it must be a text",
    "r.encode_passages([P('1', 'x', 5)])": "passages[0].title is 5; it must be a text",
    "I.open(3)": "source is 3; it must be a Retriever or the folder of a run",
    "I.open(r, 3)": "corpus is 3; it must be the name or the path of a corpus",
    "I.open(r, options='xla')": "options is 'xla'; it must be a SearchOptions",
    "I.build('x', ['x'])": "retriever is 'x'; it must be a Retriever",
    "I.build(r, None)": "corpus is None; it must be a path, or a list of passages",
    "I.build(r, ['x'], 5)": "name is 5; it must be a text",
    "I.build(r, ['x'], encoding={})": "encoding is {}; it must be an EncodeOptions",
    "I.build(r, ['x'], options=3)": "options is 3; it must be a SearchOptions",
    "I.build(r, ['x'], progress=0)": "progress is 0; it must be True or False",
    "i.search(b'x')": "queries must be a list of texts, not one bytes: put it in [ ]",
    "i.search(None)": "queries is None; it must be a list of texts",
    "i.search(['x'], 2.5)": "k is 2.5; it must be a whole number",
    "i.search(['x'], '3')": "k is '3'; it must be a whole number",
    "i.search(['x'], None)": "k is None; it must be a whole number",
    "i.search(['x'], True)": "k is True; it must be a whole number",
    "i.search(['x'], -(10**5000))": "k is a number of thousands of digits; it must have at most 18 digits",
    "R.open(run, 10**20)": "checkpoint is 100000000000000000000; it must have at most 18 digits",
    "r.encode_queries([10**5000])": "queries[0] is a number of thousands of digits; it must be a text",
    "i.search(['x'], -1)": "k is -1; it must be at least 1",
    "i.search(['x'], texts='no')": "texts is 'no'; it must be True or False",
    "i.filtered(3)": 'filters[0] is 3; it must be a text "FIELD:VALUE"',
    "i.append(3)": "passages is 3; it must be a list of texts",
    "i.append([3])": "passages[0] is 3; it must be a text, or a jaxret.Passage(id, text)",
    "i.append(['x'], 3)": "encoding is 3; it must be an EncodeOptions",
    "i.delete('p1')": "ids must be a list of texts, not one str: put it in [ ]",
    "i.delete([1])": "ids[0] is 1; it must be a text",
    "i.rows('9')": "block is '9'; it must be a whole number",
    "i.rows(0)": "block is 0; it must be at least 1",
    "S(backend=3)": "backend is 3; it must be a text",
    "S(filters='a:b')": "filters is 'a:b'; it must be a tuple of texts",
    "E(shard_rows=2.5)": "shard_rows is 2.5; it must be a whole number",
    "json.dumps([E(shard_rows=np.int64(3)).shard_rows, E(lease=np.float32(9)).lease])": "no error",
    "E(lease='long')": "lease is 'long'; it must be a number",
    "E(lease=float('nan'))": "lease is nan; it must be a finite number",
}
PROGRAM = """
import json, sys
from jaxret import EncodeOptions as E, Index as I, Passage as P, Retriever as R, SearchOptions as S
from ml_collections import ConfigDict
import numpy as np
run = sys.argv[1]
r = R.open(run, 0)
i = I.open(r)
for call in json.loads(sys.argv[2]):
    try:
        eval(call)
        print("no error")
    except ValueError as error:
        print(error)
    except Exception as error:
        print(repr(error))
"""


def test_bad_arguments_are_value_errors(root: Path) -> None:
    """The calls run in their own process, because in the tests typeguard would check types before the function does."""
    program = [sys.executable, "-c", PROGRAM, str(root / "run"), json.dumps(list(WRONG_ARGUMENTS))]
    done = subprocess.run(program, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert dict(zip(WRONG_ARGUMENTS, done.stdout.splitlines(), strict=True)) == WRONG_ARGUMENTS


def test_empty_lists_are_no_error(retriever: jaxret.Retriever, index: jaxret.Index) -> None:
    assert index.search([]) == []
    queries, passages = retriever.encode_queries([]), retriever.encode_passages([])
    assert isinstance(queries, np.ndarray)
    assert isinstance(passages, np.ndarray)
    assert queries.shape == (0, 32)
    assert passages.shape == (0, 1, 32)


def test_repr_names_run_and_step(root: Path, retriever: jaxret.Retriever, index: jaxret.Index) -> None:
    assert repr(retriever) == f"Retriever({str(root / 'run')!r}, step 0)"
    assert repr(index).startswith(f"Index({str(root / 'run' / 'embeddings' / 'data')!r}, {len(index):,} passages, ")


@pytest.mark.exhaustive
def test_the_examples_of_the_documentation(minilm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = REPOSITORY / "docs" / "python.md"
    outcome = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 10
    assert outcome.failed == 0


def test_a_notebook_shows_hits_as_tables(index: jaxret.Index) -> None:
    results = index.search(["<table> river <b>", "silver garden"], k=2)
    assert results == [list(hits) for hits in results], "hits are lists"
    shown = results._repr_html_()
    assert (shown.count("<table>"), shown.count("<tr>")) == (2, 6)
    assert "<p>&lt;table&gt; river &lt;b&gt;</p>" in shown
    hit = results[0][0]
    assert results[0]._repr_html_().count("<tr>") == 3  # type: ignore[attr-defined]
    assert f"{hit.score:.4f}" in hit._repr_html_()
    assert "vector" not in hit._repr_html_()
    assert "vector" in replace(hit, vectors=(1,))._repr_html_()
    copy = pickle.loads(pickle.dumps(results))
    assert (copy, copy._repr_html_()) == (results, shown)
    assert index.search([])._repr_html_() == ""


def test_another_working_directory_changes_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes even if the new directory has another run with the same relative path."""
    monkeypatch.chdir(root)
    retriever = jaxret.Retriever.open("run")
    assert repr(retriever).startswith("Retriever('run', step "), "relative to the current directory"
    expected = retriever.encode_queries(QUESTIONS)
    shutil.copytree(root / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    again = pickle.loads(pickle.dumps(retriever))
    assert again.run.workdir.path == root / "run"
    assert (again.encode_queries(QUESTIONS) == expected).all()
    jaxret.Index.build(retriever, ["river"], "elsewhere", progress=False)
    assert (root / "run" / "embeddings" / "elsewhere").is_dir()
    assert not (tmp_path / "run" / "embeddings" / "elsewhere").exists()
    shutil.rmtree(root / "run" / "embeddings" / "elsewhere")


def test_configs_are_read_where_warnings_are_errors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"data\.train is empty"):
            jaxret.Retriever.train("mlr", tmp_path / "run")
