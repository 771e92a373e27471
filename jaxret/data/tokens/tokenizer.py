"""Text -> token ids, with the same rules for training, encoding and search."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxret.data.records import Passage, Query
from jaxret.data.tokens.backend import TOKENIZER_FILES as TOKENIZER_FILES  # where it is looked for
from jaxret.data.tokens.backend import load_backend
from jaxret.parallel.progress import Progress
from jaxret.storage.atomic import sha256_file
from jaxret.types import Ragged

SEPARATOR = "[SEP]"  # as title_separator: the tokenizer's own end marker, whatever its name
AUTO_SEPARATOR = "auto"  # as a config's title_separator: what the model's directory implies
# Texts in front of a text and between its parts: side -> field of TextTokenizer -> default value.
JOINS = {"query": {"query_prompt": ""}, "passage": {"passage_prompt": "", "title_separator": SEPARATOR}}

_MOST_PROMPT = 65_536  # characters
TASK = "{task}"  # in a query's prompt: the place of its instruction
TITLE, NO_TITLE = "{title}", "none"  # in a passage's prompt: the place of its title, and what a passage without one has

# The Rust tokenizer needs about 100 bytes per character, and a text may be much longer than its limit in tokens. So
# only a prefix is tokenized: up to the first white space after `_CHARACTERS` characters per token of the limit (English
# has 4 to 5 per token); 8 times as much while this gives fewer tokens than the limit. The ids equal those of the whole
# text, because no token spans white space. Characters beyond `_REACH` are never read.
_CHARACTERS = 32
_REACH = 2**20
_WHITE_SPACE = re.compile("[ \\t\\n\\r]")  # BERT drops other control characters, which joins the words around them
# Upper bounds of one call of the tokenizer: texts, and characters.
_BLOCK = 2048
_BLOCK_CHARACTERS = 2**20


@dataclass
class Truncation:
    """Counts of texts and tokens that the length limit cut; `str()` is the line printed before training and encoding.

    The end of a very long text is never tokenized; its tokens are estimated from its characters.
    """

    what: str  # Name of the texts, e.g. "queries".
    limit: int  # Upper bound of a text's length in tokens
    texts: int = 0  # Number of texts
    cut: int = 0  # Texts longer than the limit
    tokens: int = 0  # Tokens of all texts before the cut
    lost: int = 0  # Tokens that were cut off
    estimated: int = 0  # Texts whose number of tokens is an estimate

    def add(self, tokens: int, unread: int) -> None:
        """Count a text of `tokens` tokens and an estimated number of `unread` ones."""
        self.texts += 1
        self.tokens += tokens + unread
        self.cut += tokens + unread > self.limit
        self.lost += max(tokens + unread - self.limit, 0)
        self.estimated += unread > 0

    def __str__(self) -> str:
        texts, tokens = max(self.texts, 1), max(self.tokens, 1)
        return (
            f"{self.texts:,} {self.what}: {self.cut / texts:.1%} cut at {self.limit} tokens, "
            f"{'about ' if self.estimated else ''}{self.lost / tokens:.1%} of tokens lost"
        )


def concatenate_blocks(blocks: Iterable[Ragged]) -> Ragged:
    """Return the rows of all blocks, in order, in memory."""
    parts = [Ragged.from_lists([]), *blocks]
    lengths = np.concatenate([part.lengths for part in parts])
    return Ragged(np.concatenate([part.flat for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))


BlockSink = Callable[[Iterator[Ragged]], Ragged]  # consumes blocks of ids: `concatenate_blocks`, or a store's writer


@dataclass
class TextTokenizer:
    """The tokenizer of a Hugging Face directory with the length limits of this run.

    A query is [CLS] text [SEP]; a passage is [CLS] title [SEP] text [SEP], without title and first [SEP] if the title
    is empty. Longer texts are cut on the right and still end in [SEP]. RoBERTa's <s> and </s> serve as [CLS] and [SEP];
    T5 has no [CLS], and its [SEP] is </s>. In place of [CLS] and [SEP], language models have what the post-processor of
    tokenizer.json puts around a text; if it appends nothing, a text ends with the tokenizer's end of text, or without a
    marker (`ends_texts`).

    `dataclasses.replace` makes a copy with other lengths; ValueError if a length leaves no token for a text.
    """

    backend: Any  # tokenizers.Tokenizer
    cls_id: int | None  # Id of [CLS], or None
    sep_id: int  # Id of [SEP]
    pad_id: int  # Id of [PAD]
    query_length: int  # Upper bound of a query's length in tokens
    passage_length: int  # Upper bound of a passage's length in tokens
    mask_id: int | None = None  # Id of [MASK], or None
    query_prompt: str = ""  # Text in front of every query, tokenized with it, as in sentence-transformers
    passage_prompt: str = ""  # Text in front of every passage, likewise; TITLE in it is replaced by the passage's title
    # "[SEP]": the marker; any other text: title, separator and text are tokenized as one text
    title_separator: str = SEPARATOR
    query_marker: int | None = None  # Id after [CLS] in every query, if the head uses one
    passage_marker: int | None = None  # Id after [CLS] in every passage, if the head uses one
    expand_queries: bool = False  # Whether queries are filled with [MASK] up to their limit, if the head uses that
    task: str = ""  # Instruction in place of TASK in `query_prompt`, for queries without one of their own
    # Whether ids of a prompt's tokens, and of markers before it, are marked: ~id instead of id. The model reads these
    # as id, and leaves them out of means (`RetrieverModule`).
    skip_prompt: bool = False
    ends_texts: bool = True  # Whether [SEP] ends a text; one without any token is [SEP] all the same

    def __post_init__(self) -> None:
        self._prompt_sizes: dict[str, int] = {}
        for side in JOINS:
            length, prompt = getattr(self, f"{side}_length"), self.prompt(side)
            if length < 3:
                raise ValueError(f"tokens.{side}_length is {length}; it must hold [CLS], a token and [SEP]: at least 3")
            if len(prompt) > _MOST_PROMPT:
                raise ValueError(f"tokens.{side}_prompt has {len(prompt):,} characters; {_MOST_PROMPT:,} are allowed")
            size = len(self.backend.encode(prompt, add_special_tokens=False).ids) if prompt else 0
            if self.expand_queries and self.mask_id is None:
                raise ValueError("queries are to be filled with [MASK], which this tokenizer does not have")
            if size + len(self._start(side)) + 1 >= length:
                raise ValueError(
                    f"tokens.{side}_prompt {prompt!r} takes {size} tokens, which leaves none of tokens.{side}_length="
                    f"{length} for a text; shorten the prompt or allow more tokens"
                )

    @classmethod
    def load(
        cls, directory: str | Path, query_length: int, passage_length: int, end_token: bool = True, **options: Any
    ) -> TextTokenizer:
        """Load a tokenizer offline and without remote code.

        Args:
            directory: Hugging Face directory.
            query_length: upper bound of a query's length in tokens.
            passage_length: upper bound of a passage's length in tokens.
            end_token: whether the end of text is put after a text where tokenizer.json has none.
            options: prompts and other fields of TextTokenizer.

        Raises:
            ValueError: there is no fast tokenizer, it has no [SEP] (or end of text) or [PAD], or a length leaves no
                token for a text.
        """
        backend, special = load_backend(Path(directory))
        start, end, pad = special["cls"], special["sep"], special["pad"]
        if end is None:  # the post-processor decides the end token, not eos_token
            start, end = added_ids(backend, directory)
            options |= {"ends_texts": end_token or end is not None}
            end = special["eos"] if end is None else end
            pad = end if pad is None else pad  # the mask marks padding, not the id
        if end is None or pad is None:
            special_ids = {"cls": start, "sep": end, "pad": pad}
            raise ValueError(
                f"{directory}: the tokenizer lacks [SEP] (or an end of text) or [PAD]; it has {special_ids}"
            )
        backend.no_padding()  # tokenizer.json may enable both
        backend.no_truncation()
        return cls(backend, start, end, pad, query_length, passage_length, special["mask"], **options)

    @staticmethod
    def digests(directory: str | Path) -> dict[str, str]:
        """Return the SHA-256 of each of `TOKENIZER_FILES` that exists in the directory, by file name."""
        paths = [Path(directory) / name for name in TOKENIZER_FILES]
        return {path.name: sha256_file(path) for path in paths if path.is_file()}

    @property
    def special_ids(self) -> dict[str, int | None]:
        return {"cls": self.cls_id, "sep": self.sep_id, "pad": self.pad_id, "mask": self.mask_id}

    @property
    def marker_ids(self) -> tuple[int, ...]:
        return tuple(id for id in (self.cls_id, self.sep_id) if id is not None)

    @property
    def markers(self) -> str:
        """Layout of a passage with its markers, for the contract."""
        parts = f"title {SEPARATOR} text" if self.title_separator == SEPARATOR else "title and text"
        markers = ["[CLS]"] * (self.cls_id is not None), ["[SEP]"] * self.ends_texts
        return " ".join([*markers[0], parts, *markers[1]])

    @property
    def joins(self) -> dict[str, Any]:
        """Prompts and separator, for the contract; with the task, where a prompt has one."""
        joins = {name: getattr(self, name) for names in JOINS.values() for name in names}
        task = {"task": self.task} if TASK in self.query_prompt else {}
        return {**joins, **task, **({"prompt_in_mean": False} if self.skip_prompt else {})}

    @property
    def digest(self) -> str:
        """SHA-256 of the vocabulary and rules."""
        return hashlib.sha256(self.backend.to_str().encode("utf-8")).hexdigest()

    def recipe(self, *sides: str) -> dict[str, Any]:
        """Return all settings that the ids of texts of the sides ("query", "passage") depend on, as a recipe of stores.

        Default prompts and separators are left out, so that a new setting with a default keeps existing stores valid.
        """
        lengths = {f"{side}_length": getattr(self, f"{side}_length") for side in sides}
        usual = {name: value for side in sides for name, value in JOINS[side].items()}
        joins = {name: value for name, value in self.joins.items() if value != usual.get(name, value)}
        more = {f"{side}_marker": id for side in sides if (id := getattr(self, f"{side}_marker")) is not None}
        more |= {"expand_queries": True} if self.expand_queries and "query" in sides else {}
        more |= {"task": self.task} if self.task and "query" in sides else {}
        more |= {"skip_prompt": True} if self.skip_prompt else {}
        more |= {} if self.ends_texts else {"ends_texts": False}
        return {
            "sha256": self.digest,
            "library": tokenizers.__version__,
            **self.special_ids,
            **lengths,
            **joins,
            **more,
        }

    def without_markers(self, texts: Iterable[str], sink: BlockSink = concatenate_blocks) -> Ragged:
        """Return token ids of queries with the prompt, but without markers and without length limit.

        An empty text has no ids. At most 2**20 characters of a text are read.
        """
        full_texts = (self.prompt("query") + text if text else "" for text in texts)
        blocks = ([text for text, *_ in block] for block in _blocks((text, "", "") for text in full_texts))
        return sink(Ragged.from_lists([ids for ids, _ in self._encoded(block, _REACH)]) for block in blocks)

    def prompt(self, side: str, query: str | Query = "") -> str:
        """Return the text in front of a passage, or of a query, with its instruction."""
        own = query.instruction if isinstance(query, Query) else ""
        prompt = getattr(self, f"{side}_prompt")
        return fill_task(prompt, own or self.task) if side == "query" else prompt.replace(TITLE, NO_TITLE)

    def queries(
        self,
        texts: Iterable[str | Query],
        progress: bool = False,
        truncation: Truncation | None = None,
        sink: BlockSink = concatenate_blocks,
    ) -> Ragged:
        """Return token ids of queries.

        Args:
            texts: queries, possibly a stream. A Query may bring an instruction along; a text has the usual one.
            truncation: counts texts and lost tokens.
            sink: consumes blocks of ids and returns all of them.
        """
        truncation = truncation or Truncation("queries", self.query_length)
        usual = self.prompt("query")

        def prompted() -> Iterator[tuple[str, str, str]]:
            for query in texts:
                prompt = self.prompt("query", query)
                if isinstance(query, Query) and query.instruction and prompt != usual:
                    self._require_room(prompt, query, truncation.limit)
                yield prompt + (query.text if isinstance(query, Query) else query), "", prompt

        return sink(self._encode(prompted(), self._start("query"), truncation, progress, fill=self.expand_queries))

    def passages(
        self,
        passages: Iterable[Passage],
        progress: bool = False,
        truncation: Truncation | None = None,
        sink: BlockSink = concatenate_blocks,
    ) -> Ragged:
        """Return token ids of passages.

        Args:
            passages: passages, possibly a stream: one block is held at a time, and only the beginning of a long text.
            truncation: counts texts and lost tokens.
            sink: consumes blocks of ids and returns all of them.
        """
        truncation = truncation or Truncation("passages", self.passage_length)
        parts = ((*self._parts(passage), self._passage_prompt(passage)) for passage in passages)
        return sink(self._encode(parts, self._start("passage"), truncation, progress))

    def passage_as_read(self, passage: Passage) -> str:
        """Return a passage as one text, with prompt, title and separator."""
        text, title = self._parts(passage)
        return f"{title} {SEPARATOR} {text}" if title else text

    def _start(self, side: str) -> list[int]:
        """Return the ids in front of a text."""
        return [id for id in (self.cls_id, getattr(self, f"{side}_marker")) if id is not None]

    def _passage_prompt(self, passage: Passage) -> str:
        return self.passage_prompt.replace(TITLE, passage.title.strip() or NO_TITLE)

    def _parts(self, passage: Passage) -> tuple[str, str]:
        """Return (text, title) with prompt and separator; the title is empty unless [SEP] separates the two."""
        prompt, title, text = self._passage_prompt(passage), passage.title, passage.text
        if TITLE in self.passage_prompt:
            return prompt + text, ""
        if self.title_separator != SEPARATOR:
            return prompt + self.title_separator.join(part for part in (title, text) if part.strip()), ""
        if prompt and not title.strip():
            return prompt + text, ""
        return text, prompt + title

    def _encode(
        self,
        texts: Iterable[tuple[str, str, str]],
        start: list[int],
        cut: Truncation,
        progress: bool,
        fill: bool = False,
    ) -> Iterator[Ragged]:
        """Yield blocks of token ids of (text, title, prompt in front of them), cut at the limit of `cut`, which counts
        them; with `fill`, filled up to it."""
        limit, end = cut.limit, [self.sep_id] * self.ends_texts
        with Progress(f"tokenize {cut.what}", shown=progress) as bar:
            for block in _blocks(texts):
                rows: list[list[int]] = []
                sides = (
                    self._encoded([text for text, *_ in block], limit),
                    self._encoded([text for _, text, *_ in block], limit),
                )
                for (_, _, prompt, size), (text, text_read), (title, title_read) in zip(block, *sides):
                    ids = [*start, *title, *([self.sep_id] if title else []), *text, *end] or [self.sep_id]
                    read = text_read + title_read
                    cut.add(len(ids), round(len(ids) * (size - read) / max(read, 1)))
                    ids = ids if len(ids) <= limit else [*ids[: limit - len(end)], *end]
                    if self.skip_prompt and prompt:
                        prompt_end = min(len(start) + self._prompt_size(prompt), len(ids) - 1)
                        ids[:prompt_end] = [~id for id in ids[:prompt_end]]
                    rows.append([*ids, *[self.mask_id] * (limit - len(ids))] if fill else ids)  # type: ignore[list-item]
                yield Ragged.from_lists(rows)
                bar.update(len(block))

    def _require_room(self, prompt: str, query: Query, limit: int) -> None:
        """Raise ValueError if a prompt with the instruction of a query leaves no token for the query's text."""
        size = self._prompt_size(prompt)
        if size + len(self._start("query")) + 1 >= limit:
            raise ValueError(
                f"query {query.id!r}: the prompt with its instruction takes {size} tokens, which leaves none of "
                f"tokens.query_length={limit} for its text; shorten the instruction or allow more tokens"
            )

    def _prompt_size(self, prompt: str) -> int:
        """Return the number of tokens of a prompt alone, as sentence-transformers counts them."""
        if prompt not in self._prompt_sizes:
            self._prompt_sizes[prompt] = len(self.backend.encode(prompt, add_special_tokens=False).ids)
        return self._prompt_sizes[prompt]

    def _encoded(self, texts: Sequence[str], limit: int) -> list[tuple[list[int], int]]:
        """Return (ids, characters read) of each text: all of it, or a prefix with at least `limit` ids."""
        results: list[tuple[list[int], int]] = [([], 0)] * len(texts)
        rest, reach = [i for i, text in enumerate(texts) if text], _CHARACTERS * max(limit, 128)
        while rest:
            parts = [_beginning(texts[i], reach) for i in rest]
            for i, part, encoding in zip(rest, parts, encode_texts(self.backend, parts)):
                results[i] = encoding.ids, len(part)
            rest = [i for i in rest if len(results[i][0]) < limit and results[i][1] < len(texts[i])]
            reach *= 8
        return results


