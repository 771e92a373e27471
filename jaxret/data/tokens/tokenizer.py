"""Turn texts into token ids, with the same rules for training, encoding and search."""

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
from jaxret.data.tokens.backend import TOKENIZER_FILES as TOKENIZER_FILES  # other rooms import this name from here
from jaxret.data.tokens.backend import load_backend
from jaxret.parallel.progress import Progress
from jaxret.storage.atomic import sha256_file
from jaxret.types import Ragged

SEPARATOR = "[SEP]"  # value of title_separator for the tokenizer's end marker, whatever its name is
AUTO_SEPARATOR = "auto"  # value of title_separator in a config: the separator that the model's directory has
# Texts in front of a text and between its parts: side -> field of TextTokenizer -> default value.
JOINS = {"query": {"query_prompt": ""}, "passage": {"passage_prompt": "", "title_separator": SEPARATOR}}

_MOST_PROMPT = 65_536  # characters
TASK = "{task}"  # placeholder of the instruction in a query's prompt
# Placeholder of the title in a passage's prompt, and the text in its place for a passage without a title.
TITLE, NO_TITLE = "{title}", "none"

# The Rust tokenizer needs about 100 bytes per character, and a text may be much longer than its limit in tokens. So
# only a prefix is tokenized: up to the first white space after `_CHARACTERS` characters per token of the limit (English
# has 4 to 5 per token). If it gives fewer tokens than the limit, a prefix 8 times as long is tokenized, and so on. The
# ids are a prefix of the whole text's ids, because no token spans white space. Characters beyond `_REACH` are never
# read.
_CHARACTERS = 32
_REACH = 2**20
_WHITE_SPACE = re.compile("[ \\t\\n\\r]")  # BERT drops other control characters, which joins the words around them
_BLOCK = 2048  # upper bound of the texts in one call of the Rust tokenizer
_BLOCK_CHARACTERS = 2**20  # upper bound of their characters


@dataclass
class Truncation:
    """Counts of texts and tokens that the length limit cut. `str()` is the line printed before training and encoding.

    The end of a very long text is never tokenized. Its number of tokens is estimated from its characters.
    """

    what: str  # Name of the texts, such as "queries"
    limit: int  # Upper bound of a text's length in tokens
    texts: int = 0  # Number of texts
    cut: int = 0  # Texts longer than the limit
    tokens: int = 0  # Tokens of all texts before the cut
    lost: int = 0  # Tokens that were cut off
    estimated: int = 0  # Texts whose number of tokens is an estimate

    def add(self, tokens: int, unread: int) -> None:
        """Count a text with `tokens` tokens that were read and an estimate of `unread` further ones."""
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


BlockSink = Callable[[Iterator[Ragged]], Ragged]  # joins blocks of ids: `concatenate_blocks`, or a store's writer


