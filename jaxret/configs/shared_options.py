"""Options that several verbs have, so that each has one wording.

A function returns the option with its name. `role` names the source of an option, and `default` describes the meaning
of an empty value, where the verbs differ.
"""

from __future__ import annotations

from dataclasses import MISSING
from functools import partial
from typing import Any

from jaxret.configs.options import option

checkpoint = partial(option, "best", "checkpoint of the run: best, last, or a step", flag="checkpoint")
encoded_corpus = partial(
    option, "", "name of the encoded corpus, or path of its data; default: the only one of the run", flag="corpus"
)
k = partial(option, 100, "passages per query", lower_bound=1, flag="k")
measures = partial(
    option,
    None,
    "measures as in ir-measures, and Accuracy@k by answers; default: nDCG@10,RR@10,R@100,Success@5,Success@20 and, with "
    "answers, Accuracy@1,5,20,100, none deeper than --k",
    flag="measures",
    parse=lambda names: tuple(names) or None,
)
self_matches = partial(
    option,
    "auto",
    "passages with the id of their query; auto removes them, as BEIR does, only if queries are passages (ArguAna)",
    ("auto", "keep", "remove"),
    flag="self_matches",
)
latency = partial(
    option,
    None,
    "queries to time, searched one at a time; 0: none; default: 100, but none begins after 20 s",
    lower_bound=0,
    flag="latency",
)
platform = partial(
    option, "", "required platform: tpu, gpu or cpu; default: the best that JAX finds", flag="platform"
)
attention = partial(option, None, "plain, flash (TPU) or cudnn (GPU); default: as in training", flag="attention")
tokens_per_batch = partial(
    option, None, "tokens that are computed at a time; default: the setting of the run", flag="tokens_per_batch"
)
result_name = partial(
    option, "", "name of the result files; default: DATA.SPLIT of the queries and judgements", flag="name"
)
download = partial(
    option, False, "download a model that is not in the local cache of Hugging Face", flag="download"
)


def workdir(role: str = "folder of the run") -> Any:
    return option(MISSING, role, flag="workdir")


def corpus(default: str = "", required: bool = False) -> Any:
    """Return the option that is a passage's text."""
    return option(MISSING if required else "", _source("passages", default), flag="corpus")


def queries(default: str = "") -> Any:
    return option("", _source("queries", default), flag="queries")


def qrels(default: str = "no evaluation by judgements") -> Any:
    return option("", f"folder or file with judgements; default: {default}", flag="qrels")


def split(default: str, role: str = "split of a folder") -> Any:
    return option(default, role, flag="split")


def match(default: str = "string", note: str = "") -> Any:
    source = "how to read answers of queries: as strings, or as regular expressions (CuratedTREC)"
    return option(default, source + note, ("string", "regex"), flag="match")


def on_error(keep: bool = False) -> Any:
    note = "; keep: encode empty passages, stop at other bad records" if keep else ""
    choices = ("error", "skip", "keep") if keep else ("error", "skip")
    return option("error", f"at a bad record: stop, or skip and count it{note}", choices, flag="on_error")


def query_length(note: str = "") -> Any:
    return option(None, f"tokens of a query, at most; default: as in training{note}", flag="query_length")


def passage_length(note: str = "") -> Any:
    return option(None, f"tokens of a passage, at most; default: as in training{note}", flag="passage_length")


def _source(records: str, default: str) -> str:
    source = f"folder or file with {records} (docs/data.md lists the formats)"
    return f"{source}; default: {default}" if default else source
