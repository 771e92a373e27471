"""Time a training step with padded and with packed texts: python bench/packing.py --train=FOLDER_OR_FILE

MiniLM is fine-tuned with configs/minilm.py on the same batches of real texts: a round has the padded steps, then the
packed ones. Prints both medians, the median of the ratios of each round, tokens computed per real one, and the number
of compiled programs. The device is JAX's default; no other job should use it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxret.configs.minilm import get_config
from jaxret.models.encoders.pretrained import load_pretrained, resolve_encoder
from jaxret.models.retriever_model import encoder_config, make_retriever_model
from jaxret.parallel.mesh import make_mesh, shard_batch
from jaxret.runs.run import load_tokenizer
from jaxret.training.examples import load_examples
from jaxret.training.optimizers import make_optimizer
from jaxret.training.starting_weights import init_state
from jaxret.training.step import make_train_step
from jaxret.training.tasks.retrieval import make_retrieval_objective, make_retrieval_plan, pack_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="BEIR folder or DPR file")
    parser.add_argument("--queries", type=int, default=32, help="in a batch, each with its passage alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="in a round")
    arguments = parser.parse_args()

    config = get_config("dual_encoder")
    config.data.train, config.data.negatives, config.data.on_error = arguments.train, 0, "skip"
    config.tokens.query_length = config.tokens.passage_length = 256
    config.train.batch_size = arguments.queries
    directory, mesh = resolve_encoder(config.encoder.checkpoint), make_mesh()
    retriever = make_retriever_model(config, encoder_config(config, directory))
    data = load_examples(config, "train", load_tokenizer(config, directory, retriever), True, print)
    assert data is not None
    objective = make_retrieval_objective(config, retriever, mesh)
    plan = make_retrieval_plan(config, retriever, arguments.queries, 1)
    plans = {"padded": plan, "packed": pack_plan(plan, data, retriever, objective.bins(arguments.queries))}
    print(plans["packed"].packer)
    optimizer, _ = make_optimizer(config.optimizer, 1000)
    _, weights = load_pretrained(directory, config.encoder.ignore, retriever.module.config)
    states = {name: init_state(config, mesh, retriever, weights, optimizer) for name in plans}
    step = make_train_step(objective, optimizer, states["padded"], jax.random.key(0))
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    padding: dict[str, list[float]] = {name: [] for name in plans}
    programs = dict.fromkeys(plans, 0)

    def run(name: str, first: int) -> float:
        batches = [shard_batch(mesh, plans[name].training_batch(data, first + i)) for i in range(arguments.steps)]
        before, begin = step.count, time.perf_counter()
        for batch in batches:
            states[name], metrics = step(states[name], batch)
            padding[name].append(float(metrics["padding"]))
        programs[name] += step.count - before
        return (time.perf_counter() - begin) / arguments.steps

    for name in plans:
        run(name, 0)  # the first call compiles the programs of these steps
    for i in range(arguments.rounds):
        before = step.count
        times = {name: run(name, i * arguments.steps) for name in plans}
        if step.count == before:  # otherwise, a program was compiled
            for name in plans:
                seconds[name].append(times[name])
    for name in plans:
        ratio = np.mean(padding[name])
        took = f"{np.median(seconds[name]):.3f} s a step, {ratio:.2f} tokens computed for each real one"
        print(f"{name}: {took}, {programs[name]} programs")
    print(f"packed / padded: {np.median(np.divide(seconds['packed'], seconds['padded'])):.2f}")


if __name__ == "__main__":
    main()
