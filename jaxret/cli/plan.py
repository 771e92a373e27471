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
from jaxret.cli.flags import OptionFlags
from jaxret.plan.print_plans import PlanRequest, print_plans

ARGUMENTS = {"[SUBJECT]": "train (the default), encode, search or table"}

_REQUEST = OptionFlags(PlanRequest, config=shared_flags.optional_config("config to plan"))


def main(subject: str = "train") -> None:
    config = flags.FLAGS["config"]
    name = config_flags.get_config_filename(config) if config.value is not None else ""
    if not print_plans(_REQUEST(subject=subject, config_name=name)):
        raise SystemExit(1)
