"""Explain a score by the words, tokens or vectors of query and passage, depending on the family."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxret.data.errors import Location
from jaxret.data.record_checks import check_passage, check_question
from jaxret.data.records import Passage
from jaxret.evaluation.text_table import aligned_table
from jaxret.experiments.explain_request import ExplainRequest
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.passages import Passages
from jaxret.models.heads.head import Side
from jaxret.runs.run import Run, open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.searcher import Searcher
from jaxret.types import Ragged, Tokens

RANK_DEPTH = 1000  # number of passages among which the rank of a passage is found


def stored_passage(encoded_corpus: EncodedCorpus, passage_id: str) -> Passage:
    """Return a passage of an encoded corpus without reading its vectors. Raises ValueError for an unknown id."""
    if encoded_corpus.missing_ids({passage_id}):
        first, folder = encoded_corpus.ids([0])[0], encoded_corpus.folder
        raise ValueError(f"{folder} has no passage {passage_id!r}; its first passage is {first!r}")
    for shards in reversed(encoded_corpus.shards):  # last part first, because a deleted id may have been appended again
        if passages := Passages.of_shards(shards).read([passage_id]):
            return passages[passage_id]
    return Passage(passage_id, "")


def open_as_encoded(workdir: str | os.PathLike[str], checkpoint: str, encoded_corpus: EncodedCorpus) -> Run:
    """Open a run with the passage length and the vector size of an encoded corpus."""
    run = open_run(workdir, checkpoint, passage_length=encoded_corpus.fingerprint["contract"].get("passage_length"))
    return run.with_dimension(encoded_corpus.dimension)


def explain_in_run(request: ExplainRequest) -> str:
    """Open a run, and return its explanation of the requested texts. If the passage is given by its id, its text, and
    its rank if requested, come first."""
    if not request.passage_id:
        run = open_run(request.workdir, request.checkpoint)
        return explain(run, request.query, request.passage, request.top)
    folder = corpus_folder(Workdir(request.workdir), request.encoded_name)
    encoded_corpus = open_encoded(folder, verify=False)
    passage = stored_passage(encoded_corpus, request.passage_id)
    run = open_as_encoded(request.workdir, request.checkpoint, encoded_corpus)
    text = "  ".join(filter(None, [f"{passage.id}:", passage.title, passage.text]))
    parts = [text, explain(run, request.query, passage, request.top)]
    if request.rank:
        parts.insert(1, describe_rank(Searcher(run, folder), request.query, passage.id))
    return "\n\n".join(parts)


def describe_rank(searcher: Searcher, question: str, passage_id: str) -> str:
    """Return a line with the rank of a passage for a question, if it is among the first RANK_DEPTH."""
    passages = searcher.encoded_corpus.total_rows
    (ranking,) = searcher.search([check_question(question)], min(RANK_DEPTH, passages)).rankings.values()
    ids = [key for key, _ in ranking]
    if passage_id not in ids:
        return f"not among the best {RANK_DEPTH:,} of {passages:,} passages"
    return f"rank {ids.index(passage_id) + 1:,} of {passages:,} passages"


def explain(run: Run, question: str = "", passage: Passage | None = None, top: int = 10) -> str:
    """Return a text that explains a query, a passage, or their score.

    Args:
        run: the run that scores.
        question: text of the query; "" to explain only a passage.
        passage: the passage; None to explain only a query.
        top: number of rows of a table.
    Raises:
        ValueError: a text is empty, or the family can explain only a query and a passage together.
    """
    texts: dict[Side, Ragged] = {}
    if question:
        texts["query"] = run.tokenizer.queries([check_question(question).text])
    if passage:
        check_passage(passage, Location(Path("the passage"), 1))
        texts["passage"] = run.tokenizer.passages([passage])
    head, parts = run.model.module.head, []
    for side, text in texts.items():
        if head.word_values(side):
            parts += [f"{side}: {head.word_values(side)}", word_table(run, text, side, texts.get("query"), top)]
            if run.checkpoint["step"] == 0:
                parts.append("the run is not trained: layers that are not in the encoder's files are random")
    if question and passage:
        parts += score_parts(run, texts["query"], texts["passage"], top)
    if not parts:
        side = "query" if question else "passage"
        raise ValueError(
            f"head {run.config.head.name!r} cannot explain a {side} alone; give both --query and a passage to see the "
            "parts of their score"
        )
    return "\n\n".join(parts)


def word_table(run: Run, text: Ragged, side: Side, question: Ragged | None, top: int) -> str:
    """Return a table of the words with the largest values of a text. For a passage, the words of the query follow.

    Args:
        run: a run whose head gives values to words.
        text: token ids of one text.
        side: whether the text is a query or a passage.
        question: token ids of the query; None without a query.
        top: number of rows before the words of the query.
    """
    values = vocabulary_values(run, text, side)
    strongest, positions = values.max(axis=0), values.argmax(axis=0)
    order = np.argsort(-strongest, kind="stable")
    rank = np.empty(len(order), int)
    rank[order] = np.arange(1, len(order) + 1)
    vocabulary_size = run.tokenizer.backend.get_vocab_size()
    top_words = [word for word in order.tolist() if word < vocabulary_size][:top]
    query_words: list[int] = []
    if question is not None and side == "passage":
        special = run.tokenizer.special_ids.values()
        query_words = [id for id in dict.fromkeys(question.flat.tolist()) if id not in special]
    rows = [
        [str(rank[word]), str(run.tokenizer.backend.id_to_token(word)), f"{strongest[word]:.4f}"]
        + ([str(positions[word])] if len(values) > 1 else [])
        + (["yes" if word in query_words else ""] if query_words else [])
        for word in [*top_words, *(word for word in query_words if word not in top_words)]
    ]
    header = ["rank", "word", "value"] + (["at token"] if len(values) > 1 else [])
    return aligned_table(header + (["in the query"] if query_words else []), rows)


def vocabulary_values(run: Run, text: Ragged, side: Side) -> np.ndarray:
    """Return the values of the vocabulary's words at each of U positions of a text, [U,vocabulary]. `text` has the
    token ids of one text; the head of `run` gives values to words."""
    ids, mask = text.padded(np.array([0]), int(text.lengths[0]), run.tokenizer.pad_id)
    tokens = Tokens(jnp.asarray(ids), jnp.asarray(mask))
    program = jax.jit(lambda params: run.model.word_values(params, tokens, side))
    return np.asarray(program(run.params))[0]


def own_word_values(run: Run, passage: Passage) -> list[tuple[str, float]]:
    """Return (token, value of its word in the passage's vector before pruning) for each token of a passage.

    Raises ValueError for a family that gives words no values, and for a passage without text.
    """
    if not run.model.module.head.word_values("passage"):
        raise ValueError(f"head {run.config.head.name!r} gives words no values")
    check_passage(passage, Location(Path("the passage"), 1))
    text = run.tokenizer.passages([passage])
    strongest = vocabulary_values(run, text, "passage").max(axis=0)
    ids = [id for id in text.flat.tolist() if id not in run.tokenizer.special_ids.values()]
    return [(str(run.tokenizer.backend.id_to_token(id)), float(strongest[id])) for id in ids]


def score_parts(run: Run, query: Ragged, passage: Ragged, top: int) -> list[str]:
    """Return the score and its parts, as paragraphs.

    Args:
        run: the run that scores.
        query: token ids of one query.
        passage: token ids of one passage.
        top: number of rows of a table.
    """
    unpooled_model = run.model.unpooled()
    query_vectors = run.embedder()(query, "query")[0].astype(np.float64)  # [U,D]
    passage_vectors = run.embedder()(passage, "passage")[0].astype(np.float64)  # [V,D]
    products = query_vectors @ passage_vectors.T
    lines = [f"score {products.max(axis=1).sum():.4f}"]
    if run.model.late_interaction:
        return [*lines, token_matches(run, products, query, passage)]
    if run.model.sparse:
        return [*lines, word_matches(run, query_vectors[0], passage_vectors[0], top)]
    if unpooled_model.vectors_per_passage != 1:
        unpooled_vectors = run.embedder(unpooled=True)(passage, "passage")[0].astype(np.float64)
        return [*lines, *vector_matches(run, (query_vectors @ unpooled_vectors.T)[0], passage, top)]
    if parts := run.model.module.head.vector_parts():
        shares = {name: float(query_vectors[0, a:b] @ passage_vectors[0, a:b]) for name, (a, b) in parts.items()}
        rows = [[name, f"{share:.4f}"] for name, share in shares.items()]
        return [*lines, aligned_table(["part", "contributes"], rows)]
    return [*lines, "query and passage have one vector each: their dot product has no parts"]


def word_matches(run: Run, query: np.ndarray, passage: np.ndarray, top: int) -> str:
    """Return a table of the words that a query and a passage share, largest contribution first. The score is the sum of
    the contributions.

    Args:
        run: a run whose vectors are weights of words.
        query: weights [D] of the query.
        passage: weights [D] of the passage.
        top: number of rows of the table.
    """
    products = query * passage
    words = np.flatnonzero(products)
    if not len(words):
        return "query and passage share no word that has a weight in both"
    order = words[np.argsort(-products[words], kind="stable")]
    rows = [
        [str(run.tokenizer.backend.id_to_token(word)), *(f"{x[word]:.4f}" for x in (query, passage, products))]
        for word in order[:top].tolist()
    ]
    if len(order) > top:
        rows.append([f"{len(order) - top} more", "", "", f"{products[order[top:]].sum():.4f}"])
    return aligned_table(["word", "in the query", "in the passage", "contributes"], rows)


def token_matches(run: Run, products: np.ndarray, query: Ragged, passage: Ragged) -> str:
    """Return a table of late interaction: each query token with its best passage token. The score is the sum of the
    contributions.

    Args:
        run: a run with late interaction.
        products: dot products of all pairs of vectors [U,V].
        query: token ids of the query.
        passage: token ids of the passage.
    """
    left, right = vector_labels(run, query, "query"), vector_labels(run, passage, "passage")
    rows = [
        [name, right[best], f"{products[row, best]:.4f}"]
        for row, (name, best) in enumerate(zip(left, products.argmax(axis=1).tolist(), strict=True))
    ]
    return aligned_table(["query token", "passage token", "contributes"], rows, left=2)


def vector_matches(run: Run, products: np.ndarray, passage: Ragged, top: int) -> list[str]:
    """Return a table of the passage's vectors before pooling, largest dot product with the query's vector first, and a
    sentence about their use.

    Args:
        run: a run with several vectors per passage before pooling.
        products: dot products [V].
        passage: token ids of the passage.
        top: number of rows of the table.
    """
    names = vector_labels(run, passage, "passage")
    order = np.argsort(-products, kind="stable")[:top]  # if products are equal, the first vector wins
    table = aligned_table(["vector", "product"], [[names[row], f"{products[row]:.4f}"] for row in order.tolist()])
    if run.model.vectors_per_passage == 1:
        pooling = f"pooling {run.config.pooling!r} combines them into one vector for search"
        return [table, f"these are the vectors before pooling; {pooling}"]
    return [table, f"the score is the product with {names[order[0]]}, the largest; the other vectors do not count"]


def vector_labels(run: Run, text: Ragged, side: Side) -> list[str]:
    """Return a label for each vector of a text before pooling: a layer, a viewer, or a token with its position."""
    head = run.model.module.head
    if names := (head.vector_names() if side == "passage" else ()):
        return list(names)
    positions = np.flatnonzero(head.vector_mask(text, side))
    tokens = [f"{place}: {run.tokenizer.backend.id_to_token(int(text.flat[place]))}" for place in positions.tolist()]
    return ["mean", *tokens] if head.selection(side).mean else tokens
