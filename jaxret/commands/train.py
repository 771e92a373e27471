"""Trains a retriever:

jaxret train --config=mlr --workdir=runs/mlr --config.data.train=FOLDER_OR_FILE

Run the same command again to resume. With several hosts, run it on each (see config.mesh).
"""

import sys

from absl import flags
from ml_collections import config_flags

from jaxret.tools.cli import config_keys

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "what to train: a shipped config's NAME or a FILE.py; also :SYSTEM"
)
flags.mark_flag_as_required("config")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)


def main() -> None:
    from jaxret.distributed import begin
    from jaxret.training.loop import train

    begin(_CONFIG.value.mesh)
    train(_CONFIG.value, _WORKDIR.value, given=config_keys(sys.argv)).require_finished()
