"""Flags that several verbs have.

A function defines the flag of its name for the verb that calls it. `role` names the source of the flag, if a verb has
several.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from jaxret.cli.flags import define_flag
from jaxret.configs.shared_options import (
    checkpoint_option,
    corpus_option,
    encoded_corpus_option,
    k_option,
    measures_option,
    on_error_option,
    platform_option,
    qrels_option,
    queries_option,
    split_option,
    workdir_option,
)
from jaxret.storage.address import is_bucket_address
from jaxret.storage.atomic import require_file_path, require_folder_path

if TYPE_CHECKING:
    from jaxret.data.formats import Corpus

flags.disclaim_key_flags()  # a flag belongs to the module of its verb


def config(role: str) -> flags.FlagHolder:
    """Define --config, required."""
    holder = optional_config(role)
    flags.mark_flag_as_required("config")
    return holder


def optional_config(role: str) -> flags.FlagHolder:
    return config_flags.DEFINE_config_file("config", None, f"{role}: NAME of a shipped config or FILE.py, also :SUFFIX")


def out_file(role: str) -> flags.FlagHolder:
    """Define --out, required: a file to write, in a folder that exists."""
    return _out(role, require_file_path)


def out_folder(role: str) -> flags.FlagHolder:
    """Define --out, required: a folder to write, in a folder that exists."""
    return _out(role, require_folder_path)


def _out(role: str, require: Callable[[str, str], None]) -> flags.FlagHolder:
    def is_free(path: str | None) -> bool:
        try:
            if path is not None and not is_bucket_address(path):  # the error of a missing flag is another's
                require(path, "--out")
        except ValueError as error:
            raise flags.ValidationError(str(error)) from error
        return True

    holder = flags.DEFINE_string("out", None, role, required=True)
    flags.register_validator("out", is_free)
    return holder


def workdir(role: str = "folder of the run") -> flags.FlagHolder:
    return define_flag("workdir", str, workdir_option(role))


def checkpoint() -> flags.FlagHolder:
    return define_flag("checkpoint", str, checkpoint_option())


def corpus(default: str = "", required: bool = False) -> flags.FlagHolder:
    """Define --corpus: passages as text."""
    return define_flag("corpus", str, corpus_option(default, required))


def open_corpus(holder: flags.FlagHolder) -> Corpus | None:
    """Return the corpus that a flag names; None if it is empty. Raises DataError if there is none at its path."""
    from jaxret.data.formats import Corpus

    return Corpus.open(holder.value) if holder.value else None


def encoded_corpus() -> flags.FlagHolder:
    """Define --corpus: passages that a run encoded."""
    return define_flag("corpus", str, encoded_corpus_option())


def queries(default: str = "") -> flags.FlagHolder:
    return define_flag("queries", str, queries_option(default))


def qrels() -> flags.FlagHolder:
    return define_flag("qrels", str, qrels_option())


def split(default: str, role: str = "split of a folder") -> flags.FlagHolder:
    return define_flag("split", str, split_option(default, role))


def k() -> flags.FlagHolder:
    return define_flag("k", int, k_option())


def measures() -> flags.FlagHolder:
    return define_flag("measures", tuple, measures_option())


def on_error() -> flags.FlagHolder:
    return define_flag("on_error", str, on_error_option())


def platform() -> flags.FlagHolder:
    return define_flag("platform", str, platform_option())


def of_job(verb: ModuleType) -> dict[str, str]:
    """Return the values of a verb's flags that are alike in all processes of a job, by name."""
    from jaxret.storage.working_copy import shown_message

    holders = (holder for holder in flags.FLAGS.get_key_flags_for_module(verb) if holder.name != "process_id")
    return {f"--{holder.name}": shown_message(str(holder.value)) for holder in holders}


def explicit_names(verb: ModuleType) -> tuple[str, ...]:
    """Return the names of a verb's flags that are on the command line."""
    return tuple(holder.name for holder in flags.FLAGS.get_key_flags_for_module(verb) if holder.present)
