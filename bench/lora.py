"""Time a forward pass and a training step with LoRA: jaxret against torch and PEFT, in turns in one process.

python bench/lora.py --layers=10 --rounds=8

Needs torch, transformers and peft. Both sides have the same weights (random ones, in the shapes of SmolLM2-135M, or
--model), adapters in all dense layers, and random tokens without padding: queries of 32 and their passages of --length
tokens, means over tokens of length 1, in-batch negatives, clipped gradients, AdamW. The torch code is a usual one, with
scaled_dot_product_attention and fused AdamW. Prints the medians, the median of the ratios of each round with its range,
the same for processor seconds, and the largest difference of losses. On a busy machine, only processor seconds with
--threads=1 are meaningful.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.rounds import Results, add_json_flag, can_import

QUERY_LENGTH, TEMPERATURE, LIMIT = 32, 0.05, 1e-4
SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
}
Run = Callable[[Any], float]  # called with a batch; returns its loss when everything is computed


def write_random_model(folder: Path, layers: int) -> str:
    """Write a random language model with the shapes of SmolLM2-135M; return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    LlamaModel(LlamaConfig(**SMOLLM2, num_hidden_layers=layers or 30)).save_pretrained(folder)
    return str(folder)


def make_ours(arguments: argparse.Namespace, adapters: Path) -> tuple[Run, Run, int]:
    """Return the forward pass, the training step, and the size of the vocabulary; write the adapters to a folder."""
    import jax

    from jaxret.configs.base import get_config
    from jaxret.models.encoders.pretrained import load_pretrained, resolve_encoder
    from jaxret.models.lora import with_adapters
    from jaxret.models.peft_files import save_adapters
    from jaxret.models.retriever_model import encoder_config, make_retriever_model
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.parallel.mesh import make_mesh, shard_batch
    from jaxret.training.optimizers import make_optimizer
    from jaxret.training.starting_weights import init_state
    from jaxret.training.step import make_eval_step, make_train_step
    from jaxret.training.tasks.retrieval import make_retrieval_objective

    keep_freed_memory()  # like every script of jaxret
    c = get_config()
    c.encoder.checkpoint, c.encoder.layers, c.encoder.tied = arguments.model, arguments.layers, True
    c.encoder.recompute, c.head.token, c.normalize, c.loss.temperature = "none", "mean", True, TEMPERATURE
    c.lora.rank, c.lora.alpha, c.lora.base_dtype = arguments.rank, 2.0 * arguments.rank, "float32"
    c.optimizer.decay, c.optimizer.warmup_fraction, c.optimizer.learning_rate = "none", 0.0, 1e-4
    directory, mesh = resolve_encoder(c.encoder.checkpoint), make_mesh()
    shapes = encoder_config(c, directory)
    retriever = with_adapters(make_retriever_model(c, shapes), c.lora)
    _, weights = load_pretrained(directory, c.encoder.ignore, shapes)
    optimizer, _ = make_optimizer(c.optimizer, total_steps=1000)
    state = init_state(c, mesh, retriever, weights, optimizer)
    adapters.mkdir()
    save_adapters(adapters, shapes, jax.device_get(state.params["encoder"]), c.lora, str(directory))
    objective = make_retrieval_objective(c, retriever, mesh)
    evaluate = make_eval_step(objective, state.weights)
    train = make_train_step(objective, optimizer, state, jax.random.key(0))

    def forward(batch: Any) -> float:
        return float(evaluate(state.weights, shard_batch(mesh, batch)).loss)

    def step(batch: Any) -> float:
        nonlocal state
        state, metrics = train(state, shard_batch(mesh, batch))
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return forward, step, shapes.vocab_size


