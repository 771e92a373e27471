"""Flags that several verbs have, each with one wording.

A function defines the flag of its name for the verb that calls it. `role` names the source of the flag, if a verb has
several.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import config_flags

from jaxret.cli.flags import OptionFlags
from jaxret.configs.options import MATCH_HELP, MATCH_KINDS
from jaxret.storage.address import is_bucket_address
from jaxret.storage.atomic import require_file_path, require_folder_path

if TYPE_CHECKING:
    from jaxret.data.formats import Corpus
    from jaxret.experiments.recipes.check_recipe import EvaluationRequest

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
    return flags.DEFINE_string("workdir", None, role, required=True)


def checkpoint() -> flags.FlagHolder:
    return flags.DEFINE_string("checkpoint", "best", "checkpoint of the run: best, last, or a step")


def corpus(default: str = "", required: bool = False) -> flags.FlagHolder:
    """Define --corpus: passages as text."""
    source = "folder or file with passages (docs/data.md lists the formats)"
    return flags.DEFINE_string(
        "corpus", None if required else "", f"{source}; default: {default}" if default else source, required=required
    )


def open_corpus(holder: flags.FlagHolder) -> Corpus | None:
    """Return the corpus that a flag names; None if it is empty. Raises DataError if there is none at its path."""
    from jaxret.data.formats import Corpus

    return Corpus.open(holder.value) if holder.value else None


def encoded_corpus() -> flags.FlagHolder:
    """Define --corpus: passages that a run encoded."""
    return flags.DEFINE_string(
        "corpus", "", "name of the encoded corpus, or path of its data; default: the only one of the run"
    )


def queries(default: str = "") -> flags.FlagHolder:
    source = "folder or file with queries (docs/data.md lists the formats)"
    return flags.DEFINE_string("queries", "", f"{source}; default: {default}" if default else source)


def qrels(default: str = "no evaluation by judgements") -> flags.FlagHolder:
    return flags.DEFINE_string("qrels", "", f"folder or file with judgements; default: {default}")


def split(default: str, role: str = "split of a folder") -> flags.FlagHolder:
    return flags.DEFINE_string("split", default, role)


def k() -> flags.FlagHolder:
    return flags.DEFINE_integer("k", 100, "passages per query", lower_bound=1)


def measures() -> flags.FlagHolder:
    return flags.DEFINE_list(
        "measures",
        None,
        "measures as in ir-measures, and Accuracy@k by answers; default: nDCG@10,RR@10,R@100,Success@5,Success@20 and, "
        "with answers, Accuracy@1,5,20,100, none deeper than --k",
    )


def match(default: str | None = "string", note: str = "") -> flags.FlagHolder:
    return flags.DEFINE_enum("match", default, list(MATCH_KINDS), MATCH_HELP + note)


def on_error(keep: bool = False) -> flags.FlagHolder:
    choices = ["error", "skip", *(["keep"] if keep else [])]
    note = "; keep: encode empty passages, stop at other bad records" if keep else ""
    return flags.DEFINE_enum("on_error", "error", choices, f"at a bad record: stop, or skip and count it{note}")


def platform() -> flags.FlagHolder:
    return flags.DEFINE_string("platform", "", "required platform: tpu, gpu or cpu; default: the best that JAX finds")


def attention() -> flags.FlagHolder:
    return flags.DEFINE_string("attention", None, "plain, flash (TPU) or cudnn (GPU); default: as in training")


def query_length(note: str = "") -> flags.FlagHolder:
    return flags.DEFINE_integer("query_length", None, f"tokens of a query, at most; default: as in training{note}")


def passage_length(note: str = "") -> flags.FlagHolder:
    return flags.DEFINE_integer("passage_length", None, f"tokens of a passage, at most; default: as in training{note}")


def download() -> flags.FlagHolder:
    return flags.DEFINE_bool("download", False, "download a model that is not in the local cache of Hugging Face")


def seed(default: int, role: str) -> flags.FlagHolder:
    return flags.DEFINE_integer("seed", default, f"seed of {role}", lower_bound=0)


def tokens_per_batch() -> flags.FlagHolder:
    return flags.DEFINE_integer(
        "tokens_per_batch", None, "tokens that are computed at a time; default: the setting of the run"
    )


def self_matches() -> flags.FlagHolder:
    return flags.DEFINE_enum(
        "self_matches",
        "auto",
        ["auto", "keep", "remove"],
        "passages with the id of their query; auto removes them, as BEIR does, only if queries are passages (ArguAna)",
    )


def latency() -> flags.FlagHolder:
    return flags.DEFINE_integer(
        "latency",
        None,
        "queries to time, searched one at a time; 0: none; default: 100, but none begins after 20 s",
        lower_bound=0,
    )


class RequestFlags(OptionFlags["EvaluationRequest"]):
    """The flags of the data and measures that evaluate the stages of a recipe, and the points of a sweep."""

    def __init__(self) -> None:
        train = "the folder of config.data.train"
        self.holders = {
            "corpus": corpus(train),
            "queries": queries(train),
            "qrels": qrels("--queries, if it is a folder"),
            "split": split("test"),
            "k": k(),
            "measures": measures(),
            "match": match(None, "; default: strings, or the setting of a stage's mining"),
        }

    def __call__(self, **changes: Any) -> EvaluationRequest:
        from jaxret.experiments.recipes.check_recipe import EvaluationRequest

        self.kind = EvaluationRequest
        names, match = self.holders["measures"].value, self.holders["match"].value
        values = {"corpus": open_corpus(self.holders["corpus"]), "measures": names or None, "match": match or ""}
        return super().__call__(**values | changes)


def of_job(verb: ModuleType) -> dict[str, str]:
    """Return the values of a verb's flags that are alike in all processes of a job, by name."""
    from jaxret.storage.working_copy import shown_message

    holders = (holder for holder in flags.FLAGS.get_key_flags_for_module(verb) if holder.name != "process_id")
    return {f"--{holder.name}": shown_message(str(holder.value)) for holder in holders}


def explicit_names(verb: ModuleType) -> tuple[str, ...]:
    """Return the names of a verb's flags that are on the command line."""
    return tuple(holder.name for holder in flags.FLAGS.get_key_flags_for_module(verb) if holder.present)
