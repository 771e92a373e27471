"""Two tiny runs with data for every part of a report, and with texts that look like HTML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.formats import Corpus
from jaxret.experiments.probe.probe_options import ProbeOptions
from jaxret.experiments.probe.probe_report import report_probe
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.experiments.vector_diversity import JudgedSource, report_diversity
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import open_run
from jaxret.training.loop import train
from tests.pipeline import tiny_config, write_data, write_encoder

TITLE, QUESTION = "</script><script>alert('title')</script>", "<img src=x onerror=alert('question')>"
RUNS: dict[str, dict[str, Any]] = {
    "dual": {"head__token": "mean", "normalize": True},
    "layers": {"head__name": "mlr", "head__mlr__chosen": (1, 3), "optimizer__learning_rate": 2e-3},
}


def change_lines(path: Path, key: str, text: str) -> None:
    """Append a text to a field of every record in a JSONL file."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**one, key: f"{one.get(key, '')} {text}"}) + "\n" for one in records))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs `dual` and `layers`, and with the folder `data` on which they were trained and
    tested. Training, test and dev share queries, and some passages are equal."""
    root = tmp_path_factory.mktemp("report")
    encoder, data = write_encoder(root / "encoder"), write_data(root / "data")
    with open(data / "corpus.jsonl", "a") as file:
        file.write(json.dumps({"_id": "copy", "title": "", "text": "river stone"}) + "\n")
        file.write(json.dumps({"_id": "again", "title": "", "text": "river stone"}) + "\n")
    change_lines(data / "corpus.jsonl", "title", TITLE)
    change_lines(data / "queries.jsonl", "text", QUESTION)
    for name, keys in RUNS.items():
        train(tiny_config(encoder, data, **keys), root / name, progress=False)
        run = open_run(root / name)
        encode_corpus(run, Corpus.open(data), progress=False)
        search_files(run, EvaluationSource.open(data, data), EvaluationOptions(k=20, latency=2), progress=False)
    source, corpus = EvaluationSource.open(data, data), Corpus.open(data)
    report_diversity(open_run(root / "layers"), JudgedSource.of(source, corpus))
    report_probe(open_run(root / "dual"), source, corpus, ProbeOptions(split="test"))
    return root
