"""Mines hard negatives for training queries, and says what is in the file that it writes:

jaxret mine --data=FOLDER --corpus=FOLDER --pool=bm25 --out=FILE.jsonl       from BM25
jaxret mine --data=FOLDER --pool=runs/stage1 --out=FILE.jsonl                from a run that encoded the corpus
jaxret mine --data=FOLDER --corpus=FOLDER --pool=RUN.trec --out=FILE.jsonl   from a file of rankings

Train on it with --config.data.train=FILE.jsonl: it needs no other file.
"""

from absl import flags

_DATA = flags.DEFINE_string(
    "data", None, "folder or file with the training queries (docs/data.md has the formats)", required=True
)
_SPLIT = flags.DEFINE_string("split", "train", "split, where --data is a folder")
_POOL = flags.DEFINE_multi_string(
    "pool", [], "bm25, the folder of a run, or a file of rankings; of several, one record has the negatives of all"
)
_OUT = flags.DEFINE_string("out", None, "training file to write, JSON lines (.gz, .zst)", required=True)
_CORPUS = flags.DEFINE_string("corpus", "", "folder or file with the passages; a run knows the one that it encoded")
_ENCODED = flags.DEFINE_string("encoded", "", "name of a run's encoded corpus; needed if there are several")
_DEPTH = flags.DEFINE_integer("depth", 200, "ranks that are looked at, from the first", lower_bound=1)
_SKIP = flags.DEFINE_integer("skip", 0, "ranks at the top that are not", lower_bound=0)
_KEEP = flags.DEFINE_integer("keep", 30, "negatives of a query from each pool, and of a record of --concat")
_DRAW = flags.DEFINE_enum("draw", "sample", ["sample", "top"], "which of those that are left")
_SEED = flags.DEFINE_integer("seed", 12345, "of the sample", lower_bound=0)
_ANSWERS = flags.DEFINE_bool("answers", True, "leave out passages with an answer string, where queries have some")
_MATCH = flags.DEFINE_enum(
    "match",
    "string",
    ["string", "regex"],
    "what the queries' answers are: strings, or regular expressions (CuratedTREC)",
)
_MARGIN = flags.DEFINE_float("margin", None, "leave out what scores at least the positive's score less this")
_SHARE = flags.DEFINE_float("share", None, "leave out what scores at least this part of the positive's, as 0.95")
_MIN_SCORE = flags.DEFINE_float("min_score", None, "leave out what scores below this")
_MAX_SCORE = flags.DEFINE_float("max_score", None, "leave out what scores this or more")
_TEACHER = flags.DEFINE_string(
    "teacher", "", "file of rankings with a teacher's scores, positives too: limits go by them, and the file keeps them"
)
_FROM_RETRIEVAL = flags.DEFINE_bool(
    "positives_from_retrieval",
    False,
    "retrieved passages with an answer string are the positives, the first one the target, as in the reference recipe",
)
_CONCAT = flags.DEFINE_multi_string("concat", [], "training file whose records follow")
_SUBSET = flags.DEFINE_integer(
    "subset", 0, "of so many queries alone, as data.subset (and --seed); 0: of all", lower_bound=0
)
_PLATFORM = flags.DEFINE_string(
    "platform", "", "tpu, gpu or cpu: it is an error if there is none; default: what is found"
)
_ON_ERROR = flags.DEFINE_enum("on_error", "error", ["error", "skip"], "what to do with bad records")


def main() -> None:
    from jaxret.distributed import require_platform
    from jaxret.mining.filters import Settings
    from jaxret.mining.mine import Job, mine

    settings = Settings(
        depth=_DEPTH.value,
        skip=_SKIP.value,
        keep=_KEEP.value,
        draw=_DRAW.value,
        seed=_SEED.value,
        answers=_ANSWERS.value,
        match=_MATCH.value,
        margin=_MARGIN.value,
        share=_SHARE.value,
        min_score=_MIN_SCORE.value,
        max_score=_MAX_SCORE.value,
        positives_from_retrieval=_FROM_RETRIEVAL.value,
    )
    require_platform(_PLATFORM.value, "--platform")
    mine(
        Job(
            data=_DATA.value,
            split=_SPLIT.value,
            pools=tuple(_POOL.value),
            out=_OUT.value,
            corpus=_CORPUS.value,
            encoded=_ENCODED.value,
            teacher=_TEACHER.value,
            concat=tuple(_CONCAT.value),
            settings=settings,
            on_error=_ON_ERROR.value,
            subset=(_SUBSET.value, _SEED.value),
        )
    )
