"""Text -> token ids, the same way for training, encoding and search."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tqdm import tqdm

from jaxret.data.backend import VOCABULARIES, load_backend
from jaxret.data.records import Passage
from jaxret.storage import sha256_file
from jaxret.types import Ragged

# Every file that a tokenizer may be stored in: what a run keeps, and what is fetched from a hub.
TOKENIZER_FILES = (
    *VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
)

SEPARATOR = "[SEP]"  # as title_separator: the tokenizer's own marker, whatever it is called there
# What stands in front of texts and between their parts: side -> field of TextTokenizer -> what says that nothing does.
JOINS = {"query": {"query_prompt": ""}, "passage": {"passage_prompt": "", "title_separator": SEPARATOR}}

# The Rust tokenizer takes about 100 bytes for each character, and nobody needs the millionth token of a text that is
# cut at 256. So a text goes to it as far as the first white space after `_CHARACTERS` for each token of the limit
# (English has 4 to 5 a token), and 8 times as far as long as that gives fewer tokens than the limit. The ids are those
# of the whole text, because no token spans white space; only what lies beyond `_REACH` characters is never looked at.
_CHARACTERS = 32
_REACH = 2**20
_WHITE_SPACE = re.compile("[ \\t\\n\\r]")  # BERT drops other control characters, and what stood around them is one word
# Texts handed to the tokenizer at a time: so many, or so many characters.
_BLOCK = 2048
_BLOCK_CHARACTERS = 2**20


@dataclass
class Truncation:
    """How much text the length limit cost; `str()` is the line printed before training and encoding.

    Of a text so long that its end was never tokenised, the tokens are estimated from its characters.
    """

    what: str
    limit: int
    texts: int = 0
    cut: int = 0
    tokens: int = 0
    lost: int = 0
    estimated: int = 0  # texts whose tokens are

    def add(self, tokens: int, unread: int) -> None:
        """Counts a text of so many tokens, and an estimated number that were not made."""
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


def joined(blocks: Iterable[Ragged]) -> Ragged:
    """The rows of all blocks, in order, in memory."""
    parts = [Ragged.from_lists([]), *blocks]
    lengths = np.concatenate([part.lengths for part in parts])
    return Ragged(np.concatenate([part.flat for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))


Keep = Callable[[Iterator[Ragged]], Ragged]  # what becomes of blocks of ids: `joined`, or a store that writes them


@dataclass
class TextTokenizer:
    """The tokenizer of a Hugging Face directory with the length limits of this run.

    A query is [CLS] text [SEP]; a passage is [CLS] title [SEP] text [SEP], or without the title if that is empty.
    What is too long is cut on the right and still ends in [SEP]. RoBERTa's <s> and </s> are its [CLS] and [SEP]; T5 has
    no [CLS], and </s> for [SEP].

    Prompts are text in front of every query or passage, tokenised with it, as sentence-transformers has them. With
    another `title_separator` than "[SEP]", title, separator and text are tokenised as one text.

    A marker is an id after [CLS], of all queries or of all passages. With `expand_queries` queries are filled with
    [MASK] up to their length limit. Both are a head's to ask for.

    `dataclasses.replace` gives the same with other lengths; one that leaves no token for a text is a ValueError.
    """

    backend: Any  # tokenizers.Tokenizer
    cls_id: int | None
    sep_id: int
    pad_id: int
    query_length: int
    passage_length: int
    mask_id: int | None = None
    query_prompt: str = ""
    passage_prompt: str = ""
    title_separator: str = SEPARATOR
    query_marker: int | None = None
    passage_marker: int | None = None
    expand_queries: bool = False

    def __post_init__(self) -> None:
        for side in JOINS:
            length, prompt = getattr(self, f"{side}_length"), getattr(self, f"{side}_prompt")
            if length < 3:
                raise ValueError(f"tokens.{side}_length is {length}; it must hold [CLS], a token and [SEP]: at least 3")
            taken = len(self.backend.encode(prompt, add_special_tokens=False).ids) if prompt else 0
            if self.expand_queries and self.mask_id is None:
                raise ValueError("queries are to be filled with [MASK], which this tokenizer does not have")
            if taken + len(self._start(side)) + 1 >= length:
                raise ValueError(
                    f"tokens.{side}_prompt {prompt!r} takes {taken} tokens, which leaves none of tokens.{side}_length="
                    f"{length} for a text; shorten the prompt or allow more tokens"
                )

    @classmethod
    def load(cls, directory: str | Path, query_length: int, passage_length: int, **options: Any) -> TextTokenizer:
        """Loads offline and without remote code. options: prompts and what else is not the default.
        Raises ValueError if there is no fast tokenizer, if it has no [SEP] (or end of text) and [PAD], or if a length
        leaves no token for a text."""
        backend, special = load_backend(Path(directory))
        end = special["sep"] if special["sep"] is not None else special["eos"]
        if end is None or special["pad"] is None:
            found = {"cls": special["cls"], "sep": end, "pad": special["pad"]}
            raise ValueError(f"{directory}: the tokenizer lacks [SEP] (or an end of text) or [PAD]; it has {found}")
        backend.no_padding()  # tokenizer.json may carry settings of its own
        backend.no_truncation()
        return cls(
            backend, special["cls"], end, special["pad"], query_length, passage_length, special["mask"], **options
        )

    @staticmethod
    def digests(directory: str | Path) -> dict[str, str]:
        """{file: SHA-256} of those of `TOKENIZER_FILES` that are in a directory."""
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
        """Where a passage has markers, for the contract."""
        parts = f"title {SEPARATOR} text" if self.title_separator == SEPARATOR else "title and text"
        return f"{parts} [SEP]" if self.cls_id is None else f"[CLS] {parts} [SEP]"

    @property
    def joins(self) -> dict[str, str]:
        """Prompts and separator, for the contract."""
        return {name: getattr(self, name) for names in JOINS.values() for name in names}

    @property
    def digest(self) -> str:
        """SHA-256 of vocabulary and rules."""
        return hashlib.sha256(self.backend.to_str().encode("utf-8")).hexdigest()

    def recipe(self, *sides: str) -> dict[str, Any]:
        """All that the ids of texts of the sides ("query", "passage") depend on, but for the texts: tokens that are
        kept belong to it. Defaults of prompts and separator are not in it: ids that were kept before there were any
        stay valid."""
        lengths = {f"{side}_length": getattr(self, f"{side}_length") for side in sides}
        usual = {name: value for side in sides for name, value in JOINS[side].items()}
        joins = {name: value for name, value in self.joins.items() if value != usual.get(name, value)}
        more = {f"{side}_marker": id for side in sides if (id := getattr(self, f"{side}_marker")) is not None}
        more |= {"expand_queries": True} if self.expand_queries and "query" in sides else {}
        return {
            "sha256": self.digest,
            "library": tokenizers.__version__,
            **self.special_ids,
            **lengths,
            **joins,
            **more,
        }

    def bare(self, texts: Iterable[str], keep: Keep = joined) -> Ragged:
        """Token ids of queries, prompt included, without markers and without a limit (of at most 2**20 characters); an
        empty text has none."""
        asked = (self.query_prompt + text if text else "" for text in texts)
        blocks = ([text for text, *_ in block] for block in _blocks((text, "") for text in asked))
        return keep(Ragged.from_lists([ids for ids, _ in self._encoded(block, _REACH)]) for block in blocks)

    def queries(
        self, texts: Iterable[str], progress: bool = False, cut: Truncation | None = None, keep: Keep = joined
    ) -> Ragged:
        """Token ids of queries; what the limit costs is counted in `cut`, if one is given."""
        cut = cut or Truncation("queries", self.query_length)
        found = ((self.query_prompt + text, "") for text in texts)
        return keep(self._encode(found, self._start("query"), cut, progress, fill=self.expand_queries))

    def passages(
        self, passages: Iterable[Passage], progress: bool = False, cut: Truncation | None = None, keep: Keep = joined
    ) -> Ragged:
        """Token ids of passages; what the limit costs is counted in `cut`, if one is given. Of `passages`, which may
        be a stream, only a block is held at a time, and of a long one only its beginning."""
        cut = cut or Truncation("passages", self.passage_length)
        return keep(self._encode(map(self._parts, passages), self._start("passage"), cut, progress))

    def _start(self, side: str) -> list[int]:
        """The ids that come before a text."""
        return [id for id in (self.cls_id, getattr(self, f"{side}_marker")) if id is not None]

    def _parts(self, passage: Passage) -> tuple[str, str]:
        """(text, title) with what belongs in front and between; an empty title where [SEP] is not between them."""
        prompt, title, text = self.passage_prompt, passage.title, passage.text
        if self.title_separator != SEPARATOR:
            return prompt + self.title_separator.join(part for part in (title, text) if part.strip()), ""
        if prompt and not title.strip():
            return prompt + text, ""
        return text, prompt + title

    def _encode(
        self, texts: Iterable[tuple[str, str]], start: list[int], cut: Truncation, progress: bool, fill: bool = False
    ) -> Iterator[Ragged]:
        """Blocks of token ids, cut as `cut` says, which counts it; or filled up to there."""
        limit = cut.limit
        with tqdm(desc=f"tokenize {cut.what}", unit="text", disable=not progress, delay=1, leave=False) as bar:
            for block in _blocks(texts):
                rows: list[list[int]] = []
                found = (
                    self._encoded([text for text, *_ in block], limit),
                    self._encoded([t for _, t, _ in block], limit),
                )
                for (_, _, size), (text, text_read), (title, title_read) in zip(block, *found):
                    ids = [*start, *title, *([self.sep_id] if title else []), *text, self.sep_id]
                    read = text_read + title_read
                    cut.add(len(ids), round(len(ids) * (size - read) / max(read, 1)))
                    ids = ids if len(ids) <= limit else [*ids[: limit - 1], self.sep_id]
                    rows.append([*ids, *[self.mask_id] * (limit - len(ids))] if fill else ids)  # type: ignore[list-item]
                yield Ragged.from_lists(rows)
                bar.update(len(block))

    def _encoded(self, texts: Sequence[str], limit: int) -> list[tuple[list[int], int]]:
        """Of each text (ids, characters read): all of them, or as many from its beginning as give `limit` ids."""
        found: list[tuple[list[int], int]] = [([], 0)] * len(texts)
        rest, reach = [i for i, text in enumerate(texts) if text], _CHARACTERS * max(limit, 128)
        while rest:
            parts = [_beginning(texts[i], reach) for i in rest]
            for i, part, encoding in zip(rest, parts, self.backend.encode_batch_fast(parts, add_special_tokens=False)):
                found[i] = encoding.ids, len(part)
            rest = [i for i in rest if len(found[i][0]) < limit and found[i][1] < len(texts[i])]
            reach *= 8
        return found


def _beginning(text: str, reach: int) -> str:
    """The words of a text that begin in its first `reach` characters."""
    space = _WHITE_SPACE.search(text, reach)
    return text[: space.start()].rstrip() if space else text


def _blocks(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str, int]]]:
    """Blocks of (text, title, characters of both); of either, so much as may be tokenised."""
    block: list[tuple[str, str, int]] = []
    held = 0
    for text, title in texts:
        block.append((text[:_REACH], title[:_REACH], len(text) + len(title)))
        held += len(block[-1][0]) + len(block[-1][1])
        if len(block) == _BLOCK or held >= _BLOCK_CHARACTERS:
            yield block
            block, held = [], 0
    if block:
        yield block
