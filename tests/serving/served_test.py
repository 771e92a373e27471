"""A served run that ranks documents."""

from __future__ import annotations

import json
from pathlib import Path

from jaxret.api import Hit, Index, Retriever
from jaxret.data.chunks import document_id
from jaxret.data.records import Passage
from jaxret.experiments.explain import explain, vector_labels
from jaxret.search.search_options import SearchOptions
from jaxret.serving.serve_options import ServeOptions
from jaxret.serving.served import ServedRetriever
from tests.pipeline import untrained_run, write_data, write_encoder

CHUNKS = {
    "a#0": "silver river stone garden",
    "a#1": "castle bridge light",
    "b#0": "garden music",
    "b#1": "stone silver",
}


def test_winners_and_explanations_of_a_document_are_those_of_its_best_passage(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data", train=2, dev=1)
    lines = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in CHUNKS.items()]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    keys = {"head__name": "colbert", "head__colbert__late": True, "normalize": True}
    run = untrained_run(tmp_path / "run", tmp_path / "encoder", tmp_path / "data", **keys)
    plain = Index.build(Retriever.open(tmp_path / "run"), tmp_path / "corpus.jsonl", progress=False)
    served = ServedRetriever(str(tmp_path / "run"), "", "best", ServeOptions(), SearchOptions(max_passage=True))
    question = "castle bridge light"
    best: dict[str, Hit] = {}
    for one in plain.search([question], 4)[0]:
        best.setdefault(document_id(one.id), one)
    assert served.searcher is not None
    (answer,) = served.search(served.tokens([question], "query"), 2, served.searcher, texts=True)
    assert [hit.id for hit in answer.hits] == list(best)
    assert best["a"].id == "a#1", "the second passage wins"
    for hit in answer.hits:
        passage = Passage(best[hit.id].id, best[hit.id].text, best[hit.id].title)
        labels = vector_labels(run, run.tokenizer.passages([passage]), "passage")
        assert hit.winners == tuple(labels[place] for place in hit.vectors)
        assert served.explained([(question, None, hit.id)], 5) == [explain(run, question, passage, 5)]
