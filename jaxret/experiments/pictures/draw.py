"""Draw one kind of picture from the folders of runs or of a sweep (`jaxret plot`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxret.data.records import Passage
from jaxret.experiments.compare_runs import split_argument
from jaxret.experiments.explain import own_word_values
from jaxret.experiments.pictures.canvas import save_picture
from jaxret.experiments.pictures.picture_options import PictureOptions
from jaxret.experiments.pictures.run_pictures import (
    Runs,
    annealing_picture,
    domain_picture,
    training_picture,
    weight_picture,
    winner_picture,
)
from jaxret.experiments.pictures.sweep_picture import sweep_picture
from jaxret.experiments.pictures.word_picture import word_picture
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# kind -> function that draws it from the files of runs
_RUN_PICTURES: dict[str, Callable[[Runs], Figure]] = {"training": training_picture, "annealing": annealing_picture}
_DIVERSITY_PICTURES = {"winners": winner_picture, "weights": weight_picture}
PICTURE_KINDS = ("sweep", *_RUN_PICTURES, *_DIVERSITY_PICTURES, "domains", "words")


def draw(kind: str, arguments: Sequence[str], out: str = "", options: PictureOptions | None = None) -> str:
    """Draw a picture, write OUT.svg and OUT.png, and return their names.

    Args:
        kind: one of PICTURE_KINDS.
        arguments: folders of runs, or NAME=RUN,RUN for seeds of a system; for a sweep, its folder.
        out: path of the picture, with or without an ending; "" for the name of the kind in the current folder.
        options: options that only some kinds read.
    Raises:
        ValueError: the kind is unknown, does not read an option, or needs files that a run does not have.
        FileNotFoundError: the sweep has no results.
    """
    options = options or PictureOptions()
    if kind not in PICTURE_KINDS:
        kinds = ", ".join(PICTURE_KINDS)
        raise ValueError(f"{kind!r} is not a kind of picture; kinds are {kinds} (jaxret report has more pictures)")
    _require_options(kind, options)
    if kind in ("sweep", "words") and len(arguments) != 1:
        raise ValueError(f"a picture of {kind} needs one folder; {len(arguments)} are given")
    if kind == "sweep":
        path = Path(arguments[0]) / "results.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: `jaxret sweep` writes it when all points are measured")
        make = partial(sweep_picture, read_json(path), next(iter(options.measures), ""))
    elif kind == "words":
        run = open_run(arguments[0], options.checkpoint)
        words = own_word_values(run, Passage("passage", options.passage, options.title))
        make = partial(word_picture, words, run.model.module.head.word_values("passage"))
    elif kind == "domains":
        make = partial(domain_picture, _read_runs(arguments), options.x, options.y, options.measures)
    elif kind in _DIVERSITY_PICTURES:
        make = partial(_DIVERSITY_PICTURES[kind], _read_runs(arguments), options.data)
    else:
        make = partial(_RUN_PICTURES[kind], _read_runs(arguments))
    return save_picture(make, out or kind)


def _require_options(kind: str, options: PictureOptions) -> None:
    """Raise ValueError for an option that is missing, or that the kind does not read."""
    reads = {"sweep": ("measures",), "domains": ("measures", "x", "y"), "words": ("passage", "title", "checkpoint")}
    reads |= dict.fromkeys(_DIVERSITY_PICTURES, ("data",))
    needs = {"domains": ("x", "y"), "words": ("passage",)}
    for name in needs.get(kind, ()):
        if not getattr(options, name):
            raise ValueError(f"{name} must be given for a picture of {kind}")
    for name, value in vars(options).items():
        if value not in ((), "", "best") and name not in reads.get(kind, ()):
            raise ValueError(f"{name} is not used by a picture of {kind}; remove it")
    if len(options.measures) > (2 if kind == "domains" else 1):
        raise ValueError(f"measures={','.join(options.measures)} has too many measures for a picture of {kind}")


def _read_runs(arguments: Sequence[str]) -> dict[str, list[Workdir]]:
    """Return name -> runs. Raises FileNotFoundError for a folder that is not a run, ValueError for a name that occurs
    twice."""
    runs: dict[str, list[Workdir]] = {}
    for argument in arguments:
        name, paths = split_argument(argument)
        members = [Workdir(path) for path in paths]
        for member in members:
            if not member.config.exists():
                raise FileNotFoundError(f"{member} is not a run (it has no config.json)")
        label = name or members[0].name
        label = argument if label in runs and not name else label
        if label in runs:
            raise ValueError(f"the name {label!r} occurs twice; give another name with NAME=RUN")
        runs[label] = members
    return runs
