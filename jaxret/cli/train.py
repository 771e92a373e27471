"""Trains a retriever:

jaxret train --config=mlr --workdir=runs/mlr --config.data.train=FOLDER_OR_FILE

Run the same command again to resume. With several hosts, run it on each of them (see config.mesh).
"""

import sys

from jaxret.cli import shared_flags
from jaxret.cli.app import config_keys
from jaxret.cli.flags import define_flag
from jaxret.configs import shared_options

_CONFIG = shared_flags.config("config to train")
_WORKDIR = define_flag(shared_options.workdir())


def main() -> None:
    from jaxret.parallel.processes import join_job
    from jaxret.training.loop import train

    join_job(_CONFIG.value.mesh)
    train(_CONFIG.value, _WORKDIR.value, explicit_keys=config_keys(sys.argv)).require_finished()
