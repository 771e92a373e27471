"""Where everything of a run lies; the only place that spells it.

<workdir>/config.json  history.jsonl  contract.json  data.json  env.json  seal.json  encoder/
          checkpoints/<step>/  metrics.jsonl  tensorboard/  .lock
          embeddings/<corpus>/  runs/<dataset>.trec  eval/<dataset>.json
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workdir:
    """The folder of a run, and the paths in it; nothing is created. `Workdir(Workdir(x))` is `Workdir(x)`. Raises
    ValueError for an empty path."""

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):  # Path("") is the folder one is in, which a variable that is not set must not mean
            raise ValueError("the workdir is empty; give the folder of a run")
        object.__setattr__(self, "path", Path(path))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        """What is in the folder, under whatever name."""
        return self.path / name

    @property
    def name(self) -> str:
        """What results call the run: the last part of its path."""
        return self.path.name or self.path.resolve().name

    @property
    def config(self) -> Path:
        """The config as it is now; it is written last of all, so with it the folder is a run."""
        return self.path / "config.json"

    @property
    def history(self) -> Path:
        """A line for each time that the config was changed on resuming."""
        return self.path / "history.jsonl"

    @property
    def contract(self) -> Path:
        return self.path / "contract.json"

    @property
    def data(self) -> Path:
        """Digests of the examples."""
        return self.path / "data.json"

    @property
    def lineage(self) -> Path:
        """Of a recipe's stage: what it comes from, but for seeds. Other runs have none."""
        return self.path / "lineage.json"

    @property
    def environment(self) -> Path:
        return self.path / "env.json"

    @property
    def seal(self) -> Path:
        """Digests of the files that must not change."""
        return self.path / "seal.json"

    @property
    def encoder(self) -> Path:
        """The encoder's config.json and tokenizer, copied when the run began."""
        return self.path / "encoder"

    @property
    def stated(self) -> Path:
        """What the encoder's directory, if it was one of sentence-transformers, says of the config."""
        return self.encoder / "stated.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def corpora(self) -> tuple[str, ...]:
        """The names of the corpora whose vectors are complete, sorted."""
        return tuple(sorted(found.parent.name for found in self.path.glob("embeddings/*/manifest.json")))

    def embeddings(self, corpus: str) -> Path:
        """The folder of a corpus's vectors. Raises ValueError for a name that is no plain name."""
        return self.path / "embeddings" / plain("the name of a corpus", corpus)

    def rankings(self, dataset: str) -> Path:
        """The TREC run of a data set ("scifact", "scifact.test"). Raises ValueError for a name that is no plain one."""
        return self.path / "runs" / f"{plain('the name of a data set', dataset)}.trec"

    @property
    def evaluations(self) -> tuple[Path, ...]:
        """The measures of every data set that has some, sorted."""
        return tuple(path for path in sorted(self.path.glob("eval/*.json")) if not path.stem.endswith(".diversity"))

    def evaluation(self, dataset: str) -> Path:
        """The measures of a data set. Raises ValueError for a name that is no plain one."""
        return self.path / "eval" / f"{plain('the name of a data set', dataset)}.json"


def plain(what: str, name: str) -> str:
    """The name, if it stays inside the folder that it is put in. Raises ValueError. what: what it is the name of."""
    if not name or name.startswith(".") or any(character in name for character in "/\\\0"):
        raise ValueError(f"{what} is {name!r}; it must not be empty, begin with a dot, or hold / or \\")
    return name
