"""Says why a passage is found for a question, as far as the run's family can:

jaxret explain --workdir=runs/i3 --passage="A passage's text."           the words that it stands for (I3, Aggretriever)
jaxret explain --workdir=runs/colbert --query="..." --passage_id=p17     what the score is made of

I3: the words of the queries that the passage imagines. Aggretriever: words and their weights, and what each part of the
vector contributes. ColBERT: which token matched which. MLR, ME-BERT, MVR: which vector won.
"""

from absl import flags

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
_QUERY = flags.DEFINE_string("query", "", "a question")
_PASSAGE = flags.DEFINE_string("passage", "", "a passage's text")
_TITLE = flags.DEFINE_string("title", "", "its title")
_PASSAGE_ID = flags.DEFINE_string("passage_id", "", "or the id of a passage that was encoded")
_CORPUS = flags.DEFINE_string("corpus", "", "the encoded corpus that has it: its name, or the path that was encoded")
_TOP = flags.DEFINE_integer("top", 10, "rows of a table", lower_bound=1)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, last, or a step")


def main() -> None:
    from jaxret.data.records import Passage
    from jaxret.retrieval.retrieve import corpus_folder
    from jaxret.runs.run import open_run
    from jaxret.runs.workdir import Workdir
    from jaxret.tools.explain import explain, open_as_encoded, stored_passage

    if not (_QUERY.value or _PASSAGE.value or _PASSAGE_ID.value) or (_PASSAGE.value and _PASSAGE_ID.value):
        raise ValueError("give a --query, and a passage as --passage=TEXT or --passage_id=ID, or one of them alone")
    passage: Passage | None = None
    if _PASSAGE_ID.value:
        folder = corpus_folder(Workdir(_WORKDIR.value), _CORPUS.value)
        passage = stored_passage(folder, _PASSAGE_ID.value)
        run = open_as_encoded(_WORKDIR.value, _CHECKPOINT.value, folder)
        print(f"{passage.id}: {passage.title} {passage.text}".rstrip() + "\n")
    else:
        run = open_run(_WORKDIR.value, _CHECKPOINT.value)
        passage = Passage("passage", _PASSAGE.value, _TITLE.value) if _PASSAGE.value else None
    print(explain(run, _QUERY.value, passage, _TOP.value))
