"""Mines hard negatives for training queries, writes a training file, and audits it:

jaxret mine --data=FOLDER --corpus=FOLDER --pool=bm25 --out=FILE.jsonl       from BM25
jaxret mine --data=FOLDER --pool=runs/stage1 --out=FILE.jsonl                from a run that encoded the corpus
jaxret mine --data=FOLDER --corpus=FOLDER --pool=RUN.trec --out=FILE.jsonl   from a file of rankings
jaxret mine --data=FOLDER --pool=gs://BUCKET/RUN --out=FILE.jsonl --engine=ray --workers=8 --resources=GPU:1
                                                                             from a run, by a Ray cluster

Train on FILE.jsonl with --config.data.train=FILE.jsonl; it contains all texts.
"""

from dataclasses import replace

from absl import flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.mining.mining_settings import MiningSettings
from jaxret.runs.ray_cluster import EngineOptions, ray_workers

_DATA = flags.DEFINE_string(
    "data", None, "folder or file with the training queries (docs/data.md lists the formats)", required=True
)
_SPLIT = define_flag(shared_options.split("train"))
_POOL = flags.DEFINE_multi_string(
    "pool",
    [],
    "bm25, the folder of a run, or a file of rankings; if it is repeated, a record has negatives from all pools",
)
_OUT = shared_flags.out_file("training file to write, JSON lines (.gz, .zst)")
_CORPUS = define_flag(shared_options.corpus("the corpus that the run encoded"))
_ENCODED = flags.DEFINE_string("encoded", "", "name of the run's encoded corpus; needed if there are several")
_TEACHER = flags.DEFINE_string(
    "teacher",
    "",
    "file of rankings with a teacher's scores of candidates and positives, for score limits and the training file",
)
_CONCAT = flags.DEFINE_multi_string("concat", [], "training file whose records are appended")
_SUBSET = flags.DEFINE_integer("subset", 0, "number of queries to mine for, as data.subset; 0: all", lower_bound=0)
_SETTINGS = OptionFlags(MiningSettings)
_ENGINE = OptionFlags(EngineOptions)
_PLATFORM = define_flag(shared_options.platform())
_ON_ERROR = define_flag(shared_options.on_error())


def main() -> None:
    from jaxret.mining.mining_job import MiningJob, mine_negatives, require_run_pool
    from jaxret.mining.training_queries import open_concatenated, open_training_queries
    from jaxret.parallel.processes import require_platform

    settings, engine = _SETTINGS(), _ENGINE()
    require_platform("cpu" if engine.engine else _PLATFORM.value, "--platform")  # an engine's workers have accelerators
    job = MiningJob(
        data=open_training_queries(_DATA.value, _SPLIT.value, not settings.positives_from_retrieval),
        pools=tuple(_POOL.value),
        out=_OUT.value,
        corpus=shared_flags.open_corpus(_CORPUS),
        encoded_name=_ENCODED.value,
        teacher=_TEACHER.value,
        concat=tuple(map(open_concatenated, _CONCAT.value)),
        settings=settings,
        on_error=_ON_ERROR.value,
        subset=(_SUBSET.value, settings.seed),
        explicit_fields=tuple(name for name, holder in _SETTINGS.holders.items() if holder.present),
    )
    if engine.engine:
        require_run_pool(job)
    with ray_workers(engine, _PLATFORM.value) as workers:
        mine_negatives(replace(job, workers=workers))
