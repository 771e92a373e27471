"""What `jaxret explain` does: why a passage is found for a question, as far as a family can say it."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxret.data.files import Where, check_passage, check_question
from jaxret.data.records import Passage
from jaxret.evaluation.table import aligned
from jaxret.models.heads.head import Side
from jaxret.retrieval.encoded import open_encoded
from jaxret.retrieval.passages import Passages
from jaxret.runs.run import Run, open_run
from jaxret.types import Ragged, Tokens


def stored_passage(folder: Path, passage_id: str) -> Passage:
    """A passage of an encoded corpus, without reading its vectors. Raises ValueError if the corpus has no such id."""
    corpus = open_encoded(folder, verify=False)
    if corpus.without({passage_id}):
        raise ValueError(f"{folder} has no passage {passage_id!r}; its first is {corpus.ids([0])[0]!r}")
    for shards in reversed(corpus.shards):  # an id that was deleted may have come again: the last one counts
        if found := Passages(shards.folder).read([passage_id]):
            return found[passage_id]
    return Passage(passage_id, "")


def open_as_encoded(workdir: str | os.PathLike[str], checkpoint: str, folder: Path) -> Run:
    """The run, which cuts passages as those of an encoded corpus were."""
    contract = open_encoded(folder, verify=False).fingerprint["contract"]
    return open_run(workdir, checkpoint, passage_length=contract.get("passage_length"))


def explain(run: Run, question: str = "", passage: Passage | None = None, top: int = 10) -> str:
    """What the model makes of a question, of a passage, or of both together, to print. top: rows of a table. Raises
    ValueError for texts that say nothing, and where the family has nothing to say of a text alone."""
    texts: dict[Side, Ragged] = {}
    if question:
        texts["query"] = run.tokenizer.queries([check_question(question).text])
    if passage:
        check_passage(passage, Where(Path("the passage"), 1))
        texts["passage"] = run.tokenizer.passages([passage])
    head, parts = run.retriever.module.head, []
    for side, text in texts.items():
        if head.words(side):
            parts += [f"{side}: {head.words(side)}", words(run, text, side, texts.get("query"), top)]
            if run.checkpoint["step"] == 0:
                parts.append("this checkpoint is untrained: what new layers say of words means nothing yet")
    if question and passage:
        parts += contributions(run, texts["query"], texts["passage"], top)
    if not parts:
        alone = "question" if question else "passage"
        raise ValueError(
            f"head {run.config.head.name!r} says nothing of a {alone} alone; give --query and a passage: what their "
            "score is made of is shown"
        )
    return "\n\n".join(parts)


def words(run: Run, text: Ragged, side: Side, question: Ragged | None, top: int) -> str:
    """The words that a text stands for, the strongest first; beside them those of the question, however weak."""
    ids, mask = text.padded(np.array([0]), int(text.lengths[0]), run.tokenizer.pad_id)
    tokens = Tokens(jnp.asarray(ids), jnp.asarray(mask))
    program = jax.jit(lambda params: run.retriever.words(params, tokens, side))
    values = np.asarray(program(run.params))[0]  # [U,vocabulary]
    strongest, places = values.max(axis=0), values.argmax(axis=0)
    order = np.argsort(-strongest, kind="stable")
    rank = np.empty(len(order), int)
    rank[order] = np.arange(1, len(order) + 1)
    known = run.tokenizer.backend.get_vocab_size()
    shown = [word for word in order.tolist() if word < known][:top]
    asked: list[int] = []
    if question is not None and side == "passage":
        special = {id for id in run.tokenizer.special_ids.values() if id is not None}
        asked = [id for id in dict.fromkeys(question.flat.tolist()) if id not in special]
    rows = [
        [str(rank[word]), str(run.tokenizer.backend.id_to_token(word)), f"{strongest[word]:.4f}"]
        + ([str(places[word])] if len(values) > 1 else [])
        + (["yes" if word in asked else ""] if asked else [])
        for word in [*shown, *(word for word in asked if word not in shown)]
    ]
    header = [
        "rank",
        "word",
        "value",
        *(["at token"] if len(values) > 1 else []),
        *(["in the question"] if asked else []),
    ]
    return aligned(header, rows)


def contributions(run: Run, query: Ragged, passage: Ragged, top: int) -> list[str]:
    """What the score is made of."""
    unpooled = run.retriever.unpooled()
    asked = run.embedder()(query, "query")[0].astype(np.float64)  # [U,D]
    found = run.embedder()(passage, "passage")[0].astype(np.float64)  # [V,D]
    products = asked @ found.T
    lines = [f"score {products.max(axis=1).sum():.4f}"]
    if run.retriever.late_interaction:
        return [*lines, tokens_matched(run, products, query, passage)]
    if unpooled.vectors_per_passage != 1:
        before = run.embedder(unpooled=True)(passage, "passage")[0].astype(np.float64)
        return [*lines, *vectors_matched(run, (asked @ before.T)[0], passage, top)]
    parts = run.retriever.module.head.parts()
    if parts:
        shares = {name: float(asked[0, a:b] @ found[0, a:b]) for name, (a, b) in parts.items()}
        return [*lines, aligned(["part", "contributes"], [[name, f"{value:.4f}"] for name, value in shares.items()])]
    return [*lines, "question and passage have one vector each: no part of their product belongs to a word"]


def tokens_matched(run: Run, products: np.ndarray, query: Ragged, passage: Ragged) -> str:
    """Late interaction: for each token of the query the token of the passage that it matches best; their sum is the
    score."""
    left, right = vector_names(run, query, "query"), vector_names(run, passage, "passage")
    rows = [
        [name, right[best], f"{products[place, best]:.4f}"]
        for place, (name, best) in enumerate(zip(left, products.argmax(axis=1).tolist(), strict=True))
    ]
    return aligned(["query token", "passage token", "contributes"], rows, left=2)


def vectors_matched(run: Run, products: np.ndarray, passage: Ragged, top: int) -> list[str]:
    """Several vectors a passage: which of them the query matches best. Where they are pooled for search, those before
    that."""
    names = vector_names(run, passage, "passage")
    order = np.argsort(-products, kind="stable")[:top]  # of equal ones the first wins
    table = aligned(["vector", "product"], [[names[place], f"{products[place]:.4f}"] for place in order.tolist()])
    if run.retriever.vectors_per_passage == 1:
        pooling = run.config.pooling
        return [
            table,
            f"these are the vectors before pooling {pooling!r}, which makes of them the one that is searched",
        ]
    return [table, f"the score is that of {names[order[0]]}: the other vectors add nothing"]


def vector_names(run: Run, text: Ragged, side: Side) -> list[str]:
    """What each vector of a text is, before pooling: a layer, a viewer, or a token with its place in the text."""
    head = run.retriever.module.head
    if names := (head.vector_names() if side == "passage" else ()):
        return list(names)
    kept = np.flatnonzero(head.kept(text, side))
    tokens = [f"{place}: {run.tokenizer.backend.id_to_token(int(text.flat[place]))}" for place in kept.tolist()]
    return ["mean", *tokens] if head.keep(side).mean else tokens
