"""Print the quality on a BEIR data set as a Markdown table: MiniLM without training, dual encoder, MLR; several seeds.

python bench/quality.py --data=FOLDER --workdir=runs/quality/NAME --seeds=3 --set=train.epochs=1.0

It uses the functions of train.py, encode.py and search.py; a second call continues.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxret.data.formats import Corpus, Policy
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.significance import paired_comparison
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.run_system import MEASURES, run_system
from jaxret.search.bm25 import BM25

TITLES = {"dual_encoder": "dual encoder", "mlr": "MLR {4,6} self-contrastive"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="BEIR folder")
    parser.add_argument(
        "--dev", action="store_true", help="the folder has a dev split: choose the best checkpoint by it"
    )
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="config key to change")
    arguments = parser.parse_args()
    workdir = Path(arguments.workdir)
    data = {"data.train": arguments.data, "data.dev": arguments.data if arguments.dev else ""}
    changes = {key: ast.literal_eval(value) for key, _, value in (s.partition("=") for s in arguments.set)}
    get_config = importlib.import_module("jaxret.configs.minilm").get_config

    def run(system: str, seed: int) -> Evaluation:
        config = get_config(system)
        config.lock()
        seeds = {f"seed.{name}": seed for name in config.seed}
        fixed = {"train.steps": 0} if system == "as_it_comes" else {}
        config.update_from_flattened_dict({**data, **changes, **seeds, **fixed})
        return run_system(config, workdir / f"{system}-{seed}", Corpus.open(arguments.data), source, MEASURES)

    source = EvaluationSource.open(arguments.data, arguments.data)
    test = source.read(Policy())
    ranking = BM25.of(Corpus.open(arguments.data).read()).search(test.queries, k=100)
    rows = [("BM25", [evaluate(ranking, test.judgements, MEASURES)])]
    rows.append(("MiniLM without training", [run("as_it_comes", 1)]))
    for system, title in TITLES.items():
        rows.append((title, [run(system, seed) for seed in range(1, arguments.seeds + 1)]))

    print(f"\n{arguments.data}: {len(test.queries)} test queries\n")
    print("| system | " + " | ".join(MEASURES) + " |\n|:--|" + "--:|" * len(MEASURES))
    for title, evaluations in rows:
        cells = []
        for measure in MEASURES:
            values = np.array([evaluation.mean[measure] for evaluation in evaluations])
            spread = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.4f}{spread}")
        print(f"| {title} | " + " | ".join(cells) + " |")
    print("\n± is the standard deviation over seeds. nDCG@10, MLR minus dual encoder, paired over queries:")
    for seed, (dual, mlr) in enumerate(zip(rows[-2][1], rows[-1][1], strict=True), 1):
        c = paired_comparison(dual.per_query["nDCG@10"], mlr.per_query["nDCG@10"], seed=0)
        print(f"seed {seed}: {c.difference:+.4f} [{c.low:+.4f}, {c.high:+.4f}], permutation p = {c.p_permutation:.3f}")


if __name__ == "__main__":
    main()
