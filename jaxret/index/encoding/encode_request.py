"""The checked request of `jaxret encode`. This module does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jaxret.configs import shared_options
from jaxret.configs.options import option
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions


@dataclass(frozen=True)
class EncodeRequest:
    """Passages to encode, to append or to delete. Raises ValueError if values are missing or exclude each other, or if
    the file of ids does not exist."""

    workdir: str = shared_options.workdir()
    corpus: str = shared_options.corpus()  # with `options.dimension` also the name of an encoded corpus, which is cut
    name: str = option("", "name of the encoded corpus; default: the name of the folder or file")
    append: bool = option(False, "add the passages to the corpus that is encoded as --name")
    delete: str = option("", "delete passages from the corpus --name: a file with their ids, one a line")
    checkpoint: str = shared_options.checkpoint()
    passage_length: int | None = shared_options.passage_length()  # None: with --append, that of the encoded corpus
    tokens_per_batch: int | None = shared_options.tokens_per_batch()
    platform: str = shared_options.platform()
    attention: str | None = shared_options.attention()
    processes: JobOptions = field(default_factory=JobOptions)
    options: EncodeOptions = EncodeOptions()
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        if not self.corpus and not self.delete:
            raise ValueError("give --corpus (a folder or file with passages), or --delete (a file of ids)")
        if self.delete and (self.corpus or self.append):
            raise ValueError("--delete only deletes. Remove --corpus and --append, and run them in another command")
        if self.delete and self.processes != JobOptions():
            raise ValueError("--delete deletes in one process. Remove --coordinator and the flags of its processes")
        if self.delete and not Path(self.delete).exists():
            raise ValueError(
                f"--delete={self.delete}: this file does not exist. Give a file with the ids of passages, one on each "
                "line"
            )
        if self.engine.engine and (self.delete or self.append or self.processes.coordinator):
            raise ValueError(
                f"--engine={self.engine.engine}: workers encode a whole corpus. Remove --append, --delete and "
                "--coordinator"
            )
