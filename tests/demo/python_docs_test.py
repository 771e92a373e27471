"""The corpus, pairs and questions that the demo ships."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from jaxret.data.records import Passage
from jaxret.demo.python_docs import SummaryPair, load_docstrings, load_questions


@pytest.fixture(scope="module")
def docstrings() -> tuple[list[Passage], list[SummaryPair]]:
    return load_docstrings()


def words(text: str) -> str:
    """Return lower-case words, separated and surrounded by single spaces."""
    return f" {' '.join(re.findall(r'[a-z0-9_]+', text.lower()))} "


def test_passages_are_distinct_sorted_and_clean(docstrings):
    passages, _ = docstrings
    ids = [passage.id for passage in passages]
    assert len(ids) == 3000
    assert ids == sorted(set(ids))
    assert len({passage.text for passage in passages}) == len(passages)
    for passage in passages:
        assert passage.title == passage.id
        assert passage.text == passage.text.strip()
        assert len(passage.text.split()) >= 4
        assert not any(part.startswith("_") for part in passage.id.split("."))


def test_no_summary_occurs_in_its_passage(docstrings):
    passages, pairs = docstrings
    texts = {passage.id: passage.text for passage in passages}
    for pair in pairs:
        summary = words(pair.query.text)
        assert summary not in words(f"{pair.passage.title} {pair.passage.text}"), pair.query.id
        assert summary in words(texts[pair.query.id]), pair.query.id  # control: the whole docstring has it


def test_train_and_dev_share_neither_ids_nor_queries(docstrings):
    _, pairs = docstrings
    assert {pair.split for pair in pairs} == {"train", "dev"}
    assert 0.06 < sum(pair.split == "dev" for pair in pairs) / len(pairs) < 0.14
    assert len({pair.passage.id for pair in pairs}) == len(pairs)
    assert len({words(pair.query.text) for pair in pairs}) == len(pairs)
    assert all(pair.query.id == pair.passage.id for pair in pairs)


def test_every_answer_is_in_the_corpus(docstrings):
    queries, judgements = load_questions()
    assert len(queries) == 287
    assert {judgement.query_id for judgement in judgements} == {query.id for query in queries}
    assert {judgement.passage_id for judgement in judgements} <= {passage.id for passage in docstrings[0]}


def test_questions_are_distinct_not_trained_on_and_do_not_name_their_answers(docstrings):
    queries, judgements = load_questions()
    questions = {query.id: words(query.text) for query in queries}
    assert len(set(questions.values())) == len(queries)
    assert not set(questions.values()) & {words(pair.query.text) for pair in docstrings[1]}
    for judgement in judgements:
        last = judgement.passage_id.rpartition(".")[2].strip("_").lower()
        assert f" {last} " not in questions[judgement.query_id]


def test_the_licence_of_the_docstrings_is_shipped():
    text = resources.files("jaxret.demo").joinpath("LICENSE-python.txt").read_text(encoding="utf-8")
    assert text.startswith("corpus.jsonl.gz holds documentation strings")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
