"""Prompts as published, by name: the texts in front of queries and passages that models were trained with."""

from __future__ import annotations

import re
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxret.configs.synonyms import suggest_name
from jaxret.data.tokens.tokenizer import NO_TITLE, TASK, TITLE, fill_task


class Prompts(NamedTuple):
    """Texts in front of queries and passages.

    query: may hold TASK, which stands for an instruction.
    task: instruction of queries that bring none along.
    in_mean: whether the tokens of a prompt count in a mean over tokens.
    """

    query: str
    passage: str = ""
    task: str = ""
    in_mean: bool = True


WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"
PRESETS = {
    "qwen3": Prompts(f"Instruct: {TASK}\nQuery:", task=WEB_SEARCH),
    "e5_mistral": Prompts(f"Instruct: {TASK}\nQuery: ", task=WEB_SEARCH),
    "bge_gemma2": Prompts(f"<instruct>{TASK}\n<query>", task=WEB_SEARCH),
    "gritlm": Prompts(f"<|user|>\n{TASK}\n<|embed|>\n", "<|embed|>\n", WEB_SEARCH, in_mean=False),
    "repllama": Prompts("query: ", "passage: "),
    "tevatron_mistral": Prompts("Query: ", "Passage: "),
    "embedding_gemma": Prompts("task: search result | query: ", f"title: {TITLE} | text: "),
    "e5": Prompts("query: ", "passage: "),
}


def read_prompts(config: ConfigDict) -> Prompts:
    """Return the prompts of a config: those of `tokens.prompts`, or of the other keys.

    Raises ValueError for an unknown name, and for keys that contradict each other.
    """
    tokens = config.tokens
    own = Prompts(tokens.query_prompt, tokens.passage_prompt, tokens.task, tokens.prompt_in_mean)
    for side, placeholder in (("query", TASK), ("passage", TITLE)):
        if unknown := [place for place in re.findall(r"\{\w+\}", getattr(own, side)) if place != placeholder]:
            raise ValueError(
                f"tokens.{side}_prompt, {getattr(own, side)!r}, has {unknown[0]}; only {placeholder} is replaced in it"
            )
    if not tokens.prompts:
        if tokens.task and TASK not in own.query:
            raise ValueError(
                f"tokens.task is {tokens.task!r}, but tokens.query_prompt, {own.query!r}, has no {TASK} to put it in"
            )
        if TASK in own.query and not tokens.task:
            raise ValueError(
                f"tokens.query_prompt, {own.query!r}, has {TASK}, but tokens.task is empty: give the instruction of "
                "queries that have none of their own"
            )
        return own
    if tokens.prompts not in PRESETS:
        raise ValueError(
            f"tokens.prompts is {tokens.prompts!r}; it must be one of {', '.join(PRESETS)}, or '' for those of "
            f"tokens.query_prompt and tokens.passage_prompt{suggest_name(tokens.prompts, PRESETS)}"
        )
    preset = PRESETS[tokens.prompts]
    if own.task and not preset.task:
        raise ValueError(f"tokens.task is {own.task!r}, but the prompts {tokens.prompts!r} have no {TASK} to put it in")
    task = own.task or preset.task
    for side in ("query", "passage"):
        prompt, theirs = getattr(own, side), getattr(preset, side)
        plain = theirs.replace(TITLE, NO_TITLE)
        variants = fill_task(plain, task), fill_task(plain, preset.task)  # as a model's directory has it
        if prompt not in ("", theirs, *variants):
            raise ValueError(
                f"tokens.{side}_prompt is {prompt!r}, but that of tokens.prompts={tokens.prompts!r} is {theirs!r}: "
                "leave one of the two keys out"
            )
    return preset._replace(task=task, in_mean=preset.in_mean and own.in_mean)
