"""A change of a run's encoded corpora as one value, which is checked before JAX is imported: `jaxret encode`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jaxret.index.encode_options import EncodeOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions


@dataclass(frozen=True)
class EncodeRequest:
    """Passages to encode, to append or to delete. Raises ValueError for values that are missing or exclude each
    other, and where there is no file of ids."""

    workdir: str  # folder of the run
    # Folder or file with passages; or, with `options.dimension`, the name of an encoded corpus, whose vectors are cut
    corpus: str = ""
    name: str = ""  # of the encoded corpus; "": that of the folder or file, or the only one that there is
    append: bool = False  # add the passages to the encoded corpus `name`
    delete: str = ""  # in place of `corpus`: file with ids of passages to delete from the encoded corpus `name`
    checkpoint: str = "best"  # "best", "last" or a step
    passage_length: int | None = None  # most tokens; None: as in training, or of what is appended as the corpus has it
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
            raise ValueError(
                "--delete deletes, and nothing else: leave --corpus and --append out, and run them after it"
            )
        if self.delete and self.processes != JobOptions():
            raise ValueError("--delete deletes in one process: leave --coordinator and the flags of its processes out")
        if self.delete and not Path(self.delete).exists():
            raise ValueError(
                f"--delete={self.delete}: there is no such file; give a file with ids of passages, one a line"
            )
        if self.engine.engine and (self.delete or self.append or self.processes.coordinator):
            raise ValueError(
                f"--engine={self.engine.engine}: workers encode a whole corpus; leave --append, --delete and "
                "--coordinator out"
            )
