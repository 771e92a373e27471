"""Time a training step: jaxret against plain PyTorch, with the same weights, batches, loss and optimizer.

python bench/train_step.py --data=FILE_OR_FOLDER --rounds=8

Needs torch and transformers (requirements-bench.txt). Each side is a process; they take turns with one step
each, and while one computes, the other waits. The PyTorch step is a usual one: transformers' BertModel, texts padded to
the longest of the batch, the mean over tokens scaled to length 1, in-batch negatives, clipped gradients, fused AdamW.
jaxret's is the step of train.py on MiniLM with configs/minilm.py. There is no dropout, so that losses can be compared
at every step; with --dropout they are not compared.

`full`: batches without padding. `ragged`: texts of their real lengths, which jaxret packs. Prints, for each, the median
seconds of both, the median of the ratios of each round with its range and the ratio of all rounds together (batches
differ in length, and a run takes the sum), the same for processor seconds, and the largest difference of two losses; on
a GPU also the MFU of both (the products of each, without recomputation, against the chip's rate). On a busy machine,
only processor seconds with --threads=1 are meaningful, because torch's threads spin while they wait for each other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.rounds import Results, add_json_flag

CASES = ("full", "ragged")
SIDES = ("jaxret", "torch")
Step = Callable[[Any], float]  # called with a batch on the host; returns its loss when everything is computed


@dataclass(frozen=True)
class Work:
    """The inputs of both sides: model, data, and batches by case and number."""

    config: Any
    directory: Path
    shapes: Any
    data: Any
    packed: Any  # BatchPlan

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Work:
        from jaxret.configs.minilm import get_config
        from jaxret.models.encoders.pretrained import resolve_encoder
        from jaxret.models.retriever_model import encoder_config, make_retriever_model
        from jaxret.runs.run import load_tokenizer
        from jaxret.training.examples import load_examples
        from jaxret.training.tasks.retrieval import make_retrieval_plan, pack_plan

        c = get_config("dual_encoder")
        if arguments.model:
            c.encoder.checkpoint, c.encoder.sha256 = arguments.model, ""
        c.encoder.dtype, c.tokens.passage_length = arguments.dtype, arguments.length
        c.data.train, c.data.on_error, c.data.store = arguments.data, "skip", arguments.store
        c.train.batch_size = arguments.queries
        c.optimizer.decay, c.optimizer.warmup_fraction = "none", 0.0
        directory = resolve_encoder(c.encoder.checkpoint)
        shapes = encoder_config(c, directory)
        if not arguments.dropout:
            shapes = replace(shapes, hidden_dropout=0.0, attention_dropout=0.0)
        retriever = make_retriever_model(c, shapes)
        data = load_examples(c, "train", load_tokenizer(c, directory, retriever), False, lambda line: None)
        assert data is not None
        return cls(
            c,
            directory,
            shapes,
            data,
            pack_plan(make_retrieval_plan(c, retriever, arguments.queries, 1), data, retriever, 1),
        )

    def batch(self, case: str, number: int, packed: bool) -> Any:
        """Return a batch: for "ragged", from the run's data; for "full", with the same text cut again, so that every
        text has the largest length."""
        from jaxret.types import Batch, Tokens

        if case == "ragged":
            plan = self.packed if packed else replace(self.packed, packer=None, length_multiple=1)
            return plan.training_batch(self.data, number)
        size, random = self.config.train.batch_size, np.random.default_rng(number)
        words = self.data.passages.flat[~np.isin(self.data.passages.flat, self.data.marker_ids)]

        def tokens(length: int) -> Tokens:
            starts = random.integers(0, len(words) - length, size)
            ids = np.stack([words[start : start + length] for start in starts])
            ids[:, 0], ids[:, -1] = self.data.marker_ids
            return Tokens(ids, np.ones_like(ids, bool))

        own, c = np.arange(size, dtype=np.int32), self.config.tokens
        return Batch(tokens(c.query_length), tokens(c.passage_length), own, own, own[:, None])


def make_ours(work: Work, arguments: argparse.Namespace) -> tuple[Step, Step]:
    """Return the step, and a function that gives the seconds of its products at the chip's full rate (0 if unknown)."""
    import jax

    from jaxret.models.encoders.pretrained import load_pretrained
    from jaxret.models.retriever_model import make_retriever_model
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.parallel.mesh import make_mesh, shard_batch
    from jaxret.training.optimizers import make_optimizer
    from jaxret.training.starting_weights import init_state
    from jaxret.training.step import make_train_step
    from jaxret.training.tasks.retrieval import make_retrieval_objective
    from jaxret.training.throughput import ideal_seconds

    keep_freed_memory()  # like every script of jaxret
    config, mesh, retriever = work.config, make_mesh(), make_retriever_model(work.config, work.shapes)
    optimizer, _ = make_optimizer(config.optimizer, total_steps=1000)
    _, weights = load_pretrained(work.directory, config.encoder.ignore, work.shapes)
    state = init_state(config, mesh, retriever, weights, optimizer)
    program = make_train_step(make_retrieval_objective(config, retriever, mesh), optimizer, state, jax.random.key(0))
    ideal = ideal_seconds(program, state, mesh.size, mesh.devices.flat[0].device_kind)

    def step(batch: Any) -> float:
        nonlocal state
        state, metrics = program(state, shard_batch(mesh, batch))
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return step, lambda batch: ideal(shard_batch(mesh, batch)) if ideal else 0.0


