"""Pre-trains an encoder for retrieval:

jaxret pretrain --config=pretraining/retromae --workdir=runs/retromae --config.data.train=CORPUS

Run the same command again to resume. --config.encoder.checkpoint=FOLDER names what to begin with; an empty one begins
with a BERT of pretraining.scratch that knows nothing. The result is WORKDIR/model: encoder.checkpoint of jaxret train.
"""

import shlex
import sys

from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "how to pre-train: a shipped config's NAME (pretraining/...) or a FILE.py; also :SUFFIX"
)
flags.mark_flag_as_required("config")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)


def main() -> None:
    from jaxret.distributed import begin
    from jaxret.tools.pretrain import pretrain

    begin(_CONFIG.value.mesh)
    command = f"jaxret {shlex.join(word for word in sys.argv[1:])}"
    pretrain(_CONFIG.value, _WORKDIR.value, command=command).require_finished()
