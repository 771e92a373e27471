"""Text -> token ids, the same way for training, encoding and search."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from tqdm import tqdm

from jaxret.data.records import Passage
from jaxret.storage import read_json
from jaxret.types import Ragged

# What turns T5's spiece.model into tokenizer.json; it needs sentencepiece, which this package does not.
SPIECE_REMEDY = (
    "; spiece.model is, and this makes tokenizer.json of it: pip install sentencepiece && python -c "
    "\"from transformers import AutoTokenizer as A; A.from_pretrained('{0}').save_pretrained('{0}')\""
)
_BLOCK = 2048  # texts handed to the Rust tokenizer at a time


@dataclass
class Truncation:
    """How much text the length limit cost; `str()` is the line printed before training and encoding."""

    what: str
    limit: int
    texts: int = 0
    cut: int = 0
    tokens: int = 0
    lost: int = 0

    def __str__(self) -> str:
        texts, tokens = max(self.texts, 1), max(self.tokens, 1)
        return (
            f"{self.texts:,} {self.what}: {self.cut / texts:.1%} cut at {self.limit} tokens, "
            f"{self.lost / tokens:.1%} of tokens lost"
        )


@dataclass
class TextTokenizer:
    """The tokenizer of a Hugging Face directory with the length limits of this run.

    A query is [CLS] text [SEP]; a passage is [CLS] title [SEP] text [SEP], or without the title if that is empty.
    What is too long is cut on the right and still ends in [SEP]. RoBERTa's <s> and </s> are its [CLS] and [SEP]; T5 has
    no [CLS], and </s> for [SEP].
    """

    backend: Any  # tokenizers.Tokenizer
    cls_id: int | None
    sep_id: int
    pad_id: int
    query_length: int
    passage_length: int
    mask_id: int | None = None
    truncation: dict[str, Truncation] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: str | Path, query_length: int, passage_length: int) -> TextTokenizer:
        """Loads offline and without remote code. Raises ValueError if there is no fast tokenizer, if it has no [SEP]
        (or end of text) and [PAD], or if a length is under 3 tokens."""
        backend, special = _load_plain(Path(directory)) or _load_with_transformers(directory)
        end = special["sep"] if special["sep"] is not None else special["eos"]
        if end is None or special["pad"] is None:
            found = {"cls": special["cls"], "sep": end, "pad": special["pad"]}
            raise ValueError(f"{directory}: the tokenizer lacks [SEP] (or an end of text) or [PAD]; it has {found}")
        for name, length in (("query_length", query_length), ("passage_length", passage_length)):
            if length < 3:
                raise ValueError(f"tokens.{name} is {length}; it must hold [CLS], a token and [SEP]: at least 3")
        backend.no_padding()  # tokenizer.json may carry settings of its own
        backend.no_truncation()
        return cls(backend, special["cls"], end, special["pad"], query_length, passage_length, special["mask"])

    def bare(self, texts: Sequence[str]) -> Ragged:
        """Token ids without markers and without a limit."""
        return Ragged.from_lists([e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=False)])

    @property
    def marker_ids(self) -> tuple[int, ...]:
        return tuple(id for id in (self.cls_id, self.sep_id) if id is not None)

    @property
    def markers(self) -> str:
        """How the parts of a passage are joined, for the contract."""
        return "title [SEP] text [SEP]" if self.cls_id is None else "[CLS] title [SEP] text [SEP]"

    @property
    def digest(self) -> str:
        """SHA-256 of vocabulary and rules."""
        return hashlib.sha256(self.backend.to_str().encode("utf-8")).hexdigest()

    def queries(self, texts: Iterable[str], progress: bool = False) -> Ragged:
        """Token ids of queries; counts truncation in `truncation["queries"]`."""
        return self._encode(((text, "") for text in texts), "queries", self.query_length, progress)

    def passages(self, passages: Iterable[Passage], progress: bool = False) -> Ragged:
        """Token ids of passages; counts truncation in `truncation["passages"]`."""
        return self._encode(((p.text, p.title) for p in passages), "passages", self.passage_length, progress)

    def _encode(self, texts: Iterable[tuple[str, str]], what: str, limit: int, progress: bool) -> Ragged:
        count = self.truncation.setdefault(what, Truncation(what, limit))
        rows: list[list[int]] = []
        with tqdm(desc=f"tokenize {what}", unit="text", disable=not progress, delay=1, leave=False) as bar:
            for block in _blocks(texts, _BLOCK):
                for ids in self._ids(block):
                    count.texts += 1
                    count.tokens += len(ids)
                    if len(ids) > limit:
                        count.cut += 1
                        count.lost += len(ids) - limit
                        ids = [*ids[: limit - 1], self.sep_id]
                    rows.append(ids)
                bar.update(len(block))
        return Ragged.from_lists(rows)

    def _ids(self, block: Sequence[tuple[str, str]]) -> Iterator[list[int]]:
        texts = self.backend.encode_batch_fast([text for text, _ in block], add_special_tokens=False)
        titles = self.backend.encode_batch_fast([title for _, title in block], add_special_tokens=False)
        start = [] if self.cls_id is None else [self.cls_id]
        for text, title in zip(texts, titles, strict=True):
            head = [*title.ids, self.sep_id] if title.ids else []
            yield [*start, *head, *text.ids, self.sep_id]


_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "BertTokenizer", "BertTokenizerFast")
# What else transformers looks at when it loads one of them; where it is there, transformers must do it.
_NOT_PLAIN = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "add_bos_token",
              "add_eos_token", "add_prefix_space", "split_special_tokens", "auto_map", "tokenizer_file")  # fmt: skip


def _load_plain(directory: Path) -> tuple[Any, dict[str, int | None]] | None:
    """(backend, ids of the special tokens) of a directory in which tokenizer.json says everything, as transformers
    would load it; None of any other. Importing transformers, and PyTorch with it, takes longer than a search."""
    try:
        settings = read_json(directory / "tokenizer_config.json")
        rules = read_json(directory / "tokenizer.json")
        if (directory / "added_tokens.json").exists() or settings.get("tokenizer_class") not in _PLAIN_CLASSES:
            return None
        named = {
            f"{name}_token": settings.get(f"{name}_token")
            for name in ("cls", "sep", "pad", "mask", "unk", "eos", "bos")
        }
        others = directory / "special_tokens_map.json"
        if any(name in settings for name in _NOT_PLAIN) or (others.exists() and read_json(others) != _given(named)):
            return None
        special = {token["content"]: token["id"] for token in rules["added_tokens"] if token["special"]}
        if any(token not in special for token in _given(named).values()):
            return None
        if settings["tokenizer_class"].startswith("Bert") and not _is_bert(rules, settings, named, special):
            return None
        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # damaged, or of a kind unknown here: transformers says what is wrong
        return None
    if backend.post_processor is None:  # transformers fills it in, and the digest counts it
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    ids = {name: special[token] if token else None for name, token in ((n.split("_")[0], t) for n, t in named.items())}
    return backend, ids


def _given(named: dict[str, Any]) -> dict[str, Any]:
    return {name: token for name, token in named.items() if token is not None}


def _is_bert(rules: dict[str, Any], settings: dict[str, Any], named: dict[str, Any], special: dict[str, int]) -> bool:
    """Whether tokenizer.json is what transformers makes of BERT's vocabulary and settings; it reads only these."""
    built = Tokenizer(WordPiece({"[UNK]": 0}, unk_token=named["unk_token"]))
    built.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(prefix="##")
    cls, sep = named["cls_token"], named["sep_token"]
    built.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, special[cls]), (sep, special[sep])],
    )
    wanted = json.loads(built.to_str())
    same = all(wanted[part] == rules[part] for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"))
    model, found = ({k: v for k, v in tree["model"].items() if k != "vocab"} for tree in (wanted, rules))
    ours = {token["content"] for token in rules["added_tokens"]} == set(_given(named).values())
    plain = all(not (t["single_word"] or t["lstrip"] or t["rstrip"] or t["normalized"]) for t in rules["added_tokens"])
    return same and model == found and ours and plain and None not in (cls, sep, named["unk_token"])


def _load_with_transformers(directory: str | Path) -> tuple[Any, dict[str, int | None]]:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch
    from transformers import AutoTokenizer  # seconds: only where it is needed

    # From a config.json alone transformers makes a tokenizer that knows no word, without complaint.
    if not any((Path(directory) / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json")):
        raise ValueError(
            f"{directory} has no tokenizer: neither tokenizer.json nor vocab.txt nor vocab.json is there"
            + (SPIECE_REMEDY.format(directory) if (Path(directory) / "spiece.model").is_file() else "")
        )
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False, use_fast=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no tokenizer that transformers can load: {error}") from error
    if not loaded.is_fast:
        raise ValueError(f"{directory}: a fast tokenizer (tokenizer.json) is needed, found {type(loaded).__name__}")
    names = ("cls", "sep", "pad", "mask", "eos")
    return loaded.backend_tokenizer, {name: getattr(loaded, f"{name}_token_id") for name in names}


def _blocks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while block := list(islice(iterator, size)):
        yield block
