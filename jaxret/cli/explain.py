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
    from jaxret.experiments.explain_request import ExplainRequest

    request = ExplainRequest(
        workdir=_WORKDIR.value,
        query=_QUERY.value,
        text=_PASSAGE.value,
        title=_TITLE.value,
        passage_id=_PASSAGE_ID.value,
        encoded_name=_CORPUS.value,
        rank=_RANK.value,
        top=_TOP.value,
        checkpoint=_CHECKPOINT.value,
    )
    from jaxret.experiments.explain import explain_in_run
    from jaxret.parallel.events import emit

    text = explain_in_run(request)
    print(text)
    emit("listing", lines=text.splitlines())
