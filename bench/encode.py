"""Encoding speed: jaxret against sentence-transformers and onnxruntime on the same weights, texts and threads.

python bench/encode.py --corpus=FOLDER --texts=2000 --rounds=5

Needs requirements-bench.txt. The systems take turns in one process and all start from strings. sentence-transformers
has its default settings. onnxruntime has a graph from its own optimizer for BERT, and texts sorted by length in batches
of 32 (like sentence-transformers), tokenized by jaxret's tokenizer, which is the faster one. Prints texts per second of
each (median over rounds), the median of the ratios of each round with its range, the largest difference between
outputs, padded tokens per real one, the number of programs compiled after warm-up, and on a GPU the MFU of jaxret and
sentence-transformers (the products of each against the chip's rate); onnxruntime only runs on a CPU here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.rounds import Results, add_json_flag, can_import

BATCH = 32  # texts that the other systems encode at a time: the default of sentence-transformers
MOST_PADDING = 1.15  # tokens that are computed per real one


def make_onnx(directory: Path, threads: int, tokenize: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that encodes the texts by onnxruntime: the model exported by torch, its graph optimized for
    BERT."""
    import numpy as np
    import onnxruntime
    import torch
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    class States(torch.nn.Module):
        """The module to export: the last layer's states, with positional arguments."""

        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(directory, add_pooling_layer=False, attn_implementation="eager")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    states = States().eval()
    shape = states.model.config
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        names, axes = ["input_ids", "attention_mask"], {0: "batch", 1: "length"}
        example = torch.ones((2, 8), dtype=torch.long)
        torch.onnx.export(
            states, (example, example), path, input_names=names, output_names=["states"], dynamo=False,
            dynamic_axes={name: axes for name in (*names, "states")},
        )  # fmt: skip
        optimized = optimizer.optimize_model(path, "bert", shape.num_attention_heads, shape.hidden_size)
        fused = {name: number for name, number in optimized.get_fused_operator_statistics().items() if number}
        print(f"onnxruntime {onnxruntime.__version__}, fused: {fused}")
        optimized.save_model_to_file(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def encode() -> Any:
        texts = tokenize()
        result = np.empty((len(texts), shape.hidden_size), np.float32)
        order = np.argsort(-texts.lengths, kind="stable")
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            ids, mask = texts.padded(rows, int(texts.lengths[rows[0]]))
            inputs = {"input_ids": ids.astype(np.int64), "attention_mask": mask.astype(np.int64)}
            (hidden,) = session.run(None, inputs)
            mean = np.einsum("bth,bt->bh", hidden, mask.astype(np.float32)) / mask.sum(1, keepdims=True)
            result[rows] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return result

    return encode


def seconds_at_full_rate(embedder: Any, lengths: Any, side: Any = "passage") -> float:
    """Return the seconds that the products of encoding these lengths take at the chips' full rate; 0 if unknown."""
    import jax
    import jax.numpy as jnp

    from jaxret.parallel.chips import find_chip
    from jaxret.parallel.flops import count_flops, seconds_at_full_rate
    from jaxret.parallel.mesh import row_sharding
    from jaxret.runs.embedder import plan_batches
    from jaxret.types import Tokens

    mesh, limit = embedder.mesh, embedder.max_lengths[side]
    chip = find_chip(mesh.devices.flat[0].device_kind)
    if chip is None:
        return 0.0

    def batch(size: int, length: int) -> float:
        ids, mask = (
            jax.ShapeDtypeStruct((size, length), t, sharding=row_sharding(mesh)) for t in (jnp.int32, jnp.bool_)
        )
        return (
            seconds_at_full_rate(count_flops(embedder.program(side).trace(embedder.params, Tokens(ids, mask))), chip)
            / mesh.size
        )

    plan = plan_batches(lengths, embedder.tokens_per_batch, mesh.size)
    shapes = Counter((size, min(length, limit)) for _, size, length in plan)
    return sum(times * batch(*shape) for shape, times in shapes.items())


def torch_seconds(encode: Callable[[], Any], dtype: str) -> float:
    """Return the seconds that torch's products take at the chip's full rate."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from jaxret.parallel.chips import find_chip

    chip = find_chip(torch.cuda.get_device_name())
    assert chip is not None  # JAX knows the chip
    with FlopCounterMode(display=False) as counter:
        encode()
    return counter.get_total_flops() / chip.rates["float32 exact" if dtype == "float32" else dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="", help="folder or file; without it, Python's documentation")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=256, help="tokens at most")
    parser.add_argument(
        "--tokens", type=int, default=0, help="of a batch; 0: as configs/minilm.py has it, 65536 on a GPU"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of products")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    add_json_flag(parser)
    arguments = parser.parse_args()
    # XLA takes its threads from the cores it may run on, the other systems from a setting: make them equal.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = arguments.device
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # all systems share the memory
    run(arguments)


def make_ours(arguments: argparse.Namespace) -> tuple[Any, Any, Path]:
    """Return the tokenizer, the embedder, and the folder of the weights."""
    import jax

    from jaxret.configs.minilm import get_config
    from jaxret.models.encoders.pretrained import load_pretrained, resolve_encoder
    from jaxret.models.retriever_model import make_retriever_model
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.parallel.mesh import make_mesh, replicated_sharding
    from jaxret.runs.run import load_tokenizer, make_embedder

    keep_freed_memory()  # like every script of jaxret; it applies to all systems in this process
    config = get_config("as_it_comes")
    config.tokens.passage_length, config.encoder.dtype = arguments.length, arguments.dtype
    on_gpu = 0 if arguments.device == "cpu" else 65536
    config.encode.tokens_per_batch = arguments.tokens or on_gpu or config.encode.tokens_per_batch
    directory, mesh = resolve_encoder(config.encoder.checkpoint), make_mesh()
    shapes, encoder = load_pretrained(directory, config.encoder.ignore)
    retriever = make_retriever_model(config, shapes)
    tokenizer = load_tokenizer(config, directory, retriever)
    params = jax.device_put({"encoder": encoder}, replicated_sharding(mesh))
    return tokenizer, make_embedder(retriever, params, mesh, tokenizer, config), directory


def make_sentence_transformers(directory: Path, texts: list[str], arguments: argparse.Namespace) -> Callable[[], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(arguments.threads)
    options = {"dtype": getattr(torch, arguments.dtype)}
    model = SentenceTransformer(str(directory), device=arguments.device, model_kwargs=options)
    model.max_seq_length = arguments.length
    return lambda: model.encode(texts, batch_size=BATCH, convert_to_numpy=True, show_progress_bar=False)


def run(arguments: argparse.Namespace) -> None:
    import numpy as np

    from jaxret.data.formats import Corpus
    from jaxret.data.records import Passage
    from jaxret.demo.python_docs import load_docstrings

    corpus = Corpus.open(arguments.corpus).read() if arguments.corpus else load_docstrings()[0]
    passages = list(islice(corpus, arguments.texts))
    texts = [f"{p.title} {p.text}".strip() for p in passages]  # without [SEP]: the same string for all systems
    passages = [Passage(p.id, text) for p, text in zip(passages, texts, strict=True)]
    tokenizer, embedder, directory = make_ours(arguments)

    def tokenize() -> Any:
        return tokenizer.passages(passages)

    encoders: dict[str, Callable[[], Any]] = {
        "jaxret": lambda: embedder(tokenize(), "passage").stacked()[:, 0],
    }
    if can_import("sentence_transformers"):
        encoders["sentence-transformers"] = make_sentence_transformers(directory, texts, arguments)
    if arguments.device == "cpu" and can_import("onnx", "onnxruntime"):
        encoders["onnxruntime"] = make_onnx(directory, arguments.threads, tokenize)
    vectors = {name: encode() for name, encode in encoders.items()}  # this is also the warm-up
    programs = embedder.programs
    results, source = Results(arguments.json), arguments.corpus or "Python's documentation"
    seconds = results.rounds(encoders, arguments.rounds)
    case = f"{len(texts)} texts of {Path(source).name}, at most {arguments.length} tokens, {arguments.dtype}"
    results.add(case, {"jaxret": seconds["jaxret"]}, {name: seconds[name] for name in encoders if name != "jaxret"})
    results.write()
    print(f"{len(texts)} texts of {source}, at most {arguments.length} tokens, {arguments.threads} threads")
    for name, took in seconds.items():
        ratios = np.divide(took, seconds["jaxret"])
        print(f"{name}: {len(texts) / np.median(took):.1f} texts/s; jaxret / {name}: ", end="")
        print(f"median {np.median(ratios):.2f}, from {ratios.min():.2f} to {ratios.max():.2f}")
    if ideal := seconds_at_full_rate(embedder, tokenize().lengths):
        print(f"MFU: jaxret {ideal / np.median(seconds['jaxret']):.3f}")
        if "sentence-transformers" in seconds:
            theirs = torch_seconds(encoders["sentence-transformers"], arguments.dtype)
            print(f"MFU: sentence-transformers {theirs / np.median(seconds['sentence-transformers']):.3f}")
    difference = max(float(np.abs(output - vectors["jaxret"]).max()) for output in vectors.values())
    compiled_later = embedder.programs - programs
    print(f"largest difference of an output: {difference:.1e} (limit 1e-5, in float32)")
    print(f"padded tokens for each real one: {embedder.padding_ratio:.3f} (limit {MOST_PADDING})")
    print(f"programs compiled: {programs} in warm-up, {compiled_later} after it (limit 0)")
    different = arguments.dtype == "float32" and difference > 1e-5
    if different or embedder.padding_ratio > MOST_PADDING or compiled_later:
        raise SystemExit("a limit is broken")


if __name__ == "__main__":
    main()
