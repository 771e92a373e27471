"""Options that several verbs have, each with one wording. `role` names the source of an option, if a verb has
several."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

from jaxret.configs.options import option


def workdir_option(role: str = "folder of the run") -> Any:
    return option(MISSING, role)


def checkpoint_option() -> Any:
    return option("best", "checkpoint of the run: best, last, or a step")


def corpus_option(default: str = "", required: bool = False) -> Any:
    """Return the option of passages as text."""
    source = "folder or file with passages (docs/data.md lists the formats)"
    return option(MISSING if required else "", f"{source}; default: {default}" if default else source)


def encoded_corpus_option() -> Any:
    """Return the option of passages that a run encoded."""
    source = "name of the encoded corpus, or path of its data; default: the only one of the run"
    return option("", source, flag="corpus")


def queries_option(default: str = "") -> Any:
    source = "folder or file with queries (docs/data.md lists the formats)"
    return option("", f"{source}; default: {default}" if default else source)


def qrels_option(default: str = "no evaluation by judgements") -> Any:
    return option("", f"folder or file with judgements; default: {default}")


def split_option(default: str, role: str = "split of a folder") -> Any:
    return option(default, role)


def k_option() -> Any:
    return option(100, "passages per query", lower_bound=1)


def measures_option() -> Any:
    source = (
        "measures as in ir-measures, and Accuracy@k by answers; default: nDCG@10,RR@10,R@100,Success@5,Success@20 and, "
        "with answers, Accuracy@1,5,20,100, none deeper than --k"
    )
    return option(None, source, parse=lambda names: tuple(names) or None)


def match_option(default: str = "string", note: str = "") -> Any:
    source = "how to read answers of queries: as strings, or as regular expressions (CuratedTREC)"
    return option(default, source + note, ("string", "regex"))


def self_matches_option() -> Any:
    return option(
        "auto",
        "passages with the id of their query; auto removes them, as BEIR does, only if queries are passages (ArguAna)",
        ("auto", "keep", "remove"),
    )


def latency_option() -> Any:
    return option(
        None,
        "queries to time, searched one at a time; 0: none; default: 100, but none begins after 20 s",
        lower_bound=0,
    )


def on_error_option(keep: bool = False) -> Any:
    note = "; keep: encode empty passages, stop at other bad records" if keep else ""
    choices = ("error", "skip", "keep") if keep else ("error", "skip")
    return option("error", f"at a bad record: stop, or skip and count it{note}", choices)


def platform_option() -> Any:
    return option("", "required platform: tpu, gpu or cpu; default: the best that JAX finds")


def attention_option() -> Any:
    return option(None, "plain, flash (TPU) or cudnn (GPU); default: as in training")


def query_length_option(note: str = "") -> Any:
    return option(None, f"tokens of a query, at most; default: as in training{note}")


def passage_length_option(note: str = "") -> Any:
    return option(None, f"tokens of a passage, at most; default: as in training{note}")


def tokens_per_batch_option() -> Any:
    return option(None, "tokens that are computed at a time; default: the setting of the run")


def download_option() -> Any:
    return option(False, "download a model that is not in the local cache of Hugging Face")
