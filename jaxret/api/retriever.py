"""A run that was opened from Python. It turns texts into vectors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxret.api.arguments import (
    checked_passages,
    checked_questions,
    require_flag,
    require_kind,
    require_path,
    whole_number,
)
from jaxret.configs import change_config, load_config, require_complete
from jaxret.data.lines import PathLike
from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import AUTO_SEPARATOR
from jaxret.export.import_model import make_run
from jaxret.export.import_options import ImportOptions
from jaxret.models.encoders.pretrained import resolve_encoder
from jaxret.runs.run import Run, open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.temporary import TemporaryFolder
from jaxret.training.loop import train

Vectors = np.ndarray | list[np.ndarray]


class Retriever:
    """A run that was opened to turn texts into vectors."""

    def __init__(self, run: Run, temporary: TemporaryFolder | None = None) -> None:
        self.run = run
        self._embed = run.embedder()
        self._temporary = temporary  # the folder of the run if it is temporary: it is removed with the retriever

    @classmethod
    def open(
        cls,
        workdir: PathLike,
        checkpoint: str | int = "best",
        *,
        query_length: int | None = None,
        passage_length: int | None = None,
    ) -> Retriever:
        """Open the folder of a run.

        Args:
            workdir: folder of the run.
            checkpoint: "best", "last", or a step.
            query_length: largest length of a query in tokens; None: the same as in training.
            passage_length: largest length of a passage in tokens; None: the same as in training.

        Raises:
            FileNotFoundError: the run does not exist.
            ContractError: (a ValueError) a file of the run was changed.
        """
        require_path("workdir", workdir)
        if isinstance(checkpoint, bool) or not isinstance(checkpoint, str):
            checkpoint = str(whole_number("checkpoint", checkpoint, '"best", "last" or a step'))
        if query_length is not None:
            query_length = whole_number("query_length", query_length)
        if passage_length is not None:
            passage_length = whole_number("passage_length", passage_length)
        if not _is_run(workdir):
            raise FileNotFoundError(
                f"{workdir} is not a run; Retriever.from_model opens a model that was not trained here"
            )
        # An absolute path, because files are read and written later, when the working directory may have changed.
        folder = Workdir(workdir).path.absolute()
        return cls(open_run(folder, checkpoint, query_length=query_length, passage_length=passage_length))

    @classmethod
    def from_model(
        cls,
        source: PathLike,
        workdir: PathLike | None = None,
        *,
        token: str = "",
        normalize: bool | None = None,
        download: bool = False,
        title_separator: str = AUTO_SEPARATOR,
    ) -> Retriever:
        """Open a model of another library as a run.

        Args:
            source: a Hugging Face or sentence-transformers directory, `package:NAME/FOLDER`, or a hub name in the local
                cache.
            workdir: folder of the run; default: a temporary folder, which is removed with the retriever, together with
                all encoded corpora.
            token: vector of an encoder without a head: "cls" or "mean".
            normalize: whether the vectors of an encoder without a head have length 1, for cosines.
            download: fetch a hub name that is not in the cache.
            title_separator: between title and text of a passage, or "[SEP]"; "auto": a space for a
                sentence-transformers or PyLate directory, else "[SEP]".

        Raises:
            FileNotFoundError: there is no such model.
            ValueError: the model is not supported, or `source` is a run.
        """
        require_path("source", source, "a path or a name")
        if workdir is not None:
            require_path("workdir", workdir, "a path or None")
        require_kind("token", token, str, "a text")
        require_flag("normalize", normalize, optional=True)
        require_flag("download", download)
        require_kind("title_separator", title_separator, str, "a text")
        if _is_run(source):
            raise ValueError(f"{source} is a run: Retriever.open opens it")
        _require_model(source, download)
        temporary = None if workdir else TemporaryFolder()
        folder = temporary.path if temporary else Path(workdir or "")
        try:
            options = ImportOptions(token, normalize, title_separator, download)
            make_run(os.fspath(source), folder, options, progress=False)
            return cls(open_run(Workdir(folder).path.absolute()), temporary)
        except BaseException:
            if temporary:
                temporary.remove()
            raise

    @classmethod
    def train(
        cls,
        config: PathLike | ConfigDict,
        workdir: PathLike,
        changes: Mapping[str, Any] | None = None,
        *,
        progress: bool = True,
        callback: Callable[[int, dict[str, float]], object] | None = None,
    ) -> Retriever:
        """Train as `jaxret train --config=CONFIG --workdir=WORKDIR` does, and open the best checkpoint.

        The same call resumes an interrupted run, and opens a finished one.

        Args:
            config: a name ("mlr", "minilm:dual_encoder"), a file, or the ConfigDict of such a file.
            workdir: folder of the run.
            changes: keys and their values, such as {"data.train": "FOLDER_OR_FILE", "train.steps": 1000};
                configs/base.py explains all keys.
            progress: whether to show progress.
            callback: function that is called with the step and the metrics of each line of the run's metrics.jsonl when
                it is written. An error in it ends the training; the same call then continues from the last checkpoint.

        Raises:
            ValueError: a config with invalid or contradicting values.
            DataError: (a ValueError) bad records.

        The errors of `jaxret.training.loop.train` are raised, too.
        """
        if not isinstance(config, ConfigDict):
            require_path("config", config, "a name, a path or a ConfigDict")
        require_path("workdir", workdir)
        require_kind("changes", changes, Mapping | None, 'a dict of keys and values, such as {"train.steps": 10}')
        for key in changes or {}:
            require_kind("a key of changes", key, str, "a text")
        require_flag("progress", progress)
        require_kind("callback", callback, Callable | None, "a function of a step and metrics")
        name = "this config" if isinstance(config, ConfigDict) else os.fspath(config)
        given_config = config if isinstance(config, ConfigDict) else load_config(name)
        require_complete(given_config, name)
        settings = change_config(given_config, changes or {}, name)
        train(settings, Path(workdir), progress, explicit_keys=changes or {}, callback=callback).require_finished()
        return cls.open(workdir)

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """Return the vectors of questions: float32 [Q,D]; under late interaction a list of [U,D], U vectors for each.
        Raises ValueError for a question that is blank or not a text."""
        vectors = self._embed(self.run.tokenizer.queries(checked_questions(queries)), "query")
        return list(vectors) if self.run.model.late_interaction else vectors.stacked()[:, 0]

    def encode_passages(self, passages: Sequence[str | Passage]) -> Vectors:
        """Return the vectors of passages: float32 [N,V,D], or a list of [V,D] if passages have different numbers.

        The score of a passage is the highest product of its vectors with the query vector. Raises ValueError for a
        passage that is not a text.
        """
        vectors = self._embed(self.run.tokenizer.passages(list(checked_passages(passages, "passages"))), "passage")
        return list(vectors) if self.run.model.vectors_per_passage is None else vectors.stacked()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path of the run, the checkpoint and the lengths, but not the parameters."""
        if self._temporary:
            raise TypeError(f"{self!r} is in a temporary folder and cannot be pickled: give from_model a workdir")
        tokenizer, workdir = self.run.tokenizer, str(self.run.workdir)
        step = str(self.run.checkpoint["step"])
        return _reopen, (workdir, step, tokenizer.query_length, tokenizer.passage_length)

    def __repr__(self) -> str:
        folder, working_directory = str(self.run.workdir), f"{Path.cwd()}{os.sep}"
        return f"Retriever({folder.removeprefix(working_directory)!r}, step {self.run.checkpoint['step']})"


def _reopen(workdir: str, checkpoint: str, query_length: int, passage_length: int) -> Retriever:
    """Open a retriever that was pickled."""
    return Retriever.open(workdir, checkpoint, query_length=query_length, passage_length=passage_length)


def _is_run(source: PathLike) -> bool:
    folder = Workdir(source)
    return folder.contract.exists() or folder.checkpoints.is_dir()


def _require_model(source: PathLike, download: bool) -> None:
    try:
        resolve_encoder(os.fspath(source), download)
    except FileNotFoundError as error:
        if download or Path(source).is_dir() or os.fspath(source).startswith("package:"):
            raise
        raise FileNotFoundError(
            f"{source} is neither the directory of a model nor a model in the local Hugging Face cache; "
            "download=True fetches it from the hub"
        ) from error
