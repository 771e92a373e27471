"""Plans memory, time and storage of a config on chips, without the chips:

jaxret plan --config=mlr --topology=v5e:4x4                 a training step, and the run
jaxret plan encode --config=... --passages=21015324         encoding a corpus
jaxret plan search --config=... --passages=21015324         searching it
jaxret plan table --configs=configs --topology=h100:1       table of docs/scale.md: every config of a folder
jaxret plan table --sizes --configs=configs --topology=...  table of docs/scale.md: sizes of corpora

The exit status is 1 if the program does not fit. Programs are compiled on the CPU. docs/scale.md explains the numbers.
"""

from absl import flags
from ml_collections import config_flags

from jaxret.cli import shared_flags

ARGUMENTS = {"[SUBJECT]": "train (the default), encode, search or table"}

_CONFIG = shared_flags.optional_config("config to plan")
_CONFIGS = flags.DEFINE_string("configs", "", "with `table`: folder of configs; all of them are planned")
_SIZES = flags.DEFINE_boolean("sizes", False, "with `table` and --configs: print bytes and search time of corpora")
_TOPOLOGY = flags.DEFINE_list("topology", [], "chips, such as v5e:4x4, v5p:2x2x1, h100:8; several separated by commas")
_UTILIZATION = flags.DEFINE_float(
    "utilization", 0.4, "expected share of the chips' full rate, to estimate hours", lower_bound=0.01, upper_bound=1
)
_ADVICE = flags.DEFINE_boolean("advice", True, "if a step does not fit, compile it with keys that may help")
_PASSAGES = flags.DEFINE_integer("passages", 1_000_000, "number of passages of the corpus", lower_bound=1)
_QUERIES = flags.DEFINE_integer("queries", 1000, "number of queries", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", [], "without data.train: mean tokens of queries and passages, such as 10,80")
_PRICE = flags.DEFINE_float("price", None, "dollars per chip and hour, to print the cost of training or encoding")
_PRECISION = flags.DEFINE_string("precision", "float32", "precision of search candidates, as in jaxret search")
_K = shared_flags.k()


def main(subject: str = "train") -> None:
    from jaxret.plan.print_plans import PlanRequest, print_plans

    request = PlanRequest(
        subject=subject,
        config=_CONFIG.value,
        config_name=config_flags.get_config_filename(flags.FLAGS["config"]) if _CONFIG.value is not None else "",
        topologies=tuple(_TOPOLOGY.value),
        configs_folder=_CONFIGS.value,
        sizes=_SIZES.value,
        utilization=_UTILIZATION.value,
        advice=_ADVICE.value,
        passages=_PASSAGES.value,
        queries=_QUERIES.value,
        k=_K.value,
        precision=_PRECISION.value,
        lengths=tuple(_LENGTHS.value),
        price=_PRICE.value,
    )
    if not print_plans(request):
        raise SystemExit(1)