def make_theirs(work: Work, arguments: argparse.Namespace) -> tuple[Step, Step]:
    """Return the same as `make_ours`, for torch."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModel

    from jaxret.parallel.chips import find_chip
    from jaxret.training.losses.in_batch import competing_passages

    torch.set_num_threads(arguments.threads)
    config, device = work.config, arguments.device
    dropout = {"hidden_dropout_prob": work.shapes.hidden_dropout}
    dropout["attention_probs_dropout_prob"] = work.shapes.attention_dropout
    model = AutoModel.from_pretrained(work.directory, add_pooling_layer=False, **dropout).to(device).train()
    c = config.optimizer
    betas, decay = (c.b1, c.b2), c.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), c.learning_rate, betas, c.eps, decay, fused=True)
    autocast = torch.autocast(device, torch.bfloat16, enabled=config.encoder.dtype == "bfloat16")

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(device)

    def embed(tokens: Any) -> torch.Tensor:
        ids, mask = tensor(tokens.ids), tensor(tokens.mask)
        with autocast:
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    def step(batch: Any) -> float:
        scores = embed(batch.queries) @ embed(batch.passages).T / config.loss.temperature
        scores = scores.masked_fill(~tensor(competing_passages(batch)), -torch.inf)
        loss = torch.nn.functional.cross_entropy(scores, tensor(batch.positives).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return float(loss.detach())

    def ideal(batch: Any) -> float:
        chip = find_chip(torch.cuda.get_device_name()) if device == "cuda" else None
        if chip is None:
            return 0.0
        with FlopCounterMode(display=False) as counter:
            step(batch)
        return counter.get_total_flops() / chip.rates["bfloat16" if arguments.dtype == "bfloat16" else "float32 exact"]

    return step, ideal


def serve(side: str, case: str, arguments: argparse.Namespace, parent: Any) -> None:
    """Run the steps of one side in a process, on request: number of a batch -> (loss, seconds, seconds of all threads).
    At the end, None -> the seconds of batch 0's products at the chip's full rate (0 if unknown)."""
    # XLA takes its threads from the cores it may run on, torch from a setting: make both equal.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = arguments.device if side == "jaxret" else "cpu"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # both sides share the memory of a GPU
    work, packed = Work.of(arguments), side == "jaxret"
    step, ideal = {"jaxret": make_ours, "torch": make_theirs}[side](work, arguments)
    while (number := parent.recv()) is not None:
        batch = work.batch(case, number, packed)
        begin, busy = time.perf_counter(), time.process_time()
        loss = step(batch)
        parent.send((loss, time.perf_counter() - begin, time.process_time() - busy))
    parent.send(ideal(work.batch(case, 0, packed)))


def compare(case: str, arguments: argparse.Namespace, results: Results) -> None:
    """Run every step twice on both sides: once to warm up and compile, and once to be timed."""
    spawn, pipes = multiprocessing.get_context("spawn"), {}
    for side in SIDES:
        pipes[side], end = spawn.Pipe()
        spawn.Process(target=serve, args=(side, case, arguments, end), daemon=True).start()
        end.close()
    rows, rounds = [], arguments.rounds
    for turn in range(2 * rounds):
        results.calibrate()
        done = {}
        for side in SIDES if turn % 2 else SIDES[::-1]:
            pipes[side].send(turn % rounds)
            done[side] = pipes[side].recv()
        rows.append([done[side] for side in SIDES])
    ideal = []
    for pipe in pipes.values():
        pipe.send(None)
        ideal.append(pipe.recv())
    losses, seconds, busy = np.moveaxis(np.array(rows), -1, 0)
    for what, took in (("seconds", seconds[rounds:]), ("processor seconds", busy[rounds:])):
        (mine, other), ratios = np.median(took, axis=0), took[:, 1] / took[:, 0]
        print(f"{case}, {what} a step: jaxret {mine:.3f}, torch {other:.3f}; torch / jaxret of the rounds: ", end="")
        print(f"median {np.median(ratios):.2f}, from {ratios.min():.2f} to {ratios.max():.2f}", end="")
        mine, other = took.sum(axis=0)
        print(f"; of their sums {other / mine:.2f}", flush=True)
    shape = f"{case}, {arguments.queries} pairs, {arguments.length} tokens, {arguments.dtype}"
    results.add(shape, *({side: took.tolist()} for side, took in zip(SIDES, seconds[rounds:].T, strict=True)))
    (mine, other), apart = np.median(seconds[rounds:], axis=0), np.abs(losses[:, 0] - losses[:, 1])
    difference = float(np.max(apart / np.maximum(losses[:, 1], 1)))
    if all(ideal):
        print(f"  MFU: jaxret {ideal[0] / mine:.3f}, torch {ideal[1] / other:.3f}")
    if arguments.dropout or arguments.dtype != "float32":
        return
    print(f"  losses of {len(losses)} steps, {losses[0, 0]:.4f} to {losses[-1, 0]:.4f}, ", end="")
    print(f"differ by at most {difference:.1e} (of what is above 1; limit 1e-5)")
    if not difference <= 1e-5:
        raise SystemExit("a limit is broken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="BEIR folder or DPR file; without it, Python's documentation")
    parser.add_argument("--model", default="", help="a Hugging Face directory of a BERT; without it, MiniLM")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--queries", type=int, default=32, help="in a batch, each with its passage alone")
    parser.add_argument("--length", type=int, default=128, help="tokens of a passage at most; of a query: 32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--dropout", action="store_true", help="as the model has it; losses are then not compared")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--store", help=argparse.SUPPRESS)
    add_json_flag(parser)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    with tempfile.TemporaryDirectory() as folder:
        arguments.store = arguments.store or folder
        if not arguments.data:
            from jaxret.demo.demo import write_data

            arguments.data = str(write_data(Path(folder)).pairs)
        packer = Work.of(arguments).packed.packer  # this tokenizes the texts once
        print(f"{arguments.queries} pairs, {arguments.dtype}, {arguments.threads} threads; {packer}", flush=True)
        for case in arguments.cases:
            compare(case, arguments, results)
    results.write()


if __name__ == "__main__":
    main()
