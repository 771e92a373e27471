"""The checked request of `jaxret encode`. This module does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jaxret.index.encode_options import EncodeOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions


@dataclass(frozen=True)
class EncodeRequest:
    """Passages to encode, to append or to delete. Raises ValueError if values are missing or exclude each other, or if
    the file of ids does not exist."""

    workdir: str  # folder of the run
    # Folder or file with passages; or, with `options.dimension`, the name of an encoded corpus, whose vectors are cut
    corpus: str = ""
    name: str = ""  # name of the encoded corpus; "": the name of the folder or file, or the only encoded corpus
    append: bool = False  # add the passages to the encoded corpus `name`
    delete: str = ""  # in place of `corpus`: file with ids of passages to delete from the encoded corpus `name`
    checkpoint: str = "best"  # "best", "last" or a step
    # Upper bound of a passage's tokens. None: as in training; for appended passages as in the encoded corpus
    passage_length: int | None = None
    tokens_per_batch: int | None = None  # None: the run's setting
    platform: str = ""  # "gpu", "tpu" or "cpu" that is required; "" for any
    attention: str | None = None  # implementation of attention; None: as in training
    options: EncodeOptions = EncodeOptions()
    engine: EngineOptions = field(default_factory=EngineOptions)
    processes: JobOptions = field(default_factory=JobOptions)

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
