"""Write a BERT with random weights as a Hugging Face directory, from which pre-training begins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxret.data.formats import Corpus, Policy
from jaxret.data.tokens.tokenizer import TOKENIZER_FILES, TextTokenizer
from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.architectures.bert import ARCHITECTURE, BertConfig
from jaxret.models.encoders.pretrained import find_model, save_pretrained
from jaxret.parallel.progress import print_line
from jaxret.training.config_sources import training_corpus
from jaxret.training.pretraining.spans import document_text
from jaxret.training.pretraining.wordpiece import save_tokenizer, train_wordpiece
from jaxret.types import Params, Tokens


def write_random_encoder(config: ConfigDict, folder: Path) -> None:
    """Write a BERT with the shapes in `pretraining.scratch` into an empty folder: random weights (`seed.init`), MLM
    head and tokenizer. The tokenizer is `pretraining.scratch.tokenizer` or, if this is empty, is trained on the corpus.

    Raises:
        ValueError: the shapes are impossible.
        DataError: the corpus cannot be read.
    """
    scratch = config.pretraining.scratch
    # Impossible shapes are an error before a tokenizer is trained, which takes minutes.
    shapes = scratch_shapes(config, 1)
    if scratch.tokenizer:
        copy_tokenizer(find_model(scratch.tokenizer), folder)
        size = TextTokenizer.load(folder, 256, 256).backend.get_vocab_size()
        print_line(f"a new BERT with the {size:,} words and pieces of {scratch.tokenizer}")
    else:
        corpus = training_corpus(config)
        tokenizer = train_wordpiece(
            lambda: corpus_texts(corpus, config.data.on_error), scratch.vocabulary, scratch.lowercase
        )
        save_tokenizer(tokenizer, folder, shapes.longest, scratch.lowercase)
        size = tokenizer.get_vocab_size()
        print_line(f"a new BERT with {size:,} words and pieces, learned from {corpus}")
    shapes = scratch_shapes(config, size)
    save_pretrained(folder, shapes, random_weights(shapes, config.seed.init))


def scratch_shapes(config: ConfigDict, vocabulary: int) -> BertConfig:
    """Return the shapes of a config. Raises ValueError for impossible shapes."""
    scratch = config.pretraining.scratch
    shapes = BertConfig(
        vocab_size=vocabulary,
        hidden_size=scratch.hidden_size,
        num_layers=scratch.layers,
        num_heads=scratch.heads,
        intermediate_size=scratch.intermediate_size,
        max_positions=scratch.positions,
        mlm_head=True,
    )
    if scratch.hidden_size % scratch.heads:
        raise ValueError(
            f"pretraining.scratch.heads is {scratch.heads}; it must divide hidden_size, {scratch.hidden_size}"
        )
    if config.pretraining.length > scratch.positions:
        raise ValueError(
            f"pretraining.length is {config.pretraining.length}; it must be at most pretraining.scratch.positions, "
            f"{scratch.positions}"
        )
    ARCHITECTURE.read(ARCHITECTURE.write(shapes))  # raises for values that are not allowed in config.json
    return shapes


def random_weights(shapes: BertConfig, seed: int) -> Params:
    """Return random weights with BERT's distribution: kernels N(0, 0.02), norms 1, biases 0."""
    tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    return jax.jit(make_encoder(shapes).init)(jax.random.key(seed), tokens)["params"]


def corpus_texts(corpus: Corpus, on_error: str) -> Iterator[str]:
    """Return the texts of the documents of a corpus."""
    scan = corpus.scan(Policy(on_error))
    return (document_text(passage) for passage in corpus.read(Policy(on_error), scan))


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