def encode_texts(backend: Any, texts: Sequence[str]) -> Any:
    """Return the encodings of texts, without special tokens. Raises ValueError if a regular expression of the tokenizer
    gives a text up: after ten million steps back."""
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as error:  # that of a panic in Rust is not an Exception, and has no name to import
        if type(error).__name__ != "PanicException":
            raise
        lengths = f"{len(texts):,} texts, the longest of {max(map(len, texts)):,} characters"
        raise ValueError(f"tokenizer.json: a rule of it cannot read one of {lengths}: {error}") from None


def fill_task(prompt: str, task: str) -> str:
    """Return a prompt with an instruction in place of TASK; a colon after it is not written twice."""
    return prompt.replace(TASK, task.removesuffix(":") if f"{TASK}:" in prompt else task)


def added_ids(backend: Any, directory: str | Path) -> tuple[int | None, int | None]:
    """Return the ids that the post-processor of tokenizer.json puts in front of a text and after it; None: none. Raises
    ValueError if it puts several there."""
    whole, text = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    before = next((i for i in range(len(whole)) if text and whole[i : i + len(text)] == text), 0)
    sides = whole[:before], whole[before + len(text) :] if text else []
    if max(map(len, sides)) > 1:
        raise ValueError(
            f"{directory}/tokenizer.json: the post_processor puts the ids {sides[0]} in front of a text and {sides[1]} "
            "after it; at most one on each side is implemented"
        )
    start, end = (side[0] if side else None for side in sides)
    return start, end


def _beginning(text: str, reach: int) -> str:
    """Return the words of a text that begin in its first `reach` characters."""
    space = _WHITE_SPACE.search(text, reach)
    return text[: space.start()].rstrip() if space else text


def _blocks(texts: Iterable[tuple[str, str, str]]) -> Iterator[list[tuple[str, str, str, int]]]:
    """Yield blocks of (text, title, prompt, characters of text and title), with text and title cut at `_REACH`
    characters."""
    block: list[tuple[str, str, str, int]] = []
    characters = 0
    for text, title, prompt in texts:
        block.append((text[:_REACH], title[:_REACH], prompt, len(text) + len(title)))
        characters += len(block[-1][0]) + len(block[-1][1])
        if len(block) == _BLOCK or characters >= _BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block
