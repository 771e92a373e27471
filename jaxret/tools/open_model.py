"""jaxret open: a model as it comes becomes a run, to encode, search and probe with, and to start from."""

from __future__ import annotations

from pathlib import Path

from jaxret.models.encoders.architectures import read_config
from jaxret.models.encoders.pretrained import find, resolve
from jaxret.models.encoders.sentence_transformers import LENGTHS
from jaxret.models.heads import stated
from jaxret.runs.adopt import UNSET, family_of
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.shipped import load
from jaxret.tools.original import difference
from jaxret.tools.transaction import new_folder
from jaxret.training.loop import train


def open_model(
    model: str, workdir: str | Path, token: str = "", download: bool = False, normalize: bool | None = None
) -> str:
    """`make_run`, and a sentence on how far the run's vectors are from the original's. A folder that was no run before
    is one at the end or is not there. Raises what `make_run` raises, ValueError if the vectors are others, and
    FileExistsError if the folder holds anything but a run."""
    if Workdir(workdir).config.exists():
        directory = make_run(model, workdir, token, download, normalize)
        return difference(open_run(workdir), directory)
    with new_folder(Path(workdir)) as folder:
        directory = make_run(model, folder, token, download, normalize)
        return difference(open_run(folder), directory)


def make_run(
    model: str,
    workdir: str | Path,
    token: str = "",
    download: bool = False,
    normalize: bool | None = None,
    progress: bool = True,
) -> Path:
    """Makes `workdir` a run of no steps with the model's own vectors, and returns where the model is.

    model: as `encoder.checkpoint`. Of a directory of sentence-transformers or PyLate the modules say what a vector is;
    of an encoder alone `token` does ("cls", which is also the default, or "mean"), and `normalize` (default: not).
    Raises FileNotFoundError if the model is not on this machine (`download` fetches it), ValueError for what cannot be
    had here, ContractError if the folder holds another run.
    """
    directory = find(model, download)
    config = load("base")
    config.update_from_flattened_dict(
        {
            "encoder.checkpoint": model,
            "encoder.download": download,
            "encoder.tied": True,
            "train.steps": 0,
        }
    )
    says = stated(directory)
    config.head.name = family_of(says) or config.head.name
    if not says:  # an encoder alone says nothing of lengths but what it can have at most
        longest = read_config(resolve(model, download)).longest
        for key in LENGTHS.values():
            config.update_from_flattened_dict({key: min(UNSET[key], longest)})
    given = {"head.token": token or None, "normalize": normalize}
    chosen = {key: value for key, value in given.items() if value is not None}
    config.update_from_flattened_dict(chosen)
    train(config, workdir, progress, given=chosen)
    return directory
