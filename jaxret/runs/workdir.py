"""The paths of all files of a run. No other module contains these paths.

<workdir>/config.json  history.jsonl  contract.json  data.json  env.json  parameters.json  seal.json
          encoder/  checkpoints/<step>/  metrics.jsonl  tensorboard/  profile/  trackers.json  .lock  .lock.json
          embeddings/<corpus>/  encoding/<corpus>.json  runs/<dataset>.trec  eval/<dataset>.json  warnings/<job>.json
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jaxret.storage.atomic import require_disk_path
from jaxret.storage.buckets.working_copy import local_path, shown_path
from jaxret.storage.folder_kinds import RANKINGS

_LONGEST_NAME = 200  # bytes of the name of a corpus or data set; most disks allow 255, and file names add to the name
_LONGEST_JOB_NAME = 216  # bytes of the name of a job: an operation, and the name of a corpus or data set


class _RunPath:
    """A property of `Workdir`: the path of a file or folder of the run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Workdir, kind: type[Workdir]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class Workdir:
    """The folder of a run and the paths in it; no file is created.

    The argument may also be a Workdir, or the address of a folder in a bucket; then `path` is this process's working
    copy (`storage.working_copy`). Raises ValueError for an empty path and for an address of another scheme.
    """

    path: Path
    config = _RunPath("config.json")  # written last, so a folder with it is a run
    history = _RunPath("history.jsonl")  # a line for each change of the config when the run was resumed
    contract = _RunPath("contract.json")
    data = _RunPath("data.json")  # digests of the training data
    lineage = _RunPath("lineage.json")  # origin of a recipe's stage, without seeds; other runs do not have this file
    environment = _RunPath("env.json")
    parameters = _RunPath("parameters.json")  # names, shapes and types of the arrays in a checkpoint
    seal = _RunPath("seal.json")  # digests of the files that must not change
    encoder = _RunPath("encoder")  # the encoder's config.json and tokenizer, copied at the start of the run
    # settings in the encoder's sentence-transformers directory, if it was one
    encoder_settings = _RunPath("encoder/stated.json")
    # the original model's pooler, which exports need; it exists only if the model had one
    pooler = _RunPath("encoder/pooler.safetensors")
    checkpoints = _RunPath("checkpoints")
    metrics = _RunPath("metrics.jsonl")
    tensorboard = _RunPath("tensorboard")
    profile = _RunPath("profile")
    trackers = _RunPath("trackers.json")  # the run's ids at experiment trackers, and the last lines that were sent

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):  # Path("") is the current folder, which an unset variable must not mean
            raise ValueError("the workdir is empty; give the folder of a run")
        require_disk_path(path)
        object.__setattr__(self, "path", local_path(path))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return shown_path(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def name(self) -> str:
        """Return the name of the run in results: the last part of its path."""
        return self.path.resolve().name if self.path.name in ("", "..") else self.path.name

    @property
    def corpora(self) -> tuple[str, ...]:
        """Return the names of the corpora whose vectors are complete, sorted."""
        return tuple(sorted(manifest.parent.name for manifest in self.path.glob("embeddings/*/manifest.json")))

    def embeddings(self, encoded_name: str) -> Path:
        """Return the folder of a corpus's vectors. Raises ValueError if `encoded_name` is not a plain name."""
        return self.path / "embeddings" / require_plain_name("the name of a corpus", encoded_name)

    @property
    def encoding_times(self) -> tuple[Path, ...]:
        """Return the files with the time of the last encoding of each corpus, sorted."""
        return tuple(sorted(self.path.glob("encoding/*.json")))

    def encoding_time(self, encoded_name: str) -> Path:
        """Return the file with the time of the last encoding of a corpus.

        Each corpus has a file, because several may be encoded at once. Raises ValueError if `encoded_name` is not a
        plain name.
        """
        return self.path / "encoding" / f"{require_plain_name('the name of a corpus', encoded_name)}.json"

    def warnings(self, job: str) -> Path:
        """Return the file of a job's warnings ("encode scifact"). Raises ValueError if it is not a plain name."""
        name = require_plain_name("the name of a job", job, _LONGEST_JOB_NAME)
        return self.path / "warnings" / f"{name.replace(' ', '.')}.json"

    def rankings(self, name: str) -> Path:
        """Return the TREC run of data ("scifact", "scifact.test"). Raises ValueError if it is not a plain name."""
        return self.path / RANKINGS / f"{require_plain_name('the name of a data set', name)}.trec"

    @property
    def evaluations(self) -> tuple[Path, ...]:
        """Return the files with the measures of all evaluated data sets, sorted."""
        return tuple(
            path for path in sorted(self.path.glob("eval/*.json")) if not path.stem.endswith((".diversity", ".probe"))
        )

    def evaluation(self, name: str) -> Path:
        """Return the file with the measures of a data set. Raises ValueError if it is not a plain name."""
        return self.path / "eval" / f"{require_plain_name('the name of a data set', name)}.json"


def require_plain_name(description: str, name: str, longest: int = _LONGEST_NAME) -> str:
    """Return `name` if it is a plain file name of at most `longest` bytes. Raises ValueError with `description`."""
    if not name or name.startswith(".") or any(character in name for character in "/\\\0"):
        raise ValueError(f"{description} is {name!r}; it must not be empty, begin with a dot, or hold / or \\")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{description} is {name!r}, which is not UTF-8; names are recorded in JSON") from None
    if (size := len(os.fsencode(name))) > longest:
        raise ValueError(f"{description} has {size} bytes; it is part of file names, so {longest} are allowed")
    return name
