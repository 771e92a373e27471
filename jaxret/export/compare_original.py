"""Compares a run's vectors with those of the library that the model is from, if this library is installed."""

from __future__ import annotations

import importlib.util
import inspect
import random
import statistics
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.records import Passage
from jaxret.models.encoders.architectures import ARCHITECTURES, read_config
from jaxret.models.encoders.dense_modules import read_dense_modules
from jaxret.models.encoders.sentence_transformers import MODULES, encoder_folder, is_pylate
from jaxret.models.heads.head import Side
from jaxret.parallel.progress import with_progress
from jaxret.runs.run import Run
from jaxret.types import Ragged

_SOURCES = (random, statistics, textwrap, inspect)


def sample_texts() -> list[str]:
    """Return 64 English texts, from a line to a page long: docstrings of Python's standard library."""
    docstrings = [
        inspect.getdoc(value) or ""
        for module in _SOURCES
        for _, value in sorted(vars(module).items())
        if getattr(value, "__module__", "") == module.__name__
    ]
    return [" ".join(text.split()) for text in dict.fromkeys(docstrings) if text][:64]


def sample_tokens(run: Run, side: Side) -> Ragged:
    """Return the token ids of `sample_texts` by the run's tokenizer."""
    texts = sample_texts()
    if side == "query":
        return run.tokenizer.queries(texts)
    return run.tokenizer.passages([Passage(str(number), text) for number, text in enumerate(texts)])


def compare_with_original(run: Run, directory: Path) -> str:
    """Return a sentence on the largest difference between a run's vectors and the vectors of the model in `directory`.

    Raises ValueError if numbers differ by more than rounding, or if the number of vectors differs.
    """
    library = original_library(directory)
    if not library:
        package = "PyLate" if is_pylate(directory) else "sentence-transformers, or transformers with PyTorch,"
        return f"not compared with the original: {package} is not installed"
    texts, largest, size = sample_texts(), 0.0, 0.0
    embed = run.with_dimension(0).embedder()  # full size, because only jaxret scales cut vectors to length 1 again
    sides: tuple[Side, ...] = ("query", "passage")
    for side in with_progress(sides, f"compare with {library}", len(sides), "side"):
        run_vectors = embed(sample_tokens(run, side), side).flat
        try:
            library_vectors = original_vectors(run, directory, library, texts, side)
        except Exception as error:  # libraries raise errors of many types
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(
                f"{directory}: {library} cannot encode with this model, so vectors cannot be compared ({reason})"
            ) from error
        if run_vectors.shape != library_vectors.shape:
            raise ValueError(
                f"{side} texts have {len(run_vectors)} vectors, {len(library_vectors)} in {library}: another model"
            )
        largest = max(largest, float(np.abs(run_vectors - library_vectors).max()))
        size = max(size, float(np.abs(library_vectors).max()))
    sentence = f"{len(texts)} texts as queries and as passages: the largest difference from {library} is {largest:.1e}"
    if not largest <= 1e-4 * max(size, 1.0):
        cause = _different_tokens(run, directory, texts) if library == "transformers" else ""
        raise ValueError(f"{sentence}, of numbers up to {size:.2g}: {cause or 'this is another model'}")
    return sentence


def _different_tokens(run: Run, directory: Path, texts: list[str]) -> str:
    """Return a sentence on the first text that transformers' tokenizer reads differently; "": none."""
    tokenizer, _ = _transformers(encoder_folder(directory))
    length, prompt = run.config.tokens.query_length, run.tokenizer.prompt("query")
    for text, row in zip(texts, run.tokenizer.queries(texts), strict=True):
        ids = np.where(row < 0, ~row, row).tolist()
        library_ids = tokenizer(prompt + text, truncation=True, max_length=length)["input_ids"]
        if ids != library_ids:
            return (
                f"their tokenizer makes {_shorten_ids(library_ids)} of {text[:40]!r}..., and ours {_shorten_ids(ids)}; "
                "see post_processor in tokenizer.json, and tokens.end_token"
            )
    return ""


def _shorten_ids(ids: list[int]) -> str:
    return f"{len(ids)} ids ({', '.join(map(str, ids[:4]))} ... {', '.join(map(str, ids[-2:]))})"


def original_library(directory: Path) -> str:
    """Return the name of the library that computes the vectors of a directory; "" if it is not installed."""
    names = ["transformers"]
    if is_pylate(directory):
        names = ["pylate"]
    elif (directory / MODULES).is_file():
        names = ["sentence_transformers", "transformers"]
    importable = [name for name in names if importlib.util.find_spec(name)]
    return importable[0].replace("_", "-") if importable and importlib.util.find_spec("torch") else ""


def original_vectors(run: Run, directory: Path, library: str, texts: list[str], side: Side) -> np.ndarray:
    """Return the vectors [vectors,D] float32 that a library computes.

    Args:
        run: the run, whose prompts, lengths and normalization are used.
        directory: folder of the model.
        library: name of the library, from `original_library`.
        texts: texts without prompts.
    """
    prompt = run.tokenizer.prompt(side)
    if library == "pylate":
        return np.concatenate(pylate_vectors(directory, [prompt + text for text in texts], side))
    if library == "sentence-transformers":
        model = load_sentence_transformer(directory)
        return model.encode(texts, prompt=prompt, normalize_embeddings=run.config.normalize, show_progress_bar=False)
    tokenizer, model = _transformers(encoder_folder(directory))
    length, token = run.config.tokens[f"{side}_length"], run.config.head.token
    vectors = []
    for text in texts:  # one by one, without padding
        tokens = tokenizer(prompt + text, truncation=True, max_length=length, return_tensors="pt")
        states = model(**tokens).last_hidden_state[0].numpy()
        read = run.tokenizer.queries([text]) if side == "query" else run.tokenizer.passages([Passage("0", text)])
        prompt_tokens = int((read.flat < 0).sum())  # tokens of a prompt that is left out of means
        vectors.append(states[prompt_tokens:].mean(0) if prompt_tokens else _pooled(states, token))
    result = np.stack(vectors)
    for matrix in read_dense_modules(directory):
        result = result @ matrix
    return result / np.linalg.norm(result, axis=1, keepdims=True) if run.config.normalize else result


def load_sentence_transformer(directory: Path) -> Any:
    """Return a model of sentence-transformers that gives vectors of full size."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
    model.truncate_dim = None
    return model


def _pooled(states: np.ndarray, token: str) -> np.ndarray:
    """Return the vector of a text from its states [T,H]."""
    if token in ("cls", "last"):
        return states[0 if token == "cls" else -1]
    return states[1 if token == "mean_without_first" and len(states) > 1 else 0 :].mean(0)


def pylate_vectors(directory: Path, texts: list[str], side: Side) -> list[np.ndarray]:
    """Return an array of PyLate's vectors [V,D] for each text."""
    from pylate import models

    model = models.ColBERT(str(directory), device="cpu", local_files_only=True)
    return list(model.encode(texts, is_query=side == "query", show_progress_bar=False))


def _transformers(directory: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the encoder of transformers, in float32 and without gradients."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, ARCHITECTURES[read_config(directory).model_type].class_name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    model = kind.from_pretrained(str(directory), local_files_only=True, dtype="float32")
    return tokenizer, model.requires_grad_(False).eval()
