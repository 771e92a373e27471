"""Published prompts: by name, with an instruction from the config or from the query; and marks of prompt tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.formats import QuerySource, TrainingSource, write_beir
from jaxret.data.formats.example_writers import write_flag_examples, write_tevatron_first, write_tuples
from jaxret.data.records import Passage, Query
from jaxret.data.tokens.prompts import PRESETS, WEB_SEARCH, read_prompts
from jaxret.data.tokens.tokenizer import NO_TITLE, TITLE, TextTokenizer, fill_task
from tests.pipeline import write_encoder, write_language_model
from tests.tiny import make_config

QUESTION = "What is the capital of China?"
# The whole texts of a query and a passage, from the models' cards and code.
AS_PUBLISHED = {
    "qwen3": (f"Instruct: {WEB_SEARCH}\nQuery:{QUESTION}", "Beijing"),
    "e5_mistral": (f"Instruct: {WEB_SEARCH}\nQuery: {QUESTION}", "Beijing"),
    "bge_gemma2": (f"<instruct>{WEB_SEARCH}\n<query>{QUESTION}", "Beijing"),
    "gritlm": (f"<|user|>\n{WEB_SEARCH}\n<|embed|>\n{QUESTION}", "<|embed|>\nBeijing"),
    "repllama": (f"query: {QUESTION}", "passage: Beijing"),
    "tevatron_mistral": (f"Query: {QUESTION}", "Passage: Beijing"),
    "embedding_gemma": (f"task: search result | query: {QUESTION}", "title: none | text: Beijing"),
    "e5": (f"query: {QUESTION}", "passage: Beijing"),
}


def test_published_prompts_equal_the_model_cards() -> None:
    assert AS_PUBLISHED.keys() == PRESETS.keys()
    for name, (query, passage) in AS_PUBLISHED.items():
        prompts = read_prompts(make_config({"tokens.prompts": name}))
        assert fill_task(prompts.query, prompts.task) + QUESTION == query
        assert prompts.passage.replace(TITLE, NO_TITLE) + "Beijing" == passage
        assert prompts.in_mean == (name != "gritlm")


def test_tokens_task_replaces_the_default_task() -> None:
    prompts = read_prompts(make_config({"tokens.prompts": "qwen3", "tokens.task": "Find a claim"}))
    assert fill_task(prompts.query, prompts.task) == "Instruct: Find a claim\nQuery:"
    own = read_prompts(make_config({"tokens.query_prompt": "{task}: ", "tokens.task": "Find a claim:"}))
    assert fill_task(own.query, own.task) == "Find a claim: "  # LLM2Vec, too, adds only a missing colon
    same = {"tokens.prompts": "qwen3", "tokens.query_prompt": f"Instruct: {WEB_SEARCH}\nQuery:"}
    assert read_prompts(make_config(same)) == PRESETS["qwen3"]  # a sentence-transformers directory sets both keys, too
    assert read_prompts(make_config(same | {"tokens.task": "Find a claim"})) == prompts


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"tokens.prompts": "qwen_3"},
            r"tokens.prompts .*'qwen_3'; .*; .*mean qwen3\?",
        ),
        ({"tokens.prompts": "gritml"}, r"did you mean gritlm\?"),
        ({"tokens.prompts": "e5", "tokens.task": "Find"}, r"prompts 'e5' .*\{task\}"),
        ({"tokens.prompts": "e5", "tokens.query_prompt": "q: "}, r"query_prompt is 'q: ', but .* stands for 'query: '"),
        ({"tokens.query_prompt": "q: ", "tokens.task": "Find"}, r"tokens.query_prompt, 'q: ', has no \{task\} to put"),
        ({"tokens.query_prompt": "{task}: "}, r"\{task\}, .*tokens.task .*instruction"),
        ({"tokens.query_prompt": "{tusk}: "}, r"query_prompt, '\{tusk\}: ', has \{tusk\}, but only \{task\}"),
        ({"tokens.passage_prompt": "{task}: "}, r"passage_prompt, .* has \{task\}, but only \{title\} is replaced"),
    ],
)
def test_contradicting_settings_are_errors(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(make_config(keys))


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer.load(write_encoder(tmp_path / "encoder"), 16, 16, query_prompt="{task} river ", task="stone")


def test_a_query_uses_the_instruction_of_its_record(tokenizer: TextTokenizer) -> None:
    queries: list[str | Query] = [Query("1", "music"), Query("2", "music", instruction="silver light"), "music"]
    texts = ["stone river music", "silver light river music", "stone river music"]
    plain = replace(tokenizer, query_prompt="", task="")
    assert [row.tolist() for row in tokenizer.queries(queries)] == [row.tolist() for row in plain.queries(texts)]
    assert tokenizer.joins["task"] == "stone"
    assert "task" not in plain.joins
    assert replace(tokenizer, task="light").settings("query") != tokenizer.settings("query")
    other = replace(tokenizer, query_prompt="river ")  # a prompt without a place for a task
    assert other.queries(queries)[1].tolist() == plain.queries(["river music"])[0].tolist()


def test_a_title_is_put_into_the_prompt_of_a_passage(tokenizer: TextTokenizer) -> None:
    """EmbeddingGemma does so; the word for a missing title is "none"."""
    prompted = replace(tokenizer, passage_prompt="river {title} stone ")
    plain = replace(tokenizer, title_separator=" ")
    passages = [Passage("1", "music", "silver light"), Passage("2", "music", " ")]
    texts = [Passage("1", "river silver light stone music"), Passage("2", "river none stone music")]
    for separator in ("[SEP]", " "):
        rows = replace(prompted, title_separator=separator).passages(passages)
        assert [row.tolist() for row in rows] == [row.tolist() for row in plain.passages(texts)]
    assert prompted.prompt("passage") == "river none stone "
    skipping = replace(prompted, skip_prompt=True).passages(passages)
    prompts = plain.passages([Passage("1", "river silver light stone"), Passage("2", "river none stone")])
    assert [int((row < 0).sum()) for row in skipping] == [len(row) - 1 for row in prompts]


def test_tokens_of_a_prompt_are_marked(tokenizer: TextTokenizer) -> None:
    """[CLS] before a prompt is marked, too, as in sentence-transformers; the end token never is, nor a text without a
    prompt."""
    skipping, long = replace(tokenizer, skip_prompt=True), "light " * 12
    queries = [Query(str(i), "music", instruction=text) for i, text in enumerate(["", "silver light", long])]
    for row, marked, prompt in zip(tokenizer.queries(queries), skipping.queries(queries), (3, 4, 14), strict=True):
        assert [id for id in marked.tolist() if id >= 0] == row[prompt:].tolist()
        assert [~id for id in marked.tolist() if id < 0] == row[:prompt].tolist()
    passages = [Passage("1", "music"), Passage("2", "music", "light")]
    assert (skipping.passages(passages).flat >= 0).all()
    titled = replace(skipping, passage_prompt="paper ").passages(passages)
    assert [(row < 0).sum() for row in titled] == [2, 2]
    assert skipping.joins["prompt_in_mean"] is False
    assert skipping.settings("passage") != tokenizer.settings("passage")


def test_an_instruction_that_leaves_no_room_is_an_error(tokenizer: TextTokenizer) -> None:
    """The limit is 16: an instruction of 13 tokens, the question and two markers fit, but one of 14 does not."""
    queries = [Query("a", "music"), Query("b", "music", instruction="light " * 13)]
    with pytest.raises(ValueError, match=r"'b': .*instruction .*14"):
        tokenizer.queries(queries)
    assert len(replace(tokenizer, query_prompt="river ").queries(queries)) == 2, (
        "a prompt without a place for an instruction ignores it"
    )


def test_a_language_model_without_a_start_has_only_the_prompt_marked(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "model")
    tokenizer = TextTokenizer.load(folder, 16, 16, query_prompt="ab ", skip_prompt=True)
    assert (tokenizer.queries(["cd"])[0] < 0).tolist() == [True, True, True, False, False, False]


def test_instructions_are_read_and_kept(tmp_path: Path) -> None:
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    (beir / "queries.jsonl").write_text(
        '{"_id": "1", "text": "music", "instruction": "Find songs"}\n{"_id": "2", "text": "stone"}\n'
    )
    (beir / "corpus.jsonl").write_text('{"_id": "p", "text": "a song"}\n{"_id": "q", "text": "a rock"}\n')
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\tp\t1\n2\tq\t1\n")
    assert [query.instruction for query in QuerySource.open(beir).read()] == ["Find songs", ""]
    flag = tmp_path / "train.jsonl"
    flag.write_text('{"query": "music", "pos": ["a song"], "neg": ["a rock"], "prompt": "Find songs"}\n')
    (example,) = TrainingSource.open(flag, "train").read()
    assert example.query.instruction == "Find songs"
    for name, write in {"flag": write_flag_examples, "tevatron": write_tevatron_first}.items():
        assert not write(tmp_path / f"{name}.jsonl", [example])["queries' instructions"]
        assert TrainingSource.open(tmp_path / f"{name}.jsonl", "train").read()[0].query.instruction == "Find songs"
    assert write_tuples(tmp_path / "tuples.tsv", [example])["queries' instructions"] == 1
    write_beir(tmp_path / "again", [], QuerySource.open(beir).read(), {})
    assert QuerySource.open(tmp_path / "again" / "queries.jsonl").read() == QuerySource.open(beir).read()
