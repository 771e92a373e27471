"""The request of `jaxret mteb`. Does not import JAX."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, option


@dataclass(frozen=True, kw_only=True)
class MtebRequest:
    """A run, the tasks, how their data are read, and how results are named. Raises ValueError for a name of the model
    without an organization."""

    workdir: str = shared_options.workdir()
    tasks: tuple[str, ...] = option(MISSING, "names of mteb's tasks, or folders in BEIR's layout", parse=tuple)
    out: str  # folder for results/ORGANIZATION__NAME/REVISION/TASK.json, and for the corpora of named tasks
    model_name: str = option("", "ORGANIZATION/NAME of the model in the results; default: jaxret/ and the run's folder")
    card: str = option(
        "",
        "model card: a README.md with metadata such as licence and languages; default: README.md of the run's folder",
    )
    split: str = shared_options.split("test")
    download: bool = option(False, "download the data of named tasks that are not in the cache of Hugging Face")
    checkpoint: str = shared_options.checkpoint()

    def __post_init__(self) -> None:
        check_options(self)
        if self.model_name and self.model_name.count("/") != 1:
            raise ValueError(f"model_name is {self.model_name!r}; it must be ORGANIZATION/NAME")
