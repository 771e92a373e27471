"""Explanations of a query and a passage, against the scores of a search."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.data.records import Passage, Query
from jaxret.experiments.explain import explain, explain_in_run, stored_passage
from jaxret.experiments.explain_request import ExplainRequest
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import Run
from jaxret.runs.workdir import Workdir
from jaxret.search.searcher import Searcher
from tests.pipeline import untrained_run, write_data, write_encoder

QUESTION = "silver river stone"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    folder = tmp_path_factory.mktemp("explain")
    write_encoder(folder / "encoder")
    write_data(folder / "data", train=6, dev=2)

    def run(name: str, **overrides: Any) -> Run:
        opened = untrained_run(folder / name, folder / "encoder", folder / "data", **overrides)
        encode_corpus(opened, Corpus.open(folder / "data"), progress=False)
        return opened

    return run


def best(run: Run) -> tuple[Passage, float]:
    """Return the best passage of a search, and its score."""
    (key, score), *_ = Searcher(run, corpus_folder(run.workdir)).search([Query("0", QUESTION)], 3).rankings["0"]
    return stored_passage(open_encoded(corpus_folder(run.workdir), verify=False), key), score


def rows(explanation: str, header: str) -> list[list[str]]:
    """Return the cells of the table under a header."""
    lines = explanation[explanation.index(header) :].split("\n\n")[0].splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines[2:]]


def test_a_missing_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere .*\(it .*config.json\)"):
        corpus_folder(Workdir(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give --query"),
        ({"title": "t"}, "give --query"),
        ({"query": "q", "text": "t", "passage_id": "p"}, "give --query"),
        ({"query": "q", "rank": True}, "--rank needs"),
        ({"passage_id": "p", "rank": True}, "--rank needs"),
        ({"query": "q", "title": "t"}, "--title needs --passage"),
        ({"passage_id": "p", "title": "t"}, "--title needs --passage"),
        ({"text": "t", "encoded_name": "c"}, "--corpus=c needs --passage_id"),
    ],
)
def test_values_that_exclude_each_other_or_are_missing(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExplainRequest("w", **values)


@pytest.mark.slow
def test_an_encoded_passage_has_its_text_and_rank(make: Callable[..., Run]) -> None:
    run = make("plain", head__token="mean")
    passage, score = best(run)
    request = ExplainRequest(str(run.workdir), QUESTION, passage_id=passage.id, rank=True)
    text, rank, parts, *_ = explain_in_run(request).split("\n\n")
    assert text == "  ".join(filter(None, [f"{passage.id}:", passage.title, passage.text]))
    assert rank.startswith("rank 1 of ")
    assert float(parts.splitlines()[0].split()[1]) == pytest.approx(score, abs=2e-4)


@pytest.mark.exhaustive
def test_late_interaction_shows_which_token_matched_which(make: Callable[..., Run]) -> None:
    run = make("late", head__name="colbert", head__colbert__late=True, normalize=True)
    passage, score = best(run)
    explanation = explain(run, QUESTION, passage)
    assert float(explanation.splitlines()[0].removeprefix("score ").split()[0]) == pytest.approx(score, abs=2e-4)
    table = rows(explanation, "query token")
    assert [row[0] for row in table] == ["0: [CLS]", "1: silver", "2: river", "3: stone", "4: [SEP]"]
    assert sum(float(row[2]) for row in table) == pytest.approx(score, abs=5e-4)
    with pytest.raises(ValueError, match="cannot explain a query alone"):
        explain(run, QUESTION)
    with pytest.raises(ValueError, match="passage 'p99'"):
        stored_passage(open_encoded(corpus_folder(run.workdir), verify=False), "p99")


@pytest.mark.exhaustive
def test_several_vectors_show_which_one_won(make: Callable[..., Run]) -> None:
    run = make("mlr", head__name="mlr", head__mlr__chosen=(2, 3), pooling="none")
    passage, score = best(run)
    explanation = explain(run, QUESTION, passage)
    table = rows(explanation, "vector")
    assert {row[0] for row in table} == {"layer 2", "layer 3"}
    assert float(table[0][1]) == pytest.approx(score, abs=1e-4)
    assert float(table[0][1]) >= float(table[1][1])
    assert explanation.endswith(
        f"the score is the product with {table[0][0]}, the largest; the other vectors do not count"
    )


@pytest.mark.exhaustive
def test_i3_shows_the_reconstructed_words(make: Callable[..., Run]) -> None:
    changes = {"reconstructor_layers": 1, "interactor_layers": 1, "pseudo_length": 4, "mask_id": 4}
    keys = {f"head__i3__{key}": value for key, value in changes.items()}
    run = make("i3", head__name="i3", data__pseudo_queries="query", **keys)
    passage, score = best(run)
    explanation = explain(run, QUESTION, passage, top=3)
    table = rows(explanation, "rank")
    assert [row[0] for row in table[:3]] == ["1", "2", "3"]
    values = [float(row[2]) for row in table]
    assert values[:3] == sorted(values[:3], reverse=True)
    assert {row[1] for row in table if row[-1] == "yes"} == {"silver", "river", "stone"}
    printed = next(line for line in explanation.splitlines() if line.startswith("score "))
    assert float(printed.split()[1]) == pytest.approx(score, abs=2e-4)  # the search adds the products in another order
    assert explanation.endswith("their dot product has no parts")
    assert "the run is not trained: layers that are not in the encoder's files are random" in explanation
    alone = explain(run, passage=passage, top=3)
    assert rows(alone, "rank") == [row[:4] for row in table[:3]]
    assert np.isfinite(values).all()
