"""Loads the tokenizer of a Hugging Face directory: from tokenizer.json if it is complete, otherwise by transformers."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from jaxret.data.tokens.expressions import check_expressions
from jaxret.storage.atomic import read_json
from jaxret.storage.foreign_files import MOST_SETTINGS, MOST_VOCABULARY, read_settings, require_size

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")  # one of these must exist
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Every file that a tokenizer may be stored in. A run copies these, and a download fetches them.
TOKENIZER_FILES = (*VOCABULARIES, "merges.txt", *_SETTINGS, "spiece.model")
# Characters that a tokenizer may make of one. Unicode's longest compatibility form has 18; a file can say any number.
MOST_GROWTH = 100
_LONGEST = 2**16  # tokens that a tokenizer may pad to
_MOST_ADDED = 256  # tokens that a tokenizer may put around a text
# Converts T5's spiece.model to tokenizer.json; needs sentencepiece, which is not a dependency of this package.
SPIECE_REMEDY = (
    "; spiece.model is, and this makes tokenizer.json of it: pip install sentencepiece && python -c "
    "\"from transformers import AutoTokenizer as A; A.from_pretrained('{0}').save_pretrained('{0}')\""
)
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "BertTokenizer", "BertTokenizerFast")
# Other keys that transformers reads when it loads one of these; with any of them, transformers does the loading.
_NOT_PLAIN = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "add_bos_token",
              "add_eos_token", "add_prefix_space", "split_special_tokens", "auto_map", "tokenizer_file")  # fmt: skip


def load_backend(directory: Path) -> tuple[Any, dict[str, int | None]]:
    """Return (tokenizers.Tokenizer, ids of its special tokens "cls", "sep", "pad", "mask", "eos").

    Raises ValueError if there is no fast tokenizer, a file is too large, the rules multiply characters, or
    their regular expressions do not end.
    """
    for name in (*TOKENIZER_FILES, "config.json"):  # transformers reads the last one, too
        if (path := directory / name).exists():
            require_size(path, MOST_SETTINGS if name in (*_SETTINGS, "config.json") else MOST_VOCABULARY)
    check_expressions(directory / "tokenizer.json")
    backend, special = _load_plain(directory) or _load_with_transformers(directory)
    if (growth := rules_growth(backend)) > MOST_GROWTH:
        raise ValueError(
            f"{directory}/tokenizer.json: its rules may turn one character into {growth:,.0f}, and {MOST_GROWTH} are "
            "allowed. Use the model's original file"
        )
    if backend.post_processor is not None:
        _require_complete_templates(json.loads(backend.post_processor.__getstate__()), directory / "tokenizer.json")
    if (count := max(map(backend.num_special_tokens_to_add, (False, True)))) > _MOST_ADDED:  # around one text, and two
        raise ValueError(f"{directory}/tokenizer.json puts {count:,} tokens around texts; {_MOST_ADDED} are allowed")
    padding = backend.padding or {}  # unused here; transformers uses it, and vectors are compared with transformers
    if (length := max(padding.get(key) or 0 for key in ("length", "pad_to_multiple_of"))) > _LONGEST:
        raise ValueError(f"{directory}/tokenizer.json pads texts to {length:,} tokens; {_LONGEST:,} are allowed")
    return backend, special


def _require_complete_templates(rule: dict[str, Any], path: Path) -> None:
    """Raise ValueError if a post-processor puts a token around texts but does not define it: the Rust code would
    panic."""
    for part in rule.get("processors") or []:  # parts of a Sequence
        _require_complete_templates(part, path)
    pieces = [*(rule.get("single") or []), *(rule.get("pair") or [])] if rule["type"] == "TemplateProcessing" else []
    for token in (piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece):
        if token not in rule["special_tokens"]:
            raise ValueError(f"{path}: post_processor puts {token!r} around texts, but its special_tokens lack it")


def rules_growth(backend: Any) -> float:
    """Return an upper bound of the characters that normalizer and pre-tokenizer make of one character. Unicode's own
    normal forms are not counted."""
    growth = 1.0
    for rules in (backend.normalizer, backend.pre_tokenizer):
        if rules is not None:
            growth *= _growth(json.loads(rules.__getstate__()))
    return growth


def _growth(rule: dict[str, Any]) -> float:
    kind = rule.get("type")
    if kind == "Sequence":
        return math.prod(map(_growth, rule.get("normalizers") or rule.get("pretokenizers") or []), start=1.0)
    if kind == "Replace":
        pattern, content = rule["pattern"], len(rule["content"])
        # A pattern that matches the empty text between two characters adds its content to them.
        between = pattern.get("String") == "" or ("Regex" in pattern and _WITHOUT_WIDTH.search(pattern["Regex"]))
        return 1.0 + content if between else max(1.0, content / len(pattern.get("String") or "x"))
    if kind == "Prepend":
        return 1.0 + len(rule["prepend"])
    if kind == "Precompiled":
        data = base64.b64decode(rule["precompiled_charsmap"] or "")
        start = 4 + int.from_bytes(data[:4], "little")  # a trie, then the replacements of characters
        return max(1.0, *(len(text.decode("utf-8", "replace")) for text in data[start:].split(b"\0")))
    adds_space = rule.get("prepend_scheme") != "never" if kind == "Metaspace" else rule.get("add_prefix_space")
    return 2.0 if adds_space else 1.0


# Repetitions from 0, and assertions such as ^ and \b: their match may be empty.
_WITHOUT_WIDTH = re.compile(r"[*?^$|]|\{0?,|\(\?|\\[bBAzZGK]")


def _load_plain(directory: Path) -> tuple[Any, dict[str, int | None]] | None:
    """Return the (backend, ids of special tokens) that transformers would return, or None if tokenizer.json is not
    complete.

    This saves the import of transformers and PyTorch, which takes longer than a search.
    """
    try:
        settings = read_json(directory / "tokenizer_config.json")
        rules = read_json(directory / "tokenizer.json")
        if (directory / "added_tokens.json").exists() or settings.get("tokenizer_class") not in _PLAIN_CLASSES:
            return None
        special_tokens = {
            f"{name}_token": settings.get(f"{name}_token")
            for name in ("cls", "sep", "pad", "mask", "unk", "eos", "bos")
        }
        special_tokens_map = directory / "special_tokens_map.json"
        if any(name in settings for name in _NOT_PLAIN) or (
            special_tokens_map.exists() and read_json(special_tokens_map) != _given(special_tokens)
        ):
            return None
        special = {token["content"]: token["id"] for token in rules["added_tokens"] if token["special"]}
        if any(token not in special for token in _given(special_tokens).values()):
            return None
        if settings["tokenizer_class"].startswith("Bert") and not _is_bert(rules, settings, special_tokens, special):
            return None
        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # a damaged file or another kind of it: transformers loads it, or raises the error
        return None
    if backend.post_processor is None:  # transformers sets this default, and the digest depends on it
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    ids = {
        name: special[token] if token else None
        for name, token in ((key.split("_")[0], token) for key, token in special_tokens.items())
    }
    return backend, ids


def _given(tokens: dict[str, Any]) -> dict[str, Any]:
    return {name: token for name, token in tokens.items() if token is not None}


def _is_bert(
    rules: dict[str, Any], settings: dict[str, Any], special_tokens: dict[str, Any], special: dict[str, int]
) -> bool:
    """Return whether tokenizer.json equals the tokenizer that transformers builds from vocabulary and settings."""
    tokenizer = Tokenizer(WordPiece({"[UNK]": 0}, unk_token=special_tokens["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    cls, sep = special_tokens["cls_token"], special_tokens["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, special[cls]), (sep, special[sep])],
    )
    expected = json.loads(tokenizer.to_str())
    if any(expected[part] != rules[part] for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor")):
        return False
    model, stored_model = ({k: v for k, v in tree["model"].items() if k != "vocab"} for tree in (expected, rules))
    has_special_tokens = {token["content"] for token in rules["added_tokens"]} == set(_given(special_tokens).values())
    plain = all(not (t["single_word"] or t["lstrip"] or t["rstrip"] or t["normalized"]) for t in rules["added_tokens"])
    names_exist = None not in (cls, sep, special_tokens["unk_token"])
    return model == stored_model and has_special_tokens and plain and names_exist


def _load_with_transformers(directory: Path) -> tuple[Any, dict[str, int | None]]:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # otherwise transformers advises to install PyTorch
    from transformers import AutoTokenizer  # takes seconds: imported only when needed

    # With only config.json, transformers silently makes a tokenizer without vocabulary.
    if not any((directory / name).is_file() for name in VOCABULARIES):
        raise ValueError(
            f"{directory} has no tokenizer: it needs one of {', '.join(VOCABULARIES)}"
            + (SPIECE_REMEDY.format(directory) if (directory / "spiece.model").is_file() else "")
            + (f"; this run's tokenizer is in {directory / 'encoder'}" if (directory / "encoder").is_dir() else "")
        )
    for path in (directory / "tokenizer_config.json", directory / "special_tokens_map.json"):
        if path.is_file():
            read_settings(path)  # raises unless it has a JSON object
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False, use_fast=True
        )
    except Exception as error:  # the Rust tokenizer has no special class for a broken tokenizer.json
        raise ValueError(f"{directory} has no tokenizer that transformers can load: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"{directory}: a fast tokenizer (tokenizer.json) is needed, found {type(tokenizer).__name__}")
    names = ("cls", "sep", "pad", "mask", "eos")
    return tokenizer.backend_tokenizer, {name: getattr(tokenizer, f"{name}_token_id") for name in names}
