"""Explains why a passage is found for a query, by the words, tokens or vectors of the run's family:

jaxret explain --workdir=runs/i3 --passage="Text of a passage."          the words of a passage (I3, Aggretriever)
jaxret explain --workdir=runs/colbert --query="..." --passage_id=p17     the parts of a score; with --rank also the rank

I3: words of the reconstructed pseudo-query. Aggretriever: words with their weights, and the contribution of each
part of the vector. ColBERT: the best passage token for each query token. MLR, ME-BERT, MVR: the vector with the best
score. SPLADE: the words with their weights, and those that query and passage share.
"""

from jaxret.cli.flags import OptionFlags
from jaxret.experiments.explain_request import ExplainRequest

_REQUEST = OptionFlags(ExplainRequest)


def main() -> None:
    request = _REQUEST()
    from jaxret.experiments.explain import explain_in_run
    from jaxret.parallel.events import emit

    text = explain_in_run(request)
    print(text)
    emit("listing", lines=text.splitlines())
