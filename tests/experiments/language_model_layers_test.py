"""Several layers of a shortened language model: encoded, searched, explained, and compared with each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.data.records import Query
from jaxret.experiments.explain import explain, stored_passage
from jaxret.experiments.vector_diversity import JudgedSource, report_diversity
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.search.searcher import Searcher
from tests.pipeline import untrained_run, write_data, write_language_model

QUESTION = "silver river stone"


@pytest.mark.daily("last")
@pytest.mark.exhaustive
@pytest.mark.parametrize("token", ["last", "mean_without_first"])
def test_mlr_on_a_language_model(tmp_path: Path, token: str) -> None:
    keys = {"head__name": "mlr", "head__mlr__chosen": (2, 3), "head__token": token, "encoder__layers": 3}
    model, data = write_language_model(tmp_path / "model"), write_data(tmp_path / "data", train=6, dev=2)
    run = untrained_run(tmp_path / "run", model, data, **keys)
    assert run.model.module.config.num_layers == 3
    assert run.contract["encoder"]["normalize_intermediate"]
    encode_corpus(run, Corpus.open(data), progress=False)
    folder = corpus_folder(run.workdir)
    (key, score), *_ = Searcher(run, folder).search([Query("0", QUESTION)], 3).rankings["0"]
    explanation = explain(run, QUESTION, stored_passage(open_encoded(folder, verify=False), key))
    best = explanation.split("the score is the product with ")[1].split(",")[0]
    assert best in ("layer 2", "layer 3")
    assert float(explanation.splitlines()[0].removeprefix("score ").split()[0]) == pytest.approx(score, abs=2e-4)
    report = report_diversity(run, JudgedSource.open(data, "train"))
    assert "layer 2" in report
    assert np.isfinite(score)
