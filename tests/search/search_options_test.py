"""Options of a search refuse unknown names in their constructor, before a run is opened."""

from typing import Any

import pytest

from jaxret.search.approximate.proxies import PROXIES
from jaxret.search.backends.precision import PRECISIONS
from jaxret.search.backends.select import BACKENDS
from jaxret.search.search_options import (
    BACKEND_NAMES,
    FLOAT32_BACKENDS,
    PRECISION_NAMES,
    PROXY_NAMES,
    SearchOptions,
)
from jaxret.search.vectors.inverted_lists import SPARSE_BACKENDS


def test_names_are_those_of_the_implementations() -> None:
    assert set(BACKEND_NAMES) == {"auto", *BACKENDS, *SPARSE_BACKENDS}
    assert tuple(PRECISIONS) == PRECISION_NAMES
    assert set(FLOAT32_BACKENDS) == {"scipy", *(name for name, kind in BACKENDS.items() if not kind.precisions)}
    assert tuple(PROXIES) == PROXY_NAMES


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"backend": "annoy"},
            r"backend .*'annoy'; .*'auto', .*'scipy'",
        ),
        ({"precision": "int4"}, r"precision .*'int4'; .*'float32', 'float16', 'bfloat16', 'int8'"),
        ({"backend": "faiss-cpu", "precision": "int8"}, r"'faiss-cpu' computes .*float32, .*int8"),
        ({"filters": ("lang",)}, r"filter 'lang': FIELD:VALUE, .*'FIELD>=BOUND'"),
        ({"candidates": "max:10"}, r"candidates .*'max:10'; .*: mean:1000, muvera:1000"),
        ({"candidates": "mean:0"}, "candidates is 'mean:0'"),
        ({"dimension": -1}, "dimension is -1"),
        ({"candidates": "mean:10", "index": "SQ8"}, r"mean:10 .*index SQ8"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_unknown_names_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchOptions(**values)


def test_each_set_of_filters_has_its_own_label() -> None:
    """Otherwise, the results of one search would replace those of another."""
    red, blue = (SearchOptions(filters=(f"colour:{name}",)).label for name in ("red", "blue"))
    assert red.startswith("filtered-")
    assert red != blue
    both = [SearchOptions(filters=filters).label for filters in (("a:1", "b:2"), ("b:2", "a:1"), ("a:1", "b:2", "a:1"))]
    assert len(set(both)) == 1
    assert SearchOptions().label == ""
