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
    from jaxret import distributed
    from jaxret.memory import keep_freed_memory
    from jaxret.tools.pretrain import pretrain

    keep_freed_memory()
    mesh = _CONFIG.value.mesh
    several = mesh.coordinator, mesh.num_processes, mesh.process_id, mesh.initialization_timeout
    distributed.initialize(*several, where="--config.mesh.")
    command = f"jaxret {shlex.join(word for word in sys.argv[1:])}"
    pretrain(_CONFIG.value, _WORKDIR.value, command=command).require_finished()
