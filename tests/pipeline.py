"""A whole retriever in miniature for the tests of the pipeline: an encoder folder, a data set, a config."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from jaxret.configs.base import get_config
from jaxret.data.formats import Corpus, write_beir
from jaxret.data.records import Judgement, Passage, Query
from jaxret.index.encoding.encode import encode_corpus
from jaxret.models.encoders.architectures.t5 import ARCHITECTURE as T5
from jaxret.models.encoders.architectures.t5 import T5Config
from jaxret.models.generation.generator_weights import generator_tensors
from jaxret.models.generation.t5_decoder import GeneratorConfig, T5Generator
from jaxret.runs.run import Run, open_run
from jaxret.storage.atomic import write_json
from jaxret.training.loop import train
from jaxret.training.throughput import TIMED
from jaxret.training.unread_keys import find_reader
from jaxret.types import Params, Tokens

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDENS = REPOSITORY / "tests" / "goldens"
TINY_BERT = GOLDENS / "tiny_bert"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "river",
    "stone",
    "music",
    "light",
    "paper",
    "forest",
    "market",
    "winter",
    "silver",
    "garden",
    "bridge",
    "window",
    "thunder",
    "copper",
    "meadow",
    "engine",
    "harbor",
    "castle",
]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
# The environment of a process with one device; without the flags of conftest.py it would compile for a minute.
ONE_DEVICE = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"}
CLOCKS = (*TIMED, "data_wait")  # fields of metrics.jsonl that differ between any two runs
QUERY_LENGTH, PASSAGE_LENGTH = 12, 24  # tokens; tiny_bert has 40 positions


def write_encoder(folder: Path) -> Path:
    """The weights of goldens/tiny_bert (vocabulary 99) with a WordPiece tokenizer that knows a few whole words."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(TINY_BERT / name, folder / name)
    tokens = [*SPECIAL, *CHARACTERS, *(f"##{c}" for c in CHARACTERS), *WORDS]
    assert len(tokens) <= 99  # the vocabulary of the stored weights
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.add_special_tokens(SPECIAL)
    ends = [(end, vocabulary[end]) for end in ("[CLS]", "[SEP]")]  # without this, transformers would not add them
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return folder


def write_t5(folder: Path, name: str = "tiny_t5") -> Path:
    """The weights of a golden T5 (vocabulary 99) with a SentencePiece-like unigram tokenizer, as tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / name / file, folder / file)
    special = ["<pad>", "</s>", "<unk>"]
    pieces = [*special, "▁", *CHARACTERS, *(f"▁{word}" for word in WORDS)]
    scores = [(piece, 0.0 if piece in special else -10.0 + len(piece)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=2))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return folder


def save_generator(folder: Path, config: GeneratorConfig, params: Params) -> None:
    """Write config.json and model.safetensors in the format of transformers' T5ForConditionalGeneration."""
    flat = traverse_util.flatten_dict(jax.device_get(dict(params)), sep="/")
    tensors: dict[str, np.ndarray] = {}
    for path, stored in generator_tensors(config).items():
        array = np.asarray(flat.pop(path), np.float32)
        for name, part in zip(stored.names, array if stored.stacked else array[None], strict=True):
            tensors[name] = np.ascontiguousarray(part.T if path.endswith("kernel") else part)
    assert not flat, f"parameters without a tensor: {sorted(flat)}"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = T5.write(config.encoder) | {
        "architectures": ["T5ForConditionalGeneration"],
        "num_decoder_layers": config.decoder.num_layers,
        "tie_word_embeddings": config.scaled_output,
        "decoder_start_token_id": config.start_id,
        "eos_token_id": config.end_id,
        "pad_token_id": config.pad_id,
    }
    write_json(folder / "config.json", raw)


def write_generator(folder: Path) -> Path:
    """A random T5 with its decoder, and a tokenizer with a few words."""
    write_t5(folder)
    encoder = T5Config(99, 32, 2, 4, 6, 48, feed_forward="gated-gelu", initializer_factor=4.0)
    config = GeneratorConfig(encoder, replace(encoder, num_layers=1), False, True, start_id=0, end_id=1, pad_id=0)
    tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    params = T5Generator(config).init(jax.random.key(3), tokens, jnp.zeros((1, 2), jnp.int32))["params"]
    save_generator(folder, config, params)
    return folder


