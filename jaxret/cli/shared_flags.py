"""Flags of several verbs for configs and for files to write. Other shared flags are in configs/shared_options.py.

A function defines the flag for the verb that calls it. `role` names the source of the flag.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from jaxret.storage.atomic import require_file_path, require_folder_path
from jaxret.storage.buckets.address import is_bucket_address

if TYPE_CHECKING:
    from jaxret.data.formats import Corpus

flags.disclaim_key_flags()  # a flag belongs to the module of its verb


def config(role: str) -> flags.FlagHolder:
    """Define --config, required."""
    holder = optional_config(role)
    flags.mark_flag_as_required("config")
    return holder


def optional_config(role: str) -> flags.FlagHolder:
    """Define --config. Its value is None if the command line has no --config."""
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
            if path is not None and not is_bucket_address(path):  # another check reports a missing flag
                require(path, "--out")
        except ValueError as error:
            raise flags.ValidationError(str(error)) from error
        return True

    holder = flags.DEFINE_string("out", None, role, required=True)
    flags.register_validator("out", is_free)
    return holder


def open_corpus(holder: flags.FlagHolder) -> Corpus | None:
    """Return the corpus that a flag names; None if it is empty. Raises DataError if there is none at its path."""
    from jaxret.data.formats import Corpus

    return Corpus.open(holder.value) if holder.value else None


def of_job(verb: ModuleType) -> dict[str, str]:
    """Return the values, by name, of the flags that must be equal in all processes of a job."""
    from jaxret.storage.buckets.working_copy import shown_message

    holders = (holder for holder in flags.FLAGS.get_key_flags_for_module(verb) if holder.name != "process_id")
    return {f"--{holder.name}": shown_message(str(holder.value)) for holder in holders}
