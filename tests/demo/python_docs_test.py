"""The demo data set: the documentation of the running Python."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from importlib import resources

import pytest

from jaxret.data.records import Passage
from jaxret.demo import python_docs, python_sources
from jaxret.demo.python_docs import Pair, load_questions, normalise, read_docstrings, split_summary, training_pairs

CANONICAL = """asyncio.gather collections.abc.Mapping collections.deque concurrent.futures.ThreadPoolExecutor csv.reader
    datetime.datetime.strftime functools.lru_cache hashlib.sha256 heapq.heappush itertools.groupby json.dumps
    multiprocessing.Pool os.listdir os.path.join pathlib.Path.read_text pathlib.PurePath.name random.choice re.compile
    re.Match.groupdict signal.signal socket.socket.connect sqlite3.connect str.split subprocess.run sys.getsizeof
    tempfile.NamedTemporaryFile tempfile.TemporaryFile time.sleep types.SimpleNamespace
    xml.etree.ElementTree.parse zlib.compress OSError""".split()  # noqa: SIM905
# Questions about what a supported Python lacks: first version that has it.
ADDED_LATER = {"itertools.batched": (3, 12)}
DESCRIBE_RUN = """
import json, sys
from jaxret.demo.python_docs import read_docstrings, training_pairs
before = set(sys.modules)
passages = read_docstrings()
loaded = [name for name, module in sys.modules.items() if name not in before and getattr(module, "__file__", None)]
pairs = [[[pair.query.text, pair.passage.text] for pair in side] for side in training_pairs(passages)]
json.dump([[[p.id, p.text] for p in passages], pairs, sorted(sys.modules), loaded], open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def corpus() -> list[Passage]:
    return read_docstrings()


@pytest.fixture(scope="module")
def pairs(corpus: list[Passage]) -> tuple[list[Pair], list[Pair]]:
    return training_pairs(corpus)


@pytest.fixture(scope="module")
def fresh_runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list]]:
    """(output, what was built) of two new processes that hash strings differently."""
    runs = []
    for seed in ("1", "2"):
        path = tmp_path_factory.mktemp("run") / "built.json"
        done = subprocess.run(
            [sys.executable, "-c", DESCRIBE_RUN, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        )
        runs.append((done.stdout + done.stderr, json.loads(path.read_text())))
    return runs


def test_counts(corpus, pairs):
    train, dev = pairs
    assert 4000 <= len(corpus) <= 7000
    assert 1500 <= len(train) <= 4000
    assert 0.06 < len(dev) / (len(train) + len(dev)) < 0.14


def test_names_are_the_ones_users_type(corpus):
    assert {name for name in CANONICAL if name not in {p.id for p in corpus}} == set()


def test_private_and_excluded_names_are_absent(corpus):
    roots = {p.id.partition(".")[0] for p in corpus}
    assert not roots & {*python_sources.EXCLUDED, "posixpath", "builtins", "test"}
    assert not [p.id for p in corpus if any(part.startswith("_") for part in p.id.split("."))]
    assert not [p.id for p in corpus if {"test", "tests"} & set(p.id.split(".")[1:-1])]


def test_passages_are_distinct_sorted_and_clean(corpus):
    ids = [p.id for p in corpus]
    assert ids == sorted(set(ids))
    assert len({p.text for p in corpus}) == len(corpus)
    for p in corpus:
        assert p.title == p.id
        assert not any(c.isspace() for c in p.id)
        assert p.text == p.text.strip()
        assert "\n\n\n" not in p.text
        assert len(p.text.split()) >= 4


def test_texts_are_the_docstrings_python_shows(corpus):
    texts = {p.id: p.text for p in corpus}
    for name, value in {"json.dumps": json.dumps, "str.split": str.split, "subprocess.run": subprocess.run}.items():
        assert texts[name] == python_docs.clean(value.__doc__)
    assert texts["csv"] != texts["csv.reader"]


def test_a_python_without_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(python_sources.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=f"no sources of the standard library under {tmp_path}"):
        read_docstrings()
    assert gc.isenabled()


def test_a_replaced_hook_does_not_change_the_corpus(corpus, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: None)
    documented = dict(python_sources.Library().documents("sys"))
    assert documented["sys.excepthook"] == sys.__excepthook__.__doc__
    assert {name for name in documented if len(documented[name].split()) >= 4} >= {
        p.id for p in corpus if p.id.startswith("sys.")
    }


@pytest.mark.exhaustive
def test_nothing_is_printed_and_only_compiled_modules_and_their_needs_are_imported(fresh_runs):
    output, (_, _, modules, loaded) = fresh_runs[0]
    assert output == ""
    forbidden = ("antigravity", "this", "turtle", "idlelib", "tkinter", "_tkinter", "readline", "lib2to3", "distutils")
    assert [name for name in modules if name.partition(".")[0] in forbidden] == []
    assert "_sqlite3" in loaded  # control: the list does show what was imported


@pytest.mark.exhaustive
def test_the_same_on_every_run(fresh_runs, corpus, pairs):
    (_, first), (_, second) = fresh_runs
    assert first[:2] == second[:2]
    assert first[0] == [[p.id, p.text] for p in corpus]
    assert first[1] == [[[pair.query.text, pair.passage.text] for pair in side] for side in pairs]


def test_no_summary_occurs_in_its_passage(corpus, pairs):
    whole = {p.id: p.text for p in corpus}
    for pair in [*pairs[0], *pairs[1]]:
        summary = normalise(pair.query.text)
        assert f" {summary} " not in f" {normalise(pair.passage.title)} {normalise(pair.passage.text)} ", pair.query.id
        assert f" {summary} " in f" {normalise(whole[pair.query.id])} ", pair.query.id  # control: unsplit, it does


def test_train_and_dev_share_neither_ids_nor_queries(corpus, pairs):
    train, dev = pairs
    everything = [*train, *dev]
    assert len({pair.passage.id for pair in everything}) == len(everything)
    assert len({normalise(pair.query.text) for pair in everything}) == len(everything)
    half_train, half_dev = training_pairs(corpus[::2])  # the side depends on nothing but the id
    assert {p.query.id for p in half_train}.isdisjoint(p.query.id for p in dev)
    assert {p.query.id for p in half_dev}.isdisjoint(p.query.id for p in train)


REST = "Everything else there is to say about it follows here, in words."


@pytest.mark.parametrize(
    ("text", "query", "kept"),
    [
        (f"Do one thing well.\n\n{REST}", "Do one thing well", REST),
        (f"Do one thing well. {REST}", "Do one thing well", REST),
        (f"Do things, e.g. many\nof them.  {REST}", "Do things, e.g. many of them", REST),
        (
            f"r(a) -> r object\nr(a[, b]) -> r\n\nGive it back. {REST}",
            "Give it back",
            f"r(a) -> r object\nr(a[, b]) -> r\n\n{REST}",
        ),
        (f"f(a,\n  b) --> thing\n\nGive a thing. {REST}", "Give a thing", f"f(a,\n  b) --> thing\n\n{REST}"),
        (f"D.pop(k[,d]) -> v, remove the key. {REST}", "remove the key", f"D.pop(k[,d]) -> v,\n\n{REST}"),
        (f"f(x) -- do one thing. {REST}", "do one thing", f"f(x) --\n\n{REST}"),
    ],
)
def test_summary_and_rest(text, query, kept):
    pair = split_summary(Passage("a.b", text, "a.b"))
    assert pair is not None
    assert (pair.query.text, pair.passage.text) == (query, kept)


@pytest.mark.parametrize(
    "text",
    [
        "Do one thing well.",  # nothing left
        f"Do it.\n\n{REST}",  # not a sentence
        f"Do one thing well.\n\n{REST} Do one\nthing, well!",  # winnable by copying
        f"The options are these:\n\n{REST}",
        f"uri [,options] -> a connection\n\n{REST}",
    ],
)
def test_what_gives_no_pair(text):
    assert split_summary(Passage("a.b", text, "a.b")) is None


def test_a_summary_shared_by_two_docstrings_is_left_out():
    shared = [Passage(name, f"Do one thing well. {REST} {name}", name) for name in ("a.b", "a.c")]
    assert training_pairs(shared) == ([], [])
    assert sum(map(len, training_pairs(shared[:1]))) == 1  # control


def test_every_question_has_an_answer_in_this_python(corpus):
    queries, judgements, skipped = load_questions({p.id for p in corpus})
    lacking = {name for name, version in ADDED_LATER.items() if sys.version_info < version}
    assert len(queries) >= 160
    assert {j.query_id for j in judgements} == {q.id for q in queries}
    unexplained = [line for line in skipped if not any(f"'{name}'" in line for name in lacking)]
    assert [line for line in unexplained if "is not in the corpus" in line] == []
    assert len([line for line in skipped if "question skipped" in line]) == len(lacking)


def test_questions_are_distinct_and_do_not_name_their_answers():
    text = resources.files("jaxret.demo").joinpath(python_docs.QUESTIONS_FILE).read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    assert len({normalise(record["question"]) for record in records}) == len(records)
    for record in records:
        for name in record["relevant"]:
            assert name.lower() not in record["question"].lower()
            last = name.rpartition(".")[2].strip("_").lower()
            assert last not in normalise(record["question"]).split(), record


def test_missing_names_are_skipped_counted_and_named(corpus):
    ids = {p.id for p in corpus}
    queries, judgements, skipped = load_questions(ids)
    fewer, remaining, named = load_questions(ids - {"csv.reader", "os.remove"})
    assert [q.id for q in queries if q not in fewer] == ["q001"]  # its only answer is gone
    assert len(judgements) - len(remaining) == 2
    new = [line for line in named if line not in skipped]
    assert len(new) == 3
    assert "q001: 'csv.reader' is not in the corpus" in new
    assert sum("'os.remove' is not in the corpus" in line for line in new) == 1
    assert sum(line.startswith("q001: question skipped") for line in new) == 1


@pytest.mark.parametrize("line", ['{"question": "x"', '{"question": "", "relevant": ["a"]}', '{"question": "x"}', "[]"])
def test_a_malformed_question_names_its_line(line):
    with pytest.raises(ValueError, match=r"python_docs_questions\.jsonl:7: "):
        python_docs.parse_question(line, 7)
