"""A corpus is detected once, however many functions it passes through."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.formats import Corpus, detect, file_sample
from jaxret.index.encode import encode_corpus
from jaxret.search.searcher import Searcher
from tests.pipeline import untrained_run, write_data, write_encoder


def test_encoding_and_a_query_detect_the_format_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path / "data")
    run = untrained_run(tmp_path / "run", write_encoder(tmp_path / "encoder"), tmp_path / "data")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": f"p{i}", "text": f"river {i}"}) + "\n" for i in range(9)))
    calls: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    count(detect, "read_sample")
    count(file_sample, "_begin")  # opens the file
    folder = encode_corpus(run, corpus, progress=False).folder
    assert calls == {"read_sample": 1, "_begin": 1}
    calls.clear()
    assert Searcher(run, folder).passages(["p3"])["p3"].text == "river 3"
    assert calls == {"read_sample": 1, "_begin": 1}


def test_an_open_corpus_is_not_opened_again(tmp_path: Path) -> None:
    write_data(tmp_path)
    corpus = Corpus.open(tmp_path)
    assert Corpus.open(corpus) is corpus
    assert (corpus.file.path, corpus.name) == (tmp_path / "corpus.jsonl", tmp_path.name)
    assert [passage.id for passage in corpus.read()] == [passage.id for _, passage in corpus.read_located()]
