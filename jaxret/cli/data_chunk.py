"""Splits the passages of a corpus, or of training records with answers, into chunks:

jaxret data chunk corpus.jsonl chunks.jsonl --words=100 --overlap=20     passage ID becomes ID#0, ID#1, ...
jaxret data chunk biencoder-train.json train.jsonl --sentences           positives become their chunks with an answer
jaxret search --workdir=RUN --queries=FILE --max_passage                 ranks documents by their best chunk
"""

from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.data.chunks import ChunkOptions

WRITES = ("DST",)
ARGUMENTS = {
    "SRC": "corpus (file, folder or named data set), or file of training records with answers",
    "DST": "JSONL file to write (.jsonl, .jsonl.gz or .jsonl.zst)",
}
_ON_ERROR = define_flag(shared_options.on_error())
_OPTIONS = OptionFlags(ChunkOptions)


def main(source: str, destination: str) -> None:
    from jaxret.data.formats import Policy
    from jaxret.experiments.chunk_data import chunk_data, open_texts
    from jaxret.parallel.events import emit
    from jaxret.storage.atomic import require_parent

    options, policy = _OPTIONS(), Policy(_ON_ERROR.value)
    require_parent(destination, "DST")
    counts = chunk_data(open_texts(source), destination, options, policy)
    print(f"{counts.records_read:,} records read, {counts.records_written:,} written: {destination}")
    if counts.without_answer:
        print(f"{counts.without_answer:,} training records are left out: no chunk of a positive has an answer")
    emit(
        "chunks",
        file=destination,
        read=counts.records_read,
        written=counts.records_written,
        without_answer=counts.without_answer,
    )
    if policy.report():
        print(policy.report())
