"""Published prompts, by name: the texts in front of queries and passages with which models were trained."""

from __future__ import annotations

import re
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxret.configs.synonyms import suggest_name
from jaxret.data.tokens.tokenizer import NO_TITLE, TASK, TITLE, fill_task


class Prompts(NamedTuple):
    """Texts in front of queries and passages."""

    query: str  # may contain TASK, which is replaced by an instruction
    passage: str = ""
    task: str = ""  # instruction for queries without an instruction
    in_mean: bool = True  # whether the tokens of a prompt count in a mean over tokens


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
    """Return the prompts of a config: the published prompts that `tokens.prompts` names, or the texts of the other
    keys.

    Raises ValueError for an unknown name, and for keys that contradict each other.
    """
    tokens = config.tokens
    prompts = Prompts(tokens.query_prompt, tokens.passage_prompt, tokens.task, tokens.prompt_in_mean)
    for side, placeholder in (("query", TASK), ("passage", TITLE)):
        if unknown := [place for place in re.findall(r"\{\w+\}", getattr(prompts, side)) if place != placeholder]:
            raise ValueError(
                f"tokens.{side}_prompt, {getattr(prompts, side)!r}, has {unknown[0]}, but only {placeholder} is "
                "replaced in it"
            )
    if not tokens.prompts:
        if tokens.task and TASK not in prompts.query:
            raise ValueError(
                f"tokens.task is {tokens.task!r}, but tokens.query_prompt, {prompts.query!r}, has no {TASK} to "
                "put it in"
            )
        if TASK in prompts.query and not tokens.task:
            raise ValueError(
                f"tokens.query_prompt, {prompts.query!r}, has {TASK}, but tokens.task is empty. Set tokens.task to "
                "the instruction for queries without an instruction"
            )
        return prompts
    if tokens.prompts not in PRESETS:
        raise ValueError(
            f"tokens.prompts is {tokens.prompts!r}; it must be one of {', '.join(PRESETS)}, or '' for the texts of "
            f"tokens.query_prompt and tokens.passage_prompt{suggest_name(tokens.prompts, PRESETS)}"
        )
    preset = PRESETS[tokens.prompts]
    if prompts.task and not preset.task:
        raise ValueError(
            f"tokens.task is {prompts.task!r}, but the prompts {tokens.prompts!r} have no {TASK} to put it in"
        )
    task = prompts.task or preset.task
    for side in ("query", "passage"):
        prompt, published_prompt = getattr(prompts, side), getattr(preset, side)
        plain = published_prompt.replace(TITLE, NO_TITLE)
        variants = fill_task(plain, task), fill_task(plain, preset.task)  # a model's directory has the filled text
        if prompt not in ("", published_prompt, *variants):
            raise ValueError(
                f"tokens.{side}_prompt is {prompt!r}, but tokens.prompts={tokens.prompts!r} stands for "
                f"{published_prompt!r}: remove one of the two keys"
            )
    return preset._replace(task=task, in_mean=preset.in_mean and prompts.in_mean)