@dataclass
class TextTokenizer:
    """The tokenizer of a Hugging Face directory with the length limits of this run.

    A query is [CLS] text [SEP]. A passage is [CLS] title [SEP] text [SEP], without title and first [SEP] if the title
    is empty. Longer texts are cut on the right and still end in [SEP]. RoBERTa's <s> and </s> serve as [CLS] and [SEP];
    T5 has no [CLS], and its [SEP] is </s>. Language models have the tokens that the post-processor of tokenizer.json
    puts around a text instead. If it appends nothing, a text ends with the tokenizer's end of text, or without a marker
    (`ends_texts`).

    `dataclasses.replace` makes a copy with other lengths. Raises ValueError if a length leaves no token for a text.
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
    # "[SEP]": the marker. With any other separator, title, separator and text are tokenized as one text
    title_separator: str = SEPARATOR
    query_marker: int | None = None  # Id after [CLS] in every query, if the head uses one
    passage_marker: int | None = None  # Id after [CLS] in every passage, if the head uses one
    expand_queries: bool = False  # Whether queries are filled with [MASK] up to their limit, if the head uses that
    task: str = ""  # Instruction in place of TASK in `query_prompt`, for queries without an instruction
    # Whether the tokens of a prompt and of the markers before it are stored as ~id instead of id. The model reads ~id
    # as id and leaves these tokens out of means (`RetrieverModule`).
    skip_prompt: bool = False
    ends_texts: bool = True  # Whether [SEP] ends a text. A text without tokens is [SEP] in either case

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
                raise ValueError("the head fills queries with [MASK], but this tokenizer has no [MASK]")
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
            end_token: whether the end of text is put after a text if the post-processor of tokenizer.json appends
                nothing.
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
            pad = end if pad is None else pad  # any id will do, because the mask marks padding
        if end is None or pad is None:
            special_ids = {"cls": start, "sep": end, "pad": pad}
            raise ValueError(
                f"{directory}: the tokenizer lacks [SEP] (or an end of text) or [PAD]; it has {special_ids}"
            )
        backend.no_padding()  # tokenizer.json may enable padding and truncation
        backend.no_truncation()
        return cls(backend, start, end, pad, query_length, passage_length, special["mask"], **options)

    @staticmethod
    def digests(directory: str | Path) -> dict[str, str]:
        """Return the SHA-256 of each of `TOKENIZER_FILES` that exists in the directory, by file name."""
        paths = [Path(directory) / name for name in TOKENIZER_FILES]
        return {path.name: sha256_file(path) for path in paths if path.is_file()}

    @property
    def special_ids(self) -> dict[str, int | None]:
        """The ids of the tokens "cls", "sep", "pad" and "mask"; None: the tokenizer lacks this token."""
        return {"cls": self.cls_id, "sep": self.sep_id, "pad": self.pad_id, "mask": self.mask_id}

    @property
    def marker_ids(self) -> tuple[int, ...]:
        """The ids of [CLS], if there is one, and of [SEP]."""
        return tuple(id for id in (self.cls_id, self.sep_id) if id is not None)

    @property
    def markers(self) -> str:
        """Layout of a passage with its markers, for the contract."""
        texts = f"title {SEPARATOR} text" if self.title_separator == SEPARATOR else "title and text"
        parts = ("" if self.cls_id is None else "[CLS]", texts, "[SEP]" if self.ends_texts else "")
        return " ".join(filter(None, parts))

    @property
    def joins(self) -> dict[str, Any]:
        """Prompts and separator, for the contract, and the task if the query's prompt has TASK."""
        joins = {name: getattr(self, name) for names in JOINS.values() for name in names}
        task = {"task": self.task} if TASK in self.query_prompt else {}
        return {**joins, **task, **({"prompt_in_mean": False} if self.skip_prompt else {})}

    @property
    def digest(self) -> str:
        """SHA-256 of the vocabulary and rules."""
        return hashlib.sha256(self.backend.to_str().encode("utf-8")).hexdigest()

    def settings(self, *sides: str) -> dict[str, Any]:
        """Return all settings that the token ids of `sides` ("query", "passage") depend on, for token stores.

        Default values are left out, so that a new setting with a default keeps existing stores valid.
        """
        lengths = {f"{side}_length": getattr(self, f"{side}_length") for side in sides}
        usual = {name: value for side in sides for name, value in JOINS[side].items()}
        joins = {name: value for name, value in self.joins.items() if value != usual.get(name, value)}
        options = {f"{side}_marker": id for side in sides if (id := getattr(self, f"{side}_marker")) is not None}
        options |= {"expand_queries": True} if self.expand_queries and "query" in sides else {}
        options |= {"task": self.task} if self.task and "query" in sides else {}
        options |= {"skip_prompt": True} if self.skip_prompt else {}
        options |= {} if self.ends_texts else {"ends_texts": False}
        return {
            "sha256": self.digest,
            "library": tokenizers.__version__,
            **self.special_ids,
            **lengths,
            **joins,
            **options,
        }

    def without_markers(self, texts: Iterable[str], sink: BlockSink = concatenate_blocks) -> Ragged:
        """Return token ids of queries with the prompt, but without markers and without length limit.

        An empty text has no ids. At most 2**20 characters of a text are read.
        """
        full_texts = (self.prompt("query") + text if text else "" for text in texts)
        blocks = ([text for text, *_ in block] for block in _split_blocks((text, "", "") for text in full_texts))
        return sink(Ragged.from_lists([ids for ids, _ in self._encode_prefixes(block, _REACH)]) for block in blocks)

    def prompt(self, side: str, query: str | Query = "") -> str:
        """Return the text in front of a passage, or of a query, with its instruction."""
        instruction = query.instruction if isinstance(query, Query) else ""
        prompt = getattr(self, f"{side}_prompt")
        return fill_task(prompt, instruction or self.task) if side == "query" else prompt.replace(TITLE, NO_TITLE)

    def queries(
        self,
        texts: Iterable[str | Query],
        progress: bool = False,
        truncation: Truncation | None = None,
        sink: BlockSink = concatenate_blocks,
    ) -> Ragged:
        """Return token ids of queries.

        Args:
            texts: queries, possibly a stream. A Query may have its own instruction; a str gets `task`.
            truncation: counter of texts and lost tokens.
            sink: function that joins blocks of ids.
        """
        truncation = truncation or Truncation("queries", self.query_length)
        usual = self.prompt("query")

        def parts() -> Iterator[tuple[str, str, str]]:
            for query in texts:
                prompt = self.prompt("query", query)
                if isinstance(query, Query) and query.instruction and prompt != usual:
                    self._require_room(prompt, query, truncation.limit)
                yield prompt + (query.text if isinstance(query, Query) else query), "", prompt

        return sink(self._encode(parts(), self._start("query"), truncation, progress, fill=self.expand_queries))

    def passages(
        self,
        passages: Iterable[Passage],
        progress: bool = False,
        truncation: Truncation | None = None,
        sink: BlockSink = concatenate_blocks,
    ) -> Ragged:
        """Return token ids of passages.

        Args:
            passages: passages, possibly a stream. One block at a time is held, and only the beginning of a long text.
            truncation: counter of texts and lost tokens.
            sink: function that joins blocks of ids.
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
        texts and tokens. With `fill`, queries are filled up to the limit with [MASK]."""
        limit, end = cut.limit, [self.sep_id] if self.ends_texts else []
        with Progress(f"tokenize {cut.what}", progress=progress) as bar:
            for block in _split_blocks(texts):
                rows: list[list[int]] = []
                sides = (
                    self._encode_prefixes([text for text, *_ in block], limit),
                    self._encode_prefixes([text for _, text, *_ in block], limit),
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

    def _encode_prefixes(self, texts: Sequence[str], limit: int) -> list[tuple[list[int], int]]:
        """Return (ids, characters read) of each text: of the whole text, or of a prefix with at least `limit` ids."""
        results: list[tuple[list[int], int]] = [([], 0)] * len(texts)
        rows, reach = [i for i, text in enumerate(texts) if text], _CHARACTERS * max(limit, 128)
        while rows:
            parts = [_beginning(texts[i], reach) for i in rows]
            for i, part, encoding in zip(rows, parts, encode_texts(self.backend, parts)):
                results[i] = encoding.ids, len(part)
            rows = [i for i in rows if len(results[i][0]) < limit and results[i][1] < len(texts[i])]
            reach *= 8
        return results


def encode_texts(backend: Any, texts: Sequence[str]) -> Any:
    """Return the encodings of texts, without special tokens. Raises ValueError if a regular expression of the tokenizer
    gives up: the library allows ten million steps back in a text."""
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as error:  # a panic in Rust is no Exception, and its class cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        lengths = f"{len(texts):,} texts, the longest of {max(map(len, texts)):,} characters"
        raise ValueError(f"tokenizer.json: one of its rules cannot read one of {lengths}: {error}") from None


def fill_task(prompt: str, task: str) -> str:
    """Return a prompt with an instruction in place of TASK. A colon at its end is dropped if one follows TASK."""
    return prompt.replace(TASK, task.removesuffix(":") if f"{TASK}:" in prompt else task)


def added_ids(backend: Any, directory: str | Path) -> tuple[int | None, int | None]:
    """Return the id that the post-processor of tokenizer.json puts in front of a text, and the id after it; None: no
    id. Raises ValueError if it puts several ids on one side."""
    full_ids, ids = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    start = next((i for i in range(len(full_ids)) if ids and full_ids[i : i + len(ids)] == ids), 0)
    sides = full_ids[:start], full_ids[start + len(ids) :] if ids else []
    if max(map(len, sides)) > 1:
        raise ValueError(
            f"{directory}/tokenizer.json: the post_processor puts the ids {sides[0]} in front of a text and {sides[1]} "
            "after it; at most one on each side is implemented"
        )
    start_id, end_id = (side[0] if side else None for side in sides)
    return start_id, end_id


def _beginning(text: str, reach: int) -> str:
    """Return the words of a text that begin in its first `reach` characters."""
    space = _WHITE_SPACE.search(text, reach)
    return text[: space.start()].rstrip() if space else text


def _split_blocks(texts: Iterable[tuple[str, str, str]]) -> Iterator[list[tuple[str, str, str, int]]]:
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
