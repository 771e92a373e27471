"""Options of `jaxret open`: how the model of another library becomes a run."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class ImportOptions:
    """Options of the import of a model. `token` and `normalize` are for plain encoders, because the modules of a
    sentence-transformers or PyLate directory determine the vector and its length. Raises ValueError for invalid
    values."""

    token: str = option(
        "",
        "vector of a text: cls or mean for a plain encoder, last, mean or mean_without_first for a language model; "
        "default: cls, last for a causal language model, mean for T5 and a bidirectional one",
        choices=("", "cls", "mean", "last", "mean_without_first"),
    )
    normalize: bool | None = option(None, "for a plain encoder: scale vectors to length 1, for cosines")
    title_separator: str = option(
        "auto",
        "text between title and text of a passage, or [SEP]; auto: a space for sentence-transformers and PyLate "
        "directories, else [SEP]",
    )
    download: bool = shared_options.download()

    def __post_init__(self) -> None:
        check_options(self)