def write_cross_encoder(folder: Path) -> Path:
    """The encoder of `write_encoder` with a pooler and a classifier of random weights."""
    write_encoder(folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_labels": 1}
    write_json(folder / "config.json", config)
    tensors, size = load_file(folder / "model.safetensors"), config["hidden_size"]
    random = np.random.default_rng(0)
    shapes = {"pooler.dense.weight": (size, size), "pooler.dense.bias": (size,)}
    shapes |= {"classifier.weight": (1, size), "classifier.bias": (1,)}
    tensors |= {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_language_model(folder: Path, name: str = "tiny_qwen3", template: str = "$A <|end|>") -> Path:
    """The weights of a golden language model (vocabulary 99) with a byte-pair tokenizer. Like that of Qwen3-Embedding,
    its post-processor appends a token that is not its `eos_token`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / name / file, folder / file)
    special = ["<|end|>", "<|turn|>", "<|begin|>"]
    vocabulary = {piece: i for i, piece in enumerate([*special, "Ġ", *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    ids = [(piece, vocabulary[piece]) for piece in special]
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=ids)  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|turn|>", "pad_token": "<|end|>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return folder


def words(random: np.random.Generator, count: int) -> str:
    return " ".join(random.choice(WORDS, count))


def write_data(folder: Path, train: int = 40, dev: int = 12, seed: int = 0) -> Path:
    """A BEIR folder: a passage for each query (two for every fifth query), a judgement of 0, answers, and the splits
    train, dev and test. Some test queries have no judgement."""
    random = np.random.default_rng(seed)
    passages, queries = [], []
    judgements: dict[str, list[Judgement]] = {"train": [], "dev": [], "test": []}
    for i in range(train + dev):
        text = words(random, int(random.integers(4, 14)))
        query = Query(f"q{i}", " ".join(text.split()[:4]), answers=(text.split()[0],))
        queries.append(query)
        passages += [Passage(f"p{i}", text, f"{WORDS[i % len(WORDS)]} {i}"), Passage(f"n{i}", words(random, 8))]
        split = "train" if i < train else "dev"
        judged = [Judgement(query.id, f"p{i}", 1), Judgement(query.id, f"n{i}", 0)]
        if i % 5 == 0:
            passages.append(Passage(f"o{i}", f"{text} again"))
            judged.append(Judgement(query.id, f"o{i}", 2))
        judgements[split] += judged
        if i % 3 == 0:
            judgements["test"] += judged
    write_beir(folder, passages, queries, judgements)
    return folder


def tiny_config(encoder: Path | str, data: Path | str, **overrides: Any) -> ConfigDict:
    """configs/base.py with small sizes. overrides: "train__steps" is train.steps."""
    config = get_config()
    config.lock()
    small = {
        "encoder.checkpoint": str(encoder),
        "encoder.tied": True,
        "encoder.recompute": "none",
        "tokens.query_length": QUERY_LENGTH,
        "tokens.passage_length": PASSAGE_LENGTH,
        "tokens.length_multiple": PASSAGE_LENGTH,  # all batches have one shape, so one program is compiled
        "data.train": str(data),
        "data.dev": str(data),
        "data.negatives": 1,
        "optimizer.learning_rate": 1e-3,
        "train.batch_size": 8,
        "train.steps": 6,
        "train.log_every": 1,
        "train.checkpoint_every": 3,
        "validation.batch_size": 8,
        "validation.pool_size": 40,
        "encode.tokens_per_batch": 384,
        "encode.shard_rows": 50,
    }
    own = {key.replace("__", "."): value for key, value in overrides.items()}
    small = {key: value for key, value in small.items() if not find_reader(own.get("task", "retrieval"), key)}
    config.update_from_flattened_dict(small | own)
    return config


def untrained_run(workdir: Path, encoder: Path, data: Path | str, **overrides: Any) -> Run:
    """A run of no steps: its checkpoint is the encoder as it was loaded."""
    config = tiny_config(encoder, data, train__steps=0, data__dev="", **overrides)
    train(config, workdir, progress=False)
    return open_run(workdir)


def encoded_folder(folder: Path, **overrides: Any) -> Path:
    """The folder with encoder/, data/, and run/: an untrained run that has encoded the data."""
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    run = untrained_run(folder / "run", folder / "encoder", folder / "data", **overrides)
    encode_corpus(run, Corpus.open(folder / "data"), progress=False)
    return folder


def copied_run(folder: Path, to: Path) -> Run:
    """A copy of the run of an `encoded_folder`, which a test may change."""
    shutil.copytree(folder / "run", to)
    return open_run(to)


def contents(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of every file under a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, script, *arguments]


def environment() -> dict[str, str]:
    """The environment of a script: the devices of this process, and errors as users see them, without tracebacks."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAXRET_DEBUG": ""}


def run_script(script: str, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts to its end, in the folder of the repository. input: its standard input."""
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": environment(), "capture_output": True, "text": True}
    options["errors"] = "surrogateescape"  # bytes that are not UTF-8
    return subprocess.run(command(script, *arguments), input=input, timeout=300, **options)


_MEASURE = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
sys.stderr.write(f"\\n{used}")
sys.exit(done.returncode)
"""


def run_measured(*arguments: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run Python with some arguments; return the process, and the peak of its memory in bytes.

    A small process starts it: a child of this process would begin with this one's memory.
    """
    code = [sys.executable, "-c", _MEASURE, sys.executable, *arguments]
    done = subprocess.run(code, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    done.stderr, _, used = done.stderr.rpartition("\n")
    return done, int(used)


def resources() -> tuple[int, int, int]:
    """Return the open files, the threads, and the bytes in memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/fd")), threads, pages * os.sysconf("SC_PAGE_SIZE")


def together(*commands: list[str], stop: Callable[[list[subprocess.Popen[str]]], None] | None = None) -> list[Any]:
    """Run two commands at the same time, with four devices each; return (exit status, output, errors) of each. `stop`
    is called while they run."""
    more = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"}  # the last flag wins
    workers = [
        subprocess.Popen(
            arguments,
            cwd=REPOSITORY,
            env=environment() | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in commands
    ]
    try:
        if stop:
            stop(workers)
        outputs = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *output) for worker, output in zip(workers, outputs, strict=True)]


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def train_arguments(encoder: Path | str, data: Path, workdir: Path, **overrides: Any) -> list[str]:
    """The flags of train.py for `tiny_config`, as a user gives them on the command line."""
    flat = flat_config(tiny_config(encoder, data, **overrides))
    base = flat_config(get_config())
    changed = {key: value for key, value in flat.items() if value != base[key]}
    return [
        f"--config={REPOSITORY / 'configs' / 'base.py'}",
        f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in changed.items()),
    ]


def flat_config(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Map keys with dots to values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flat_config(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else {f"{prefix}{key}": value}
    return flat
