"""Exports a cross-encoder to transformers' class for sequence classification, which CrossEncoder of
sentence-transformers reads, too."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxret.data.records import Passage, Query
from jaxret.data.tokens.tokenizer import TOKENIZER_FILES
from jaxret.export.compare_original import sample_texts
from jaxret.export.round_trip import TOLERANCE
from jaxret.models.cross_encoder import CrossEncoderModel, save_cross_encoder
from jaxret.models.encoders.layers import Compute
from jaxret.runs.reranker import Reranker, open_pretrained_reranker, open_reranker
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import atomic_write
from jaxret.storage.transaction import new_folder

CARD = """---
library_name: sentence-transformers
pipeline_tag: text-ranking
tags:
- cross-encoder
---

# {name}

A cross-encoder: a query and a passage read together, at most {query} and {passage} tokens, one score (the logit).
Written by `jaxret export --workdir={workdir} --to=hf --out={name}`, of step {step}.

    from sentence_transformers import CrossEncoder
    CrossEncoder("FOLDER").predict([("query", "title text")])  # the sigmoid of the score

{notes}
"""


def export_cross_encoder(workdir: Path, out: Path, checkpoint: str = "best") -> str:
    """Write the new folder `out`, read it back, and return a sentence on the difference of the scores of 64 pairs.
    Raises ValueError if scores differ."""
    reranker = reranker_in_float32(open_reranker(workdir, checkpoint, attention="plain"))
    model, tokenizer = reranker.scorer.model, reranker.tokenizer
    lengths = tokenizer.query_length, tokenizer.passage_length
    with new_folder(out) as folder:
        save_cross_encoder(folder, model.module.config, reranker.scorer.params)
        for name in TOKENIZER_FILES:
            if (Workdir(workdir).encoder / name).is_file():
                shutil.copyfile(Workdir(workdir).encoder / name, folder / name)
        read_back = open_pretrained_reranker(str(folder), *lengths)
        read_back = replace(read_back, tokenizer=tokenizer)  # joins pairs like the run
        farthest = float(np.abs(sample_scores(reranker) - sample_scores(read_back)).max())
        if not farthest <= TOLERANCE:
            raise ValueError(f"{out}: scores read back differ from the run's by {farthest:.1e}; nothing was written")
        note = f"Scores of 64 pairs, read back, differ from the run's by at most {farthest:.1e}."
        step = reranker.origin["checkpoint"]["step"]
        card = CARD.format(name=out.name, query=lengths[0], passage=lengths[1], workdir=workdir, step=step, notes=note)
        with atomic_write(folder / "README.md") as file:
            file.write(card)
    return f"{out}: {note}"


def reranker_in_float32(reranker: Reranker) -> Reranker:
    """Return the reranker with products in float32."""
    model = CrossEncoderModel(reranker.scorer.model.module.clone(compute=Compute()))
    return replace(reranker, scorer=replace(reranker.scorer, model=model, program_cache={}))


def sample_scores(reranker: Reranker) -> np.ndarray:
    """Return the scores of 64 pairs of sample texts."""
    texts = sample_texts()[:8]
    queries = {str(i): Query(str(i), text) for i, text in enumerate(texts)}
    passages = {str(i): Passage(str(i), text) for i, text in enumerate(texts)}
    return reranker(queries, passages, [(q, p) for q in queries for p in passages])[0]
