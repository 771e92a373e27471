"""Options of commands: values that are refused whatever the option is."""

from __future__ import annotations

from typing import Any

import pytest

from jaxret.index.encode_options import EncodeOptions
from jaxret.mining.generation_options import GenerationOptions
from jaxret.models.generation.decoding_options import DecodingOptions
from jaxret.search.bm25_settings import BM25Settings
from jaxret.serving.serve_options import ServeOptions


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (BM25Settings, "k1"),
        (BM25Settings, "b"),
        (DecodingOptions, "temperature"),
        (DecodingOptions, "top_p"),
        (DecodingOptions, "length_penalty"),
        (EncodeOptions, "lease"),
        (GenerationOptions, "lease"),
        (ServeOptions, "answer_seconds"),
    ],
)
def test_nan_and_infinity_are_refused(kind: Any, name: str, value: str) -> None:
    """NaN is below no bound, and would be the score of every passage."""
    with pytest.raises(ValueError, match=rf"^{name} .*{value}; .*finite number$"):
        kind(**{name: float(value)})
