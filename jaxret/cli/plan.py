"""Plans memory, time and storage of a config on chips, without the chips:

jaxret plan --config=mlr --topology=v5e:4x4                 a training step, and the run
jaxret plan encode --config=... --passages=21015324         encoding a corpus
jaxret plan search --config=... --passages=21015324         searching it

The exit status is 1 if the program does not fit. Programs are compiled on the CPU. docs/scale.md explains the numbers.
"""

from absl import flags
from ml_collections import config_flags

from jaxret.cli import shared_flags
from jaxret.cli.flags import OptionFlags
from jaxret.plan.print_plans import PlanRequest, print_plans

ARGUMENTS = {"[SUBJECT]": "train (the default), encode or search"}

_REQUEST = OptionFlags(PlanRequest, config=shared_flags.config("config to plan"))


def main(subject: str = "train") -> None:
    name = config_flags.get_config_filename(flags.FLAGS["config"])
    if not print_plans(_REQUEST(subject=subject, config_name=name)):
        raise SystemExit(1)
