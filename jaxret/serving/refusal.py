"""The error of a refused request, and checks of a request's values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxret.configs.synonyms import suggest_name


class RefusalError(Exception):
    """A refused request. The answer has a sentence, an HTTP status, headers, and `code`, a word for programs."""

    def __init__(
        self, status: int, message: str, code: str = "invalid_request", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})


class Body:
    """The JSON object of a request. Each method raises `RefusalError` with the name and the value of a wrong key."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise RefusalError(422, "the body must be a JSON object")
        self._values: dict[str, Any] = value

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def require_keys(self, *keys: str) -> None:
        """Raise RefusalError for any other key, because a mistyped key would otherwise be ignored."""
        for name in self._values:
            if name not in keys:
                hint = suggest_name(name, keys)
                raise RefusalError(422, f"{shown(name)} is not a key of this request{hint} (keys: {', '.join(keys)})")

    def get(self, name: str, kind: type, default: Any) -> Any:
        """Return the value of a key, or `default` if it is missing or null. Raises RefusalError for a value of another
        type than `kind`."""
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not kind:
            kinds = {str: "a text", int: "a whole number", bool: "true or false", dict: "an object", list: "a list"}
            raise RefusalError(422, f"{name} is {shown(value)}; it must be {kinds[kind]}")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """Return the value of a key, which must be one of `choices`. Raises RefusalError for another text."""
        value = self.get(name, str, default)
        if value not in choices:
            raise RefusalError(422, f"{name} is {shown(value)}; it must be one of {', '.join(choices)}")
        return value

    def count(self, name: str, default: int, limit: int) -> int:
        """Return a whole number from 1 to `limit`. Raises RefusalError for a number out of range."""
        value = self.get(name, int, default)
        if not 1 <= value <= limit:
            raise RefusalError(422, f"{name} is {value}; it must be 1 to {limit}")
        return value

    def texts(self, name: str, limit: int, most_characters: int, single: bool = True) -> list[str]:
        """Return a list of texts that are not blank.

        Args:
            name: key.
            limit: largest number of texts.
            most_characters: largest number of characters of a text.
            single: one text is a list of one, as for OpenAI and TEI; if False, it is an error, as in Python.

        Raises:
            RefusalError: no texts, too many texts, texts that are too long, or token ids.
        """
        value = self._values.get(name)
        expected = "a text, or a list of texts" if single else "a list of texts"
        if value is None:
            raise RefusalError(422, f"{name} is missing: {expected}")
        if isinstance(value, str) and not single:
            raise RefusalError(422, f"{name} must be a list of texts, not one text: put it in [ ]")
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values:
            raise RefusalError(422, f"{name} must be {expected} that is not empty")
        if len(values) > limit:
            raise RefusalError(413, f"{name} has {len(values)} texts; a request may have {limit}", "too_many_inputs")
        for number, text in enumerate(values):
            place = name if isinstance(value, str) else f"{name}[{number}]"
            if isinstance(text, int | list):
                raise RefusalError(
                    400,
                    f"{place} is a list of token ids, perhaps of another vocabulary; send texts "
                    "(LangChain: check_embedding_ctx_length=False)",
                )
            check_text(text, place, most_characters)
        return values


def check_text(text: Any, place: str, most_characters: int) -> str:
    """Return a text. Raises `RefusalError` for another type, and for a text that is blank, too long, or has half of a
    surrogate pair."""
    if not isinstance(text, str):
        raise RefusalError(422, f"{place} is {shown(text)}; it must be a text")
    if not text.strip():
        raise RefusalError(422, f"{place} is blank")
    if len(text) > most_characters:
        raise RefusalError(413, f"{place} has {len(text)} characters; a text may have {most_characters}", "too_long")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{place} holds half of a surrogate pair at character {error.start + 1}"
        raise RefusalError(422, message) from None
    return text


def shown(value: Any) -> str:
    """Return the beginning of a value as JSON, the language of requests, for an error."""
    # UTF-8 has no half of a surrogate pair.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()[:60]
