"""Encoding speed: jaxret against sentence-transformers on the same weights, texts and threads, interleaved in one run.

python bench/encode.py --corpus=FOLDER --texts=2000 --rounds=5

Needs sentence-transformers (requirements-bench.txt). Prints texts per second of both (median over rounds), the median
of the ratios of each round, the largest difference between the two outputs, padded tokens for each real one, and how
many programs were compiled after warm-up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="BEIR folder, corpus.jsonl or psgs.tsv")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=256, help="tokens at most")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    # XLA takes its threads from the cores it may run on, torch from a setting: make both the same.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    if arguments.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"

    import jax
    import numpy as np
    import torch
    from sentence_transformers import SentenceTransformer

    from configs.minilm import get_config
    from jaxret.data.formats import read_corpus
    from jaxret.data.records import Passage
    from jaxret.distributed import make_mesh, replicated
    from jaxret.models.encoders.pretrained import load_pretrained, resolve
    from jaxret.models.retriever import build_retriever
    from jaxret.runs.embedder import Embedder
    from jaxret.runs.run import load_tokenizer

    torch.set_num_threads(arguments.threads)
    passages = list(islice(read_corpus(arguments.corpus), arguments.texts))
    texts = [f"{p.title} {p.text}".strip() for p in passages]  # no [SEP]: the same string for both
    passages = [Passage(p.id, text) for p, text in zip(passages, texts, strict=True)]

    config = get_config("as_it_comes")
    config.tokens.passage_length = arguments.length
    directory = resolve(config.encoder.checkpoint)
    bert, encoder = load_pretrained(directory, config.encoder.ignore)
    mesh = make_mesh()
    retriever = build_retriever(config, bert)
    tokenizer = load_tokenizer(config, directory, retriever)
    params = jax.device_put({"encoder": encoder}, replicated(mesh))
    lengths = {"query": 32, "passage": arguments.length}
    tokens_per_batch = config.encode.tokens_per_batch if arguments.device == "cpu" else 65536
    embedder = Embedder(retriever, params, mesh, tokenizer.pad_id, lengths, tokens_per_batch)  # type: ignore[arg-type]

    peer = SentenceTransformer(str(resolve(config.encoder.checkpoint)), device=arguments.device)
    peer.max_seq_length = arguments.length

    def ours() -> np.ndarray:
        return embedder(tokenizer.passages(passages), "passage").stacked()[:, 0]

    def theirs() -> np.ndarray:
        return peer.encode(texts, batch_size=32, convert_to_numpy=True, show_progress_bar=False)

    difference = float(np.abs(ours() - theirs()).max())  # also the warm-up of both
    programs = embedder.programs
    times = []
    for _ in range(arguments.rounds):
        round_times = []
        for encode in (ours, theirs):
            begin = time.perf_counter()
            encode()
            round_times.append(time.perf_counter() - begin)
        times.append(round_times)
    mine, other = np.array(times).T
    print(f"{len(texts)} texts of {arguments.corpus}, at most {arguments.length} tokens, {arguments.threads} threads")
    print(
        f"jaxret {len(texts) / np.median(mine):.1f} texts/s, sentence-transformers {len(texts) / np.median(other):.1f}"
    )
    ratios = other / mine
    print(f"speed ratio: median {np.median(ratios):.2f}, from {ratios.min():.2f} to {ratios.max():.2f}")
    print(f"largest difference of an output: {difference:.1e} (limit 1e-5)")
    print(f"padded tokens for each real one: {embedder.padding_ratio:.3f} (limit 1.10)")
    print(f"programs compiled: {programs} in warm-up, {embedder.programs - programs} after it (limit 0)")
    if difference > 1e-5 or embedder.padding_ratio > 1.10 or embedder.programs > programs:
        raise SystemExit("a limit is broken")


if __name__ == "__main__":
    main()
