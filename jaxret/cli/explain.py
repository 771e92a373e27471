"""Explains why a passage is found for a query, by the words, tokens or vectors of the run's family:

jaxret explain --workdir=runs/i3 --passage="Text of a passage."          the words of a passage (I3, Aggretriever)
jaxret explain --workdir=runs/colbert --query="..." --passage_id=p17     the parts of a score; with --rank also the rank

I3: words of the reconstructed pseudo-query. Aggretriever: words with their weights, and the contribution of each
part of the vector. ColBERT: the best passage token for each query token. MLR, ME-BERT, MVR: the vector with the best
score. SPLADE: the words with their weights, and those that query and passage share.
"""

from absl import flags

from jaxret.cli import shared_flags

_WORKDIR = shared_flags.workdir()
_QUERY = flags.DEFINE_string("query", "", "text of a query")
_PASSAGE = flags.DEFINE_string("passage", "", "text of a passage")
_TITLE = flags.DEFINE_string("title", "", "title of the passage")
_PASSAGE_ID = flags.DEFINE_string("passage_id", "", "instead of --passage: id of an encoded passage")
_RANK = flags.DEFINE_bool(
    "rank", False, "with --query and --passage_id: search the corpus, and print the passage's rank"
)
_CORPUS = shared_flags.encoded_corpus()
_TOP = flags.DEFINE_integer("top", 10, "rows of a table", lower_bound=1)
_CHECKPOINT = shared_flags.checkpoint()


def main() -> None:
    from jaxret.data.records import Passage
    from jaxret.experiments.explain import StoredPassage, explain_in_run
    from jaxret.parallel.events import emit

    if not (_QUERY.value or _PASSAGE.value or _PASSAGE_ID.value) or (_PASSAGE.value and _PASSAGE_ID.value):
        raise ValueError("give a --query, and a passage as --passage=TEXT or --passage_id=ID, or one of them alone")
    passage = Passage("passage", _PASSAGE.value, _TITLE.value) if _PASSAGE.value else None
    if _RANK.value and not (_QUERY.value and _PASSAGE_ID.value):
        raise ValueError("--rank is the rank of a --passage_id for a --query: give both")
    stored_passage = StoredPassage(_PASSAGE_ID.value, _CORPUS.value, _RANK.value)
    text = explain_in_run(_WORKDIR.value, _CHECKPOINT.value, _QUERY.value, passage, stored_passage, _TOP.value)
    print(text)
    emit("listing", lines=text.splitlines())
