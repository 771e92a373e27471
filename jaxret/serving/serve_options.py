"""Options and arguments of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxret.configs.options import check_options, option


@dataclass(frozen=True)
class ServeOptions:
    """Where a server listens, and its limits. Raises ValueError for a value that is not allowed."""

    host: str = option(
        "127.0.0.1", "address to listen at; other addresses than loopback need the variable JAXRET_TOKEN"
    )
    port: int = option(8080, "port to listen at; 0: a free one", lower_bound=0)
    search: bool = option(True, "search the corpus; --nosearch: only vectors and scores of texts, without a corpus")
    texts: bool = option(True, "return titles and texts; --notexts: only ids, for a corpus whose file is missing")
    batch: int = option(32, "texts computed at a time", lower_bound=1)
    queue: int = option(2048, "texts that may wait, at most; further requests get 429", lower_bound=1)
    requests: int = option(
        256, "requests at a time, at most; further requests get 429 before their bodies are read", lower_bound=1
    )
    most_inputs: int = option(1024, "texts of a request, at most", lower_bound=1)
    most_characters: int = option(100_000, "characters of a text, at most", lower_bound=1)
    most_bytes: int = option(8 * 2**20, "bytes of a request's body, at most", lower_bound=1)
    most_k: int = option(1000, "passages for a question, at most", lower_bound=1)
    most_hits: int = option(2**17, "passages in an answer, over all its questions, at most", lower_bound=1)
    most_numbers: int = option(2**22, "numbers in an answer, over all vectors of its texts, at most", lower_bound=1)
    body_seconds: float = option(10.0, "seconds for a request to arrive", lower_bound=0.1)
    answer_seconds: float = option(60.0, "seconds for the answer of a request", lower_bound=0.1)
    stop_seconds: float = option(30.0, "seconds after SIGTERM in which running requests may end", lower_bound=0.1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.port > 65535:
            raise ValueError(f"port is {self.port}; it must be at most 65535")


def named_run(argument: str) -> tuple[str, str]:
    """Return (name, folder) of an argument NAME=FOLDER or FOLDER. The name of FOLDER is the last part of its path.

    Raises ValueError for an empty name, and for a name that cannot be part of a model's id such as NAME:query.
    """
    name, separator, folder = argument.partition("=")
    if not separator or Path(argument).exists():
        return Path(argument).resolve().name, argument
    if not name or not folder or ":" in name or not name.isprintable():
        raise ValueError(f"{argument!r}: write NAME=FOLDER, with a name of printable characters without a colon")
    return name, folder
