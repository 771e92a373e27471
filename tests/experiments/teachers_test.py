"""A retriever as a teacher, which scores passages by their ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jaxret.data.formats import Corpus, write_beir
from jaxret.data.records import Passage, Query
from jaxret.experiments.teachers import RetrieverTeacher
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import open_run
from tests.pipeline import WORDS, untrained_run, write_data, write_encoder


def test_a_retriever_scores_no_other_texts_of_the_same_ids(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data", train=2, dev=1)
    texts = [" ".join(WORDS[i : i + 4]) for i in range(10)]
    write_beir(tmp_path / "corpus", [Passage(str(i), text, "title") for i, text in enumerate(texts)], [], {})
    untrained_run(tmp_path / "run", tmp_path / "encoder", tmp_path / "data")
    encode_corpus(open_run(tmp_path / "run"), Corpus.open(tmp_path / "corpus"), progress=False)
    passages = {passage.id: passage for passage in Corpus.open(tmp_path / "corpus").read()}
    queries, teacher = {"q": Query("q", "river")}, RetrieverTeacher(str(tmp_path / "run"), "")
    written_otherwise = {key: replace(one, text=f"title {one.text.upper()}") for key, one in passages.items()}
    few = {key: replace(one, text="other") if key in "012" else one for key, one in passages.items()}
    for same in (passages, written_otherwise, few):
        assert len(teacher.scorer_of(queries, same)([("q", key) for key in same])) == 10
    turned = {key: replace(one, text=texts[9 - int(key)]) for key, one in passages.items()}
    with pytest.raises(ValueError, match=r"10 of 10 passages .*'0'"):
        teacher.scorer_of(queries, turned)
