"""Runs the stages of a config (mine, score by a teacher, train, encode, search), and prints the results of all stages:

jaxret recipe --config=minilm:mlr --workdir=runs/two --config.data.train=FOLDER --config.data.dev=FOLDER
jaxret recipe --config=recipes/mlr_mined --workdir=runs/nq --config.data.train=train.json --corpus=psgs.tsv \\
  --queries=test.qa.csv

Run the same command again to continue. A completed step runs again only if its inputs changed.
"""

import sys

from absl import flags
from ml_collections import config_flags

from jaxret.cli import shared_flags
from jaxret.cli.app import config_overrides
from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.experiments.recipes.evaluation_request import EvaluationRequest

_CONFIG = shared_flags.config("config with stages")
_WORKDIR = define_flag(shared_options.workdir("folder of the recipe; each stage has a run in it"))
_EVALUATION = OptionFlags(EvaluationRequest)


def main() -> None:
    from jaxret.experiments.recipes.check_recipe import complete_evaluation
    from jaxret.experiments.recipes.run_recipe import run_recipe
    from jaxret.experiments.recipes.stages import read_stages
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.parallel.processes import require_platform

    keep_freed_memory()
    config = _CONFIG.value
    require_platform(config.mesh.platform, "mesh.platform")
    request = _EVALUATION()
    evaluation = complete_evaluation(request, config)
    name = config_flags.get_config_filename(flags.FLAGS["config"])
    stages = read_stages(name, config_overrides(config, sys.argv), request.match)
    run_recipe(stages, _WORKDIR.value, evaluation)