def make_theirs(arguments: argparse.Namespace, adapters: Path) -> tuple[Run, Run]:
    """Return the forward pass and the training step of torch, with the adapters in a folder."""
    import torch
    from peft import PeftModel
    from transformers import AutoModel

    from jaxret.configs.base import get_config
    from jaxret.models.encoders.pretrained import resolve_encoder

    torch.set_num_threads(arguments.threads)
    layers = {"num_hidden_layers": arguments.layers} if arguments.layers else {}
    base = AutoModel.from_pretrained(resolve_encoder(arguments.model), **layers)
    model = PeftModel.from_pretrained(base, adapters, is_trainable=True).train()
    trained, c = [one for one in model.parameters() if one.requires_grad], get_config().optimizer
    optimizer = torch.optim.AdamW(trained, 1e-4, (c.b1, c.b2), c.eps, c.weight_decay, fused=True)

    def embed(tokens: Any) -> torch.Tensor:
        ids, mask = torch.from_numpy(tokens.ids).long(), torch.from_numpy(tokens.mask)
        states = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return torch.nn.functional.normalize(states.mean(1), dim=-1)

    def loss_of(batch: Any) -> torch.Tensor:
        scores = embed(batch.queries) @ embed(batch.passages).T / TEMPERATURE
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))

    def forward(batch: Any) -> float:
        with torch.inference_mode():
            return float(loss_of(batch))

    def step(batch: Any) -> float:
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, c.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return forward, step


def make_batch(arguments: argparse.Namespace, vocabulary: int, number: int) -> Any:
    """Return a batch of random tokens."""
    from jaxret.types import Batch, Tokens

    random, count = np.random.default_rng(number), arguments.queries

    def tokens(length: int) -> Tokens:
        ids = random.integers(3, vocabulary, (count, length), dtype=np.int32)
        return Tokens(ids, np.ones_like(ids, bool))

    own = np.arange(count, dtype=np.int32)
    return Batch(tokens(QUERY_LENGTH), tokens(arguments.length), own, own, own[:, None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a Hugging Face directory of a language model")
    parser.add_argument("--layers", type=int, default=0, help="the first layers of the model alone; 0: all")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--queries", type=int, default=16, help="in a batch, each with its passage alone")
    parser.add_argument("--length", type=int, default=64, help="tokens of a passage")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add_json_flag(parser)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    if not can_import("torch", "transformers", "peft"):
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # XLA uses a thread per core
    with tempfile.TemporaryDirectory() as folder:
        adapters = Path(folder) / "adapters"
        arguments.model = arguments.model or write_random_model(Path(folder) / "model", arguments.layers)
        *ours, vocabulary = make_ours(arguments, adapters)
        theirs = make_theirs(arguments, adapters)
    cases, differences = ("forward pass", "training step"), []
    seconds: dict[str, list[list[tuple[float, float]]]] = {case: [] for case in cases}
    for number in range(arguments.rounds + 1):  # the first is a warm-up
        results.calibrate()
        batch = make_batch(arguments, vocabulary, number)
        for case, *sides in zip(cases, ours, theirs, strict=True):
            took, losses = [], []
            for run in sides:
                begin, busy = time.perf_counter(), time.process_time()
                losses.append(run(batch))
                took.append((time.perf_counter() - begin, time.process_time() - busy))
            seconds[case].append(took)
            differences.append(abs(losses[0] - losses[1]) / max(losses[1], 1))
    for case, rows in seconds.items():
        timed: Any = np.array(rows[1:])  # [rounds, sides, wall and processor]
        shape = f"{case}, {arguments.layers} layers, {arguments.queries} pairs, {arguments.length} tokens"
        results.add(shape, {"jaxret": timed[:, 0, 0].tolist()}, {"torch": timed[:, 1, 0].tolist()})
        for what, times in zip(("seconds", "processor seconds"), np.moveaxis(timed, -1, 0), strict=True):
            (mine, other), ratios = np.median(times, axis=0), times[:, 1] / times[:, 0]
            print(f"{case}, {what}: jaxret {mine:.3f}, torch {other:.3f}; torch / jaxret of the rounds: ", end="")
            print(f"median {np.median(ratios):.2f}, from {ratios.min():.2f} to {ratios.max():.2f}")
    load = os.getloadavg()[0]
    print(f"{arguments.threads} threads, load {load:.1f}; losses differ by at most {max(differences):.1e}")
    results.write()
    if not max(differences) <= LIMIT:
        raise SystemExit(f"the limit is {LIMIT}")


if __name__ == "__main__":
    main()
