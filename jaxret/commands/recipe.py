"""Does the stages of a config one after the other: mine, score (a teacher), train, encode, search, and again; ends with
a table of them:

jaxret recipe --config=minilm:mlr --workdir=runs/two --config.data.train=FOLDER --config.data.dev=FOLDER
jaxret recipe --config=recipes/mlr_mined --workdir=runs/nq --config.data.train=train.json --corpus=psgs.tsv \\
  --queries=test.qa.csv

Run the same command again to go on: what is done is not done again while what it was made from is the same.
"""

import sys
from functools import reduce
from operator import getitem

from absl import flags
from ml_collections import config_flags

from jaxret.tools.cli import config_keys

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "a config with stages: a shipped one's NAME or a FILE.py; also :SYSTEM"
)
flags.mark_flag_as_required("config")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder for all of it; each stage has a run in it", required=True)
_CORPUS = flags.DEFINE_string("corpus", "", "folder or file with passages; default: the folder of config.data.train")
_QUERIES = flags.DEFINE_string("queries", "", "what to evaluate with; default: the folder of config.data.train")
_QRELS = flags.DEFINE_string("qrels", "", "folder or file with judgements; default: --queries, if it is a folder")
_SPLIT = flags.DEFINE_string("split", "test", "split to evaluate with, where --queries or --qrels is a folder")
_K = flags.DEFINE_integer("k", 100, "passages per query", lower_bound=1)
_MEASURES = flags.DEFINE_list(
    "measures", None, "as ir-measures names them; default: nDCG@10,RR@10,R@100,Success@5,Success@20, no deeper than --k"
)
_MATCH = flags.DEFINE_enum(
    "match",
    None,
    ["string", "regex"],
    "what the queries' answers are, in mining and in evaluation; default: string, or what a stage says of its mining",
)


def main() -> None:
    from jaxret.data.formats import source_path
    from jaxret.data.formats.places import is_folder, is_named
    from jaxret.distributed import require_platform
    from jaxret.memory import keep_freed_memory
    from jaxret.tools.recipe import run_recipe
    from jaxret.tools.recipe_check import Evaluated
    from jaxret.tools.stages import read_stages

    keep_freed_memory()
    config = _CONFIG.value
    require_platform(config.mesh.platform, "mesh.platform")
    given = {key: reduce(getitem, key.split("."), config) for key in config_keys(sys.argv)}
    data = config.data.train
    if data and not is_named(path := source_path(data)) and not path.exists():
        raise FileNotFoundError(f"--config.data.train={data}: {path} does not exist")
    whole = data if data and is_folder(source_path(data)) else ""
    corpus, queries = _CORPUS.value or whole, _QUERIES.value or whole
    for flag, value in (("--config.data.train", data), ("--corpus", corpus), ("--queries", queries)):
        if not value:
            raise ValueError(f"give {flag}; only where config.data.train is a folder does it have all of them")
    qrels = _QRELS.value or (queries if is_folder(source_path(queries)) else "")
    measures = tuple(_MEASURES.value) if _MEASURES.value else None
    on = Evaluated(corpus, queries, qrels, _SPLIT.value, _K.value, measures, _MATCH.value or "string")
    name = config_flags.get_config_filename(flags.FLAGS["config"])
    run_recipe(read_stages(name, given, _MATCH.value or ""), _WORKDIR.value, on)
