"""Pre-trains an encoder for retrieval:

jaxret pretrain --config=pretraining/retromae --workdir=runs/retromae --config.data.train=CORPUS

Run the same command again to resume. --config.encoder.checkpoint=FOLDER names the encoder to start from; if it is
empty, training starts from a random BERT of the sizes in pretraining.scratch. The result is WORKDIR/model, for
encoder.checkpoint of jaxret train.
"""

import shlex
import sys

from jaxret.cli import shared_flags
from jaxret.cli.flags import define_flag
from jaxret.configs import shared_options

_CONFIG = shared_flags.config("config of the pre-training (pretraining/...)")
_WORKDIR = define_flag(shared_options.workdir())


def main() -> None:
    from jaxret.parallel.processes import join_job
    from jaxret.training.pretraining.pretrain import pretrain

    join_job(_CONFIG.value.mesh)
    command = f"jaxret {shlex.join(word for word in sys.argv[1:])}"
    pretrain(_CONFIG.value, _WORKDIR.value, command=command).require_finished()
