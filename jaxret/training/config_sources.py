"""Open the corpora and the training data that keys of a config name. No other module opens the paths in these keys."""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxret.data.formats import Corpus, TrainingSource

TRAINING_PASSAGES = "train"  # value of validation.corpus for the passages of data.train, which are read anyway


def validation_corpus(config: ConfigDict) -> Corpus | None:
    """Return the corpus of validation.corpus; None if the key is empty or names the training passages. Raises DataError
    if the path has no corpus."""
    path = config.validation.corpus
    return Corpus.open(path) if path not in ("", TRAINING_PASSAGES) else None


def training_corpus(config: ConfigDict) -> Corpus:
    """Return the corpus of data.train: the documents of pre-training, or the corpus of a folder with training data.
    Raises DataError if the path has no corpus."""
    return Corpus.open(config.data.train)


def training_data(config: ConfigDict) -> TrainingSource:
    """Return the examples of data.train. Raises DataError if the path has none."""
    return TrainingSource.open(config.data.train, config.data.train_split, config.data.negatives_run)


def dev_data(config: ConfigDict) -> TrainingSource:
    """Return the examples of data.dev. Raises DataError if the path has none."""
    return TrainingSource.open(config.data.dev, config.data.dev_split, config.data.dev_negatives_run)
