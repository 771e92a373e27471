"""Runs a config at every point of a grid of its keys, with several seeds, and compares the points:

jaxret sweep --config=minilm:mlr --workdir=runs/layers --config.data.train=FOLDER --seeds=1,2,3 \\
  --grid="head.mlr.chosen=(2,6);(4,6)" --grid=loss.local_weight=0.01,0.1,1
jaxret sweep ... --list            the runs with their numbers
jaxret sweep ... --index=5         only one of them, for example in a Slurm array

Run the same command again to continue. The table, its numbers and the picture are WORKDIR/results.md, .json, .svg and
.png. Points are compared with --baseline by the first of --measures.
"""

import sys

from absl import flags
from ml_collections import config_flags

from jaxret.cli import shared_flags
from jaxret.cli.app import config_overrides
from jaxret.cli.flags import OptionFlags, define_flag
from jaxret.configs import shared_options
from jaxret.experiments.sweeps.grid import SweepSetup, read_grid

_CONFIG = shared_flags.config("config of the points")
_WORKDIR = define_flag(shared_options.workdir("folder of the sweep; each point has a folder in it"))
_GRID = flags.DEFINE_multi_string("grid", [], "values of a config key: KEY=VALUE,VALUE or KEY=(1,2);(3,4)")
_SEEDS = flags.DEFINE_list(
    "seeds", [], "values of all keys of config.seed; default: one run with the seeds of the config"
)
_LIST = flags.DEFINE_boolean("list", False, "only print the runs")
_INDEX = flags.DEFINE_integer("index", 0, "only do the run with this number; 0: all runs, and the table", lower_bound=0)
_SETUP = OptionFlags(SweepSetup)


def main() -> None:
    from jaxret.experiments.sweeps.run_sweep import list_sweep, report_sweep
    from jaxret.parallel.events import emit
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.parallel.processes import require_platform

    keep_freed_memory()
    config = _CONFIG.value
    require_platform(config.mesh.platform, "mesh.platform")
    overrides = config_overrides(config, sys.argv)
    grid = read_grid(_GRID.value, _SEEDS.value, config, tuple(overrides))
    name = config_flags.get_config_filename(flags.FLAGS["config"])
    setup = _SETUP(config=name, overrides=overrides, grid=grid)
    if _LIST.value:
        text = list_sweep(setup, _WORKDIR.value)
        print(text)
        emit("listing", lines=text.splitlines())
    else:
        report_sweep(setup, _WORKDIR.value, _INDEX.value)
