"""Makes a run of a pre-trained model, for encoding and search, or to start training from it (`jaxret open`)."""

from __future__ import annotations

from pathlib import Path

from jaxret.configs import load_config
from jaxret.data.dataset_check import cut_for_display
from jaxret.data.formats import Corpus
from jaxret.data.records import Passage
from jaxret.export.compare_original import compare_with_original
from jaxret.export.import_options import ImportOptions
from jaxret.models.encoders.architectures import is_language_model, read_config
from jaxret.models.encoders.pretrained import find_model, resolve_encoder
from jaxret.models.encoders.sentence_transformers import END_TOKEN, LENGTH_KEYS, TITLE_SEPARATOR
from jaxret.models.heads import read_model_keys
from jaxret.parallel.events import without_events
from jaxret.runs.from_sentence_transformers import UNSET, settings_family
from jaxret.runs.run import Run, open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.buckets.working_copy import shown_path
from jaxret.storage.transaction import new_folder
from jaxret.training.loop import train

_EXAMPLE = Passage("", "TEXT", "TITLE")


def import_model(
    model: str, workdir: str | Path, options: ImportOptions = ImportOptions(), corpus: Corpus | None = None
) -> str:
    """Make a run of a model. Return sentences on how it reads a passage, and on the difference of its vectors from the
    model's. After an error, a new folder does not exist.

    Args:
        model: directory or name of the model, as in `encoder.checkpoint`.
        workdir: folder of the run.
        options: options of the import.
        corpus: corpus whose first passage is shown as the model reads it; None: an example is shown.

    Raises:
        ValueError: the vectors differ, or the corpus has no passage.
        FileExistsError: the folder has files that do not belong to a run.
    """
    passage = _first_passage(corpus) if corpus else _EXAMPLE
    if Workdir(workdir).config.exists():
        directory = make_run(model, workdir, options)
        return _describe_run(open_run(workdir), directory, passage)
    with new_folder(Path(workdir)) as folder, without_events():
        directory = make_run(model, folder, options)
        return _describe_run(open_run(folder), directory, passage)


def _first_passage(corpus: Corpus) -> Passage:
    """Return the first passage of a corpus, with long parts cut. Raises ValueError for an empty corpus."""
    for passage in corpus.read():
        return cut_for_display(passage)
    raise ValueError(f"{corpus} has no passage")


def _describe_run(run: Run, directory: Path, passage: Passage) -> str:
    read = run.tokenizer.passage_as_read(passage)
    subject = "a passage with a title" if passage is _EXAMPLE else f"the first passage, {passage.id!r},"
    key = f"tokens.title_separator={run.tokenizer.title_separator!r}"
    ids = (run.tokenizer.cls_id, run.tokenizer.sep_id if run.tokenizer.ends_texts else None)
    words = ("nothing" if id is None else f"{run.tokenizer.backend.id_to_token(id)!r} (id {id})" for id in ids)
    return (
        f"{subject} is read as {read!r} ({key})\n"
        f"around every text: {' and '.join(words)}; its vector: head.token={run.config.head.token!r}\n"
        f"{compare_with_original(run, directory)}"
    )


def make_run(model: str, workdir: str | Path, options: ImportOptions = ImportOptions(), progress: bool = True) -> Path:
    """Make a run of zero steps with the vectors of a model. Return the directory of the model.

    Args:
        model: directory or name of the model, as in `encoder.checkpoint`.
        workdir: folder of the run.
        options: options of the import.
        progress: whether to show progress.

    Raises:
        FileNotFoundError: the model is not on this machine.
        ValueError: the model is not supported.
        ContractError: the folder holds another run.
    """
    directory = find_model(model, options.download)
    config = load_config("base")
    encoder = {"encoder.checkpoint": shown_path(model), "encoder.download": options.download}
    config.update_from_flattened_dict({**encoder, "encoder.tied": True, "train.steps": 0})
    stated_settings = read_model_keys(directory)
    config.head.name = settings_family(stated_settings) or config.head.name
    ends, token = None, options.token
    if not stated_settings:  # a plain encoder has no settings but its largest length
        shapes = read_config(resolve_encoder(model, options.download))
        for key in LENGTH_KEYS.values():
            config.update_from_flattened_dict({key: min(UNSET[key], shapes.longest)})
        ends = False if is_language_model(shapes) else None
        if not token and "cls" in shapes.lacks:
            token = "last" if "leading_tokens" in shapes.lacks else "mean"  # last: tokens see only earlier tokens
    values = {"head.token": token or None, "normalize": options.normalize, END_TOKEN: ends}
    values[TITLE_SEPARATOR] = options.title_separator
    keys = {key: value for key, value in values.items() if value is not None}
    config.update_from_flattened_dict(keys)
    train(config, workdir, progress, explicit_keys=keys)
    return directory
