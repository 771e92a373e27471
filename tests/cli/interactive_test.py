"""Questions typed one after the other."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxret.cli import interactive
from jaxret.cli.interactive import interact
from jaxret.data.formats import Corpus
from jaxret.data.records import Query
from jaxret.experiments.searches.answer_question import show_answer
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import Run
from jaxret.search.backends import accelerators
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from tests.pipeline import untrained_run, write_data, write_encoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("interactive")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    run = untrained_run(folder / "run", folder / "encoder", folder / "data", head__token="mean", normalize=True)
    encode_corpus(run, Corpus.open(folder / "data"), progress=False)
    return run


def ask(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


@pytest.mark.daily("faiss-cpu")
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["faiss-cpu", "xla"])
def test_answers_equal_those_of_single_searches(
    backend: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ["silver river", "stone", "paper light forest market winter garden bridge window thunder"]
    for question in questions:
        show_answer(Searcher(run, corpus_folder(run.workdir), SearchOptions(backend)), question, 3, progress=False)
    alone = capsys.readouterr().out
    ask(monkeypatch, "\n".join([*questions, "  ", "never"]).encode())
    interact(Searcher(run, corpus_folder(run.workdir), SearchOptions(backend)), 3)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "115 passages; an empty line or Ctrl-D ends"
    seconds = re.compile(r", \d+\.\d{3} s\)")
    assert len(seconds.findall("\n".join(lines))) == len(questions)
    assert seconds.sub("", "\n".join(lines)) == seconds.sub("", alone.rstrip("\n"))
    assert "never" not in "\n".join(lines)


@pytest.mark.exhaustive
def test_a_bad_question_does_not_end_the_session(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(monkeypatch, b"caf\xe9\nstone\r\n")
    interact(Searcher(run, corpus_folder(run.workdir)), 2)
    out, err = capsys.readouterr()
    assert err == "error: the question holds byte 0xe9, which is not UTF-8, at character 4; write it in UTF-8\n"
    assert out.splitlines()[1].startswith("stone   (exact search of 115 passages")


def compiled() -> int:
    """Return the number of compiled programs of the search."""
    return int(accelerators.search_cells._cache_size())  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_later_questions_compile_nothing_and_read_few_bytes(run: Run) -> None:
    searcher = Searcher(replace(run, program_cache={}), corpus_folder(run.workdir), SearchOptions("xla"))
    interactive.warm_up(searcher, 3)
    assert searcher.texts.bytes_read > 0, "the first answer does not wait for the index of all texts"
    before, searches = searcher.embedder.programs, compiled()
    size = len((run.workdir.path.parent / "data" / "corpus.jsonl").read_bytes())
    for text in ("river", "silver river stone", "paper light forest market winter garden bridge window thunder"):
        read = searcher.texts.bytes_read
        ranking = searcher.search([Query("0", text)], 3).rankings["0"]
        assert searcher.texts.read([key for key, _ in ranking])
        assert searcher.texts.bytes_read - read < size / 10
    assert searcher.embedder.programs == before > 0
    assert compiled() == searches > 0


@pytest.mark.slow
def test_ctrl_c_ends_a_line_and_the_end_of_input_ends_all(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of a terminal come from input()."""
    typed: Iterator[str | type[BaseException]] = iter([KeyboardInterrupt, "river", EOFError])

    def read(prompt: str) -> str:
        assert prompt == "question> "
        one = next(typed)
        if isinstance(one, str):
            return one
        raise one

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    interact(Searcher(run, corpus_folder(run.workdir)), 1)
    assert "river   (exact search" in capsys.readouterr().out


@pytest.mark.parametrize("error", [BrokenPipeError(), KeyError("x")])
def test_other_errors_end_the_session(error: Exception, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*_: object, **__: object) -> None:
        raise error

    ask(monkeypatch, b"one\ntwo\n")
    searcher = Searcher(run, corpus_folder(run.workdir))
    monkeypatch.setattr(interactive, "show_answer", show)
    with pytest.raises(type(error)):
        interact(searcher, 1)


def test_ctrl_c_in_a_search_ends_the_search(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions: list[str] = []

    def show(_: Searcher, question: str, *__: object, **___: object) -> None:
        questions.append(question)
        if question == "one":
            raise KeyboardInterrupt
        print("answered")

    ask(monkeypatch, b"one\ntwo\n")
    searcher = Searcher(run, corpus_folder(run.workdir))
    monkeypatch.setattr(interactive, "show_answer", show)
    interact(searcher, 1)
    out, err = capsys.readouterr()
    assert err == "interrupted\n"
    assert out.endswith("answered\n")
    assert questions == ["one", "two"]
